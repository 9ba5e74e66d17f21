"""Every pair of the table with Triton kernels, run on CPU tensors in Triton's interpreter, compared with eager.

``python -m tools.conformance triton --journal FILE`` prints what is not equal and a table of counts; a run that was
cut off goes on with its journal. torch's own stack traces the graph on the CPU, it is lowered for a CUDA device, and
its launch plan runs with the interpreter for a driver. ``--only``, ``--dtypes``, ``--directions``, ``--every`` and
``--limit`` choose.
"""

from __future__ import annotations

import argparse
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from aotkit_inductor_lower import LoweringError, decompositions
from aotkit_inductor_lower.pieces import needs_pieces
from aotkit_inductor_lower.triton import InterpreterDriver, TritonError, bind_device, lower_for_device

from .journal import Emit, read_journal, work_through
from .kernels import PASSED, summary, verdict
from .pairs import DIRECTIONS, Pair, all_pairs, compare, make_program, run

__all__ = ["DTYPES", "check_pair", "check_pairs", "main"]

DTYPES = ("float32", "bfloat16", "int64")


class NotWhole(LoweringError):
    """The graph is not compiled in one piece, and pieces are not for this tool."""


def check_pairs(pairs: Sequence[Pair], emit: Emit) -> None:
    """The outcome of each pair to ``emit``; meant for a process of its own, whose settings it changes."""
    torch._dynamo.config.capture_scalar_outputs = True
    torch._dynamo.config.capture_dynamic_output_shape_ops = True
    for number, pair in enumerate(pairs, 1):
        emit(pair, {})
        emit(pair, check_pair(pair))
        if number % 50 == 0:
            torch._dynamo.reset()


def check_pair(pair: Pair) -> dict[str, Any]:
    """One call of the compiled pair: its kind, the reason of a failure, the kernels, the ATen calls by name."""
    from torch._dynamo.backends.common import aot_autograd

    started = time.perf_counter()
    try:
        program = make_program(pair)
        expected = run(program, program.fn)
    except Exception as error:  # noqa: BLE001  # there is nothing to compare with then
        return {"kind": "absent", "reason": f"{type(error).__name__}: {str(error)[:150]}"}
    externs: Counter[str] = Counter()
    launched: list[str] = []
    graphs: list[str] = []

    def compile_graph(graph: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
        if needs_pieces(graph):
            raise NotWhole("the graph needs pieces: sizes that depend on data, effects or higher-order operators")
        lowered = lower_for_device(graph, examples, device="cuda:0")
        externs.update(step.target for step in lowered.scheduled.steps if hasattr(step, "target"))
        launched.extend(launch.name for launch in lowered.program.launches())
        graphs.append(lowered.program.plan.name)
        bound = bind_device(lowered.program, InterpreterDriver(), lowered.constants)

        def call(args: list[Any]) -> list[Any]:  # a function: torch wraps it and keeps the attributes of functions only
            return bound(args)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    table = decompositions()
    backend = aot_autograd(fw_compiler=compile_graph, bw_compiler=compile_graph, decompositions=table)
    compiled = torch.compile(program.fn, backend=backend, dynamic=False)
    kind, reason = verdict(lambda: compare(program, expected, run(program, compiled)), (LoweringError, TritonError))
    if kind in PASSED and not graphs:
        kind = "eager"
    outcome = {"kind": kind, "reason": reason, "kernels": len(launched)}
    return {**outcome, "externs": dict(externs), "seconds": round(time.perf_counter() - started, 3)}


def main(argv: Sequence[str] | None = None) -> int:
    """Run, print what is not equal and a table of counts. Returns 1 if anything differs, crashes or dies."""
    parser = argparse.ArgumentParser(prog="python -m tools.conformance triton", description=__doc__.partition("\n")[0])
    parser.add_argument("--journal", type=Path, required=True, help="one line per pair; a second run goes on with it")
    parser.add_argument("--dtypes", nargs="+", default=DTYPES)
    parser.add_argument("--directions", nargs="+", default=DIRECTIONS)
    parser.add_argument("--only", nargs="+", default=[], help="operators, as nn.functional.gelu")
    parser.add_argument("--chunk", type=int, default=200, help="pairs in one process")
    parser.add_argument("--every", type=int, default=1, help="take each so-and-so-many-th pair only")
    parser.add_argument("--limit", type=int, help="at most so many pairs that have no line yet")
    chosen = parser.parse_args(argv)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    chosen.journal.parent.mkdir(parents=True, exist_ok=True)
    known = read_journal(chosen.journal)
    pairs = list(all_pairs(chosen.dtypes, chosen.directions))[:: chosen.every]
    if chosen.only:
        pairs = [p for p in pairs if {p.operator, p.operator.partition("(")[0]} & set(chosen.only)]
    pairs = [p for p in pairs if p.key not in known][: chosen.limit] if chosen.limit else pairs
    known = work_through(pairs, chosen.journal, check_pairs, chunk=chosen.chunk)
    return summary({p.key: known[p.key] for p in pairs})
