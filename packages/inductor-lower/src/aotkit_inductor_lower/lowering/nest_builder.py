"""Writes one loop nest: typed SSA values, common subexpressions found while writing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..errors import Fallback, IRError
from ..ir import (
    CheckedIndex,
    Compute,
    Const,
    DType,
    Index,
    Instr,
    Load,
    LoopNest,
    Origin,
    Range,
    Reduce,
    Stage,
    Store,
)
from ..ops.dtypes import is_float, is_half
from ..ops.scalar import result_dtype
from ..symbolic import Expr, SymbolKind, sym, to_expr
from .promotion import compute_dtype, ir_dtype
from .values import FloatExpr, View

__all__ = ["NestBuilder", "Value", "broadcast_index"]

_ZERO = to_expr(0)


@dataclass(frozen=True, slots=True)
class Value:
    """A scalar of the nest's body."""

    name: str
    dtype: DType


class NestBuilder:
    """One nest under construction.

    ``index`` holds one expression per entry of ``sizes``; dimensions of size 1 get no loop and index 0. Code
    is written into the current stage; :meth:`stage` starts the next one. A nest begins in a stage without ranges.
    """

    def __init__(self, name: str, sizes: Sequence[Expr], origin: Origin) -> None:
        self.name = name
        self.origin = origin
        self.sizes = tuple(sizes)
        self.index, self._outer = _ranges("i", 0, sizes)
        self._stages: list[Stage] = []
        self._ranges: tuple[Range, ...] = ()
        self._body: list[Instr] = []
        self._seen: dict[object, Value] = {}
        self._row_seen: dict[object, Value] = {}
        self._counter = 0
        self._inner_count = 0
        self._spans: dict[tuple[Expr, ...], tuple[Expr, ...]] = {}
        self.span(self.index, self.sizes)

    # -- structure ---------------------------------------------------------------------------------

    def stage(self, sizes: Sequence[Expr] = ()) -> tuple[Expr, ...]:
        """Begin the next stage; returns its index expressions. Values of stages with ranges go out of scope, except
        results of reductions. Stages without ranges that follow each other are one."""
        index, ranges = _ranges("r", self._inner_count, sizes)
        if not ranges and not self._ranges:
            return index
        self._close()
        self._ranges = ranges
        self._inner_count += len(self._ranges)
        self._seen = dict(self._row_seen)
        return index

    def span(self, index: tuple[Expr, ...], sizes: Sequence[Expr]) -> None:
        """Tensors that are read at ``index`` have to have these sizes: fake kernels do not look at all sizes, and what
        is read of a smaller tensor lies outside of it."""
        self._spans[index] = tuple(sizes)

    def finish(self) -> LoopNest:
        """The nest."""
        self._close()
        return LoopNest(self.name, self._outer, tuple(self._stages), self.origin)

    def _close(self) -> None:
        if self._body:
            self._stages.append(Stage(self._ranges, tuple(self._body)))
        if not self._ranges:
            self._row_seen = self._seen
        self._body = []

    # -- instructions ------------------------------------------------------------------------------

    def load(
        self, view: View, index: Sequence[Expr], *, mask: Value | None = None, other: int | float | bool = 0
    ) -> Value:
        """The element of a tensor at ``index`` (one expression per dimension of the view, not broadcast). Raises
        :class:`~..errors.Fallback` if the tensor may be smaller than what the index spans."""
        span = self._spans.get(tuple(index)) if mask is None else None
        if span is not None and not all(map(_covers, view.sizes, span)):
            raise Fallback("sizes that are not known to agree are left to ATen")
        dtype = ir_dtype(view.dtype)
        indices = view.at(index)
        mask_name = mask.name if mask else None
        key = ("load", view.buffer, indices, mask_name, repr(other))
        if key in self._seen:
            return self._seen[key]
        name = self._name()
        self._body.append(Load(name, view.buffer, indices, dtype, mask_name, other))
        return self._remember(key, name, dtype)

    def load_broadcast(self, view: View, index: Sequence[Expr]) -> Value:
        """The element at ``index`` of the broadcast shape: leading dimensions dropped, size-1 dimensions at 0.

        Raises :class:`~..errors.Fallback` for a tensor that does not broadcast with the nest's sizes.
        """
        if index is self.index:
            sizes = self.sizes[len(self.sizes) - len(view.sizes) :]
            if any(mine != size and mine != 1 for mine, size in zip(view.sizes, sizes, strict=False)):
                raise Fallback("sizes that are not known to agree are left to ATen")
        return self.load(view, broadcast_index(view.sizes, index))

    def const(self, value: int | float | bool, dtype: DType) -> Value:
        """A literal, converted to ``dtype`` as Python numbers are."""
        if is_half(dtype):
            return self.cast(self.const(value, DType.F32), dtype)
        if is_float(dtype):
            value = float(value)
        elif dtype is DType.BOOL:
            value = bool(value)
        else:
            value = _wrapped(int(value), dtype)
        key = ("const", repr(value), dtype)
        if key in self._seen:
            return self._seen[key]
        name = self._name()
        self._body.append(Const(name, value, dtype))
        return self._remember(key, name, dtype)

    def index_value(self, expr: Expr, dtype: DType = DType.I64) -> Value:
        """An index expression as a number."""
        if expr.constant is not None:
            return self.const(expr.constant, dtype)
        key = ("index", expr, dtype)
        if key in self._seen:
            return self._seen[key]
        name = self._name()
        self._body.append(Index(name, expr, dtype))
        return self._remember(key, name, dtype)

    def scalar(self, value: object, dtype: DType) -> Value:
        """A Python number, or one that depends on sizes, in ``dtype``."""
        if isinstance(value, FloatExpr):
            number = self._float(value)
            return self.cast(self.cast(number, DType.F32) if is_half(dtype) else number, dtype)
        if isinstance(value, Expr) and value.constant is not None:
            return self.const(value.constant, dtype)
        if isinstance(value, Expr):
            return self.cast(self.index_value(value), dtype)
        if isinstance(value, bool | int | float):
            return self.const(value, dtype)
        raise TypeError(f"not a real number: {value!r}")

    def _float(self, value: FloatExpr) -> Value:
        if value.op == "item":
            (tensor,) = value.args
            assert isinstance(tensor, View)
            return self.cast(self.load(tensor, ()), DType.F64)
        return self.op(value.op, *(self.scalar(arg, DType.F64) for arg in value.args))

    def op(self, op: str, *args: Value, to: DType | None = None) -> Value:
        """A row of the op table; ``to`` is the target of casts. Raises :class:`Fallback` for types it does not take."""
        try:
            dtype = result_dtype(op, [a.dtype for a in args], to)
        except IRError as error:
            raise Fallback(str(error)) from error
        key = (op, tuple(a.name for a in args), dtype)
        if key in self._seen:
            return self._seen[key]
        name = self._name()
        self._body.append(Compute(name, op, tuple(a.name for a in args), dtype))
        return self._remember(key, name, dtype)

    def cast(self, value: Value, dtype: DType) -> Value:
        """``value`` converted; nothing if it has the type."""
        return value if value.dtype is dtype else self.op("cast", value, to=dtype)

    def round_to(self, value: Value, dtype: torch.dtype) -> Value:
        """``value`` rounded to ``dtype`` and back: eager's rounding point between two ops on halves."""
        return self.cast(self.cast(value, ir_dtype(dtype)), value.dtype)

    def operand(self, value: Value, dtype: torch.dtype) -> Value:
        """``value`` converted to ``dtype``, in the type that arithmetic on ``dtype`` is done in."""
        return self.cast(self.cast(value, ir_dtype(dtype)), compute_dtype(dtype))

    def where(self, condition: Value, a: Value, b: Value) -> Value:
        """``a`` where the bool is true, else ``b``."""
        return self.op("where", condition, a, b)

    def check_index(self, value: Value, size: Expr) -> Expr:
        """An i64 value as an index of a dimension of ``size``: negatives wrap, out of range is eager's error."""
        value = self.cast(value, DType.I64)
        key = ("check", value.name, size)
        if key not in self._seen:
            name = self._name()
            self._body.append(CheckedIndex(name, value.name, size))
            self._remember(key, name, DType.I64)
        return sym(self._seen[key].name, SymbolKind.VALUE)

    def reduce(self, kind: str, value: Value) -> Value:
        """Reduce over the stage's ranges; without ranges there is one element, which is the result."""
        dtype = DType.I64 if kind.startswith("arg") else value.dtype
        if not self._ranges:
            return self.const(0, dtype) if kind.startswith("arg") else self._alone(kind, value)
        key = ("reduce", kind, value.name)
        if key in self._row_seen:
            return self._row_seen[key]
        name = self._name()
        self._body.append(Reduce(name, kind, value.name, dtype))
        result = self._remember(key, name, dtype)
        self._row_seen[key] = result
        return result

    def _alone(self, kind: str, value: Value) -> Value:
        """The reduction of one element: a sum begins with zero, so it is never -0.0."""
        starts = kind == "sum" and is_float(value.dtype)
        return self.op("add", self.const(0, value.dtype), value) if starts else value

    def scan(self, kind: str, value: Value) -> Value:
        """Reduce over the stage's iterations so far, this one included."""
        if not self._ranges:
            return self._alone(kind, value)
        name = self._name()
        self._body.append(Reduce(name, kind, value.name, value.dtype, running=True))
        return self._remember(("scan", kind, value.name), name, value.dtype)

    def store(
        self, view: View, index: Sequence[Expr], value: Value, mode: str = "set", mask: Value | None = None
    ) -> None:
        """Write an element, converted to the tensor's type."""
        value = self.cast(value, ir_dtype(view.dtype))
        self._body.append(Store(view.buffer, view.at(index), value.name, mode, mask.name if mask else None))

    def _name(self) -> str:
        self._counter += 1
        return f"v{self._counter - 1}"

    def _remember(self, key: object, name: str, dtype: DType) -> Value:
        value = self._seen[key] = Value(name, dtype)
        return value


