"""Layer, group and batch normalization and their derivatives: statistics and result as row nests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._prims_common import is_channels_last_contiguous_or_false, is_contiguous_or_false
from torch.fx import Node

from ..ir import DType
from ..symbolic import Expr
from .context import LoweringContext, NodeValue
from .nest_builder import NestBuilder, Value
from .promotion import compute_dtype
from .reductions import RowNest, mean_and_squares
from .registry import RuleTable, aten
from .values import View

__all__ = ["TABLE"]

TABLE = RuleTable("norms")

Index = Sequence[Expr]


def _load(nest: NestBuilder, view: View, index: Index, dtype: DType) -> Value:
    return nest.cast(nest.load(view, index), dtype)


def _declare(ctx: LoweringContext, node: Node, position: int) -> View:
    return ctx.declare(f"{node.name}_{position}", node.meta["val"][position])


def _inverse_root(nest: NestBuilder, squares: Value, count: Value, eps: float) -> Value:
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
    result, mean_out, rstd_out = (_declare(ctx, node, k) for k in range(3))
    rows = RowNest(ctx, node, result.buffer, x.sizes, range(rank - inner, rank))
    nest, dtype = rows.nest, compute_dtype(x.dtype)
    mean, squares = mean_and_squares(rows, lambda index: _load(nest, x, index, dtype), ctx.sorts)
    rstd = _inverse_root(nest, squares, rows.count_value(dtype), eps)
    nest.store(mean_out, rows.row(keepdim=True), mean)
    nest.store(rstd_out, rows.row(keepdim=True), rstd)
    index = rows.stage()
    value = nest.op("mul", nest.op("sub", _load(nest, x, index, dtype), mean), rstd)
    if weight is not None:
        value = nest.op("mul", value, _load(nest, weight, index[rank - inner :], dtype))
    if bias is not None:
        value = nest.op("add", value, _load(nest, bias, index[rank - inner :], dtype))
    nest.store(result, index, value)
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

    def parts(nest: NestBuilder, index: Index) -> tuple[Value, Value]:
        row = (*index[: rank - inner], *(index[0] * 0,) * inner)
        center = nest.op("sub", _load(nest, x, index, dtype), _load(nest, mean, row, dtype))
        return _load(nest, grad, index, dtype), nest.op("mul", center, _load(nest, rstd, row, dtype))

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
    parts: Callable[[NestBuilder, Index], tuple[Value, Value]],
    inner: int,
) -> View:
    """``rstd * (g - mean(g) - xhat*mean(g*xhat))`` with ``g = grad*weight``."""
    rank, dtype = len(x.sizes), compute_dtype(x.dtype)
    result = _declare(ctx, node, 0)
    rows = RowNest(ctx, node, result.buffer, x.sizes, range(rank - inner, rank))
    nest = rows.nest

    def scaled(index: Index) -> tuple[Value, Value]:
        g, normal = parts(nest, index)
        if weight is not None:
            g = nest.op("mul", g, _load(nest, weight, index[rank - inner :], dtype))
        return g, normal

    g, normal = scaled(rows.stage())
    sum_g, sum_gn = nest.reduce("sum", g), nest.reduce("sum", nest.op("mul", g, normal))
    nest.stage()
    count = rows.count_value(dtype)
    mean_g, mean_gn = nest.op("div", sum_g, count), nest.op("div", sum_gn, count)
    scale = _load(nest, rstd, rows.row(keepdim=True), dtype)
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
    parts: Callable[[NestBuilder, Index], tuple[Value, Value]],
) -> tuple[View | None, View | None]:
    """(sum of grad*xhat, sum of grad) over ``dims``: the gradients of weight and bias."""
    outputs = [_declare(ctx, node, k + 1) if wanted else None for k, wanted in enumerate(mask)]
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


# -- batch norm -----------------------------------------------------------------------------------------


def _channel_dims(x: View) -> list[int]:
    return [dim for dim in range(len(x.sizes)) if dim != 1]


def _statistics_dtype(ctx: LoweringContext, x: View) -> DType:
    """What batch norm's sums accumulate in, as eager's do: on the CPU double for float32, else float32.

    Note [Batch norm rounds as eager]
        Behind a batch norm usually stands a relu, whose gradient jumps at 0. A normalized value that differs from
        eager's in its last bit now and then lands on the other side, and one such element moves a convolution's
        gradient by 1e-3. So sums are as wide as eager's, mean and variance are rounded before they are used, and the
        result is ``fma(x, alpha, beta)`` with one alpha and beta per channel: the bits of eager's CPU kernel.
        For dense bfloat16 whose statistics are bfloat16, too, that kernel also rounds the sum of squared differences
        and the variance; it does not for float16, or for another layout.
    """
    on_cpu = ctx.buffers[x.buffer].device.startswith("cpu")
    return DType.F64 if x.dtype is torch.float32 and on_cpu else compute_dtype(x.dtype)


def _affine(
    ctx: LoweringContext,
    node: Node,
    x: View,
    result: View,
    mean: View,
    scale: Callable[[NestBuilder, Expr], Value],
    bias: View | None,
) -> None:
    """``x*scale + (bias - mean*scale)`` per channel; see Note [Batch norm rounds as eager]."""
    dtype = compute_dtype(x.dtype)
    nest = ctx.nest(result.buffer, node, x.sizes)
    channel = nest.index[1]
    alpha = scale(nest, channel)
    shift = _load(nest, bias, (channel,), dtype) if bias is not None else nest.const(0, dtype)
    beta = nest.op("fma", nest.op("neg", _load(nest, mean, (channel,), dtype)), alpha, shift)
    nest.store(result, nest.index, nest.op("fma", _load(nest, x, nest.index, dtype), alpha, beta))
    ctx.add(nest)


@dataclass(frozen=True, slots=True)
class _Running:
    """Running mean and variance before and after, and the weight of this batch's."""

    old: tuple[View, View]
    new: tuple[View, View]
    momentum: float


