"""Warm starts: what is left of a compile in a second process, for aotkit and Inductor.

python -m tools.bench.warm                         the five architectures, one training step each
python -m tools.bench.warm --models bert --runs 1  a short look

Each backend's first process fills its cache; further ones, in turn, are measured. `stages` is processor time spent in
the backend, its imports included; `backward` that of the first backward, in which aotkit binds it and both run it;
`step` that of the whole first training step, without Inductor's imports, most of which is Dynamo's in both. The
ratio is of our stages and our whole backward to Inductor's warm start. The least of the runs counts.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

BACKENDS = ("aotkit", "inductor")


def step(name: str, backend: str) -> dict[str, Any]:
    """One training step in this process; processor seconds."""
    import torch

    from tools.bench.models import make_batch, make_model

    spent = [0.0]
    hits: list[str] = []

    def timed(compile_graph: Any) -> Any:
        def compiler(gm: Any, inputs: Any) -> Any:
            begin = time.process_time()
            try:
                return compile_graph(gm, inputs)
            finally:
                spent[0] += time.process_time() - begin

        return compiler

    if backend == "aotkit":
        import aotkit

        recorder = aotkit.Recorder()
        chosen = timed(aotkit.make_backend(aotkit.Options(fallback="error"), recorder))
    else:
        from torch._inductor.compile_fx import compile_fx

        chosen = timed(compile_fx)
    model, batch = make_model(name), make_batch(name, quick=True)
    begin = time.process_time()
    loss = torch.compile(model, backend=chosen)(**batch)
    forward = time.process_time()
    (loss.loss if hasattr(loss, "loss") else loss[0]).backward()
    end = time.process_time()
    if backend == "aotkit":
        hits = [n for n, _ in recorder.events if n in ("cache.loaded", "cache.bypass")]
    return {"stages": spent[0], "step": end - begin, "backward": end - forward, "hits": hits}


def measure(name: str, runs: int) -> dict[str, dict[str, Any]]:
    """The least of ``runs`` second processes per backend, taken in turn."""
    found: dict[str, list[dict[str, Any]]] = {backend: [] for backend in BACKENDS}
    with tempfile.TemporaryDirectory(prefix="aotkit-warm-") as folder:
        env = {
            **os.environ,
            "AOTKIT_CACHE_DIR": str(Path(folder) / "aotkit"),
            "TORCHINDUCTOR_CACHE_DIR": str(Path(folder) / "inductor"),
        }
        for run in range(runs + 1):
            for backend in BACKENDS:
                command = [sys.executable, "-m", "tools.bench.warm", "--worker", name, backend]
                done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
                if done.returncode:
                    raise RuntimeError(f"{name} {backend}: {done.stderr[-2000:]}")
                if run:
                    found[backend].append(json.loads(done.stdout.splitlines()[-1]))
    return {backend: _least(rows) for backend, rows in found.items()}


def _least(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of each figure by itself: one more of Python's collections falls here in one run and there in another."""
    return {**rows[0], **{what: min(row[what] for row in rows) for what in ("stages", "backward", "step")}}


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.warm", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["bert", "gpt2", "resnet", "vit", "llama"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--worker", nargs=2, metavar=("MODEL", "BACKEND"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        print(json.dumps(step(*given.worker)))
        return
    print("| model | aotkit: stages | backward | step | Inductor: stages | backward | step | ratio | of the steps | |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for name in given.models:
        row = measure(name, given.runs)
        ours, theirs = row["aotkit"], row["inductor"]
        total = ours["stages"] + ours["backward"]
        ratios = f"{total / theirs['step']:.2f} | {ours['step'] / theirs['step']:.2f}"
        times = " | ".join(f"{side[what]:.2f} s" for side in (ours, theirs) for what in ("stages", "backward", "step"))
        loaded, bypassed = (ours["hits"].count(f"cache.{what}") for what in ("loaded", "bypass"))
        print(f"| {name} | {times} | {ratios} | {loaded} graphs loaded, {bypassed} not kept |", flush=True)


if __name__ == "__main__":
    main()
