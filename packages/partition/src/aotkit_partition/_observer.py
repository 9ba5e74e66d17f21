"""How a caller watches a package at work: one optional argument, no global logger.

This file is the same in every package that has it; the original is tools/shared/_observer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

__all__ = ["SILENT", "Observer"]


class Observer(Protocol):
    """Is told what a package does; what it makes of it is its own business. One may watch several packages."""

    def stage(self, name: str, /) -> AbstractContextManager[Any]:
        """A context manager around one named stage of the work."""
        ...

    def dump(self, name: str, kind: str, text: Callable[[], str], /) -> None:
        """One intermediate result; ``kind`` is graphs, ir, kernels or passes. ``text`` is called only if wanted."""

    def event(self, name: str, fields: Mapping[str, object], /) -> None:
        """Something that happened once, and what is known about it: a cache hit, a wrapper bound."""


class _Silent:
    """The observer that makes nothing of what it is told."""

    def stage(self, _name: str, /) -> AbstractContextManager[Any]:
        return nullcontext()

    def dump(self, _name: str, _kind: str, _text: Callable[[], str], /) -> None:
        return

    def event(self, _name: str, _fields: Mapping[str, object], /) -> None:
        return

    def __repr__(self) -> str:
        return "SILENT"


SILENT: Observer = _Silent()
