"""One line on a terminal while a compile takes long: the stage and the seconds. It is gone when the compile is done.

Nothing is written where standard error is no terminal, where anything else is logged, or with ``AOTKIT_PROGRESS=0``.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

__all__ = ["AFTER", "progress"]

AFTER = 2.0  # seconds of a compile before there is a line
_EVERY = 0.2
_CLEAR = "\r\x1b[K"


@contextmanager
def progress(
    graph: str, stage: Callable[[], str], stream: TextIO | None = None, after: float | None = None
) -> Iterator[None]:
    """Around a compile of ``graph``; ``stage`` tells what is at work. ``stream`` is standard error, if not given."""
    target = stream or sys.stderr
    if not target.isatty():
        yield
        return
    done = threading.Event()
    thread = threading.Thread(
        target=_show,
        args=(done, graph, stage, target, AFTER if after is None else after),
        name="aotkit-progress",
        daemon=True,
    )
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


def _show(done: threading.Event, graph: str, stage: Callable[[], str], stream: TextIO, after: float) -> None:
    begin = time.perf_counter()
    if done.wait(after):
        return
    while True:
        seconds = time.perf_counter() - begin
        stream.write(f"{_CLEAR}aotkit compiles {graph}: {stage() or 'Dynamo'}, {seconds:.0f} s")
        stream.flush()
        if done.wait(_EVERY):
            stream.write(_CLEAR)
            stream.flush()
            return
