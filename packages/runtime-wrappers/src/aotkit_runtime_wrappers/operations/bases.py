"""Bases of arguments that share memory; see Note [Synthetic bases]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..base_views import base_of
from ..contract import ViewSpec
from ..source import Source, tuple_text
from .operation import Operation, Value, Values

__all__ = ["BuildBase"]


@dataclass(frozen=True, slots=True)
class BuildBase(Operation):
    """``base`` covers the storage that ``members`` share: their common ``_base``, or (``flat``) a tensor over it.

    ``views`` say, per member, which part of the base it was when the graph was captured, over ``symbols``; checked at
    each call.
    """

    functions: ClassVar = {"_base_of": base_of}
    checks_memory: ClassVar = True

    base: Value
    members: tuple[Value, ...]
    views: tuple[ViewSpec, ...]
    flat: bool = False
    symbols: tuple[Value, ...] = ()

    @property
    def reads(self) -> tuple[Value, ...]:
        """The members, and what their places depend on."""
        return (*self.members, *self.symbols)

    @property
    def writes(self) -> tuple[Value, ...]:
        """The base."""
        return (self.base,)

    def emit(self, source: Source, indent: int) -> None:
        """One call."""
        values = ", ".join(f"{symbol!r}: {symbol}" for symbol in self.symbols)
        views, names = source.constant(self.views), " ".join(self.members)
        what = f"{tuple_text(self.members)}, {views}, {names!r}, {self.flat}, {{{values}}}"
        source.add(f"{self.base} = _base_of({what})", indent)

    def run(self, values: Values) -> None:
        """Look for it."""
        members = [values[name] for name in self.members]
        symbols = {name: values[name] for name in self.symbols}
        values[self.base] = base_of(members, self.views, " ".join(self.members), self.flat, symbols)

    def __str__(self) -> str:
        return f"{self.base} = base of {', '.join(self.members)}"
