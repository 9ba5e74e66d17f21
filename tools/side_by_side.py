"""Run nox sessions side by side: `python -m tools.side_by_side --jobs 2 lint types "test_package(cache)"`.

A session writes to a file of its own under `build/sessions/`, which is printed in one piece when the session ends.
After the last one comes a table with the result and the times of each. A failed session does not stop the others.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.workspace import ROOT

try:
    import resource
except ImportError:  # on Windows
    resource = None  # type: ignore[assignment]

LOGS = ROOT / "build" / "sessions"

#: More sessions at once than this need more memory than a small machine has.
MOST_JOBS = 4

#: How far a session may give way: with this, it has two fifths of the time that the first one has, and none starves.
LEAST_PRIORITY = 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """A session that has ended."""

    name: str
    code: int
    seconds: float
    log: Path
    used: float = 0.0  #: seconds of processors, its own and those of processes that it waited for


@dataclass(frozen=True, slots=True)
class _Running:
    name: str
    process: subprocess.Popen[bytes]
    begun: float
    log: Path


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def nox_command(name: str) -> list[str]:
    """The command that runs one session."""
    return [sys.executable, "-m", "nox", "-s", name]


def run_sessions(
    names: Sequence[str],
    jobs: int,
    logs: Path = LOGS,
    command: Callable[[str], list[str]] = nox_command,
    pause: float = 60,
) -> Iterator[Outcome]:
    """Run the sessions in this order, `jobs` of them at a time; yields each as it ends.

    Each learns from ``SESSIONS_AT_ONCE`` with how many it shares the processors, and gives way to the first ones: these
    are the longest, and nothing would be left to run beside their ends. What runs is said every `pause` seconds, so
    that nobody takes a long session for one that hangs.
    """
    logs.mkdir(parents=True, exist_ok=True)
    waiting, running, said = list(names), list[_Running](), time.monotonic()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                running.append(_start(waiting.pop(0), logs, command, jobs))
                _give_way(running[-1].process, len(names) - len(waiting) - 1)
            ended = [outcome for each in running if (outcome := _outcome(each))]
            running = [each for each in running if each.process.returncode is None]
            yield from ended
            if not ended:
                time.sleep(0.1)
            if running and time.monotonic() - said >= pause:
                said = time.monotonic()
                print("running:", ", ".join(each.name for each in running), flush=True)
    finally:
        for each in running:
            each.process.terminate()
            each.process.wait()


def _start(name: str, logs: Path, command: Callable[[str], list[str]], jobs: int) -> _Running:
    log = logs / (re.sub(r"\W+", "-", name).strip("-") + ".log")
    with log.open("wb") as file:
        process = subprocess.Popen(
            command(name),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            cwd=ROOT,
            env={**os.environ, "SESSIONS_AT_ONCE": str(jobs)},
        )
    return _Running(name, process, time.monotonic(), log)


def _outcome(running: _Running) -> Outcome | None:
    """What became of a session, or nothing while it runs."""
    before = processor_time()
    code = running.process.poll()  # if it has ended, its time is now among that of our children
    if code is None:
        return None
    wall = time.monotonic() - running.begun
    return Outcome(running.name, code, wall, running.log, processor_time() - before)


def processor_time() -> float:
    """Seconds of processors that the processes have used that this one has waited for; 0 where nobody counts them."""
    if resource is None:
        return 0.0
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _give_way(process: subprocess.Popen[bytes], before: int) -> None:
    """A lower priority for a process and those that it will start, by how many sessions come before."""
    if hasattr(os, "setpriority"):
        lower = min(os.getpriority(os.PRIO_PROCESS, 0) + min(before, LEAST_PRIORITY), 19)
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.setpriority(os.PRIO_PROCESS, process.pid, lower)


def table(outcomes: Sequence[Outcome], seconds: float) -> str:
    """Result, wall time and processors' time of each session, the longest first, and of all."""
    width = max(len(outcome.name) for outcome in outcomes)
    lines = [
        f"session {each.name:<{width}} {'passed' if each.code == 0 else 'FAILED'} in {clock(each.seconds)}, "
        f"{clock(each.used)} of a processor"
        for each in sorted(outcomes, key=lambda each: -each.seconds)
    ]
    failed = sum(each.code != 0 for each in outcomes)
    used = sum(each.used for each in outcomes)
    lines.append(f"{len(outcomes)} sessions, {failed} failed, in {clock(seconds)}, {clock(used)} of a processor")
    return "\n".join(lines)


def clock(seconds: float) -> str:
    """`12 min 03 s`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes:2d} min {rest:02d} s"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sessions that the command line names; 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tools.side_by_side", description=__doc__)
    parser.add_argument("names", nargs="+", metavar="NAME", help="a nox session")
    # One more than there are processors: some tests wait for each other, and pip for the network.
    parser.add_argument("--jobs", type=int, default=min(processors() + 1, MOST_JOBS), help="sessions at a time")
    options = parser.parse_args(arguments)
    begun, outcomes = time.monotonic(), list[Outcome]()
    for outcome in run_sessions(options.names, max(1, options.jobs)):
        outcomes.append(outcome)
        print(f"\n=== {outcome.name}: {clock(outcome.seconds).strip()}", flush=True)
        print(outcome.log.read_text(encoding="utf-8", errors="replace"), end="", flush=True)
    print(f"\n{table(outcomes, time.monotonic() - begun)}", flush=True)
    return int(any(outcome.code for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main())
