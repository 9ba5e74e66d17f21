"""Drive the workers of one (model, mode): first calls, interleaved rounds, memory, errors."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.bench.numerics import ErrorReport, compare, load
from tools.workspace import ROOT


@dataclass(frozen=True, slots=True)
class Settings:
    """How to measure. ``round_seconds`` is the least duration of one backend's turn in a round; ``precision`` that of
    :func:`torch.set_float32_matmul_precision`, or ``"autocast"`` to bfloat16."""

    backends: tuple[str, ...] = ("eager", "inductor", "aotkit")
    rounds: int = 7
    round_seconds: float = 1.0
    threads: int = 1
    quick: bool = False
    precision: str = "highest"


@dataclass(slots=True)
class Measurement:
    """What was measured for one backend; `error` says what failed, the other fields are then as far as it got."""

    model: str
    mode: str
    backend: str
    first_call_s: float | None = None
    steady_ms: float | None = None
    speedup: float | None = None
    round_speedups: list[float] = field(default_factory=list)
    peak_tensor_mb: float | None = None
    peak_resident_mb: float | None = None
    accuracy: dict[str, Any] | None = None
    error: str | None = None


class WorkerFailed(Exception):
    """A worker answered with an error or died."""


@dataclass(slots=True)
class WorkerProcess:
    """The parent's end of a worker."""

    backend: str
    process: subprocess.Popen[str]

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        """Send one request and wait for its answer; raises :class:`WorkerFailed`."""
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("a worker needs pipes")
        try:
            self.process.stdin.write(json.dumps({"command": command, **arguments}) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            raise WorkerFailed(f"{command}: the process ended with status {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerFailed(f"{command}: {answer['error']}")
        return dict(answer)


@contextmanager
def worker(model: str, mode: str, backend: str, settings: Settings, folder: Path) -> Iterator[WorkerProcess]:
    """Start a worker; it ends with the block. A backend's first worker in a folder finds empty caches."""
    cache = folder / f"cache-{backend}"
    env = {
        **os.environ,
        "OMP_NUM_THREADS": str(settings.threads),
        "TORCHINDUCTOR_CACHE_DIR": str(cache / "inductor"),
        "TRITON_CACHE_DIR": str(cache / "triton"),
        "AOTKIT_CACHE_DIR": str(cache / "aotkit"),
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")])),
    }
    arguments = [model, mode, backend, str(settings.threads), str(int(settings.quick)), settings.precision]
    with open(folder / f"{backend}.log", "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tools.bench.worker", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            env=env,
            text=True,
        )
        try:
            yield WorkerProcess(backend, process)
        finally:
            if process.stdin is not None:
                process.stdin.close()
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()


def measure(model: str, mode: str, settings: Settings, report: Any = print) -> list[Measurement]:
    """Measure all backends on one model in one mode; a backend that fails gets a row that says so."""
    results = {backend: Measurement(model, mode, backend) for backend in settings.backends}
    with tempfile.TemporaryDirectory(prefix="aotkit-bench-") as name, ExitStack() as stack:
        folder = Path(name)
        workers = {b: stack.enter_context(worker(model, mode, b, settings, folder)) for b in settings.backends}
        for backend in settings.backends:  # one at a time: nothing else runs during a first call
            with recorded(results[backend], folder):
                workers[backend].ask("prepare")
                results[backend].first_call_s = workers[backend].ask("first")["seconds"]
                report(f"{model} {mode} {backend}: first call {results[backend].first_call_s:.2f} s")
        interleave(workers, results, settings, folder)
        for backend in settings.backends:
            if results[backend].error is None:
                with recorded(results[backend], folder):
                    results[backend].peak_resident_mb = workers[backend].ask("resident")["mb"]
        add_accuracy(workers, results, folder)
        stack.close()
        # Tensor memory is followed from before the first call, so it takes a second process, with warm caches.
        for backend in settings.backends:
            if results[backend].error is None:
                with recorded(results[backend], folder), worker(model, mode, backend, settings, folder) as process:
                    process.ask("prepare")
                    results[backend].peak_tensor_mb = process.ask("tensors")["mb"]
    return list(results.values())


@contextmanager
def recorded(result: Measurement, folder: Path) -> Iterator[None]:
    """Turn a worker's failure into the row's error, with the end of its log."""
    try:
        yield
    except WorkerFailed as failure:
        log = (folder / f"{result.backend}.log").read_text(encoding="utf-8", errors="replace")
        tail = "\n".join(log.strip().splitlines()[-5:])
        result.error = f"{failure}" + (f"\n{tail}" if tail else "")


def interleave(
    workers: dict[str, WorkerProcess], results: dict[str, Measurement], settings: Settings, folder: Path
) -> None:
    """Rounds in which each backend has one turn; a turn's figure is its median step.

    Ratios are taken within a round, so that a slow phase of the machine hits both sides, and the reported ratio is
    the median over rounds. The order turns from round to round.
    """
    medians: dict[str, list[float]] = {backend: [] for backend in workers}
    order = list(workers)
    for number in range(settings.rounds + 1):  # round 0 warms up and is dropped
        for backend in order:
            if results[backend].error is None:
                with recorded(results[backend], folder):
                    seconds = settings.round_seconds / 2 if number == 0 else settings.round_seconds
                    times = workers[backend].ask("steady", seconds=seconds)["ms"]
                    if number > 0:
                        medians[backend].append(statistics.median(times))
        order = order[1:] + order[:1]
    for backend, values in medians.items():
        if len(values) == settings.rounds:
            results[backend].steady_ms = statistics.median(values)
            if len(medians.get("eager", ())) == settings.rounds:
                ratios = [eager / own for eager, own in zip(medians["eager"], values, strict=True)]
                results[backend].round_speedups = ratios
                results[backend].speedup = statistics.median(ratios)


def add_accuracy(workers: dict[str, WorkerProcess], results: dict[str, Measurement], folder: Path) -> None:
    """Compare every backend's outputs and gradients with eager's in float64; again without ties where one is beyond the
    bound."""
    if "eager" not in workers or results["eager"].error is not None:
        return
    reference = ask_values(workers["eager"], folder / "float64.npz", double=True)
    eager = ask_values(workers["eager"], folder / "eager.npz", double=False)
    for backend, result in results.items():
        if result.error is None:
            with recorded(result, folder):
                path = folder / f"{backend}.npz"
                own = eager if backend == "eager" else ask_values(workers[backend], path, double=False)
                report = compare(own, eager, reference)
                result.accuracy = report.to_json()
                if not report.ok and result.mode == "train":
                    result.accuracy = without_ties(workers["eager"], folder, backend, own, eager).to_json()


def without_ties(
    process: WorkerProcess, folder: Path, backend: str, own: dict[str, Any], eager: dict[str, Any]
) -> ErrorReport:
    """Errors against float64 with those elements on the backend's side of a kink that float32 cannot place, see Note
    [Ties at kinks] in `tools/bench/ties.py`; eager's errors in the same way."""
    given = {name: str(folder / f"{name}.npz") for name in ("eager", backend)}
    results = {name: str(folder / f"{name}-tied.npz") for name in given}
    answer = process.ask("ties", reference=str(folder / "float64.npz"), given=given, results=results)
    tied = {name: load(path) for name, path in results.items()}
    return compare(own, eager, tied[backend], tied["eager"], answer["ties"][backend])


def ask_values(process: WorkerProcess, path: Path, double: bool) -> dict[str, Any]:
    """One step's outputs and gradients."""
    process.ask("values", path=str(path), double=double)
    return load(path)


def measure_all(models: Sequence[str], modes: Sequence[str], settings: Settings) -> list[Measurement]:
    """All pairs, one after the other."""
    return [row for model in models for mode in modes for row in measure(model, mode, settings)]
