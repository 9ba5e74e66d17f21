"""How long the first call takes beside Inductor's: `python -m tools.bench.compile_time`.

*Own stages* is what a backend spends on the graphs that Dynamo gives it, measured alike for both: the time inside
the call of the backend, and for ours also the compile of the backward, which begins when the first backward does
(Inductor compiles both at once). The rest of a first call is Dynamo's and the step's. Processor seconds are those
of the process and everything it started.

The models are compiled in a fresh process each, with empty caches. The small functions are compiled in a process that
has compiled before, several times at sizes that no cache has seen; what counts is the quickest. *Beyond Dynamo*
is such a first call less one of Dynamo's ``eager`` backend.
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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from tools.bench.models import MODELS, make_batch, make_model
from tools.workspace import ROOT

__all__ = ["FUNCTIONS", "first_step", "main", "measure"]

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


def measure(what: str, backend: str, fresh: int = 5) -> dict[str, Any]:
    """What :func:`worker` gives for one model or function, in a process of its own."""
    with tempfile.TemporaryDirectory(prefix="aotkit-compile-time-") as folder:
        caches = ("AOTKIT_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
        env = {**os.environ, "OMP_NUM_THREADS": "1", **{name: str(Path(folder) / name.lower()) for name in caches}}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # an installed package has byte code
        command = [sys.executable, "-m", "tools.bench.compile_time", "--worker", what, backend, "--fresh", str(fresh)]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    return dict(json.loads(done.stdout.splitlines()[-1]))


def worker(what: str, backend: str, fresh: int) -> dict[str, Any]:
    """The child's part: seconds of first calls.

    ``first``, ``first_cpu`` of the call, ``own``, ``own_cpu`` of the backend's stages, ``table`` of them; for a
    function those of the quickest call, and ``beyond``, ``beyond_cpu``, what it took more than with no compile.
    """
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")
    clock = _Clock()
    run, stages = _prepared(backend, clock)
    if what not in FUNCTIONS:
        name, mode = what.split("/")
        model, batch = make_model(name).train(mode == "train"), make_batch(name, False)
        function = run(model)

        def step() -> Any:
            with torch.set_grad_enabled(mode == "train"):
                result = function(**batch)
                return result.loss.backward() if mode == "train" else result

        return {**_first_call(step, clock), "table": stages()}
    calls = [_fresh_call(what, run, clock, turn) for turn in range(-1, fresh)][1:]
    plain = [_fresh_call(what, lambda fn: torch.compile(fn, backend="eager"), clock, turn) for turn in range(-1, fresh)]
    best = {key: min(call[key] for call in calls) for key in calls[0]}
    beyond = {f"beyond{end}": best[f"first{end}"] - min(call[f"first{end}"] for call in plain) for end in ("", "_cpu")}
    return {**best, **beyond, "table": {name: seconds / (fresh + 1) for name, seconds in stages().items()}}


def first_step(make: Callable[[Callable[[Any], Any]], Callable[[], Any]], options: dict[str, Any]) -> dict[str, Any]:
    """What the first call of a step takes with aotkit and ``options``: ``first``, ``own`` and both ``_cpu``.

    ``make`` gets what compiles a function and gives the step.
    """
    clock = _Clock()
    run, _ = _prepared("aotkit", clock, options)
    return _first_call(make(run), clock)


def _fresh_call(what: str, run: Callable[[Any], Callable[..., Any]], clock: _Clock, turn: int) -> dict[str, float]:
    """The first call of a function at a size of its own; turn -1 makes the process one that has compiled before."""
    torch._dynamo.reset()
    width = 384 + 32 * turn
    inputs, function = (torch.randn(256, width), torch.randn(width)), run(FUNCTIONS[what])
    return _first_call(lambda: function(*inputs), clock)


def _first_call(step: Callable[[], Any], clock: _Clock) -> dict[str, float]:
    clock.wall = clock.cpu = 0.0
    begin, cpu = time.perf_counter(), _cpu_seconds()
    step()
    first, first_cpu = time.perf_counter() - begin, _cpu_seconds() - cpu
    return {"first": first, "first_cpu": first_cpu, "own": clock.wall, "own_cpu": clock.cpu}


class _Clock:
    """Sums the wall-clock and the processor seconds inside of ``with clock.running():``, nested ones once."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0
        self._depth = 0

    @contextmanager
    def running(self) -> Iterator[None]:
        begin, cpu = time.perf_counter(), _cpu_seconds() if self._depth == 0 else 0.0
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.wall += time.perf_counter() - begin
                self.cpu += _cpu_seconds() - cpu