def _batch_norm_training(
    ctx: LoweringContext,
    node: Node,
    x: View,
    weight: View | None,
    bias: View | None,
    eps: float,
    running: _Running | None = None,
) -> list[NodeValue]:
    """(normalized, saved mean, saved 1/std); writes the updated running statistics where asked."""
    result, mean_out, rstd_out = (_declare(ctx, node, k) for k in range(3))
    rows = RowNest(ctx, node, mean_out.buffer, x.sizes, _channel_dims(x))
    nest, dtype, wide = rows.nest, compute_dtype(x.dtype), _statistics_dtype(ctx, x)
    mean, squares = _batch_statistics(rows, x, wide)
    keeps_halves = _keeps_halves(node, mean_out)
    squares = nest.round_to(squares, torch.bfloat16) if keeps_halves else squares
    variance = nest.op("div", squares, rows.count_value(dtype))
    variance = nest.cast(nest.round_to(variance, torch.bfloat16) if keeps_halves else variance, wide)
    deviation = nest.op("sqrt", nest.op("add", variance, nest.const(eps, wide)))
    rstd = nest.op("div", nest.const(1, wide), deviation)
    row = rows.row(keepdim=False)
    nest.store(mean_out, row, mean)
    nest.store(rstd_out, row, rstd)
    if running is not None:
        momentum = running.momentum
        unbiased = nest.op("div", squares, nest.op("sub", rows.count_value(dtype), nest.const(1, dtype)))
        for old, new, fresh in zip(running.old, running.new, (mean, unbiased), strict=True):
            kept = nest.op("mul", _load(nest, old, row, wide), nest.const(1 - momentum, wide))
            fresh = nest.op("mul", nest.cast(fresh, wide), nest.const(momentum, wide))
            nest.store(new, row, nest.op("add", fresh, kept))
    ctx.add(nest)

    def scale(pointwise: NestBuilder, channel: Expr) -> Value:
        value = _load(pointwise, rstd_out, (channel,), dtype)
        if weight is None:
            return value
        return pointwise.op("mul", value, _load(pointwise, weight, (channel,), dtype))

    _affine(ctx, node, x, result, mean_out, scale, bias)
    return [result, mean_out, rstd_out]


def _keeps_halves(node: Node, mean: View) -> bool:
    """Whether eager's kernel keeps sums in bfloat16; see Note [Batch norm rounds as eager]."""
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    dense = is_contiguous_or_false(x) or is_channels_last_contiguous_or_false(x)
    return mean.dtype is torch.bfloat16 and x.device.type == "cpu" and dense


def _batch_statistics(rows: RowNest, x: View, wide: DType) -> tuple[Value, Value]:
    """Mean and sum of squared differences per channel, as the result's type: each is rounded before it is used."""
    nest, dtype = rows.nest, compute_dtype(x.dtype)
    total = nest.reduce("sum", _load(nest, x, rows.stage(), wide))
    nest.stage()
    mean = nest.cast(nest.op("div", total, rows.count_value(wide)), dtype)
    center = nest.op("sub", _load(nest, x, rows.stage(), dtype), mean)
    squares = nest.reduce("sum", nest.cast(nest.op("mul", center, center), wide))
    nest.stage()
    return mean, nest.cast(squares, dtype)


