"""How a caller watches a capture: one optional argument, no global logger."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

__all__ = ["Observer", "stage"]


class Observer(Protocol):
    """What a capture tells about its work."""

    def stage(self, name: str, /) -> AbstractContextManager[Any]:
        """Context manager around a named stage: ``trace`` (the run of the function) or ``finish`` (graph clean-up)."""
        ...

    def dump(self, name: str, kind: str, text: Callable[[], str], /) -> None:
        """One intermediate product; ``text`` is called only if it is wanted."""
        ...


def stage(observer: Observer | None, name: str) -> AbstractContextManager[Any]:
    """The observer's stage, or nothing."""
    return nullcontext() if observer is None else observer.stage(name)