def _prepared(
    backend: str, clock: _Clock, options: dict[str, Any] | None = None
) -> tuple[Callable[[Any], Callable[..., Any]], Callable[[], dict[str, float]]]:
    """How to compile under the clock, and how to ask for the seconds per stage."""
    if backend == "aotkit":
        import aotkit

        class Recorder(aotkit.Recorder):
            @contextmanager
            def stage(self, name: str) -> Iterator[None]:
                with clock.running(), super().stage(name):
                    yield

        recorder = Recorder()
        chosen = aotkit.Options(fallback="error", **(options or {}))
        compiler, table = aotkit.make_backend(chosen, recorder), recorder.stage_seconds
    else:  # as aotkit, it is imported before the clock starts
        compiler = importlib.import_module("torch._inductor.compile_fx").compile_fx

        def table() -> dict[str, float]:
            return {}

    def timed(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
        with clock.running():
            return compiler(graph, inputs)

    return lambda fn: torch.compile(fn, backend=timed), table


def _cpu_seconds() -> float:
    """Of this process, of those it has waited for, and of those that still run below it."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used) + _running_below(os.getpid())


def _running_below(process: int) -> float:
    total = 0.0
    for listed in Path(f"/proc/{process}/task").glob("*/children"):
        try:
            children = listed.read_text().split()
        except OSError:
            continue  # that thread has ended
        for child in children:
            try:
                fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue  # that process has ended
            total += sum(int(field) for field in fields[11:15]) / os.sysconf("SC_CLK_TCK") + _running_below(int(child))
    return total


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per function and model. With ``--check``, returns 1 where a promised figure is missed."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.compile_time", description=__doc__.partition("\n")[0])
    parser.add_argument("--worker", nargs=2, metavar=("WHAT", "BACKEND"), help="measure one, print JSON")
    parser.add_argument("--functions", nargs="*", choices=tuple(FUNCTIONS), default=list(FUNCTIONS))
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=list(MODELS))
    parser.add_argument("--modes", nargs="+", choices=("train", "infer"), default=["train"])
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--fresh", type=int, default=5, help="how often a small function is compiled")
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args(argv)
    if chosen.worker:
        what, backend = chosen.worker
        print(json.dumps(worker(what, backend, chosen.fresh)))
        return 0
    models = [f"{name}/{mode}" for name in chosen.models for mode in chosen.modes]
    missed = _compare(chosen.functions, _FUNCTION_COLUMNS, chosen.rounds, chosen.fresh)
    missed += _compare(models, _MODEL_COLUMNS, chosen.rounds, chosen.fresh)
    for what in missed if chosen.check else ():
        print(f"MISSED {what}", file=sys.stderr)
    return int(bool(chosen.check and missed))


_FUNCTION_COLUMNS = {"beyond": "beyond Dynamo s", "beyond_cpu": "processor s", "own": "own stages s"}
_MODEL_COLUMNS = {"first": "first call s", "first_cpu": "processor s", "own": "own s", "own_cpu": "own processor s"}


def _compare(names: Sequence[str], columns: dict[str, str], rounds: int, fresh: int) -> list[str]:
    """Prints a table; gives the names of what misses a promise."""
    missed: list[str] = []
    if not names:
        return missed
    headings = [f"{whose}: {text}" for whose in ("ours", "Inductor") for text in columns.values()]
    ratios = [key for key in columns if key in ("first_cpu", "own_cpu")]
    print(f"| what | {' | '.join(headings + ['/ ' + columns[key] for key in ratios])} |")
    print("|" + "---|" * (1 + len(headings) + len(ratios)))
    for what in names:
        turns = [{backend: measure(what, backend, fresh) for backend in BACKENDS} for _ in range(rounds)]
        ours, theirs = (_middle([turn[backend] for turn in turns]) for backend in BACKENDS)
        cells = [f"{side[key]:.2f}" for side in (ours, theirs) for key in columns]
        print(f"| {what} | {' | '.join(cells + [f'{ours[key] / theirs[key]:.3f}' for key in ratios])} |", flush=True)
        table = turns[0]["aotkit"]["table"].items()
        print("  " + ", ".join(f"{name} {seconds * 1e3:.0f}" for name, seconds in table), file=sys.stderr)
        if what in FUNCTIONS:
            missed += [what] if ours["beyond"] > SMALL_LIMIT else []
        elif any(
            ours[f"{key}{end}"] > limit * theirs[f"{key}{end}"]
            for key, limit in (("own", STAGES_LIMIT), ("first", TOTAL_LIMIT))
            for end in ("", "_cpu")
        ):
            missed.append(what)
    return missed


def _middle(turns: list[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(turn[key] for turn in turns) for key in turns[0] if key != "table"}


if __name__ == "__main__":
    raise SystemExit(main())
