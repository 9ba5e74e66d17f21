"""Page faults of a training step: `python -m tools.bench.faults resnet swin`.

Memory that the C library gave back to the system appears anew, page by page, when it is written the next time: a row
for each model and backend with the faults of a step (median of some), and the processor time of a step within the
system and outside of it (means). Each is measured in a process of its own, on one thread.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass

import torch

from tools.bench.models import MODELS, MORE
from tools.bench.worker import Worker

__all__ = ["Faults", "faults_of", "main"]

WARMUP = 5
STEPS = 15


@dataclass(frozen=True, slots=True)
class Faults:
    """Of one step: pages that appeared, and milliseconds."""

    pages: float
    system_ms: float
    user_ms: float


def faults_of(step: Callable[[], object], warmup: int = WARMUP, steps: int = STEPS) -> Faults:
    """Page faults and processor time of a step, after some that are not counted."""
    for _ in range(warmup):
        step()
    pages, begin = list[int](), resource.getrusage(resource.RUSAGE_SELF)
    before = begin.ru_minflt
    for _ in range(steps):
        step()
        now = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        pages.append(now - before)
        before = now
    end = resource.getrusage(resource.RUSAGE_SELF)
    system, user = (end.ru_stime - begin.ru_stime, end.ru_utime - begin.ru_utime)
    return Faults(statistics.median(pages), system / steps * 1e3, user / steps * 1e3)


def main() -> int:
    """Prints a row for each model and backend."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.faults", description=__doc__)
    parser.add_argument("models", nargs="+", choices=[*MODELS, *MORE])
    parser.add_argument("--backends", nargs="+", default=["eager", "aotkit"])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)  # here, not in other processes
    chosen = parser.parse_args()
    if chosen.measure:
        torch.set_num_threads(1)
        worker = Worker(chosen.models[0], "train", chosen.backends[0], chosen.quick)
        worker.prepare()
        worker.first()
        print(json.dumps(asdict(faults_of(worker.run))))
        return 0
    print("| model | backend | page faults | ms in the system | ms outside |\n|---|---|---:|---:|---:|")
    for model in chosen.models:
        for backend in chosen.backends:
            asked = [model, "--backends", backend, "--measure", *(["--quick"] if chosen.quick else [])]
            done = subprocess.run([sys.executable, "-m", __spec__.name, *asked], capture_output=True, text=True)
            if done.returncode:
                sys.exit(done.stderr)
            found = Faults(**json.loads(done.stdout.splitlines()[-1]))
            times = f"{found.system_ms:.1f} | {found.user_ms:.1f}"
            print(f"| {model} | {backend} | {found.pages:.0f} | {times} |", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
