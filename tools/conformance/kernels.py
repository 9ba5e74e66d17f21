"""Every pair of the table through ``torch.compile(backend="aotkit")`` with generated kernels, compared with eager.

``python -m tools.conformance kernels --journal FILE`` prints what is not equal and a table of counts; a run that was
cut off goes on with its journal. ``--only``, ``--dtypes`` and ``--directions`` choose; ``--again KIND ..`` repeats the
pairs of some outcomes; ``--json`` writes the file that the coverage page is made of.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

import aotkit
from aotkit.driver.refusals import REFUSALS
from tools.workspace import ROOT

from .journal import Emit, read_journal, work_once, work_through
from .pairs import DIRECTIONS, DTYPES, Absent, Pair, all_pairs, compare, make_program, run

__all__ = ["KINDS", "PASSED", "check_pair", "check_pairs", "main", "summary", "verdict"]

#: equal and nearer: as compare() says; refused: a typed error; different, crash (an untyped error), died (the process):
#: failures; eager: Dynamo left everything to eager mode; absent: the table has no sample, or eager raises.
KINDS = ("equal", "nearer", "refused", "different", "crash", "died", "eager", "absent")
PASSED = ("equal", "nearer")
OPTIONS = aotkit.Options(fallback="error", cache=False)


def check_pairs(pairs: Sequence[Pair], emit: Emit, options: aotkit.Options = OPTIONS, device: str = "cpu") -> None:
    """The outcome of each pair to ``emit``; meant for a process of its own, whose settings it changes.

    Returns early where an error has taken the device away from this process.
    """
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    for number, pair in enumerate(pairs, 1):
        emit(pair, {})
        outcome = check_pair(pair, options, device)
        emit(pair, outcome)
        if "CUDA error" in outcome["reason"]:
            return
        if number % 50 == 0:
            torch._dynamo.reset()


def check_pair(pair: Pair, options: aotkit.Options = OPTIONS, device: str = "cpu") -> dict[str, Any]:
    """Two calls of the compiled pair: its kind, the reason of a failure, the kernels, the ATen calls by name."""
    started = time.perf_counter()
    try:
        program = make_program(pair, device)
        expected = run(program, program.fn)
    except Exception as error:  # noqa: BLE001  # there is nothing to compare with then
        return {"kind": "absent", "reason": f"{type(error).__name__}: {str(error)[:150]}"}
    recorder = aotkit.Recorder()
    backend = aotkit.make_backend(options, recorder)
    compiled = torch.compile(program.fn, backend=backend, dynamic=False)
    kind, reason = verdict(lambda: compare(program, expected, run(program, compiled)))
    if kind in PASSED:
        again, reason = verdict(lambda: compare(program, expected, run(program, compiled)))
        kind, reason = (kind, reason) if again in PASSED else (again, f"second call: {reason}")
    reports: list[Any] = [record.report for record in recorder.graphs]
    if kind in PASSED and not reports:
        kind = "eager"
    externs: Counter[str] = Counter()
    for report in reports:
        externs.update({extern.target: extern.count for extern in report.externs})
    outcome = {"kind": kind, "reason": reason, "kernels": sum(r.kernel_count for r in reports)}
    return {**outcome, "externs": dict(externs), "seconds": round(time.perf_counter() - started, 3)}


def verdict(
    attempt: Callable[[], tuple[str, str]], refusals: tuple[type[Exception], ...] = (*REFUSALS, aotkit.CompileError)
) -> tuple[str, str]:
    """The kind and reason that an attempt gives, or that its error stands for."""
    try:
        return attempt()
    except Absent as error:
        return "different", str(error)
    except Exception as error:  # noqa: BLE001  # whatever it is, it is what the report is about
        for cause in _causes(error):
            if isinstance(cause, refusals):
                return "refused", f"{type(cause).__name__}: {cause}"[:400]
        first = next((line for line in str(error).splitlines() if line.strip()), "")
        frames = "".join(traceback.format_tb(error.__traceback__)[-3:])
        return "crash", f"{type(error).__name__}: {first[:300]}\n{frames}"


def _causes(error: BaseException | None) -> Iterable[BaseException]:
    while error is not None:
        yield error
        error = getattr(error, "inner_exception", None) or error.__cause__


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print what is not equal and a table of counts. Returns 1 if anything differs, crashes or dies."""
    return run_table(argv, "kernels", __doc__ or "", DTYPES, OPTIONS)


