"""Layer and group normalization and their derivatives: statistics and result as row nests."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch.fx import Node

from ..errors import Fallback
from ..ir import DType
from ..symbolic import Expr
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype
from .reductions import RowNest, mean_and_squares
from .registry import RuleTable, aten
from .values import NodeValue, View

__all__ = ["TABLE", "Indices", "declare_part", "load_as"]

TABLE = RuleTable("norms")

Indices = Sequence[Expr]


def load_as(nest: ViewBuilder, view: View, index: Indices, dtype: DType) -> Value:
    """An element, converted."""
    return nest.cast(nest.load(view, index), dtype)


def declare_part(ctx: LoweringContext, node: Node, position: int) -> View:
    """One of a node's several results."""
    return ctx.declare(f"{node.name}_{position}", node.meta["val"][position])


def _affine(nest: ViewBuilder, value: Value, weight: View | None, bias: View | None, index: Indices) -> Value:
    """``value * weight + bias``, rounded once, as eager's vectors do: a product that alone would overflow does not."""
    gain = load_as(nest, weight, index, value.dtype) if weight is not None else None
    shift = load_as(nest, bias, index, value.dtype) if bias is not None else None
    if gain is None:
        return value if shift is None else nest.op("add", value, shift)
    return nest.op("mul", value, gain) if shift is None else nest.op("fma", value, gain, shift)


def _inverse_root(nest: ViewBuilder, squares: Value, count: Value, eps: float) -> Value:
    variance = nest.op("div", squares, count)
    return nest.op("rsqrt", nest.op("add", variance, nest.const(eps, variance.dtype)))


# -- layer norm -----------------------------------------------------------------------------------------


@TABLE.lowers(aten.native_layer_norm.default)
def layer_norm(
    ctx: LoweringContext,
    node: Node,
    x: View,
    normalized_shape: Sequence[object],
    weight: View | None,
    bias: View | None,
    eps: float,
) -> NodeValue:
    """(normalized, mean, 1/std) in one nest of three passes over a row."""
    rank, inner = len(x.sizes), len(normalized_shape)
    result, mean_out, rstd_out = (declare_part(ctx, node, k) for k in range(3))
    rows = RowNest(ctx, node, result.buffer, x.sizes, range(rank - inner, rank))
    nest, dtype = rows.nest, compute_dtype(x.dtype)
    careful = ctx.capabilities.careful_variance
    mean, squares = mean_and_squares(rows, lambda index: load_as(nest, x, index, dtype), careful)
    rstd = _inverse_root(nest, squares, rows.count_value(dtype), eps)
    nest.store(mean_out, rows.row(keepdim=True), mean)
    nest.store(rstd_out, rows.row(keepdim=True), rstd)
    index = rows.stage()
    value = nest.op("mul", nest.op("sub", load_as(nest, x, index, dtype), mean), rstd)
    nest.store(result, index, _affine(nest, value, weight, bias, index[rank - inner :]))
    ctx.add(nest)
    return [result, mean_out, rstd_out]


@TABLE.lowers(aten.native_layer_norm_backward.default)
def layer_norm_backward(
    ctx: LoweringContext,
    node: Node,
    grad: View,
    x: View,
    normalized_shape: Sequence[object],
    mean: View,
    rstd: View,
    weight: View | None,
    bias: View | None,
    mask: Sequence[bool],
) -> NodeValue:
    """Gradient of the input by rows, of weight and bias by columns."""
    rank, inner = len(x.sizes), len(normalized_shape)
    dtype = compute_dtype(x.dtype)
    rows = [*x.sizes[: rank - inner], *(1,) * inner]
    if any(list(statistic.sizes) != rows for statistic in (mean, rstd)):
        raise Fallback("statistics that are not one number per row are left to ATen")

    def parts(nest: ViewBuilder, index: Indices) -> tuple[Value, Value]:
        row = (*index[: rank - inner], *(index[0] * 0,) * inner)
        center = nest.op("sub", load_as(nest, x, index, dtype), load_as(nest, mean, row, dtype))
        return load_as(nest, grad, index, dtype), nest.op("mul", center, load_as(nest, rstd, row, dtype))

    results: list[NodeValue] = [None, None, None]
    if mask[0]:
        results[0] = _layer_norm_input_grad(ctx, node, x, weight, rstd, parts, inner)
    results[1], results[2] = _column_sums(ctx, node, x.sizes, range(rank - inner), mask[1:], parts)
    return results