def _covers(size: Expr, wanted: Expr) -> bool:
    """Whether a dimension has as many elements as are wanted."""
    if size == wanted or wanted == 1:
        return True
    have, want = size.constant, wanted.constant
    return have is not None and want is not None and have >= want


def _wrapped(value: int, dtype: DType) -> int:
    """An integer in an integer type's range, modulo its width: 300 beside int8 is 44, as in eager."""
    bits = 8 if dtype is DType.U8 else int(dtype.value[1:])
    value %= 1 << bits
    return value - (1 << bits) if dtype is not DType.U8 and value >> (bits - 1) else value


def broadcast_index(sizes: Sequence[Expr], index: Sequence[Expr]) -> tuple[Expr, ...]:
    """Indices into a tensor of ``sizes`` for the element at ``index`` of the shape it is broadcast to."""
    skipped = len(index) - len(sizes)
    return tuple(_ZERO if size == 1 else index[skipped + k] for k, size in enumerate(sizes))


def _ranges(letter: str, first: int, sizes: Sequence[Expr]) -> tuple[tuple[Expr, ...], tuple[Range, ...]]:
    index: list[Expr] = []
    ranges: list[Range] = []
    for size in sizes:
        if size == 1:
            index.append(_ZERO)
            continue
        name = f"{letter}{first + len(ranges)}"
        ranges.append(Range(name, size))
        index.append(sym(name))
    return tuple(index), tuple(ranges)
