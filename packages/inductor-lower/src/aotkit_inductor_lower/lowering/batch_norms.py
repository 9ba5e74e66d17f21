"""Batch normalization and its derivative: statistics per channel, then the result."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch._prims_common import is_channels_last_contiguous_or_false, is_contiguous_or_false
from torch.fx import Node

from ..ir import DType
from ..symbolic import Expr
from ..target import on_host
from .access import Value, ViewBuilder
from .context import LoweringContext
from .norms import declare_part, load_as
from .promotion import compute_dtype
from .reductions import RowNest
from .registry import RuleTable, aten
from .values import NodeValue, View

__all__ = ["TABLE"]

TABLE = RuleTable("batch norms")


def _channel_dims(x: View) -> list[int]:
    return [dim for dim in range(len(x.sizes)) if dim != 1]


def _statistics_dtype(ctx: LoweringContext, x: View) -> DType:
    """What batch norm's sums accumulate in, as eager's do: on the CPU double for float32, else float32.

    Note [Batch norm rounds as eager]
        Behind a batch norm usually stands a relu, whose gradient jumps at 0. A normalized value that differs from
        eager's in its last bit now and then lands on the other side, and one such element moves a convolution's
        gradient by 1e-3. So sums are as wide as eager's, mean and variance are rounded before they are used, and the
        result is ``fma(x, alpha, beta)`` with one alpha and beta per channel: the bits of eager's CPU kernel. Where
        elements of the input, the weight or the bias lie apart, eager has another kernel, without alpha and beta.
        For dense bfloat16 whose statistics are bfloat16, too, that kernel also rounds the sum of squared differences
        and the variance; it does not for float16, or for another layout.
    """
    wide = ctx.capabilities.wide_statistics and x.dtype is torch.float32
    return DType.F64 if wide else compute_dtype(x.dtype)


def _affine(
    ctx: LoweringContext,
    node: Node,
    x: View,
    result: View,
    mean: View,
    rstd: Callable[[ViewBuilder, Expr], Value],
    weight: View | None,
    bias: View | None,
) -> None:
    """``x*scale + (bias - mean*scale)`` per channel, or of memory with gaps ``(x - mean)*rstd*weight + bias``; see
    Note [Batch norm rounds as eager]."""
    dtype = compute_dtype(x.dtype)
    nest = ctx.nest(result.buffer, node, x.sizes)
    channel = nest.index[1]
    value, center = load_as(nest, x, nest.index, dtype), load_as(nest, mean, (channel,), dtype)
    scale = rstd(nest, channel)
    gain = load_as(nest, weight, (channel,), dtype) if weight is not None else None
    shift = load_as(nest, bias, (channel,), dtype) if bias is not None else nest.const(0, dtype)
    if all(_is_dense(arg.meta["val"]) for arg in node.args[:3] if isinstance(arg, Node)):
        alpha = scale if gain is None else nest.op("mul", scale, gain)
        beta = nest.op("fma", nest.op("neg", center), alpha, shift)
        nest.store(result, nest.index, nest.op("fma", value, alpha, beta))
    else:
        normal = nest.op("mul", nest.op("sub", value, center), scale)
        scaled = normal if gain is None else nest.op("mul", normal, gain)
        nest.store(result, nest.index, nest.op("add", scaled, shift))
    ctx.add(nest)


def _is_dense(x: torch.Tensor) -> bool:
    return bool(is_contiguous_or_false(x) or is_channels_last_contiguous_or_false(x))


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
    result, mean_out, rstd_out = (declare_part(ctx, node, k) for k in range(3))
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
            kept = nest.op("mul", load_as(nest, old, row, wide), nest.const(1 - momentum, wide))
            fresh = nest.op("mul", nest.cast(fresh, wide), nest.const(momentum, wide))
            nest.store(new, row, nest.op("add", fresh, kept))
    ctx.add(nest)

    def inverse(pointwise: ViewBuilder, channel: Expr) -> Value:
        return load_as(pointwise, rstd_out, (channel,), dtype)

    _affine(ctx, node, x, result, mean_out, inverse, weight, bias)
    return [result, mean_out, rstd_out]


def _keeps_halves(node: Node, mean: View) -> bool:
    """Whether eager's kernel keeps sums in bfloat16; see Note [Batch norm rounds as eager]."""
    x = node.args[0].meta["val"]  # type: ignore[union-attr]
    return mean.dtype is torch.bfloat16 and on_host(x) and _is_dense(x)


