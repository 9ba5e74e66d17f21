"""Warnings that point at the user's line, not at the line of ours that gives them.

This file is the same in every package that has it; the original is tools/shared/_notices.py.
"""

from __future__ import annotations

import sys
import sysconfig
import warnings
from types import FrameType

__all__ = ["warn_user"]

_LIBRARY = tuple({path for name, path in sysconfig.get_paths().items() if name in ("stdlib", "platstdlib")})


def warn_user(message: str, category: type[Warning]) -> None:
    """Warn as of the innermost line that is neither ours nor torch's, of the user's own files if there is one.

    Between that line and ours lie as many frames as a compile happens to have, so no ``stacklevel`` tells them.
    """
    frame = _users_frame(sys._getframe(1))
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _users_frame(first: FrameType) -> FrameType:
    outside: FrameType | None = None
    frame: FrameType | None = first
    while frame is not None:
        if not _is_ours_or_torchs(frame):
            if _is_own_file(frame.f_code.co_filename):
                return frame
            outside = outside or frame
        frame = frame.f_back
    return outside or first


def _is_ours_or_torchs(frame: FrameType) -> bool:
    module = str(frame.f_globals.get("__name__", "")).partition(".")[0]  # generated code has none
    return module in ("", "torch", "aotkit") or module.startswith("aotkit_")


def _is_own_file(path: str) -> bool:
    return "-packages" not in path and not path.startswith((*_LIBRARY, "<frozen"))
