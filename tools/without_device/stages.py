"""How long the stages of our compile for a CUDA device take, without one.

``python -m tools.without_device.stages [--models gpt2 ...] [--workers 0 2] [--turns 3] [--stages]``

Each turn compiles a training step of each model, forward and backward, once with each number of worker processes: in a
process of its own, with nothing kept from before, up to where a driver would load the kernels. Wall times depend on how
many processors there are and what else runs; processor times of kernels don't, and tell what any number of processors
would take at least: the sum shared out, or the longest. Medians; the ratios are of times of the same turn.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["compiled", "main", "row"]

PROCESSORS = 16  # of the machine that is reckoned for
COMPILE = "compile-kernels"


class _Captured(BaseException):
    """What is run is compiled; there is nothing to run it on."""


def compiled(model: str, workers: int) -> dict[str, Any]:
    """The stages of one compile, in a process that believes in a device: wall and processor seconds of each, and
    processor seconds of each kernel that a worker compiled."""
    from aotkit.driver.job import GraphJob
    from aotkit.frontend.inputs import attribute_tensors
    from aotkit.options import Options
    from aotkit.recorder import Recorder
    from tools.without_device.models import on_fake_device, step

    own: defaultdict[str, float] = defaultdict(float)

    class Watching(Recorder):
        @contextmanager
        def stage(self, name: str, /) -> Iterator[None]:
            before, others = _processor(), sum(own.values())
            with super().stage(name):
                yield
            own[name] += _processor() - before - (sum(own.values()) - others)

    recorder, options = Watching(), Options(cache=False, fallback="error", compile_workers=workers)

    def backend(gm: Any, inputs: Sequence[Any]) -> Any:
        begin = time.perf_counter()
        GraphJob(gm, options, recorder, "graph").complete([*inputs, *attribute_tensors(gm)])
        recorder.event("whole", {"seconds": time.perf_counter() - begin})
        raise _Captured

    with on_fake_device(model) as (module, batch), suppress(_Captured):
        step(module, batch, backend)
    wall: defaultdict[str, float] = defaultdict(float)
    for timing in recorder.stages:
        wall[timing.name] += timing.seconds
    found = {name: [fields["seconds"] for event, fields in recorder.events if event == name] for name in _EVENTS}
    return {"wall": dict(wall), "processor": dict(own), "whole": sum(found["whole"]), "kernels": found[_EVENTS[1]]}


_EVENTS = ("whole", "kernel.compiled")


def _processor() -> float:
    return sum(os.times()[:4])


def _alone(model: str, workers: int) -> dict[str, Any]:
    warnings.filterwarnings("ignore")
    from tools.without_device.pretend import pretend, pretend_attention, pretend_for_triton

    pretend()
    pretend_for_triton()
    kept = pretend_attention()
    found = compiled(model, workers)
    del kept
    return found


def _turn(model: str, workers: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as empty:
        command = [sys.executable, "-m", "tools.without_device.stages", "--one", model, str(workers)]
        run = subprocess.run(command, check=True, capture_output=True, env=os.environ | {"TRITON_CACHE_DIR": empty})
    return json.loads(run.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def row(model: str, turns: Sequence[Sequence[dict[str, Any]]]) -> str:
    """``turns``: of each number of workers the results, in order."""

    def median(values: Sequence[float]) -> str:
        return f"{statistics.median(values):.2f}"

    walls = [[t["wall"][COMPILE] for t in side] for side in turns]
    whole = [[t["whole"] for t in side] for side in turns]
    kernels = next((t["kernels"] for side in reversed(turns) for t in side if t["kernels"]), [0.0])
    cells = [model, str(len(kernels))]
    cells += [" / ".join(median(side) for side in each) for each in (walls, whole)]
    cells += [
        " / ".join(median([b / a for a, b in zip(each[0], side, strict=True)]) for side in each[1:]) or "-"
        for each in (walls, whole)
    ]
    cells += [median([t["processor"][COMPILE] for t in turns[0]]), f"{sum(kernels):.2f}"]
    cells += [f"{max(kernels):.2f}", f"{max(max(kernels), sum(kernels) / PROCESSORS):.2f}"]
    return f"| {' | '.join(cells)} |"


def _stages(results: Sequence[dict[str, Any]]) -> str:
    names = sorted(results[0]["processor"], key=lambda n: -results[0]["processor"][n])

    def line(name: str) -> str:
        wall, used = ([r[kind].get(name, 0.0) for r in results] for kind in ("wall", "processor"))
        return f"  {name:30} {1e3 * statistics.median(wall):9.1f} {1e3 * statistics.median(used):9.1f}"

    return "\n".join([f"  {'ms':30} {'wall':>9} {'processor':>9}", *map(line, names[:40])])


def main() -> None:
    """Print a line for each model, and with ``--stages`` its stages; see the module's docstring."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--models", nargs="+", default=["gpt2", "bert", "llama", "convnextv2"])
    parser.add_argument(
        "--workers", nargs="+", type=int, default=[0, 2], help="the first is what others are compared with"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--stages", action="store_true")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.one:
        print(json.dumps(_alone(chosen.one[0], int(chosen.one[1]))))
        return
    print(f"workers {' / '.join(map(str, chosen.workers))}; {os.cpu_count()} processors")
    print(
        "| model | kernels | their compile, s | all of ours, s | ratio | ratio | processor s, threads | workers "
        f"| longest | at least, {PROCESSORS} processors |"
    )
    for model in chosen.models:
        turns: list[list[dict[str, Any]]] = [[] for _ in chosen.workers]
        for _ in range(chosen.turns):
            for side, workers in zip(turns, chosen.workers, strict=True):
                side.append(_turn(model, workers))
        print(row(model, turns), flush=True)
        if chosen.stages:
            print(_stages(turns[-1]))


if __name__ == "__main__":
    main()
