"""Kernels compiled in processes of their own: what comes out, what fails, and how those processes end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_to_program, decompositions
from aotkit_inductor_lower.compiled import Compiled
from aotkit_inductor_lower.driver import start_compile_workers
from aotkit_inductor_lower.targets.triton import KernelSource, TritonError, compile_kernel, kernels_of
from aotkit_inductor_lower.targets.triton import workers as module
from aotkit_inductor_lower.targets.triton.compile import compile_all, compile_by
from aotkit_inductor_lower.targets.triton.workers import CompileWorkers, WorkersLost, worker_count

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")


class Watched:
    """What an observer is told."""

    def __init__(self) -> None:
        self.events: list[tuple[str, Mapping[str, object]]] = []

    def stage(self, name: str) -> Any:
        return nullcontext()

    def dump(self, name: str, kind: str, text: Any) -> None:
        return

    def event(self, name: str, fields: Mapping[str, object]) -> None:
        self.events.append((name, fields))

    def named(self, name: str) -> list[Mapping[str, object]]:
        return [fields for event, fields in self.events if event == name]


def sources() -> list[KernelSource]:
    def f(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.nn.functional.gelu(x), x.softmax(-1) * 2, y.sum(0), (x + 1).sum(1)

    graph = make_fx(f, decompositions(), tracing_mode="fake")(torch.randn(32, 64), torch.randn(48, 80))
    lowered = compile_to_program(graph, options=LowerOptions(processor="triton-interpreter", fuse=False))
    assert isinstance(lowered, Compiled)
    return [kernel.source for kernel in kernels_of(lowered.program)]


def running(text: str) -> KernelSource:
    """A kernel whose text does something else to the process that compiles it."""
    return replace(sources()[0], text=text)


@pytest.fixture
def two() -> Iterator[CompileWorkers]:
    workers = CompileWorkers(2)
    yield workers
    workers.close()


def processes(workers: CompileWorkers) -> list[int]:
    """Of the workers that have nothing to do."""
    return [worker.process.pid for worker in workers._idle]


def gone(pid: int, seconds: float = 30.0) -> bool:
    """Whether a process ends in time. One that nobody waited for has ended, too."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except OSError:
            return True
        time.sleep(0.05)
    return False


# -- what comes out ----------------------------------------------------------------------------------------------


def test_workers_compile_what_this_process_would(two: CompileWorkers) -> None:
    kernels, watched = sources(), Watched()
    assert len(kernels) > 2
    assert compile_all(kernels, 90, compile_by(two, watched)) == [compile_kernel(kernel, 90) for kernel in kernels]
    told = watched.named("kernel.compiled")
    assert {each["kernel"] for each in told} == {kernel.name for kernel in kernels} and not watched.named(
        "compile-workers.lost"
    )
    assert 1 <= len(processes(two)) <= 2


def test_threads_share_the_workers(two: CompileWorkers) -> None:
    kernels, found = sources(), list[Any]()

    def compile_them() -> None:
        found.append(compile_all(kernels, 80, compile_by(two)))

    threads = [threading.Thread(target=compile_them) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [[compile_kernel(kernel, 80) for kernel in kernels]] * 4 and len(processes(two)) <= 2


def test_a_graph_is_compiled_by_workers_if_its_options_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from aotkit_inductor_lower.targets.triton import build

    asked: list[int] = []
    monkeypatch.setattr(build, "shared_workers", lambda count: asked.append(count) or CompileWorkers(count))
    assert build._compiler(LowerOptions(compile_workers=0), None) is compile_kernel and not asked
    assert build._compiler(LowerOptions(compile_workers=3), None) is not compile_kernel and asked == [3]


def test_a_worker_imports_no_torch(two: CompileWorkers) -> None:
    loaded = running("import sys\nraise RuntimeError('torch' in sys.modules, 'numpy' in sys.modules)")
    with pytest.raises(TritonError, match=r"\(False, False\)"):
        compile_by(two)(loaded, 90)


def test_what_is_printed_is_no_answer(two: CompileWorkers) -> None:
    kernel = sources()[0]
    loud = replace(kernel, text="print('noise' * 1000)\n" + kernel.text)
    assert compile_by(two)(loud, 90).name == kernel.name


# -- what fails --------------------------------------------------------------------------------------------------


def test_a_refusal_names_the_kernel_and_its_line_and_the_worker_goes_on(two: CompileWorkers) -> None:
    kernel = sources()[0]
    wrong = replace(kernel, text=kernel.text.replace("tl.store(", "tl.no_such_function(", 1))
    with pytest.raises(TritonError, match=f"does not compile the kernel {kernel.name} for sm_90") as caught:
        compile_by(two)(wrong, 90)
    assert "no_such_function" in str(caught.value) and any("Traceback" in n for n in caught.value.__notes__)
    (before,) = processes(two)
    assert compile_by(two)(kernel, 90) == compile_kernel(kernel, 90) and processes(two) == [before]


def test_a_kernel_that_crashes_the_compiler_is_a_refusal(two: CompileWorkers) -> None:
    crash = running("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)")
    with pytest.raises(TritonError, match=r"its compiler crashed \(SIGSEGV\)"):
        compile_by(two)(crash, 90)
    kernel = sources()[0]
    assert compile_by(two)(kernel, 90) == compile_kernel(kernel, 90)


def test_a_worker_that_is_killed_is_told_once_and_threads_go_on(two: CompileWorkers) -> None:
    kernels, watched = sources(), Watched()
    two.start()
    for pid in processes(two):
        os.kill(pid, signal.SIGKILL)
    made = compile_all(kernels, 90, compile_by(two, watched))
    assert made == [compile_kernel(kernel, 90) for kernel in kernels]
    (lost,) = watched.named("compile-workers.lost")
    assert "-9" in str(lost["reason"]) and not processes(two)


def test_where_no_process_may_be_started_threads_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: Any, **__: Any) -> Any:
        raise PermissionError("not in this sandbox")

    monkeypatch.setattr(module.subprocess, "Popen", forbidden)
    workers, kernels, watched = CompileWorkers(4), sources(), Watched()
    workers.start()
    assert compile_all(kernels, 90, compile_by(workers, watched)) == [compile_kernel(k, 90) for k in kernels]
    (lost,) = watched.named("compile-workers.lost")
    assert "not in this sandbox" in str(lost["reason"])


