"""Ranks as processes that are forked from one which has imported what all need."""

from __future__ import annotations

import json
import os
import shutil
import signal
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

__all__ = ["Body", "run_ranks"]

#: What a rank does: its number, a folder that all have; it gives something that JSON can hold.
Body = Callable[[int, Path], dict[str, Any]]
_GROUP_TIMEOUT = 60
_FRAMES = 6  # of an error, the innermost


def run_ranks(
    count: int, body: Body, timeout: float, *, master: int | None = None
) -> tuple[list[dict[str, Any] | None], bool]:
    """What ``body`` gives on each rank, or ``{"error": ..., "where": ...}`` of what it raised; ``None`` of a rank that
    has died. And whether all have ended within ``timeout`` seconds; those that have not are ended.

    ``master``: a port, for a store that the first rank holds; else the store is a file.
    """
    folder = Path(tempfile.mkdtemp())
    began = time.monotonic()
    try:
        children = [_start(count, body, folder, rank, master) for rank in range(count)]
        ended = _wait(children, folder, began + timeout)
        return [_read(folder / f"answer{rank}") for rank in range(count)], ended
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _start(count: int, body: Body, folder: Path, rank: int, master: int | None) -> int:
    child = os.fork()
    if child:
        return child
    warnings.simplefilter("default")  # torch's own capture of a backward pass can't stand warnings that are errors
    os.environ["AOTKIT_CACHE_DIR"] = str(folder / f"cache{rank}")
    try:
        dist.init_process_group(
            "gloo",
            store=_store(count, folder, rank, master),
            rank=rank,
            world_size=count,
            timeout=timedelta(seconds=_GROUP_TIMEOUT),
        )
        _join(count, folder, rank)
        answer = body(rank, folder)
    except BaseException as error:  # noqa: BLE001  # the caller looks at it
        inner = getattr(error, "inner_exception", error)
        if os.environ.get("RANKS_TRACEBACK"):
            traceback.print_exception(inner)
        where = traceback.format_list(traceback.extract_tb(inner.__traceback__)[-_FRAMES:])
        answer = {"error": f"{type(inner).__name__}: {inner}"[:2000], "where": "".join(where)}
    (folder / f"part{rank}").write_text(json.dumps(answer))
    (folder / f"part{rank}").rename(folder / f"answer{rank}")
    others = [folder / f"answer{other}" for other in range(count)]
    # They may be talking to this one, however long they take: an end of its own would cut them off in the middle of
    # it, and say nothing about why they are late. Whoever started all ranks ends those that take too long.
    while not all(other.exists() for other in others):
        if (folder / "somebody died").exists():
            time.sleep(0.5)
            break
        time.sleep(0.01)
    os._exit(0)  # gloo's threads are not always joined when a process ends by itself


def _join(count: int, folder: Path, rank: int) -> None:
    """Wait until all have joined the group: in the midst of that torch waits for one that has ended, not we."""
    (folder / f"joined{rank}").touch()
    while not all((folder / f"joined{other}").exists() for other in range(count)):
        time.sleep(0.01)


def _store(count: int, folder: Path, rank: int, master: int | None) -> Any:
    if master is None:
        return dist.FileStore(str(folder / "store"), count)
    return dist.TCPStore("127.0.0.1", master, count, rank == 0, timedelta(seconds=_GROUP_TIMEOUT))


def _wait(children: Sequence[int], folder: Path, until: float) -> bool:
    """Whether all have ended by then. Those that wait for one that has ended without an answer are told so."""
    left = dict(enumerate(children))
    while left and time.monotonic() < until:
        for rank, child in list(left.items()):
            if os.waitpid(child, os.WNOHANG)[0]:
                del left[rank]
                if not (folder / f"answer{rank}").exists():
                    (folder / "somebody died").touch()
        time.sleep(0.02)
    for child in left.values():
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return not left


def _read(path: Path) -> dict[str, Any] | None:
    return json.loads(path.read_text()) if path.exists() else None
