"""Tensors in loop nests: a builder that reads and writes the elements of views."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from ..errors import Fallback, IRError
from ..ir import DType, Origin, Range
from ..ir.builder import NestBuilder, Value
from ..kernel_ir.bounds import lower_bound
from ..ops.dtypes import is_float, is_half
from ..ops.reductions import REDUCTIONS, is_positional
from ..symbolic import Expr, sym, to_expr
from .promotion import compute_dtype, ir_dtype
from .values import FloatExpr, View

__all__ = ["Value", "ViewBuilder", "broadcast_index"]

_ZERO = to_expr(0)


class ViewBuilder(NestBuilder):
    """A nest over the elements of a tensor.

    ``index`` holds one expression per entry of ``sizes``; dimensions of size 1 get no loop and index 0. Code
    is written into the current stage; :meth:`stage` starts the next one. A nest begins in a stage without ranges.
    Operators that are not defined for a type raise :class:`~..errors.Fallback`.
    """

    def __init__(self, name: str, sizes: Sequence[Expr], origin: Origin) -> None:
        self.index, outer = _loops("i", 0, sizes)
        super().__init__(name, outer, origin)
        self.sizes = tuple(sizes)
        self._inner_count = 0
        self._loop_sizes = _sizes_of_loops(self.index, sizes)

    # -- structure ---------------------------------------------------------------------------------

    def stage(self, sizes: Sequence[Expr] = ()) -> tuple[Expr, ...]:
        """Begin the next stage; returns its index expressions. Stages without ranges that follow each other are one."""
        index, ranges = _loops("r", self._inner_count, sizes)
        if ranges or self._ranges:
            self.begin_stage(ranges)
            self._inner_count += len(ranges)
            self._loop_sizes.update(_sizes_of_loops(index, sizes))
        return index

    # -- tensors -----------------------------------------------------------------------------------

    def load(
        self, view: View, index: Sequence[Expr], *, mask: Value | None = None, other: int | float | bool = 0
    ) -> Value:
        """The element of a tensor at ``index`` (one expression per dimension of the view, not broadcast). Raises
        :class:`~..errors.Fallback` if the tensor may be smaller than what the index spans."""
        self._stay_inside(view, index, mask, _covers)
        return self.load_element(view.buffer, view.at(index), ir_dtype(view.dtype), mask, other)

    def load_broadcast(self, view: View, index: Sequence[Expr]) -> Value:
        """The element at ``index`` of the broadcast shape: leading dimensions dropped, size-1 dimensions at 0.

        Raises :class:`~..errors.Fallback` for a tensor that does not broadcast with the nest's sizes.
        """
        if index is self.index:
            sizes = self.sizes[len(self.sizes) - len(view.sizes) :]
            if any(mine != size and mine != 1 for mine, size in zip(view.sizes, sizes, strict=False)):
                raise Fallback("sizes that are not known to agree are left to ATen")
        return self.load(view, broadcast_index(view.sizes, index))

    def store(
        self, view: View, index: Sequence[Expr], value: Value, mode: str = "set", mask: Value | None = None
    ) -> None:
        """Write an element, converted to the tensor's type. Raises :class:`~..errors.Fallback` if the tensor is
        certainly smaller than what the index spans: the sizes of results are the rule's own."""
        self._stay_inside(view, index, mask, lambda size, wanted: lower_bound(wanted - size) <= 0)
        self.store_element(view.buffer, view.at(index), self.cast(value, ir_dtype(view.dtype)), mode, mask)

    def _stay_inside(
        self, view: View, index: Sequence[Expr], mask: Value | None, fits: Callable[[Expr, Expr], bool]
    ) -> None:
        """Fake kernels do not look at all sizes, and what lies beyond those of a smaller tensor is not its."""
        agree = len(view.sizes) == len(index)
        if agree and mask is None:
            wanted = map(self._loop_sizes.get, index)
            agree = all(want is None or fits(size, want) for size, want in zip(view.sizes, wanted, strict=True))
        if not agree:
            raise Fallback("sizes that are not known to agree are left to ATen")

    # -- numbers -----------------------------------------------------------------------------------

    def const(self, value: int | float | bool, dtype: DType) -> Value:
        """A literal, converted to ``dtype`` as Python numbers are."""
        if is_half(dtype):
            return self.cast(self.const(value, DType.F32), dtype)
        if is_float(dtype):
            return super().const(float(value), dtype)
        return super().const(bool(value) if dtype is DType.BOOL else _wrapped(int(value), dtype), dtype)

    def index_value(self, expr: Expr | int, dtype: DType = DType.I64) -> Value:
        """An index expression as a number."""
        constant = to_expr(expr).constant
        return self.const(constant, dtype) if constant is not None else super().index_value(expr, dtype)

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

    # -- operators ---------------------------------------------------------------------------------

    def op(self, op: str, *args: Value, to: DType | None = None) -> Value:
        """A row of the op table; ``to`` is the target of casts. Raises :class:`Fallback` for types it does not take."""
        try:
            return super().op(op, *args, to=to)
        except IRError as error:
            raise Fallback(str(error)) from error

    def round_to(self, value: Value, dtype: torch.dtype) -> Value:
        """``value`` rounded to ``dtype`` and back: eager's rounding point between two ops on
        float16 or bfloat16."""
        return self.cast(self.cast(value, ir_dtype(dtype)), value.dtype)

    def operand(self, value: Value, dtype: torch.dtype) -> Value:
        """``value`` converted to ``dtype``, in the type that arithmetic on ``dtype`` is done in."""
        return self.cast(self.cast(value, ir_dtype(dtype)), compute_dtype(dtype))

    def check_index(self, value: Value, size: Expr | int) -> Expr:
        """An integer value as an index of a dimension of ``size``: negatives wrap, out of range is eager's error."""
        return super().check_index(self.cast(value, DType.I64), size)

    def reduce(self, kind: str, value: Value) -> Value:
        """Reduce over the stage's ranges; without ranges there is one element, which is the result."""
        if self._ranges:
            return super().reduce(kind, value)
        return self.const(0, DType.I64) if is_positional(kind) else self._alone(kind, value)

    def scan(self, kind: str, value: Value) -> Value:
        """Reduce over the stage's iterations so far, this one included."""
        return super().scan(kind, value) if self._ranges else self._alone(kind, value)

    def _alone(self, kind: str, value: Value) -> Value:
        """The reduction of one element, which is that element unless it begins with something else."""
        row = REDUCTIONS[kind]
        if not row.starts or not is_float(value.dtype):
            return value

        def write(op: str, *args: Value | float) -> Value:
            return self.op(op, *(a if isinstance(a, Value) else self.const(a, value.dtype) for a in args))

        return row.join(write, self.const(row.identity(value.dtype), value.dtype), value, value.dtype)


