"""Writes a loop nest instruction by instruction, with value names chosen and types worked out.

b = NestBuilder("scale", outer={"i0": n})
x = b.load(x_buffer, [b["i0"]])
b.store(y_buffer, [b["i0"]], b.op("mul", x, b.const(2.0, DType.F32)))
nest = b.finish()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..errors import IRError
from ..ops.dtypes import dtype_from_torch_name
from ..ops.reductions import reduce_dtype
from ..ops.scalar import result_dtype
from ..symbolic import Expr, SymbolKind, sym, to_expr
from .nodes import (
    Buffer,
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

__all__ = ["NestBuilder", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """A typed SSA value. ``index`` is the value as an index expression (i64 only)."""

    name: str
    dtype: DType

    @property
    def index(self) -> Expr:
        return sym(self.name, SymbolKind.VALUE)


class NestBuilder:
    """One nest under construction. Instructions go to the current stage; the first has no ranges until
    :meth:`stage` is called. ``builder["i0"]`` is a loop variable as an expression."""

    def __init__(self, name: str, outer: Mapping[str, Expr | int], origin: Origin | None = None) -> None:
        self.name = name
        self.origin = origin or Origin()
        self.outer = _ranges(outer)
        self._ranges: tuple[Range, ...] = ()
        self._body: list[Instr] = []
        self._stages: list[Stage] = []
        self._count = 0

    def __getitem__(self, symbol: str) -> Expr:
        if all(r.symbol != symbol for r in (*self.outer, *self._ranges)):
            raise KeyError(f"nest {self.name} has no loop variable {symbol!r} here")
        return sym(symbol)

    def stage(self, ranges: Mapping[str, Expr | int] | None = None) -> None:
        """Begin the next stage."""
        self._close()
        self._ranges = _ranges(ranges or {})

    def finish(self) -> LoopNest:
        """The nest."""
        self._close()
        return LoopNest(self.name, self.outer, tuple(self._stages), self.origin)

    def _close(self) -> None:
        if self._body:
            self._stages.append(Stage(self._ranges, tuple(self._body)))
        self._body = []

    def _value(self, dtype: DType) -> Value:
        self._count += 1
        return Value(f"v{self._count - 1}", dtype)

    # -- instructions ------------------------------------------------------------------------------

    def load(
        self, buffer: Buffer, indices: Sequence[Expr | int], mask: Value | None = None, other: int | float | bool = 0
    ) -> Value:
        """``buffer[indices]``, or ``other`` where ``mask`` is false."""
        result = self._value(_element(buffer))
        self._body.append(
            Load(result.name, buffer.name, _exprs(indices), result.dtype, None if mask is None else mask.name, other)
        )
        return result

    def store(
        self, buffer: Buffer, indices: Sequence[Expr | int], value: Value, mode: str = "set", mask: Value | None = None
    ) -> None:
        """``buffer[indices] = value``, converted to the buffer's type first."""
        value = self.cast(value, _element(buffer))
        self._body.append(Store(buffer.name, _exprs(indices), value.name, mode, None if mask is None else mask.name))

    def const(self, value: int | float | bool, dtype: DType) -> Value:
        """A literal."""
        result = self._value(dtype)
        self._body.append(Const(result.name, value, dtype))
        return result

    def index(self, expr: Expr | int, dtype: DType = DType.I64) -> Value:
        """An index expression as a number."""
        result = self._value(dtype)
        self._body.append(Index(result.name, to_expr(expr), dtype))
        return result

    def check(self, value: Value, size: Expr | int) -> Expr:
        """An i64 value as an index below ``size``: negatives wrap, out of range is an error."""
        result = self._value(DType.I64)
        self._body.append(CheckedIndex(result.name, value.name, to_expr(size)))
        return result.index

    def op(self, op: str, *args: Value, to: DType | None = None) -> Value:
        """A row of the op table; ``to`` is the target of casts. Raises :class:`IRError` if the types do not fit."""
        result = self._value(result_dtype(op, [a.dtype for a in args], to))
        self._body.append(Compute(result.name, op, tuple(a.name for a in args), result.dtype))
        return result

    def cast(self, value: Value, dtype: DType) -> Value:
        """``value`` converted; nothing if it has the type."""
        return value if value.dtype is dtype else self.op("cast", value, to=dtype)

    def reduce(self, kind: str, value: Value) -> Value:
        """Reduce over the current stage's ranges; the result is for later stages."""
        result = self._value(reduce_dtype(kind, value.dtype))
        self._body.append(Reduce(result.name, kind, value.name, result.dtype))
        return result


def _ranges(sizes: Mapping[str, Expr | int]) -> tuple[Range, ...]:
    return tuple(Range(name, to_expr(size)) for name, size in sizes.items())


def _exprs(indices: Sequence[Expr | int]) -> tuple[Expr, ...]:
    return tuple(to_expr(i) for i in indices)


def _element(buffer: Buffer) -> DType:
    dtype = dtype_from_torch_name(buffer.dtype)
    if dtype is None:
        raise IRError(f"generated code cannot hold elements of {buffer.dtype}")
    return dtype
