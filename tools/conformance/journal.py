"""Work through pairs in child processes, one line of JSON per finished pair: a run that was cut off goes on.

A child says which pair it is about to run; if it dies there, that pair has failed and the next child goes on behind it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from .pair import Pair

__all__ = ["Emit", "read_journal", "work_once", "work_through"]

Emit = Callable[[Pair, dict[str, Any]], None]
_STUCK = 300.0  # seconds without a line after which a child is ended


def read_journal(path: Path) -> dict[str, dict[str, Any]]:
    """What is known, by the key of the pair; a later line replaces an earlier one."""
    found: dict[str, dict[str, Any]] = {}
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            entry = json.loads(line)
        except json.JSONDecodeError:  # cut off in the middle of a line
            continue
        if "kind" in entry:
            found[entry["key"]] = entry
    return found


def work_through(
    pairs: Sequence[Pair],
    path: Path,
    check: Callable[[Sequence[Pair], Emit], None],
    *,
    chunk: int,
    again: bool = False,
    command: Sequence[str] = (),
) -> dict[str, dict[str, Any]]:
    """Run ``check(chunk of pairs, emit)`` in children until each pair has its line in ``path``; returns all of them.

    ``emit(pair, {})`` says that the pair is about to run, ``emit(pair, outcome)`` keeps its outcome. ``again`` runs
    the pairs that have a line already, too. ``command``: start this instead of a fork; it calls :func:`work_once`.
    """
    done = set() if again else set(read_journal(path))
    waiting = [pair for pair in pairs if pair.key not in done]
    while waiting:
        part, start = waiting[:chunk], path.stat().st_size if path.exists() else 0
        died = _in_command(command, path) if command else _in_child(part, path, check)
        finished, running = _new_lines(path, start)
        if died and running is None:
            running = part[0].key
        if died and running not in finished:
            finished.add(str(running))
            _append(path, {"key": running, "kind": "died", "reason": died})
        waiting = [pair for pair in waiting if pair.key not in finished]
        if not died and not finished:
            raise RuntimeError(f"no outcome for any of {[pair.key for pair in part]}")
        print(f"{time.strftime('%H:%M:%S')} {len(waiting)} pairs left", file=sys.stderr, flush=True)
    return read_journal(path)


def work_once(pairs: Sequence[Pair], path: Path, check: Callable[[Sequence[Pair], Emit], None], chunk: int) -> None:
    """Run ``check`` for the first ``chunk`` pairs without a line in this process, as far as it comes."""
    done = read_journal(path)
    part = [pair for pair in pairs if pair.key not in done][:chunk]
    check(part, lambda pair, outcome: _append(path, {"key": pair.key, **outcome}))


def _new_lines(path: Path, start: int) -> tuple[set[str], str | None]:
    finished, running = set(), None
    with path.open() as file:
        file.seek(start)
        for line in file:
            entry = json.loads(line)
            if "kind" in entry:
                finished.add(entry["key"])
            else:
                running = entry["key"]
    return finished, running


def _append(path: Path, entry: dict[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(entry) + "\n")


def _in_child(part: Sequence[Pair], path: Path, check: Callable[[Sequence[Pair], Emit], None]) -> str:
    """Empty, or how the child ended otherwise than by itself."""
    path.touch()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            check(part, lambda pair, outcome: _append(path, {"key": pair.key, **outcome}))
            status = 0
        except BaseException as error:  # noqa: BLE001  # the child ends here; the parent reads how
            print(f"child: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        finally:
            os._exit(status)
    return _watched(child, path)


def _in_command(command: Sequence[str], path: Path) -> str:
    """As :func:`_in_child`, in a process of its own: a device can't be used in a fork of one that looked at it."""
    path.touch()
    return _watched(subprocess.Popen(command).pid, path)


def _watched(child: int, path: Path) -> str:
    size, since = -1, time.monotonic()
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
            return "" if code == 0 else f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        if path.stat().st_size != size:
            size, since = path.stat().st_size, time.monotonic()
        elif time.monotonic() - since > _STUCK:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return f"no answer in {_STUCK:.0f} s"
        time.sleep(0.05)


def chunks(pairs: Sequence[Pair], size: int) -> Iterable[Sequence[Pair]]:
    """Consecutive parts."""
    return (pairs[i : i + size] for i in range(0, len(pairs), size))
