"""Steady speed of a compile with sizes known at run time against one for the very sizes, in one process.

python -m tools.bench.dynamic                                  all five models, training and inference
python -m tools.bench.dynamic --quick --models bert --modes infer
python -m tools.bench.dynamic --new-lengths 40                 texts of lengths that the process has not seen yet
python -m tools.bench.dynamic --new-lengths 40 --autocast      the same under autocast to bfloat16

Both sides take turns at one step each, timed in processor time of the calling thread; the ratio is that of the
medians. Values of the two are compared, and Dynamo's compiles counted.

With `--new-lengths` eager mode and the dynamic compile take steps on texts, each of another length, and then on the
same ones again: what a library does once for each size it sees is in the first, and what it keeps in the growth of the
process. Each side runs in a process of its own, since memory is counted.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from types import MappingProxyType

import torch
import torch._dynamo
from torch._dynamo.utils import counters

import aotkit  # noqa: F401  (registers the backend where no entry point is installed)
from tools.bench.memory import resident_mb
from tools.bench.models import MODELS, Batch, make_model, token_batch
from tools.bench.worker import make_step

__all__ = ["NewLengths", "compare", "main", "serve_new_lengths"]

BOUND = 0.95
OPTIONS: Mapping[str, str | int | bool | Callable[..., object]] = MappingProxyType(
    {"fallback": "error", "cache": False}
)
Step = Callable[[], dict[str, torch.Tensor]]


def compare(name: str, mode: str, *, quick: bool, steps: int) -> tuple[float, int]:
    """Speed of the dynamic compile over that of the static one, and how often Dynamo compiled the former.

    Raises ``AssertionError`` where values differ. The dynamic one has served other batch sizes before it is timed.
    """
    case = MODELS[name]
    length = case.quick_length if quick else case.length
    generator = torch.Generator().manual_seed(1)
    sizes = (6, 2, case.batch_size)
    batches = {size: case.inputs(size, length, generator) for size in sizes}
    measured = batches[case.batch_size]
    torch._dynamo.reset()
    static = compiled_step(name, mode, measured, dynamic=False)(measured)
    counters.clear()
    dynamic = compiled_step(name, mode, batches[6], dynamic=True)
    for batch in batches.values():
        dynamic(batch)()
    compiles = counters["stats"]["unique_graphs"]
    sides = {"static": static, "dynamic": dynamic(measured)}
    values = {side: step() for side, step in sides.items()}
    for key, want in values["static"].items():
        torch.testing.assert_close(values["dynamic"][key], want, rtol=2e-3, atol=2e-4)
    times: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(steps):
        for side, step in sides.items():
            begin = time.thread_time()
            step()
            times[side].append(time.thread_time() - begin)
    return statistics.median(times["static"]) / statistics.median(times["dynamic"]), compiles


def compiled_step(name: str, mode: str, batch: Batch, *, dynamic: bool) -> Callable[[Batch], Step]:
    """A step of a model of its own, by batch; compiled for ``batch``."""
    model = make_model(name).train(mode == "train")
    call = torch.compile(model, backend="aotkit", dynamic=dynamic, options=dict(OPTIONS))
    make_step(model, call, batch, mode)()
    return lambda given: make_step(model, call, given, mode)


@dataclass(frozen=True, slots=True)
class NewLengths:
    """Milliseconds of a step where each has a length that is new, of the same lengths again, and MB that the process
    has grown by."""

    first: float
    again: float
    grown: float


def serve_new_lengths(
    name: str, mode: str, *, quick: bool, count: int, backend: str, autocast: bool = False
) -> NewLengths:
    """Steps on ``count`` texts of as many lengths. Sums, since what a library does for a new size may be rare."""
    case = MODELS[name]
    longest = case.quick_length if quick else case.length
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randperm(longest - 4, generator=generator)[:count].add(4).tolist()
    batches = [case.inputs(case.batch_size, length, generator) for length in lengths]
    model = make_model(name).train(mode == "train")
    options = dict(OPTIONS) if backend == "aotkit" else None
    call = torch.compile(model, backend=backend, dynamic=True, options=options)
    for size in (2, 3):  # the first sizes that are seen
        make_step(model, call, case.inputs(size, longest, generator), mode, autocast)()
    before = resident_mb()
    rounds = []
    for _ in range(2):
        begin = time.thread_time()
        for batch in batches:
            make_step(model, call, batch, mode, autocast)()
        rounds.append((time.thread_time() - begin) * 1e3 / count)
    first, again = rounds
    return NewLengths(first, again, resident_mb() - before)


def _print_new_lengths(name: str, mode: str, *, quick: bool, count: int, autocast: bool) -> None:
    found = {}
    for backend in ("eager", "aotkit"):
        with ProcessPoolExecutor(1, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
            task = functools.partial(
                serve_new_lengths, name, mode, quick=quick, count=count, backend=backend, autocast=autocast
            )
            found[backend] = pool.submit(task).result()
    eager, ours = found["eager"], found["aotkit"]
    print(
        f"{name:8s} {mode:6s} new lengths {ours.first:.2f} ms, {eager.first / ours.first:.2f} of eager's speed; again "
        f"{ours.again:.2f} ms, {eager.again / ours.again:.2f}; the process grew by {ours.grown:.0f} MB, "
        f"eager's by {eager.grown:.0f}",
        flush=True,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """One line per model and mode; 1 with ``--check`` if one is slower than the bound."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.dynamic", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=("infer", "train"), default=["infer", "train"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="short inputs")
    parser.add_argument("--new-lengths", type=int, metavar="N", help="compare eager mode at texts of N lengths instead")
    parser.add_argument("--autocast", action="store_true", help="of --new-lengths, to bfloat16")
    parser.add_argument("--check", action="store_true", help=f"fail below {BOUND}")
    chosen = parser.parse_args(arguments)
    if chosen.new_lengths and chosen.check:
        parser.error("--check compares with a static compile, --new-lengths with eager mode")
    if chosen.autocast and not chosen.new_lengths:
        parser.error("--autocast is for --new-lengths")
    torch.set_num_threads(1)
    slow = 0
    for name in chosen.models:
        for mode in chosen.modes:
            if chosen.new_lengths:
                if MODELS[name].inputs is token_batch:
                    _print_new_lengths(
                        name, mode, quick=chosen.quick, count=chosen.new_lengths, autocast=chosen.autocast
                    )
                else:
                    print(f"{name:8s} {mode:6s} takes no texts", flush=True)
                continue
            ratio, compiles = compare(name, mode, quick=chosen.quick, steps=chosen.steps)
            slow += ratio < BOUND
            print(f"{name:8s} {mode:6s} {ratio:.3f} of the static compile's speed, {compiles} graphs", flush=True)
    return 1 if chosen.check and slow else 0


if __name__ == "__main__":
    sys.exit(main())
