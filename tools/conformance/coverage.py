"""docs/coverage.md: what became of each class of operators, from the committed results.

python -m tools.conformance coverage [--check]     write (or compare) docs/coverage.md

Needs no torch. ``python -m tools.conformance kernels --json`` and ``.. inductor --json`` write what it reads.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from tools.workspace import ROOT

__all__ = ["OperatorClass", "Row", "load_classes", "load_rows", "main", "page"]

HERE = Path("tools") / "conformance"
PAGE = Path("docs") / "coverage.md"
OWN, INDUCTOR = HERE / "results" / "op_db.json", HERE / "results" / "inductor.json"
PASSED = ("equal", "nearer")
_DTYPES = ("float32", "float64", "float16", "bfloat16", "int32", "int64", "bool")


@dataclass(frozen=True, slots=True)
class OperatorClass:
    """A class of operators of tools/conformance/classes.toml; ``operators`` are patterns."""

    name: str
    rows: tuple[str, ...]
    fusable: bool
    reason: str
    operators: tuple[str, ...]

    def holds(self, operator: str) -> bool:
        """Whether a pattern of the class has the operator."""
        return any(fnmatchcase(operator, pattern) for pattern in self.operators)


@dataclass(frozen=True, slots=True)
class Row:
    """The outcome of one pair; ``inductor``: the kind of its outcome, or empty where it was not recorded."""

    operator: str
    dtype: str
    direction: str
    kind: str
    externs: tuple[str, ...]
    reason: str
    inductor: str
    cls: OperatorClass

    @property
    def counted(self) -> bool:
        """Whether a graph came to the compiler."""
        return self.kind not in ("absent", "eager")

    @property
    def passed(self) -> bool:
        """Whether the result was right."""
        return self.kind in PASSED

    @property
    def generated(self) -> bool:
        """Right, and no ATen call."""
        return self.passed and not self.externs


def load_classes(root: Path = ROOT) -> list[OperatorClass]:
    """Read the table of classes."""
    table = tomllib.loads((root / HERE / "classes.toml").read_text(encoding="utf-8"))["class"]
    return [
        OperatorClass(c["name"], tuple(c["rows"]), c["fusable"], c["reason"], tuple(c["operators"].split()))
        for c in table
    ]


def load_rows(root: Path = ROOT) -> list[Row]:
    """Every recorded pair. Raises ``StopIteration`` for an operator that no class has."""
    classes = load_classes(root)
    own = json.loads((root / OWN).read_text())
    other = json.loads((root / INDUCTOR).read_text()) if (root / INDUCTOR).exists() else {"outcomes": {}}
    rows = []
    for operator, pairs in own["outcomes"].items():
        cls = next(c for c in classes if c.holds(operator))
        theirs = other["outcomes"].get(operator, {})
        for name, (kind, *externs) in pairs.items():
            dtype, direction = name.split()
            reason = own["reasons"].get(f"{operator} {name}", "")
            rows.append(Row(operator, dtype, direction, kind, tuple(externs), reason, theirs.get(name, ""), cls))
    return rows


def page(rows: Sequence[Row], classes: Sequence[OperatorClass], torch_version: str, not_run: Mapping[str, int]) -> str:
    """The text of docs/coverage.md. ``not_run``: pairs without an outcome, by dtype and direction."""
    heading = (
        "# Coverage of operators\n\n"
        "Every operator of torch's own table of operators (`op_db`), with one fixed sample per dtype, forward and "
        'gradient, through\n`torch.compile(backend="aotkit")` with generated kernels, compared with eager under the '
        f"table's own tolerances (torch {torch_version}, CPU).\n"
        "`nox -s conformance` runs it, `python -m tools.conformance coverage` writes this page from\n"
        "`tools/conformance/results`; which class an operator belongs to, and which classes are fusable, says\n"
        "`tools/conformance/classes.toml`.\n"
    )
    parts = [heading, _summary(rows)]
    for direction in ("forward", "gradient"):
        parts.append(_table(direction, [r for r in rows if r.direction == direction], classes))
    parts += [_failures(rows), _calls(rows), _left_out(rows), _not_run(not_run)]
    return "\n".join(parts)


def _summary(rows: Sequence[Row]) -> str:
    counted = [r for r in rows if r.counted]
    fusable = [r for r in counted if r.cls.fusable]
    nearer = sum(r.kind == "nearer" for r in rows)
    known = [r for r in counted if r.inductor and r.inductor != "absent"]
    missing = [r for r in known if r.inductor in PASSED and not r.passed]
    lines = [
        "| | pairs | share |",
        "|---|---:|---:|",
        _line("pairs that a graph was compiled for", len(counted), None),
        _line("right", sum(r.passed for r in counted), len(counted)),
        _line("of the pairs in fusable classes: right and without an ATen call", _generated(fusable), len(fusable)),
        _line("pairs that Inductor was recorded on", len(known), len(counted)),
        _line("Inductor is right on", sum(r.inductor in PASSED for r in known), len(known)),
        _line("aotkit is right on, of the same pairs", sum(r.passed for r in known), len(known)),
        _line("Inductor is right on and aotkit is not", len(missing), len(known)),
    ]
    note = (
        f"\nRight means within the tolerance of eager's result. {nearer} results in float16 and bfloat16 are farther "
        "from eager's, but count as right\nbecause they are no farther from the same function in float64 than eager's "
        "are (or than the tolerance): eager keeps partial sums in\nthese types, and rounds the elements after its last "
        "whole vector in another way. The same holds for Inductor's results.\n"
    )
    return "\n".join(lines) + "\n" + note


def _line(what: str, count: int, whole: int | None) -> str:
    share = f"{100 * count / whole:.1f} %" if whole else ""
    return f"| {what} | {count} | {share} |"


def _generated(rows: Iterable[Row]) -> int:
    return sum(r.generated for r in rows)


def _table(direction: str, rows: Sequence[Row], classes: Sequence[OperatorClass]) -> str:
    dtypes = [d for d in _DTYPES if any(r.dtype == d for r in rows)]
    lines = [
        f"## {direction.capitalize()}\n",
        "Pairs by kernels alone / with ATen calls / refused or wrong.\n",
        f"| class | fusable | {' | '.join(dtypes)} |",
        f"|---|:---:|{'---:|' * len(dtypes)}",
    ]
    for cls in classes:
        cells = [_cell([r for r in rows if r.cls == cls and r.dtype == dtype and r.counted]) for dtype in dtypes]
        if any(cells):
            lines.append(f"| {cls.name} | {'yes' if cls.fusable else ''} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(rows: Sequence[Row]) -> str:
    if not rows:
        return ""
    failed = sum(not r.passed for r in rows)
    called = sum(r.passed and bool(r.externs) for r in rows)
    return f"{_generated(rows)} / {called} / {failed}"


def _failures(rows: Sequence[Row]) -> str:
    failed = [r for r in rows if r.counted and not r.passed]
    lines = ["## Refused or wrong\n", "| operator | pairs | outcome | Inductor | reason |", "|---|---|---|---|---|"]
    grouped: dict[tuple[str, str], list[Row]] = {}
    for row in failed:
        grouped.setdefault((row.operator, row.kind), []).append(row)
    for (operator, kind), group in grouped.items():
        pairs = ", ".join(f"{r.dtype} {r.direction}" for r in group)
        theirs = ", ".join(sorted({"right" if r.inductor in PASSED else r.inductor or "not recorded" for r in group}))
        reason = group[0].reason.replace("|", "\\|")[:200]
        lines.append(f"| `{operator}` | {pairs} | {kind} | {theirs} | {reason} |")
    return "\n".join(lines) + "\n" if failed else "## Refused or wrong\n\nNone.\n"


def _calls(rows: Sequence[Row]) -> str:
    counts: Counter[str] = Counter()
    operators: dict[str, set[str]] = {}
    for row in rows:
        if row.cls.fusable and row.passed:
            counts.update(row.externs)
            for extern in row.externs:
                operators.setdefault(extern, set()).add(row.operator)
    lines = ["## ATen calls in fusable classes\n", "| call | pairs | operators |", "|---|---:|---|"]
    for name, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        used = sorted(operators[name])
        shown = ", ".join(f"`{o}`" for o in used[:6]) + (f" and {len(used) - 6} more" if used[6:] else "")
        lines.append(f"| `{name}` | {count} | {shown} |")
    return "\n".join(lines) + "\n"


def _left_out(rows: Sequence[Row]) -> str:
    def listed(kind: str) -> str:
        found = sorted({r.operator for r in rows if r.kind == kind})
        return ", ".join(f"`{name}`" for name in found) or "none"

    return (
        "## Not counted\n\n"
        f"No graph comes to the compiler, because Dynamo runs these eagerly ({_count(rows, 'eager')} pairs): "
        f"{listed('eager')}.\n\n"
        f"No sample, or eager itself raises ({_count(rows, 'absent')} pairs): {listed('absent')}.\n"
    )


def _not_run(counts: Mapping[str, int]) -> str:
    if not counts:
        return ""
    listed = ", ".join(f"{count} {name}" for name, count in counts.items())
    return f"Not run yet, {sum(counts.values())} pairs: {listed}.\n"


def _count(rows: Sequence[Row], kind: str) -> int:
    return sum(r.kind == kind for r in rows)


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Write the page, or with ``--check`` return 1 if it is not what the results make it."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance coverage")
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args(argv)
    own: Mapping[str, Any] = json.loads((root / OWN).read_text())
    text = page(load_rows(root), load_classes(root), own["torch"], own["not_run"])
    if not chosen.check:
        (root / PAGE).write_text(text, encoding="utf-8")
        return 0
    if (root / PAGE).read_text(encoding="utf-8") == text:
        return 0
    print(f"{PAGE} is out of date: python -m tools.conformance coverage")
    return 1
