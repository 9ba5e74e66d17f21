"""How long the first call takes beside the incumbent's: `python -m tools.bench.compile_time`.

Each measurement is a process of its own with empty cache folders. *Own stages* is what a backend spends on the graphs
that the frontend gives it: ours from the stage table, the incumbent's from its own timer around calls of the backend,
which compiles the backward as well. The rest of a first call is the frontend's, the same for both, and the step itself.
The small functions are compiled in a process that has compiled before; the models in a fresh one.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from tools.bench.models import MODELS, make_batch, make_model
from tools.workspace import ROOT

__all__ = ["FUNCTIONS", "main", "measure"]

BACKENDS = ("aotkit", "inductor")
SMALL_LIMIT, STAGES_LIMIT, TOTAL_LIMIT = 0.15, 0.1, 0.25


def gelu_residual(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """An elementwise chain."""
    return torch.nn.functional.gelu(x + bias, approximate="tanh") + x


def row_softmax(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A reduction over rows with what is before and after it."""
    return torch.softmax(x * 0.5 + bias, -1) * x


def column_norm(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """A reduction over columns."""
    return (x - x.mean(0)) * torch.rsqrt(x.var(0) + 1e-5) + bias


FUNCTIONS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    function.__name__: function for function in (gelu_residual, row_softmax, column_norm)
}


def measure(what: str, backend: str) -> dict[str, Any]:
    """Seconds of one first call in a process of its own: ``first``, ``stages``, ``cpu`` (children too), ``table``."""
    with tempfile.TemporaryDirectory(prefix="aotkit-compile-time-") as folder:
        caches = ("AOTKIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        env = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(Path(folder) / name.lower()) for name in caches}}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
        command = [sys.executable, "-m", "tools.bench.compile_time", "--worker", what, backend]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def worker(what: str, backend: str) -> dict[str, Any]:
    """The child's part: one first call."""
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")
    run, stages = _prepared(backend)
    if what in FUNCTIONS:
        inputs = torch.randn(256, 384), torch.randn(384)
        run(lambda x, bias: (x + bias).sum(-1))(*inputs)  # the process has compiled before
        torch._dynamo.reset()
        function = run(FUNCTIONS[what])

        def step() -> Any:
            return function(*inputs)
    else:
        name, mode = what.split("/")
        model, batch = make_model(name).train(mode == "train"), make_batch(name, False)
        function = run(model)

        def step() -> Any:
            with torch.set_grad_enabled(mode == "train"):
                result = function(**batch)
                return result.loss.backward() if mode == "train" else result

    before, begin, cpu = stages(), time.perf_counter(), _cpu_seconds()
    step()
    first, cpu = time.perf_counter() - begin, _cpu_seconds() - cpu
    table = {name: seconds - before.get(name, 0.0) for name, seconds in stages().items()}
    return {"first": first, "cpu": cpu, "stages": sum(table.values()), "table": table}


def _prepared(backend: str) -> tuple[Callable[[Any], Callable[..., Any]], Callable[[], dict[str, float]]]:
    """How to compile, and how to ask for the seconds per stage so far."""
    if backend == "aotkit":
        import aotkit

        recorder = aotkit.Recorder()
        options: dict[str, Any] = {"observer": recorder, "fallback": "error"}
        return lambda fn: torch.compile(fn, backend="aotkit", options=options), recorder.stage_seconds
    importlib.import_module("torch._inductor.compile_fx")  # as aotkit, it is imported before the clock starts
    from torch._dynamo.utils import compilation_time_metrics

    def seconds() -> dict[str, float]:
        return {"backend": sum(compilation_time_metrics.get("OutputGraph.call_user_compiler", []))}

    return lambda fn: torch.compile(fn, backend=backend), seconds


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per function and model. With ``--check``, returns 1 where a promised figure is missed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.compile_time", description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", nargs=2, metavar=("WHAT", "BACKEND"), help="measure one, print JSON")
    parser.add_argument("--functions", nargs="*", choices=tuple(FUNCTIONS), default=list(FUNCTIONS))
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=("train", "infer"), default=["train"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args(argv)
    if chosen.worker:
        print(json.dumps(worker(*chosen.worker)))
        return 0
    missed = []
    figures = "first call s | own stages s | processor s"
    print(f"| what | ours: {figures} | incumbent: {figures} |")
    print("|---|---|---|---|---|---|---|")
    for what in [*chosen.functions, *(f"{name}/{mode}" for name in chosen.models for mode in chosen.modes)]:
        taken = [{backend: measure(what, backend) for backend in BACKENDS} for _ in range(chosen.rounds)]
        ours, theirs = (_median([turn[backend] for turn in taken]) for backend in BACKENDS)
        cells = [f"{side[key]:.2f}" for side in (ours, theirs) for key in ("first", "stages", "cpu")]
        print(f"| {what} | {' | '.join(cells)} |", flush=True)
        print("  " + ", ".join(f"{n} {s * 1e3:.0f}" for n, s in taken[0]["aotkit"]["table"].items()), file=sys.stderr)
        if what in FUNCTIONS:
            missed += [what] if ours["stages"] > SMALL_LIMIT else []
        elif ours["stages"] > STAGES_LIMIT * theirs["stages"] or ours["first"] > TOTAL_LIMIT * theirs["first"]:
            missed.append(what)
    for what in missed if chosen.check else ():
        print(f"MISSED {what}", file=sys.stderr)
    return int(bool(chosen.check and missed))


def _median(turns: list[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(turn[key] for turn in turns) for key in ("first", "stages", "cpu")}


if __name__ == "__main__":
    raise SystemExit(main())
