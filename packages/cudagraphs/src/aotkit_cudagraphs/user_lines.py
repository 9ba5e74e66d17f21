"""Which line of the user's code something happened in."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import CodeType, FrameType

import torch

_NOT_THE_USERS = (str(Path(torch.__file__).parent), str(Path(__file__).parent))


def user_line_of(error: BaseException) -> str | None:
    """`file:line: source` of the innermost frame of the user's code in an error's traceback."""
    found = None
    trace = (error.__cause__ or error).__traceback__ if isinstance(error, RuntimeError) else error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame.f_code):
            found = _line(trace.tb_frame.f_code, trace.tb_lineno)
        trace = trace.tb_next
    return found


def user_line_here() -> str | None:
    """`file:line: source` of the innermost frame of the user's code that is running now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _is_users(frame.f_code):
            return _line(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return None


def _is_users(code: CodeType) -> bool:
    return not code.co_filename.startswith(_NOT_THE_USERS)


def _line(code: CodeType, number: int) -> str:
    source = linecache.getline(code.co_filename, number).strip()
    return f"{code.co_filename}:{number}: {source}".rstrip(": ")
