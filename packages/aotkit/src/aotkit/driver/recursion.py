"""Room for the recursion that long chains of operations need."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["deep_recursion"]


@contextmanager
def deep_recursion(least: int = 10_000) -> Iterator[None]:
    """Context in which Python's recursion limit is at least this high; it is set back, whatever happens inside."""
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, least))
    try:
        yield
    finally:
        sys.setrecursionlimit(before)