@pytest.mark.parametrize("text", ["", "import sys; sys.stdout.write('hello ' * 100)"], ids=["silent", "chatty"])
def test_another_program_is_no_worker(text: str) -> None:
    workers = CompileWorkers(1, command=(sys.executable, "-c", text))
    with pytest.raises(WorkersLost):
        workers.compile({})


def test_a_worker_without_triton_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "triton.py").write_text("raise ImportError('a broken triton')")
    workers = CompileWorkers(1)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(WorkersLost, match="a broken triton"):
        workers.compile({})


# -- how they end ------------------------------------------------------------------------------------------------


def test_a_worker_without_work_ends_and_another_one_takes_its_place() -> None:
    workers, kernel, watched = CompileWorkers(1, idle=0.2), sources()[0], Watched()
    try:
        first = compile_by(workers, watched)(kernel, 90)
        (before,) = processes(workers)
        assert gone(before)
        assert compile_by(workers, watched)(kernel, 90) == first and processes(workers) != [before]
        assert not watched.named("compile-workers.lost")
    finally:
        workers.close()


def test_closed_workers_end(two: CompileWorkers) -> None:
    two.start()
    started = processes(two)
    assert len(started) == 2
    two.close()
    assert all(map(gone, started))
    with pytest.raises(WorkersLost, match="closed"):
        two.compile({})


SCRIPT = """\
import os, sys
import torch
from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.driver import start_compile_workers
from aotkit_inductor_lower.targets.triton.workers import shared_workers
print("main", flush=True)
start_compile_workers([torch.device("cuda:0")], LowerOptions(compile_workers=2))
workers = shared_workers(2)
print(*(worker.process.pid for worker in workers._idle), flush=True)
"""


def script(end: str) -> tuple[list[str], list[int]]:
    """What a script without a main guard prints, and the workers that it started."""
    run = subprocess.run([sys.executable, "-c", SCRIPT + end], capture_output=True, text=True, timeout=120)
    lines = run.stdout.split("\n")
    assert lines[0] == "main" and "main" not in lines[1:], run.stderr
    return lines[2:], [int(pid) for pid in lines[1].split()]


@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), 9)"], ids=["ends", "exits", "is killed"])
def test_workers_end_with_their_parent(end: str) -> None:
    _, started = script(end)
    assert len(started) == 2 and all(map(gone, started))


def test_a_forked_process_has_workers_of_its_own() -> None:
    lines, started = script(
        "from aotkit_inductor_lower.targets.triton.worker import compile_job\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    own = shared_workers(2)\n"
        "    own.start()\n"
        "    print('child', *(worker.process.pid for worker in own._idle), flush=True)\n"
        "    os._exit(0)\n"
        "os.waitpid(child, 0)\n"
        "print('parent', all(worker.process.poll() is None for worker in workers._idle))\n"
    )
    own = [int(pid) for pid in lines[0].removeprefix("child").split()]
    assert len(own) == 2 and not set(own) & set(started) and lines[1] == "parent True"
    assert all(map(gone, [*own, *started]))


# -- when there are some -----------------------------------------------------------------------------------------


def test_only_cuda_devices_have_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    monkeypatch.setattr(module, "start_shared", asked.append)
    cpu, cuda = torch.device("cpu"), torch.device("cuda:0")
    start_compile_workers([cpu], LowerOptions(compile_workers=2))
    start_compile_workers([cuda], LowerOptions(compile_workers=2, processor="triton-interpreter"))
    assert not asked
    start_compile_workers([cpu, cuda], LowerOptions(compile_workers=2))
    assert asked == [2]


def test_as_many_as_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for usable, expected in ((1, 0), (2, 2), (16, 16), (128, 16)):
        monkeypatch.setattr(module.os, "sched_getaffinity", lambda _, n=usable: set(range(n)), raising=False)
        assert worker_count(None) == expected
    assert worker_count(0) == 0 and worker_count(40) == 40


def test_a_program_that_is_no_python_starts_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    workers = CompileWorkers(2)
    workers.start()
    with pytest.raises(WorkersLost, match="no Python interpreter"):
        workers.compile({})
