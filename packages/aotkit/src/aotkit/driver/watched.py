"""What stands around a compile: a line for whoever waits for it, and no collection of garbage."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from ..environment import read_environment
from ..progress import progress
from ..recorder import Recorder
from .process import collections_put_off

__all__ = ["watched"]


@contextmanager
def watched(name: str, recorder: Recorder) -> Iterator[None]:
    """A line on the terminal while the graph ``name`` is compiled, unless more than that is logged; garbage is
    collected afterwards."""
    silent = recorder.log or not sys.stderr.isatty() or not read_environment().progress
    with collections_put_off(keeps=False), nullcontext() if silent else progress(name, recorder.at_work):
        yield
