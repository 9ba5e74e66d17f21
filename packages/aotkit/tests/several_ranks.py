"""Runs a function of a test file in several processes, which are the ranks of a gloo group."""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

Case = Callable[[int, Path], Any]


def run_ranks(
    python: Any, file: str, case: str, folder: Path, size: int = 2, timeout: float = 240.0, **variables: str
) -> list[Any]:
    """What ``case`` of the test ``file`` returns on each rank, by rank; ``None`` where the process ended before.

    ``python`` is the fixture ``warm_python``. A case is a function of its rank and of a folder that all have, and gives
    something that JSON can hold. Each file calls :func:`main` with its cases when it is run as a script.
    """
    env = {**os.environ, "AOTKIT_VERIFY": "0", "AOTKIT_CACHE_DIR": str(folder / "cache"), **variables}
    errors = python.run([file, case, str(folder), str(size)], env=env, timeout=timeout).stderr
    found: list[Any] = [None] * size
    for rank in range(size):
        answer = folder / f"answer{rank}"
        if answer.exists():
            found[rank] = json.loads(answer.read_text())
    assert any(answer is not None for answer in found), errors[-4000:]
    return found


def wait_for(file: Path, timeout: float = 60.0) -> None:
    """Until another rank has made ``file``."""
    until = time.monotonic() + timeout
    while not file.exists():
        assert time.monotonic() < until, f"nobody made {file.name}"
        time.sleep(0.01)


def main(cases: Mapping[str, Case]) -> None:
    """In the script: one process imports for all, and becomes as many as there are ranks."""
    import torch
    import torch.distributed as dist

    case, folder, size = cases[sys.argv[1]], Path(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    importlib.import_module("torch._dynamo")
    importlib.import_module("aotkit.backend")
    rank, children = 0, []
    for other in range(1, size):
        child = os.fork()
        if child == 0:
            rank, children = other, []
            break
        children.append(child)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    # A rank that ends at once would take the connections away from those that are still making theirs.
    (folder / f"joined{rank}").touch()
    for other in range(size):
        wait_for(folder / f"joined{other}")
    try:
        answer = case(rank, folder)
    except BaseException as error:  # noqa: BLE001  # the test compares it
        answer = f"{type(error).__name__}: {error}"
    done = folder / f"answer{rank}.part"
    done.write_text(json.dumps(answer))
    done.rename(folder / f"answer{rank}")
    for child in children:
        os.waitpid(child, 0)
    if rank:  # others may still be talking to this one
        while os.getppid() != 1 and not all((folder / f"answer{other}").exists() for other in range(size)):
            if (folder / "somebody dies").exists():
                break
            time.sleep(0.01)
    os._exit(0)  # gloo's threads are not always joined when a process ends by itself: its failure would become ours
