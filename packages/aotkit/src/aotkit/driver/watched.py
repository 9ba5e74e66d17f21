"""What stands around a compile for whoever waits for it."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext

from ..environment import read_environment
from ..progress import progress
from ..recorder import Recorder

__all__ = ["watched"]


def watched(name: str, recorder: Recorder) -> AbstractContextManager[None]:
    """A line on the terminal while the graph ``name`` is compiled, unless more than that is logged."""
    if recorder.log or not sys.stderr.isatty() or not read_environment().progress:
        return nullcontext()
    return progress(name, recorder.at_work)
