"""Steady speed of a compile with sizes known at run time against one for the very sizes, in one process.

python -m tools.bench.dynamic                                  all five models, training and inference
python -m tools.bench.dynamic --quick --models bert --modes infer

Both sides take turns at one step each, timed in processor time of the calling thread; the ratio is that of the
medians. Values of the two are compared, and Dynamo's compiles counted.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
import torch._dynamo
from torch._dynamo.utils import counters

import aotkit  # noqa: F401  (registers the backend where no entry point is installed)
from tools.bench.models import MODELS, Batch, make_model
from tools.bench.worker import make_step

__all__ = ["compare", "main"]

BOUND = 0.95
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
    call = torch.compile(model, backend="aotkit", dynamic=dynamic, options={"fallback": "error", "cache": False})
    make_step(model, call, batch, mode)()
    return lambda given: make_step(model, call, given, mode)


def main(arguments: Sequence[str] | None = None) -> int:
    """One line per model and mode; 1 with ``--check`` if one is slower than the bound."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.dynamic", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=("infer", "train"), default=["infer", "train"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="short inputs")
    parser.add_argument("--check", action="store_true", help=f"fail below {BOUND}")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    slow = 0
    for name in chosen.models:
        for mode in chosen.modes:
            ratio, compiles = compare(name, mode, quick=chosen.quick, steps=chosen.steps)
            slow += ratio < BOUND
            print(f"{name:8s} {mode:6s} {ratio:.3f} of the static compile's speed, {compiles} graphs", flush=True)
    return 1 if chosen.check and slow else 0


if __name__ == "__main__":
    sys.exit(main())