def _batch_norm_inference(
    ctx: LoweringContext, node: Node, x: View, weight: View | None, bias: View | None, mean: View, var: View, eps: float
) -> View:
    result = _declare(ctx, node, 0)
    dtype = compute_dtype(x.dtype)

    def scale(nest: NestBuilder, channel: Expr) -> Value:
        variance = nest.op("add", _load(nest, var, (channel,), dtype), nest.const(eps, dtype))
        value = nest.op("div", nest.const(1, dtype), nest.op("sqrt", variance))
        return nest.op("mul", value, _load(nest, weight, (channel,), dtype)) if weight is not None else value

    _affine(ctx, node, x, result, mean, scale, bias)
    return result


def _empty_results(ctx: LoweringContext, node: Node, positions: Sequence[int]) -> list[NodeValue]:
    """Results that inference leaves empty."""
    values: list[NodeValue] = []
    for position in positions:
        view = _declare(ctx, node, position)
        nest = ctx.nest(view.buffer, node, view.sizes)
        nest.store(view, nest.index, nest.const(0, compute_dtype(view.dtype)))
        ctx.add(nest)
        values.append(view)
    return values


def _copy_result(ctx: LoweringContext, node: Node, position: int, source: View) -> View:
    """A result equal to an input: new memory in the result's strides, which readers in other graphs count on."""
    view = _declare(ctx, node, position)
    nest = ctx.nest(view.buffer, node, view.sizes)
    nest.store(view, nest.index, nest.load(source, nest.index))
    ctx.add(nest)
    return view


@TABLE.lowers(aten._native_batch_norm_legit_functional.default)
def batch_norm_functional(
    ctx: LoweringContext,
    node: Node,
    x: View,
    weight: View | None,
    bias: View | None,
    running_mean: View,
    running_var: View,
    training: bool,
    momentum: float,
    eps: float,
) -> NodeValue:
    """(normalized, saved mean, saved 1/std, new running mean, new running variance)."""
    if not training:
        result = _batch_norm_inference(ctx, node, x, weight, bias, running_mean, running_var, eps)
        kept = [_copy_result(ctx, node, k, source) for k, source in ((3, running_mean), (4, running_var))]
        return [result, *_empty_results(ctx, node, (1, 2)), *kept]
    updated = (_declare(ctx, node, 3), _declare(ctx, node, 4))
    running = _Running((running_mean, running_var), updated, momentum)
    return [*_batch_norm_training(ctx, node, x, weight, bias, eps, running), *updated]


@TABLE.lowers(aten._native_batch_norm_legit.no_stats)
def batch_norm_no_stats(
    ctx: LoweringContext,
    node: Node,
    x: View,
    weight: View | None,
    bias: View | None,
    training: bool,
    momentum: float,
    eps: float,
) -> NodeValue:
    """Always by the batch's own statistics."""
    return _batch_norm_training(ctx, node, x, weight, bias, eps)


@TABLE.lowers(aten._native_batch_norm_legit_no_training.default)
def batch_norm_no_training(
    ctx: LoweringContext,
    node: Node,
    x: View,
    weight: View | None,
    bias: View | None,
    running_mean: View,
    running_var: View,
    momentum: float,
    eps: float,
) -> NodeValue:
    """By the running statistics."""
    result = _batch_norm_inference(ctx, node, x, weight, bias, running_mean, running_var, eps)
    return [result, *_empty_results(ctx, node, (1, 2))]


@TABLE.lowers(aten.native_batch_norm_backward.default)
def batch_norm_backward(
    ctx: LoweringContext,
    node: Node,
    grad: View,
    x: View,
    weight: View | None,
    running_mean: View | None,
    running_var: View | None,
    save_mean: View | None,
    save_rstd: View | None,
    train: bool,
    eps: float,
    mask: Sequence[bool],
) -> NodeValue:
    """Sums per channel, then the input's gradient."""
    dtype = compute_dtype(x.dtype)

    def statistics(nest: NestBuilder, channel: Expr) -> tuple[Value, Value]:
        if train:
            assert save_mean is not None and save_rstd is not None
            return _load(nest, save_mean, (channel,), dtype), _load(nest, save_rstd, (channel,), dtype)
        assert running_mean is not None and running_var is not None
        variance = nest.op("add", _load(nest, running_var, (channel,), dtype), nest.const(eps, dtype))
        return _load(nest, running_mean, (channel,), dtype), nest.op("rsqrt", variance)

    results: list[NodeValue] = [None, None, None]
    results[1], results[2], means = _batch_norm_sums(ctx, node, grad, x, statistics, mask)
    if mask[0]:
        results[0] = _batch_norm_input_grad(ctx, node, grad, x, weight, statistics, means if train else None)
    return results