def run_table(
    argv: Sequence[str] | None, table: str, about: str, dtypes: Sequence[str], options: aotkit.Options
) -> int:
    """:func:`main` of a table of pairs that are compiled with these options."""
    parser = argparse.ArgumentParser(prog=f"python -m tools.conformance {table}", description=about.partition("\n")[0])
    parser.add_argument("--journal", type=Path, required=True, help="one line per pair; a second run goes on with it")
    parser.add_argument("--dtypes", nargs="+", default=dtypes)
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS)
    parser.add_argument("--processor", default=options.processor, help="as the option of that name")
    parser.add_argument("--device", default="cpu", help="where the tensors are")
    parser.add_argument(
        "--part", type=int, nargs=2, default=(0, 1), metavar=("K", "N"), help="the Kth of N equal parts"
    )
    parser.add_argument("--only", nargs="+", default=[], help="operators, as nn.functional.gelu")
    parser.add_argument("--again", nargs="*", default=[], choices=KINDS, help="repeat pairs with these outcomes")
    parser.add_argument("--chunk", type=int, default=200, help="pairs in one process")
    parser.add_argument("--limit", type=int, help="at most so many pairs that have no line yet")
    parser.add_argument("--json", type=Path, help="write the outcomes here")
    parser.add_argument("--once", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--no-run", action="store_true", help="only write --json and print")
    chosen = parser.parse_args(argv)
    options = options.patch(processor=chosen.processor)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)

    def check(pairs: Sequence[Pair], emit: Emit) -> None:
        check_pairs(pairs, emit, options, chosen.device)

    chosen.journal.parent.mkdir(parents=True, exist_ok=True)
    known = read_journal(chosen.journal)
    every = list(all_pairs(chosen.dtypes, chosen.directions))[chosen.part[0] :: chosen.part[1]]
    pairs = [p for p in every if not chosen.only or {p.operator, p.operator.partition("(")[0]} & set(chosen.only)]
    if chosen.no_run:
        pairs = [p for p in pairs if p.key in known]
    elif chosen.again:
        repeated = [p for p in pairs if known.get(p.key, {}).get("kind") in chosen.again]
        work_through(repeated, chosen.journal, check, chunk=chosen.chunk, again=True)
    pairs = [p for p in pairs if p.key not in known][: chosen.limit] if chosen.limit else pairs
    if chosen.once:
        work_once(pairs, chosen.journal, check, chosen.chunk)
        return 0
    given = list(sys.argv[1:] if argv is None else argv)
    command = [sys.executable, "-m", "tools.conformance", table, *given, "--once"] if chosen.device != "cpu" else []
    if not chosen.no_run:
        known = work_through(pairs, chosen.journal, check, chunk=chosen.chunk, command=command)
    if chosen.json:
        write_json(chosen.json, every, known)
    return summary({p.key: known[p.key] for p in pairs})


def write_json(path: Path, pairs: Sequence[Pair], known: Mapping[str, dict[str, Any]]) -> None:
    """Operator to dtype and direction to [kind, ATen calls]; the reasons of what did not pass; what was not run."""
    outcomes: dict[str, dict[str, list[Any]]] = {}
    reasons: dict[str, str] = {}
    missing: Counter[str] = Counter()
    for pair in pairs:
        if pair.key not in known:
            missing[f"{pair.dtype} {pair.direction}"] += 1
            continue
        entry = known[pair.key]
        externs = sorted(entry.get("externs", {}))
        outcomes.setdefault(pair.operator, {})[f"{pair.dtype} {pair.direction}"] = [entry["kind"], *externs]
        if entry["kind"] not in (*PASSED, "absent"):
            reasons[pair.key] = entry["reason"].partition("\n")[0].replace(f"{ROOT}/", "")
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in outcomes.items())
    texts = ",\n".join(f"{json.dumps(key)}: {json.dumps(reason)}" for key, reason in reasons.items())
    parts = (
        f'"torch": {json.dumps(torch.__version__)}',
        f'"outcomes": {{\n{rows}\n}}',
        f'"reasons": {{\n{texts}\n}}',
        f'"not_run": {json.dumps(missing)}',
    )
    path.write_text("{" + ",\n".join(parts) + "}\n")


def summary(known: Mapping[str, dict[str, Any]]) -> int:
    counts: Counter[tuple[str, str]] = Counter()
    for key, entry in known.items():
        _, dtype, direction = key.rsplit(" ", 2)
        counts[f"{dtype} {direction}", entry["kind"]] += 1
        if entry["kind"] not in (*PASSED, "absent", "eager"):
            print(f"{entry['kind']}: {key}: {entry['reason'].partition(chr(10))[0]}")
    kinds = [kind for kind in KINDS if any(k == kind for _, k in counts)]
    print(f"{'':20}" + "".join(f"{kind:>10}" for kind in kinds))
    for row in dict.fromkeys(row for row, _ in counts):
        print(f"{row:20}" + "".join(f"{counts[row, kind]:10}" for kind in kinds))
    return int(any(kind in ("different", "crash", "died") for _, kind in counts))
