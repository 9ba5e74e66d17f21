"""Tensors made from nothing: fills, ranges, masks of position."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import DType
from ..symbolic import Expr, to_expr
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype, ir_dtype
from .registry import Rule, RuleTable, aten, prims
from .values import FloatExpr, View

__all__ = ["TABLE"]

TABLE = RuleTable("constants")


def fill(ctx: LoweringContext, node: Node, value: object) -> View:
    """Every element the same number."""
    dtype = ir_dtype(node.meta["val"].dtype)
    if not isinstance(value, bool | int | float | Expr | FloatExpr):
        raise Fallback("only plain numbers are filled in by generated code")
    if dtype is DType.BOOL and isinstance(value, Expr | FloatExpr):
        raise Fallback("a bool from a dynamic size is left to ATen")
    working = compute_dtype(node.meta["val"].dtype)
    return ctx.pointwise(node, [], lambda nest: nest.scalar(value, working), working)


@TABLE.lowers(aten.full.default, aten.scalar_tensor.default)
def full(ctx: LoweringContext, node: Node, *args: object, **_: object) -> View:
    """``full(size, value)`` and ``scalar_tensor(value)``."""
    return fill(ctx, node, args[-1])


@TABLE.lowers(aten.full_like.default, aten.fill.Scalar, aten.new_full.default)
def full_like(ctx: LoweringContext, node: Node, *args: object, **_: object) -> View:
    """As another tensor."""
    return fill(ctx, node, args[-1])


@TABLE.lowers(
    aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default, aten.empty.memory_format,
    aten.empty_like.default, aten.new_empty.default, aten.empty_strided.default, aten.new_empty_strided.default,
    aten.empty_permuted.default, aten._efficientzerotensor.default,
)  # fmt: skip
def zeros(ctx: LoweringContext, node: Node, *_: object, **__: object) -> View:
    """Zeros. ``empty`` too: a functional graph overwrites it, and where it does not, zeros are as good as any."""
    return fill(ctx, node, 0)


@TABLE.lowers(aten.ones.default, aten.ones_like.default, aten.new_ones.default)
def ones(ctx: LoweringContext, node: Node, *_: object, **__: object) -> View:
    """Ones."""
    return fill(ctx, node, 1)


@TABLE.lowers(aten.fill.Tensor)
def fill_tensor(ctx: LoweringContext, node: Node, x: View, value: View) -> View:
    """Every element the value of a 0-d tensor."""
    return ctx.pointwise(node, [value], lambda nest, v: v, compute_dtype(x.dtype))


def _position(ctx: LoweringContext, node: Node, start: object, step: object) -> View:
    """``start + step*i``, computed in i64 for integers and in f64, rounded at the end, for floats, as eager does."""
    dtype = node.meta["val"].dtype
    working = DType.F64 if dtype.is_floating_point else DType.I64
    if dtype.is_floating_point:
        # Eager multiplies in the accumulation type: double for doubles, and for floats on the CPU too.
        working = DType.F64

    def compute(nest: ViewBuilder) -> Value:
        index = nest.index[0] if nest.index else to_expr(0)
        if isinstance(start, int | Expr) and isinstance(step, int | Expr):
            return nest.cast(nest.index_value(index * step + start), working)
        i = nest.cast(nest.index_value(index), working)
        return nest.op("fma", nest.scalar(step, working), i, nest.scalar(start, working))

    return ctx.pointwise(node, [], compute, working)


@TABLE.lowers(aten.arange.default)
def arange(ctx: LoweringContext, node: Node, end: object, **_: object) -> View:
    """``0 .. end``."""
    return _position(ctx, node, 0, 1)


@TABLE.lowers(aten.arange.start)
def arange_start(ctx: LoweringContext, node: Node, start: object, end: object, **_: object) -> View:
    """``start .. end``."""
    return _position(ctx, node, start, 1)


@TABLE.lowers(aten.arange.start_step)
def arange_step(ctx: LoweringContext, node: Node, start: object, end: object, step: object = 1, **_: object) -> View:
    """``start, start + step ..``."""
    return _position(ctx, node, start, step)


@TABLE.lowers(prims.iota.default)
def iota(ctx: LoweringContext, node: Node, length: object, *, start: object, step: object, **_: object) -> View:
    """``start + step*i``."""
    return _position(ctx, node, start, step)


def _triangle(keep_lower: bool) -> Rule:
    def rule(ctx: LoweringContext, node: Node, x: View, diagonal: object = 0) -> View:
        dtype = ir_dtype(x.dtype)

        def compute(nest: ViewBuilder, v: Value) -> Value:
            row, column = nest.index_value(nest.index[-2]), nest.index_value(nest.index[-1])
            edge = nest.op("sub", column, row)
            keep = nest.op("le" if keep_lower else "ge", edge, nest.scalar(diagonal, DType.I64))
            return nest.where(keep, v, nest.const(0, dtype))

        return ctx.pointwise(node, [x], compute, dtype)

    return rule


TABLE.add(aten.tril.default, _triangle(keep_lower=True))
TABLE.add(aten.triu.default, _triangle(keep_lower=False))


@TABLE.lowers(aten.eye.default, aten.eye.m)
def eye(ctx: LoweringContext, node: Node, *_: object, **__: object) -> View:
    """Ones on the diagonal."""
    dtype = ir_dtype(node.meta["val"].dtype)
    if dtype is DType.BOOL or node.meta["val"].dtype is torch.bool:
        return ctx.pointwise(node, [], _on_diagonal, DType.BOOL)
    return ctx.pointwise(node, [], lambda nest: nest.cast(_on_diagonal(nest), dtype), dtype)


def _on_diagonal(nest: ViewBuilder) -> Value:
    return nest.op("eq", nest.index_value(nest.index[0]), nest.index_value(nest.index[1]))
