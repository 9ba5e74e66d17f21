"""Processes that compile kernels side by side, see Note [Worker processes]."""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from . import worker as worker_program
from .worker import Job, Made, read_message, write_message

__all__ = ["CompileWorkers", "KernelRefused", "WorkersLost", "shared_workers", "start_shared", "worker_count"]

MOST = 16  # workers, where nothing else is said: a graph seldom has more kernels that differ
IDLE = 300.0  # seconds
_CRASHES = frozenset(-s for s in (signal.SIGSEGV, signal.SIGABRT, signal.SIGILL, signal.SIGFPE))


class KernelRefused(Exception):
    """Triton does not compile a kernel. ``trace``: where it gave up, in the worker."""

    def __init__(self, message: str, trace: str = "") -> None:
        super().__init__(message)
        self.trace = trace


class WorkersLost(Exception):
    """There are no workers, or none any more, for the reason in the message."""


def worker_count(asked: int | None) -> int:
    """How many workers there may be: as many as asked for, or as processors that this process may use. One worker alone
    is no faster than none."""
    if asked is not None:
        return asked
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return 0 if usable < 2 else min(usable, MOST)


class _Worker:
    """One process. It is asked by one thread at a time."""

    def __init__(self, command: Sequence[str], idle: float) -> None:
        arguments = [*command, str(os.getpid()), str(idle)]
        self.process = subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
        assert self.process.stdin is not None and self.process.stdout is not None
        self._requests, self._answers = self.process.stdin, self.process.stdout
        self._ready = False
        write_message(self._requests, [str(path) for path in sys.path])

    def ask(self, job: Job) -> Made:
        """Raises :class:`KernelRefused`; and ``EOFError``, ``OSError`` or ``ValueError`` where it is gone."""
        if not self._ready:
            said = read_message(self._answers)
            if said != ["ready"]:
                raise ValueError(f"it says {said}")
            self._ready = True
        write_message(self._requests, job)
        kind, content = read_message(self._answers)
        if kind == "error":
            raise KernelRefused(*content)
        return content  # type: ignore[no-any-return]

    def close(self) -> None:
        """It ends when it sees that nobody writes to it any more."""
        for stream in (self._requests, self._answers):
            with contextlib.suppress(OSError):
                stream.close()

    def end(self) -> int:
        """Its exit status, once it has ended: by itself, or else by force."""
        self.close()
        try:
            return self.process.wait(2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class CompileWorkers:
    """At most ``count`` processes, started when first needed or by :meth:`start`, that end after ``idle`` seconds
    without work. Safe under threads. ``command``: what is run, for tests."""

    def __init__(self, count: int, idle: float = IDLE, command: Sequence[str] = ()) -> None:
        self.count, self._idle_seconds = count, idle
        self._command = tuple(command) or _command()
        self._changed = threading.Condition()
        self._idle: list[_Worker] = []
        self._alive = 0
        self._lost = ""
        self._told = False

    def start(self) -> None:
        """Start all that are missing, without waiting for them: what they import, they import meanwhile."""
        while True:
            with self._changed:
                if self._lost or self._alive >= self.count:
                    return
                self._alive += 1
            try:
                self._give(self._started())
            except WorkersLost:
                return

    def compile(self, job: Job) -> Made:
        """What a worker makes of a job, once one has time.

        Raises :class:`KernelRefused`, also for a kernel on which Triton crashes, and :class:`WorkersLost`.
        """
        while True:
            worker = self._take()
            try:
                made = worker.ask(job)
            except KernelRefused:
                self._give(worker)
                raise
            except (EOFError, OSError, ValueError, TypeError) as error:
                self._ended(worker, error)
            except BaseException:  # raised again: whoever interrupts leaves an answer in the pipe, which is nobody's
                worker.process.kill()
                self._ended(worker, None)
                raise
            else:
                self._give(worker)
                return made

    def tell_once(self) -> bool:
        """Whether nobody was told yet that they are lost."""
        with self._changed:
            told, self._told = self._told, True
        return not told

    def close(self) -> None:
        """End those that have nothing to do; there will be no others."""
        with self._changed:
            self._lost = self._lost or "they are closed"
            idle, self._idle = self._idle, []
            self._alive -= len(idle)
            self._changed.notify_all()
        for worker in idle:
            worker.close()
        for worker in idle:
            worker.end()

    def leave_to_parent(self) -> None:
        """In a process that was forked: the workers are its parent's. They must see when that one closes them."""
        for worker in self._idle:
            worker.close()
            worker.process.returncode = 0  # there is nothing to wait for

    def _take(self) -> _Worker:
        with self._changed:
            while True:
                if self._lost:
                    raise WorkersLost(self._lost)
                if self._idle:
                    return self._idle.pop()
                if self._alive < self.count:
                    self._alive += 1
                    break
                self._changed.wait()
        return self._started()

    def _started(self) -> _Worker:
        try:
            if not self._command:
                raise OSError("this program has no Python interpreter of its own to start")
            return _Worker(self._command, self._idle_seconds)
        except (OSError, ValueError) as error:
            self._lose(f"no process can be started ({error})")
            raise WorkersLost(self._lost) from error

    def _give(self, worker: _Worker) -> None:
        with self._changed:
            if not self._lost:
                self._idle.append(worker)
                self._changed.notify()
                return
            self._alive -= 1
        worker.end()

    def _ended(self, worker: _Worker, error: Exception | None) -> None:
        """Go on where it was idle for too long, or was interrupted; else raise."""
        asked, status = worker._ready, worker.end()
        if error is not None and status in _CRASHES:
            self._forget()
            raise KernelRefused(f"its compiler crashed ({signal.Signals(-status).name})") from error
        if error is None or (status == 0 and asked):
            self._forget()
            return
        self._lose(f"a process ended with status {status} ({error or type(error).__name__})")
        raise WorkersLost(self._lost) from error

    def _forget(self) -> None:
        with self._changed:
            self._alive -= 1
            self._changed.notify()

    def _lose(self, reason: str) -> None:
        self._forget()
        with self._changed:
            self._lost = self._lost or reason
        self.close()


def _command() -> tuple[str, ...]:
    """Python, which runs the file of :mod:`.worker`; nothing where ``sys.executable`` is another program."""
    path = Path(worker_program.__file__)
    plain = bool(sys.executable) and not getattr(sys, "frozen", False) and path.is_file()
    return (sys.executable, "-P", str(path)) if plain else ()


class _Shared:
    """The workers of this process. What they make does not depend on who asks, so all compiles share them."""

    def __init__(self) -> None:
        self._lock, self._of = threading.Lock(), dict[int, CompileWorkers]()
        atexit.register(self._close)
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def of(self, count: int) -> CompileWorkers:
        with self._lock:
            if count not in self._of:
                self._of[count] = CompileWorkers(count)
            return self._of[count]

    def _close(self) -> None:
        for workers in list(self._of.values()):
            workers.close()

    def _forked(self) -> None:
        for workers in self._of.values():
            workers.leave_to_parent()
        self._lock, self._of = threading.Lock(), {}


_SHARED = _Shared()
shared_workers = _SHARED.of


def start_shared(asked: int | None) -> None:
    """Start the workers of this process, if there may be some."""
    count = worker_count(asked)
    if count and find_spec("triton") is not None:
        shared_workers(count).start()
