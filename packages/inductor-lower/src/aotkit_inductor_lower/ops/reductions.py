"""Every kind of reduction: one row each.

What lowering, the loop passes, the interpreters and the renderers of all targets know of a kind they read here. A kind
that no target has a word for needs none: its ``combine`` is written in scalar ops, as a body of :mod:`.expansions` is.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..errors import IRError
from . import reference as ref
from .dtypes import ARITHMETIC_INTS, FLOATS, HALVES, DType, int_bounds, is_float
from .expansions import Write
from .scalar import OP_TABLE

__all__ = ["REDUCTIONS", "Reduction", "combine_tensors", "identity", "is_positional", "reduce_dtype", "store_op"]

V = TypeVar("V")
_F = FLOATS - HALVES
_I = ARITHMETIC_INTS
_B = frozenset({DType.BOOL})


@dataclass(frozen=True, slots=True)
class Reduction:
    """One kind of reduction over the flattened stage ranges.

    ``reference`` takes a tensor whose last dimension is reduced. ``combine`` joins two partial results: a scalar op, or
    a body of several. ``identity``: of a type, the value that changes nothing. ``bools``: the scalar op in the place of
    ``combine`` for bools. ``starts``: a float result begins with the identity even if there is one element (a sum is
    never -0.0). ``store``: the mode of a store that combines so. ``position_of``: the result is the position, as i64,
    of what this other kind gives. ``native``: by target, the name of its own function of the kind. ``scannable``: also
    over the iterations so far.

    Eager refuses an empty min, max, argmin or argmax before a kernel runs, and so must lowering.
    """

    kind: str
    domain: frozenset[DType]
    reference: Callable[[Tensor], Tensor]
    edges: str
    identity: Callable[[DType], float | int | bool]
    combine: str | Callable[..., Any]
    bools: str = ""
    starts: bool = False
    store: str = ""
    position_of: str = ""
    native: Mapping[str, str] = field(default_factory=dict)
    scannable: bool = True

    def name_in(self, target: str, dtype: DType) -> str:
        """What a target's functions of the kind are called: its own, or those that are made for a type."""
        return self.native.get(target) or f"{self.kind}_{dtype.value}"

    def join(self, write: Write[V], a: V, b: V, dtype: DType) -> V:
        """Two partial results of ``dtype`` as one."""
        if dtype is DType.BOOL and self.bools:
            return write(self.bools, a, b)
        if isinstance(self.combine, str):
            return write(self.combine, a, b)
        result: V = self.combine(write, a, b)
        return result


def _zero(dtype: DType) -> float | int | bool:
    return 0.0 if is_float(dtype) else dtype is not DType.BOOL and 0


def _one(dtype: DType) -> float | int | bool:
    return 1.0 if is_float(dtype) else dtype is DType.BOOL or 1


def _highest(dtype: DType) -> float | int | bool:
    return math.inf if is_float(dtype) else dtype is DType.BOOL or int_bounds(dtype)[1]


def _lowest(dtype: DType) -> float | int | bool:
    return -math.inf if is_float(dtype) else dtype is not DType.BOOL and int_bounds(dtype)[0]


def _triton(name: str) -> Mapping[str, str]:
    return MappingProxyType({"triton": name})


_ROWS = (
    Reduction(
        "sum",
        _F | _I,
        ref.reduce_sum,
        "empty: 0; integers wrap; floats in any order of additions",
        _zero,
        "add",
        bools="logical_or",
        starts=True,
        store="add",
        native=_triton("sum"),
    ),
    Reduction(
        "prod",
        _F | _I,
        ref.reduce_prod,
        "empty: 1; integers wrap; floats in any order of products",
        _one,
        "mul",
        bools="logical_and",
        store="mul",
        native=_triton("prod"),
    ),
    Reduction(
        "min",
        _F | _I | _B,
        ref.reduce_min,
        "nan if any is nan; empty: inf, the largest integer, true",
        _highest,
        "minimum",
        bools="logical_and",
        store="min",
        native=_triton("min"),
    ),
    Reduction(
        "max",
        _F | _I | _B,
        ref.reduce_max,
        "nan if any is nan; empty: -inf, the smallest integer, false",
        _lowest,
        "maximum",
        bools="logical_or",
        store="max",
        native=_triton("max"),
    ),
    Reduction(
        "xor",
        _I,
        lambda x: functools.reduce(torch.bitwise_xor, x.unbind(-1), x.new_zeros(x.shape[:-1])),
        "empty: 0",
        _zero,
        "bitwise_xor",
    ),
    Reduction("any", _B, ref.reduce_any, "empty: false", _zero, "logical_or", native=_triton("or")),
    Reduction("all", _B, ref.reduce_all, "empty: true", _one, "logical_and", native=_triton("and")),
    Reduction(
        "argmin",
        _F | _I | _B,
        ref.reduce_argmin,
        "first of equals, first nan if any; empty: 0",
        _highest,
        "minimum",
        position_of="min",
        native=_triton("argmin"),
        scannable=False,
    ),
    Reduction(
        "argmax",
        _F | _I | _B,
        ref.reduce_argmax,
        "first of equals, first nan if any; empty: 0",
        _lowest,
        "maximum",
        position_of="max",
        native=_triton("argmax"),
        scannable=False,
    ),
)

REDUCTIONS: Mapping[str, Reduction] = MappingProxyType({row.kind: row for row in _ROWS})
_STORES = {row.store: row for row in _ROWS if row.store}


def reduce_dtype(kind: str, value: DType) -> DType:
    """The type of a ``reduce kind`` over values of type ``value``. Raises :class:`IRError`."""
    row = REDUCTIONS.get(kind)
    if row is None:
        raise IRError(f"there is no reduction named {kind!r}")
    if value not in row.domain:
        raise IRError(f"reduce {kind} is not defined for {value.value}")
    return DType.I64 if row.position_of else value


def is_positional(kind: str) -> bool:
    """Whether the result is a position; of a kind that does not exist it is not."""
    return kind in REDUCTIONS and bool(REDUCTIONS[kind].position_of)


def identity(kind: str, dtype: DType) -> float | int | bool:
    """The value of ``dtype`` that changes no result."""
    return REDUCTIONS[kind].identity(dtype)


def store_op(mode: str, dtype: DType) -> str:
    """The scalar op by which a store of a ``mode`` combines an element with what is there."""
    row = _STORES[mode]
    assert isinstance(row.combine, str)
    return row.bools if dtype is DType.BOOL else row.combine


def combine_tensors(kind: str, a: Tensor, b: Tensor) -> Tensor:
    """Partial results joined element by element, slowly and obviously right."""

    def write(op: str, *args: Tensor | float) -> Tensor:
        tensors = [arg if isinstance(arg, Tensor) else torch.full_like(a, arg) for arg in args]
        return OP_TABLE[op].reference(*tensors)

    row = REDUCTIONS[kind]
    return row.join(write, a, b, DType.BOOL if a.dtype == torch.bool else DType.F32)
