"""First calls: how long a compile takes from the first call of a step to its end, on a CUDA device, with empty caches.

    python -m tools.bench.first_calls [--only REGEX] [--jobs 4]

Each model, task and backend has a process of its own, `jobs` of them at once. An eager step comes first: what loads
the libraries and their kernels is no part of a compile, though what a backend calls beside them is. The seconds are
those of the wall. Prints one line and ends where there is no CUDA device.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

__all__ = ["main", "table"]

NO_DEVICE = "no CUDA device on this machine: first calls were not measured"
TASKS = {
    name: ("inference", "training", *(("one token",) if name in ("gpt2", "qwen2") else ()))
    for name in ("bert", "gpt2", "qwen2", "convnext", "t5")
}
SIDES = ("inductor", "aotkit")
Row = tuple[str, str, str]


def rows(only: str = "") -> list[Row]:
    """Model, task and backend of each process, both backends of a task one after the other."""
    found = [(name, task, side) for name, tasks in TASKS.items() for task in tasks for side in SIDES]
    return [row for row in found if re.search(only, "/".join(row))]


def first_call(name: str, task: str, backend: str) -> float:
    """Seconds of the first compiled step, in this process."""
    import torch

    from tools.device_items import MODELS, make_inputs, settings_of, wait

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    model = MODELS[name](device == "cpu").to(device, dtype).train(task == "training")
    inputs = make_inputs(model, task, device)

    def step(run: Any) -> None:
        with torch.set_grad_enabled(task == "training"):
            result = run(**inputs)
        if task == "training":
            model.zero_grad(set_to_none=True)
            result.loss.backward()
        wait(device)

    step(model)
    begin = time.perf_counter()
    step(torch.compile(model, **(settings_of(backend, device) or {})))
    return time.perf_counter() - begin


def in_a_process(row: Row) -> float:
    """The same in one of its own, with caches that are empty."""
    with tempfile.TemporaryDirectory(prefix="aotkit-first-") as folder:
        caches = {f"{which}_CACHE_DIR": str(Path(folder) / which) for which in ("AOTKIT", "TRITON", "TORCHINDUCTOR")}
        command = [sys.executable, "-m", "tools.bench.first_calls", "--worker", *row]
        done = subprocess.run(command, env={**os.environ, **caches}, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"{'/'.join(row)}: {done.stderr[-2000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def table(seconds: dict[Row, float]) -> str:
    """A row for each model and task of which both sides are known, and the geometric mean of the shares."""
    lines = ["| model | task | inductor | aotkit | share |", "|---|---|---|---|---|"]
    shares = []
    for (name, task, side), ours in seconds.items():
        theirs = seconds.get((name, task, "inductor"))
        if side == "aotkit" and theirs is not None:
            shares.append(ours / theirs)
            lines.append(f"| {name} | {task} | {theirs:.1f} s | {ours:.1f} s | {shares[-1]:.2f} |")
    if shares:
        lines += ["", f"geometric mean of the shares: {math.exp(sum(map(math.log, shares)) / len(shares)):.2f}"]
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a regular expression: models/tasks/backends that are measured")
    parser.add_argument("--jobs", type=int, default=4, help="processes at once")
    parser.add_argument("--worker", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker:
        print(json.dumps(first_call(*options.worker)))
        return 0
    import torch

    if not torch.cuda.is_available():
        print(NO_DEVICE)
        return 0
    wanted = rows(options.only)
    with ThreadPoolExecutor(options.jobs) as pool:
        print(table(dict(zip(wanted, pool.map(in_a_process, wanted), strict=True))))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