def _layer_norm_input_grad(
    ctx: LoweringContext,
    node: Node,
    x: View,
    weight: View | None,
    rstd: View,
    parts: Callable[[ViewBuilder, Indices], tuple[Value, Value]],
    inner: int,
) -> View:
    """``rstd * (g - mean(g) - xhat*mean(g*xhat))`` with ``g = grad*weight``."""
    rank, dtype = len(x.sizes), compute_dtype(x.dtype)
    result = declare_part(ctx, node, 0)
    rows = RowNest(ctx, node, result.buffer, x.sizes, range(rank - inner, rank))
    nest = rows.nest

    def scaled(index: Indices) -> tuple[Value, Value]:
        g, normal = parts(nest, index)
        if weight is not None:
            g = nest.op("mul", g, load_as(nest, weight, index[rank - inner :], dtype))
        return g, normal

    g, normal = scaled(rows.stage())
    sum_g, sum_gn = nest.reduce("sum", g), nest.reduce("sum", nest.op("mul", g, normal))
    nest.stage()
    count = rows.count_value(dtype)
    mean_g, mean_gn = nest.op("div", sum_g, count), nest.op("div", sum_gn, count)
    scale = load_as(nest, rstd, rows.row(keepdim=True), dtype)
    index = rows.stage()
    g, normal = scaled(index)
    value = nest.op("sub", nest.op("sub", g, mean_g), nest.op("mul", normal, mean_gn))
    nest.store(result, index, nest.op("mul", scale, value))
    ctx.add(nest)
    return result


def _column_sums(
    ctx: LoweringContext,
    node: Node,
    sizes: Sequence[Expr],
    dims: Sequence[int],
    mask: Sequence[bool],
    parts: Callable[[ViewBuilder, Indices], tuple[Value, Value]],
) -> tuple[View | None, View | None]:
    """(sum of grad*xhat, sum of grad) over ``dims``: the gradients of weight and bias."""
    outputs = [declare_part(ctx, node, k + 1) if wanted else None for k, wanted in enumerate(mask)]
    if not any(mask):
        return None, None
    name = next(o.buffer for o in outputs if o is not None)
    rows = RowNest(ctx, node, name, sizes, dims)
    g, normal = parts(rows.nest, rows.stage())
    sums: list[Value | None] = [None, None]
    if mask[0]:
        sums[0] = rows.nest.reduce("sum", rows.nest.op("mul", g, normal))
    if mask[1]:
        sums[1] = rows.nest.reduce("sum", g)
    rows.nest.stage()
    for output, total in zip(outputs, sums, strict=True):
        if output is not None and total is not None:
            rows.nest.store(output, rows.row(keepdim=False), total)
    ctx.add(rows.nest)
    return outputs[0], outputs[1]


# -- group norm -----------------------------------------------------------------------------------------


@TABLE.lowers(aten.native_group_norm.default)
def group_norm(
    ctx: LoweringContext,
    node: Node,
    x: View,
    weight: View | None,
    bias: View | None,
    batch: object,
    channels: object,
    spatial: object,
    groups: int,
    eps: float,
) -> NodeValue:
    """(normalized, mean, 1/std) with statistics over the channels of a group and all positions."""
    result, mean_out, rstd_out = (declare_part(ctx, node, k) for k in range(3))
    per_group = x.sizes[1] // groups
    split = (x.sizes[0], rstd_out.sizes[1], per_group, *x.sizes[2:])
    rows = RowNest(ctx, node, result.buffer, split, range(2, len(split)))
    nest, dtype = rows.nest, compute_dtype(x.dtype)

    def joined(index: Indices) -> tuple[Expr, ...]:
        return (index[0], index[1] * per_group + index[2], *index[3:])

    careful = ctx.capabilities.careful_variance
    mean, squares = mean_and_squares(rows, lambda index: load_as(nest, x, joined(index), dtype), careful)
    rstd = _inverse_root(nest, squares, rows.count_value(dtype), eps)
    nest.store(mean_out, rows.row(keepdim=False), mean)
    nest.store(rstd_out, rows.row(keepdim=False), rstd)
    index = joined(rows.stage())
    value = nest.op("mul", nest.op("sub", load_as(nest, x, index, dtype), mean), rstd)
    nest.store(result, index, _affine(nest, value, weight, bias, (index[1],)))
    ctx.add(nest)
    return [result, mean_out, rstd_out]