def _batch_statistics(rows: RowNest, x: View, wide: DType) -> tuple[Value, Value]:
    """Mean and sum of squared differences per channel, as the result's type: each is rounded before it is used."""
    nest, dtype = rows.nest, compute_dtype(x.dtype)
    total = nest.reduce("sum", load_as(nest, x, rows.stage(), wide))
    nest.stage()
    mean = nest.cast(nest.op("div", total, rows.count_value(wide)), dtype)
    center = nest.op("sub", load_as(nest, x, rows.stage(), dtype), mean)
    squares = nest.reduce("sum", nest.cast(nest.op("mul", center, center), wide))
    nest.stage()
    return mean, nest.cast(squares, dtype)


def _batch_norm_inference(
    ctx: LoweringContext, node: Node, x: View, weight: View | None, bias: View | None, mean: View, var: View, eps: float
) -> View:
    result = declare_part(ctx, node, 0)
    dtype = compute_dtype(x.dtype)

    def inverse(nest: ViewBuilder, channel: Expr) -> Value:
        variance = nest.op("add", load_as(nest, var, (channel,), dtype), nest.const(eps, dtype))
        return nest.op("div", nest.const(1, dtype), nest.op("sqrt", variance))

    _affine(ctx, node, x, result, mean, inverse, weight, bias)
    return result


def _empty_results(ctx: LoweringContext, node: Node, positions: Sequence[int]) -> list[NodeValue]:
    """Results that inference leaves empty."""
    values: list[NodeValue] = []
    for position in positions:
        view = declare_part(ctx, node, position)
        nest = ctx.nest(view.buffer, node, view.sizes)
        nest.store(view, nest.index, nest.const(0, compute_dtype(view.dtype)))
        ctx.add(nest)
        values.append(view)
    return values


def _copy_result(ctx: LoweringContext, node: Node, position: int, source: View) -> View:
    """A result equal to an input: new memory in the result's strides, which readers in other graphs count on."""
    view = declare_part(ctx, node, position)
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
    updated = (declare_part(ctx, node, 3), declare_part(ctx, node, 4))
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

    def statistics(nest: ViewBuilder, channel: Expr) -> tuple[Value, Value]:
        if train:
            assert save_mean is not None and save_rstd is not None
            return load_as(nest, save_mean, (channel,), dtype), load_as(nest, save_rstd, (channel,), dtype)
        assert running_mean is not None and running_var is not None
        variance = nest.op("add", load_as(nest, running_var, (channel,), dtype), nest.const(eps, dtype))
        return load_as(nest, running_mean, (channel,), dtype), nest.op("rsqrt", variance)

    results: list[NodeValue] = [None, None, None]
    results[1], results[2], means = _batch_norm_sums(ctx, node, grad, x, statistics, mask)
    if mask[0]:
        results[0] = _batch_norm_input_grad(ctx, node, grad, x, weight, statistics, means if train else None)
    return results


Statistics = Callable[[ViewBuilder, Expr], tuple[Value, Value]]


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
    g = load_as(nest, grad, index, wide)
    center = nest.op("sub", load_as(nest, x, index, wide), mean)
    total, weighted = nest.reduce("sum", g), nest.reduce("sum", nest.op("mul", g, center))
    nest.stage()
    count, by_weight = rows.count_value(wide), nest.op("mul", weighted, rstd)
    nest.store(means[0], row, nest.op("div", total, count))
    nest.store(means[1], row, nest.op("div", nest.op("mul", by_weight, rstd), count))
    gradients: list[View | None] = [None, None]
    for position, value in ((1, by_weight), (2, total)):
        if mask[position]:
            view = gradients[position - 1] = declare_part(ctx, node, position)
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
    result = declare_part(ctx, node, 0)
    nest = ctx.nest(result.buffer, node, x.sizes)
    channel = nest.index[1]
    mean, rstd = statistics(nest, channel)
    value = load_as(nest, grad, nest.index, dtype)
    if means is not None:
        center = nest.op("sub", load_as(nest, x, nest.index, dtype), mean)
        slope = nest.op("mul", center, load_as(nest, means[1], (channel,), dtype))
        value = nest.op("sub", nest.op("sub", value, load_as(nest, means[0], (channel,), dtype)), slope)
    value = nest.op("mul", value, rstd)
    if weight is not None:
        value = nest.op("mul", value, load_as(nest, weight, (channel,), dtype))
    nest.store(result, nest.index, value)
    ctx.add(nest)
    return result
