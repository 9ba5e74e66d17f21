"""What every operation of a wrapper plan can do.

Note [A plan is a small register program]
    Values have names: ``in3`` is the caller's argument 3, ``base0`` a synthetic base, ``fw2`` forward
    output 2 of the compiled graph, ``out1`` the caller's output 1, and symbols keep their own names. Each
    operation reads and writes such names, so a plan prints as a program, :mod:`.emit` lets each operation
    write a line or two of Python with the same names as local variables, and :mod:`.interpret` lets them
    run one by one over a dictionary. Everything about an operation stands in its class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, ClassVar

from ..contract import Dim, ViewSpec
from ..source import Source

__all__ = ["Operation", "Value", "Values", "geometry"]

Value = str
"""Name of a value; see Note [A plan is a small register program]."""

Values = MutableMapping[str, Any]
"""What the names stand for while a plan is interpreted."""


class Operation:
    """One step around the call of a compiled graph; its subclasses are frozen records.

    Attributes:
        functions: what the emitted code of such operations calls, by the global names that it has there.
        checks_memory: the plan relies on which arguments share memory, and this refuses a call where others do.
    """

    __slots__ = ()

    functions: ClassVar[Mapping[str, Callable[..., Any]]] = {}
    checks_memory: ClassVar[bool] = False

    @property
    def reads(self) -> tuple[Value, ...]:
        """Names that have to stand for something before."""
        raise NotImplementedError

    @property
    def writes(self) -> tuple[Value, ...]:
        """Names that stand for something, or for something else, afterwards."""
        return ()

    @property
    def dims_read(self) -> tuple[Dim, ...]:
        """Sizes whose symbols have to be bound before."""
        return ()

    @property
    def needs_no_grad(self) -> bool:
        """Whether it runs with grad mode off."""
        return False

    def emit(self, source: Source, indent: int) -> None:
        """Write it as Python."""
        raise NotImplementedError

    @classmethod
    def emit_all(cls, group: Sequence[Any], source: Source, indent: int) -> None:
        """Write operations of this class that follow each other."""
        for operation in group:
            operation.emit(source, indent)

    def run(self, values: Values) -> None:
        """Do it."""
        raise NotImplementedError


def geometry(view: ViewSpec) -> str:
    """Sizes, strides and offset of a view, for people."""
    sizes = ", ".join(map(str, view.sizes))
    strides = ", ".join(map(str, view.strides))
    return f"sizes=({sizes}), strides=({strides}), offset+{view.offset_delta}"
