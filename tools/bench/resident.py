"""Resident memory of a process that compiles a model and trains it, at most over its life, per backend.

python -m tools.bench.resident                         the five architectures
python -m tools.bench.resident --models bert --runs 1  a short look

Each figure is of a process of its own, with empty caches: it makes the model, compiles it for training and takes some
steps, on one thread. `after` is what the process holds at the end, after a garbage collection. Compilers that a backend
starts as processes of their own do not count. The median of the runs counts.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tools.bench.memory import peak_resident_mb, resident_mb

BACKENDS = ("eager", "inductor", "aotkit")
STEPS = 5


def train(name: str, backend: str) -> dict[str, float]:
    """Compile and train in this process; MiB."""
    import torch

    from tools.bench.models import make_batch, make_model

    torch.set_num_threads(1)
    model, batch = make_model(name).train(), make_batch(name, quick=False)
    before = resident_mb()
    call: Any = model
    if backend != "eager":
        if backend == "aotkit":
            import aotkit  # noqa: F401
        call = torch.compile(model, backend=backend)
    for _ in range(STEPS):
        model.zero_grad(set_to_none=True)
        call(**batch).loss.backward()
    peak = peak_resident_mb()
    gc.collect()
    return {"before": before, "peak": peak, "after": resident_mb()}


def measure(name: str, backend: str) -> dict[str, float]:
    """:func:`train` in a process of its own, with caches of its own."""
    with tempfile.TemporaryDirectory(prefix="aotkit-resident-") as folder:
        env = {
            **os.environ,
            "AOTKIT_CACHE_DIR": str(Path(folder) / "aotkit"),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "tools.bench.resident", "--worker", name, backend]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: {done.stderr[-2000:]}")
        found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return found


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.resident", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["bert", "gpt2", "resnet", "vit", "llama"])
    parser.add_argument("--backends", nargs="+", default=list(BACKENDS), choices=BACKENDS)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(train(*given.worker)))
        return
    print("| model | " + " | ".join(f"{backend}: peak MB | after MB" for backend in given.backends) + " |")
    print("|---" * (1 + 2 * len(given.backends)) + "|")
    for name in given.models:
        found: dict[str, list[dict[str, float]]] = {backend: [] for backend in given.backends}
        for _ in range(given.runs):
            for backend in given.backends:
                found[backend].append(measure(name, backend))
        cells = [
            f"{statistics.median(row[what] for row in rows):.0f}"
            for rows in found.values()
            for what in ("peak", "after")
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