def _covers(size: Expr, wanted: Expr) -> bool:
    """Whether a dimension has as many elements as are wanted."""
    if size == wanted or wanted == 1:
        return True
    return lower_bound(size - wanted) >= 0


def _wrapped(value: int, dtype: DType) -> int:
    """An integer in an integer type's range, modulo its width: 300 beside int8 is 44, as in eager."""
    bits = 8 if dtype is DType.U8 else int(dtype.value[1:])
    value %= 1 << bits
    return value - (1 << bits) if dtype is not DType.U8 and value >> (bits - 1) else value


def broadcast_index(sizes: Sequence[Expr], index: Sequence[Expr]) -> tuple[Expr, ...]:
    """Indices into a tensor of ``sizes`` for the element at ``index`` of the shape it is broadcast to."""
    skipped = len(index) - len(sizes)
    return tuple(_ZERO if size == 1 else index[skipped + k] for k, size in enumerate(sizes))


def _sizes_of_loops(index: Sequence[Expr], sizes: Sequence[Expr]) -> dict[Expr, Expr]:
    return {expr: size for expr, size in zip(index, sizes, strict=True) if expr != _ZERO}


def _loops(letter: str, first: int, sizes: Sequence[Expr]) -> tuple[tuple[Expr, ...], tuple[Range, ...]]:
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
