"""Elementwise operators of three tensors, rounded as eager rounds them."""

from __future__ import annotations

from torch.fx import Node

from ..errors import Fallback
from ..ir import DType
from .access import Value, ViewBuilder
from .context import LoweringContext
from .pointwise import apply, rounded
from .promotion import compute_dtype
from .registry import RuleTable, aten, prims
from .values import View

__all__ = ["TABLE"]

TABLE = RuleTable("ternary")


@TABLE.lowers(aten.addcmul.default)
def addcmul(ctx: LoweringContext, node: Node, x: View, a: View, b: View, value: object = 1) -> View:
    """``x + value*a*b``; the sum and the last product of floats are rounded once, as in eager mode."""

    def compute(nest: ViewBuilder, *values: Value) -> Value:
        v, p, q = rounded(nest, values, (x, a, b), node.meta["val"].dtype)
        if value != 1:
            p = apply(nest, "mul", nest.scalar(value, p.dtype), p)
        if v.dtype in (DType.F32, DType.F64):
            return nest.op("fma", p, q, v)
        return apply(nest, "add", v, apply(nest, "mul", p, q))

    return ctx.pointwise(node, [x, a, b], compute)


@TABLE.lowers(aten.addcdiv.default)
def addcdiv(ctx: LoweringContext, node: Node, x: View, a: View, b: View, value: object = 1) -> View:
    """``x + value*a/b``."""

    def compute(nest: ViewBuilder, *values: Value) -> Value:
        v, p, q = rounded(nest, values, (x, a, b), node.meta["val"].dtype)
        if value != 1:
            p = apply(nest, "mul", nest.scalar(value, p.dtype), p)
        return apply(nest, "add", v, apply(nest, "div", p, q))

    return ctx.pointwise(node, [x, a, b], compute)


@TABLE.lowers(aten.lerp.Scalar, aten.lerp.Tensor)
def lerp(ctx: LoweringContext, node: Node, a: View, b: View, weight: object) -> View:
    """``a + w*(b-a)``, from the nearer end: ``b + (w-1)*(b-a)`` where ``|w| >= 0.5``; rounded once, as in eager."""

    def compute(nest: ViewBuilder, x: Value, y: Value, w: Value) -> Value:
        delta = nest.op("sub", y, x)
        one, half = nest.const(1, w.dtype), nest.const(0.5, w.dtype)
        far = nest.op("fma", nest.op("sub", w, one), delta, y)
        near = nest.op("fma", w, delta, x)
        if isinstance(weight, int | float):
            return near if abs(weight) < 0.5 else far
        return nest.where(nest.op("lt", nest.op("abs", w), half), near, far)

    if not a.dtype.is_floating_point:
        raise Fallback("lerp of integers is left to ATen")
    return ctx.pointwise(node, [a, b, weight], compute, compute_dtype(a.dtype))


def fma(ctx: LoweringContext, node: Node, a: View, b: View, c: View) -> View:
    """``a*b + c`` rounded once."""
    return ctx.pointwise(node, [a, b, c], lambda nest, x, y, z: apply(nest, "fma", x, y, z))


if hasattr(prims, "fma"):
    TABLE.add(prims.fma.default, fma)
