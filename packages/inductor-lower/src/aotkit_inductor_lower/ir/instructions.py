"""The instructions that bodies are made of, the same in the loop IR and in kernels.

In the loop IR a load or a store has one index per dimension of a buffer, in a kernel the one offset in its memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ..ops.dtypes import DType
from ..symbolic import Expr
from .arguments import is_negative_zero

__all__ = ["STORE_MODES", "CheckedIndex", "Compute", "Const", "Index", "Instr", "Load", "Reduce", "Store"]


@dataclass(frozen=True, slots=True)
class Load:
    """``result = buffer[indices]``. With ``mask`` (a bool value): lanes where it is false read nothing and
    give ``other``. The value has the buffer's dtype."""

    result: str
    buffer: str
    indices: tuple[Expr, ...]
    dtype: DType
    mask: str | None = None
    other: int | float | bool = 0
    negative_zero: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.other != self.other:
            object.__setattr__(self, "other", math.nan)
        object.__setattr__(self, "negative_zero", is_negative_zero(self.other))


@dataclass(frozen=True, slots=True)
class Const:
    """A literal. Floats may be inf or nan."""

    result: str
    value: int | float | bool
    dtype: DType
    negative_zero: bool = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.value != self.value:
            object.__setattr__(self, "value", math.nan)
        object.__setattr__(self, "negative_zero", is_negative_zero(self.value))


@dataclass(frozen=True, slots=True)
class Index:
    """An index expression as a value of type ``dtype`` (i64 or i32)."""

    result: str
    expr: Expr
    dtype: DType


@dataclass(frozen=True, slots=True)
class Compute:
    """``result = op(args)``; ``op`` is a row of the op table (``add``, ``exp``, ``where``, ``cast`` ...), ``dtype``
    the result's type. Except for casts, comparisons and ``where``, arguments have the result's type."""

    result: str
    op: str
    args: tuple[str, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class CheckedIndex:
    """``result`` = ``value`` (i64), plus ``size`` if negative. Outside ``[-size, size)`` the kernel reports
    an index error, with this nest's origin, and the lane reads element 0."""

    result: str
    value: str
    size: Expr


@dataclass(frozen=True, slots=True)
class Reduce:
    """Reduce ``value`` over the stage's ranges. ``kind``: sum, prod, min, max (NaN propagates), any, all,
    argmin, argmax (first index; result i64, over the flattened stage ranges in order).

    ``running`` makes it a scan: the result, visible in this stage only, is the reduction of all iterations up to and
    including the present one, which then run in order. Not for argmin and argmax.

    ``position``: in a kernel, whose loops may be split, merged and reordered, what argmin and argmax give where the
    value is found; the smallest of equals. In the loop IR the stage's ranges tell."""

    result: str
    kind: str
    value: str
    dtype: DType
    running: bool = False
    position: Expr | None = None


@dataclass(frozen=True, slots=True)
class Store:
    """``buffer[indices] = value``; the other modes (add, mul, min, max; NaN propagates) combine it with what is there.
    Their indices may collide within the nest; a nest with such a store runs its outer iterations in order. The value
    has the buffer's dtype, and so has each intermediate result."""

    buffer: str
    indices: tuple[Expr, ...]
    value: str
    mode: str = "set"
    mask: str | None = None

    @property
    def accumulates(self) -> bool:
        """Whether the element's old value takes part."""
        return self.mode != "set"

    @property
    def plain(self) -> bool:
        """Whether the element is the value afterwards, whatever it was: no old value takes part, nothing is masked."""
        return self.mode == "set" and self.mask is None


STORE_MODES = {"set": "=", "add": "+=", "mul": "*=", "min": "min=", "max": "max="}  # and how they are written

Instr = Load | Const | Index | Compute | CheckedIndex | Reduce | Store
