"""Runs tasks in forks of this process, a few at once, and stops those that hang.

A fork reports through a pipe: the test that it begins, and what came of the task. Time is processor time, so that a
busy machine makes no time-out of a slow test; a fork that waits for nothing is stopped by the clock.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

__all__ = ["Send", "supervise"]

T = TypeVar("T")
Send = Callable[..., None]

_TICKS = os.sysconf("SC_CLK_TCK")
_MORE_MEMORY = 12 << 30  # what a fork may map beyond what its parent has


@dataclass
class _Fork(Generic[T]):
    task: T
    pid: int
    pipe: int
    began: float  # clock
    cpu: float  # processor time when the present test began
    limit: float
    test: str = ""
    text: str = ""


def supervise(
    tasks: Iterable[T],
    work: Callable[[T, Send], None],
    done: Callable[[T, dict[str, Any]], None],
    jobs: int = 1,
) -> None:
    """Call ``work(task, send)`` in a fork for each task, and ``done(task, message)`` here with its last message.

    ``send(test=name, limit=seconds)`` says that a test begins, and the processor time it may take; ``send(result=...)``
    ends the task. A fork that dies before sends ``result="crash"``, one that exceeds its limit ``result="timeout"``,
    and one whose ``work`` raises ``result="error"``. The message for ``done`` says also how much processor time
    the fork took: ``seconds``.
    """
    waiting = iter(tasks)
    running: list[_Fork[T]] = []
    exhausted = False
    while running or not exhausted:
        while len(running) < jobs and not exhausted:
            try:
                running.append(_fork(next(waiting), work))
            except StopIteration:
                exhausted = True
        ready, _, _ = select.select([fork.pipe for fork in running], [], [], 0.5) if running else ([], [], [])
        for fork in list(running):
            message = _read(fork) if fork.pipe in ready else _overdue(fork)
            if message is not None:
                running.remove(fork)
                seconds = _end(fork)
                done(fork.task, {"test": fork.test, **message, "seconds": seconds})


def _fork(task: T, work: Callable[[T, Send], None]) -> _Fork[T]:
    readable, writable = os.pipe()
    pid = os.fork()
    if pid:
        os.close(writable)
        return _Fork(task, pid, readable, time.monotonic(), 0.0, 600.0)
    status = 1
    try:
        os.setpgrp()  # what a test starts ends with it
        os.close(readable)
        nothing = os.open(os.devnull, os.O_RDWR)
        for descriptor in (0, 1, 2):
            os.dup2(nothing, descriptor)
        _limit_memory()

        def send(**message: Any) -> None:
            os.write(writable, (json.dumps(message) + "\n").encode())

        try:
            work(task, send)
        except Exception as error:  # noqa: BLE001  # the parent is told; nobody else sees it
            send(result="error", why=repr(error))
        status = 0
    finally:
        os._exit(status)


def _limit_memory() -> None:
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (mapped + _MORE_MEMORY, hard))


def _read(fork: _Fork[T]) -> dict[str, Any] | None:
    """Take what the fork has sent; the message that ends its task, if there is one."""
    block = os.read(fork.pipe, 1 << 16)
    if not block:
        return {"result": "crash"}
    *lines, fork.text = (fork.text + block.decode()).split("\n")
    for line in lines:
        message: dict[str, Any] = json.loads(line)
        if "result" in message:
            return message
        fork.test, fork.limit = message["test"], message["limit"]
        fork.began, fork.cpu = time.monotonic(), _processor_time(fork.pid)
    return None


def _overdue(fork: _Fork[T]) -> dict[str, Any] | None:
    used = _processor_time(fork.pid) - fork.cpu
    if used > fork.limit or time.monotonic() - fork.began > 20 * fork.limit + 60:
        return {"result": "timeout"}
    return None


def _end(fork: _Fork[T]) -> float:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(fork.pid, signal.SIGKILL)
    os.close(fork.pipe)
    _, _, used = os.wait4(fork.pid, 0)
    return round(used.ru_utime + used.ru_stime, 2)


def _processor_time(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return sum(int(ticks) for ticks in fields[11:15]) / _TICKS
