"""Cumulative sums, products and extrema: one pass per row, in the type that eager accumulates in."""

from __future__ import annotations

from collections.abc import Callable

from torch.fx import Node

from ..ir import DType
from ..ops.dtypes import is_float
from .context import LoweringContext
from .promotion import compute_dtype
from .reductions import RowNest
from .registry import RuleTable, aten
from .values import NodeValue, View

__all__ = ["TABLE"]

TABLE = RuleTable("scans")


def _accumulated(kind: str) -> Callable[..., View]:
    def rule(ctx: LoweringContext, node: Node, x: View, dim: int, *, dtype: object = None) -> View:
        result = ctx.declare(node.name, node.meta["val"])
        rows = RowNest(ctx, node, result.buffer, x.sizes, [dim])
        nest = rows.nest
        wide = compute_dtype(result.dtype)
        if wide is DType.F32 and result.dtype.itemsize == 4:
            wide = DType.F64  # eager accumulates floats in doubles, float16 and bfloat16 in float32
        index = rows.stage()
        element = nest.operand(nest.load(x, index), result.dtype)
        nest.store(result, index, nest.scan(kind, nest.cast(element, wide)))
        ctx.add(nest)
        return result

    return rule


TABLE.add(aten.cumsum.default, _accumulated("sum"))
TABLE.add(aten.cumprod.default, _accumulated("prod"))


def _extremum(kind: str) -> Callable[..., NodeValue]:
    """The best so far and where it was: the last of equals, and from the first nan on the last nan. Zeros are equal,
    and the last one has the sign: where it was is told with that, as an odd number for -0.0."""

    def rule(ctx: LoweringContext, node: Node, x: View, dim: int) -> NodeValue:
        values, indices = (ctx.declare(f"{node.name}_{k}", val) for k, val in enumerate(node.meta["val"]))
        rows = RowNest(ctx, node, values.buffer, x.sizes, [dim])
        nest, dtype = rows.nest, compute_dtype(x.dtype)
        index = rows.stage()
        element = nest.cast(nest.load(x, index), dtype)
        best = nest.scan(kind, element)
        here = nest.op("eq", element, best)
        zero, one = (nest.const(number, DType.I64) for number in (0, 1))
        place = nest.index_value(index[dim % len(x.sizes)]) if x.sizes else zero
        if is_float(dtype):
            here = nest.op("logical_or", here, nest.op("isnan", element))
            negative = nest.cast(nest.op("signbit", element), DType.I64)
            place = nest.op("bitwise_or", nest.op("shl", place, one), negative)
        last = nest.scan("max", nest.where(here, place, zero))
        if is_float(dtype):
            negative = nest.op("ne", nest.op("bitwise_and", last, one), zero)
            signed = nest.where(negative, nest.const(-0.0, dtype), nest.const(0.0, dtype))
            best = nest.where(nest.op("eq", best, nest.const(0.0, dtype)), signed, best)
            last = nest.op("shr", last, one)
        nest.store(values, index, best)
        nest.store(indices, index, last)
        ctx.add(nest)
        return [values, indices]

    return rule


TABLE.add(aten.cummax.default, _extremum("max"))
TABLE.add(aten.cummin.default, _extremum("min"))
