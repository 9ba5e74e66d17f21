"""Every pair of the table with the kernels that a CUDA device would get, in Triton's interpreter, compared with eager.

``python -m tools.conformance triton --journal FILE`` is ``kernels`` with ``processor="triton-interpreter"``, for three
dtypes. With ``--page`` it runs nothing and writes ``docs/triton-coverage.md`` from the committed results
(``tools/conformance/results/triton.json``, which ``--json`` writes), beside those of the CPU.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aotkit

from .kernels import OPTIONS, PASSED, run_table
from .kernels import check_pair as check_any_pair
from .pairs import Pair

__all__ = ["DTYPES", "check_pair", "main", "page"]

DTYPES = ("float32", "bfloat16", "int64")
INTERPRETED: aotkit.Options = OPTIONS.patch(processor="triton-interpreter", rng="eager")
ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"

HEAD = """\
# Operators as Triton kernels

torch's own table of operators (`op_db`), one fixed sample per dtype and direction, through
`torch.compile(backend="aotkit")` with the kernels that a CUDA device gets, run on CPU tensors in Triton's interpreter
and compared with eager; beside it the same pairs with the CPU's kernels. torch {torch}. Run by
`python -m tools.conformance triton --journal FILE --json tools/conformance/results/triton.json`, and written by
`python -m tools.conformance triton --page`.

| pairs | compiled | right | right on the CPU | there and not here | generated kernels alone | on the CPU |
|---|---:|---:|---:|---:|---:|---:|
"""


def check_pair(pair: Pair) -> dict[str, Any]:
    """Two calls of the compiled pair in the interpreter; see :func:`.kernels.check_pair`."""
    return check_any_pair(pair, INTERPRETED)


def page(ours: Mapping[str, Any], cpu: Mapping[str, Any]) -> str:
    """The page of two files of results."""
    lines, missing = [HEAD.format(torch=ours["torch"])], []
    found = _by_kind(ours["outcomes"])
    reference = _by_kind(cpu["outcomes"])
    for kind, pairs in found.items():
        compiled = {o: row for o, row in pairs.items() if row[0] not in ("absent", "eager")}
        right = {o for o, row in compiled.items() if row[0] in PASSED}
        there = {o for o in compiled if reference.get(kind, {}).get(o, ["absent"])[0] in PASSED}
        lost = sorted(there - right)
        missing += [f"{operator} {kind}" for operator in lost]
        alone = sum(len(compiled[o]) == 1 for o in right)
        alone_there = sum(len(reference[kind][o]) == 1 for o in there)
        cells = (kind, len(compiled), len(right), len(there), len(lost), alone, alone_there)
        lines.append("| " + " | ".join(map(str, cells)) + " |\n")
    lines.append("\n## Right on the CPU and not here\n\n")
    lines += [f"- `{key}`: {ours['reasons'].get(key, '')}\n" for key in missing] or ["None.\n"]
    if ours["not_run"]:
        counts = ", ".join(f"{count} of {kind}" for kind, count in ours["not_run"].items())
        lines.append(f"\nNot run: {counts}.\n")
    return "".join(lines)


def _by_kind(outcomes: Mapping[str, Mapping[str, list[Any]]]) -> dict[str, dict[str, list[Any]]]:
    found: dict[str, dict[str, list[Any]]] = {}
    for operator, row in outcomes.items():
        for kind, outcome in row.items():
            found.setdefault(kind, {})[operator] = outcome
    return dict(sorted(found.items()))


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print what is not equal and a table of counts; or with ``--page`` write the page."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments != ["--page"]:
        return run_table(arguments, "triton", __doc__ or "", DTYPES, INTERPRETED)
    read = [json.loads((RESULTS / name).read_text()) for name in ("triton.json", "op_db.json")]
    (ROOT / "docs" / "triton-coverage.md").write_text(page(*read))
    return 0