Statistics = Callable[[NestBuilder, Expr], tuple[Value, Value]]


def _batch_norm_sums(
    ctx: LoweringContext, node: Node, grad: View, x: View, statistics: Statistics, mask: Sequence[bool]
) -> tuple[View | None, View | None, tuple[View, View]]:
    """Gradients of weight and bias, and per channel (mean of grad, mean of grad*(x - mean), times 1/var)."""
    wide = _statistics_dtype(ctx, x)
    torch_dtype = torch.float64 if compute_dtype(x.dtype) is DType.F64 else torch.float32
    means = tuple(ctx.declare_dense(f"{node.name}_{kind}", (x.sizes[1],), torch_dtype) for kind in ("mean", "slope"))
    rows = RowNest(ctx, node, means[0].buffer, x.sizes, _channel_dims(x))
    nest, row = rows.nest, rows.row(keepdim=False)
    mean, rstd = (nest.cast(value, wide) for value in statistics(nest, row[0]))
    index = rows.stage()
    g = _load(nest, grad, index, wide)
    center = nest.op("sub", _load(nest, x, index, wide), mean)
    total, weighted = nest.reduce("sum", g), nest.reduce("sum", nest.op("mul", g, center))
    nest.stage()
    count, by_weight = rows.count_value(wide), nest.op("mul", weighted, rstd)
    nest.store(means[0], row, nest.op("div", total, count))
    nest.store(means[1], row, nest.op("div", nest.op("mul", by_weight, rstd), count))
    gradients: list[View | None] = [None, None]
    for position, value in ((1, by_weight), (2, total)):
        if mask[position]:
            view = gradients[position - 1] = _declare(ctx, node, position)
            nest.store(view, row, value)
    ctx.add(nest)
    return gradients[0], gradients[1], (means[0], means[1])


def _batch_norm_input_grad(
    ctx: LoweringContext,
    node: Node,
    grad: View,
    x: View,
    weight: View | None,
    statistics: Statistics,
    means: tuple[View, View] | None,
) -> View:
    """Training: ``(g - mean(g) - (x - mean)*slope) * rstd * weight``; else ``g * rstd * weight``."""
    dtype = compute_dtype(x.dtype)
    result = _declare(ctx, node, 0)
    nest = ctx.nest(result.buffer, node, x.sizes)
    channel = nest.index[1]
    mean, rstd = statistics(nest, channel)
    value = _load(nest, grad, nest.index, dtype)
    if means is not None:
        center = nest.op("sub", _load(nest, x, nest.index, dtype), mean)
        slope = nest.op("mul", center, _load(nest, means[1], (channel,), dtype))
        value = nest.op("sub", nest.op("sub", value, _load(nest, means[0], (channel,), dtype)), slope)
    value = nest.op("mul", value, rstd)
    if weight is not None:
        value = nest.op("mul", value, _load(nest, weight, (channel,), dtype))
    nest.store(result, nest.index, value)
    ctx.add(nest)
    return result


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
    result, mean_out, rstd_out = (_declare(ctx, node, k) for k in range(3))
    per_group = x.sizes[1] // groups
    split = (x.sizes[0], rstd_out.sizes[1], per_group, *x.sizes[2:])
    rows = RowNest(ctx, node, result.buffer, split, range(2, len(split)))
    nest, dtype = rows.nest, compute_dtype(x.dtype)

    def joined(index: Index) -> tuple[Expr, ...]:
        return (index[0], index[1] * per_group + index[2], *index[3:])

    mean, squares = mean_and_squares(rows, lambda index: _load(nest, x, joined(index), dtype), ctx.sorts)
    rstd = _inverse_root(nest, squares, rows.count_value(dtype), eps)
    nest.store(mean_out, rows.row(keepdim=False), mean)
    nest.store(rstd_out, rows.row(keepdim=False), rstd)
    index = joined(rows.stage())
    value = nest.op("mul", nest.op("sub", _load(nest, x, index, dtype), mean), rstd)
    if weight is not None:
        value = nest.op("mul", value, _load(nest, weight, (index[1],), dtype))
    if bias is not None:
        value = nest.op("add", value, _load(nest, bias, (index[1],), dtype))
    nest.store(result, index, value)
    ctx.add(nest)
    return [result, mean_out, rstd_out]
