"""What runs around each stage: room to recurse, and errors as this package raises them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..driver.bugs import is_bug, raise_bug, raised_by_user
from ..driver.process import deep_recursion
from ..driver.refusals import REFUSALS
from ..errors import CompileError

__all__ = ["in_stage"]


@contextmanager
def in_stage(name: str, line: str = "") -> Iterator[None]:
    """Refusals become :class:`CompileError`, bugs :class:`InternalError`; what the user's code raises stays."""
    try:
        with deep_recursion():
            yield
    except REFUSALS as refusal:
        raise CompileError(f"the stage {name!r} refused: {refusal}") from refusal
    except Exception as error:
        if not is_bug(error) or raised_by_user(error):
            raise
        raise_bug(error, line)
