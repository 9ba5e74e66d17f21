"""Softmax, log-softmax, their derivatives, and the negative log likelihood loss: one nest each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import DType
from ..symbolic import Expr
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype
from .reductions import RowNest
from .registry import RuleTable, aten
from .values import NodeValue, View

__all__ = ["TABLE"]

TABLE = RuleTable("softmax")


@TABLE.lowers(aten._softmax.default)
def softmax(ctx: LoweringContext, node: Node, x: View, dim: int, half_to_float: bool) -> View:
    """``exp(x - max) / sum``. The exponentials are kept for the last stage in a temporary (which scheduling shrinks to
    one row), so that each is computed once."""
    result = ctx.declare(node.name, node.meta["val"])
    dtype = compute_dtype(x.dtype)
    kept = ctx.declare(f"{node.name}_exp", node.meta["val"], dtype=_torch(dtype))
    rows = RowNest(ctx, node, result.buffer, x.sizes, [dim])
    nest = rows.nest
    top = nest.reduce("max", nest.cast(nest.load(x, rows.stage()), dtype))
    index = rows.stage()
    power = nest.op("exp", nest.op("sub", nest.cast(nest.load(x, index), dtype), top))
    nest.store(kept, index, power)
    total = nest.reduce("sum", power)
    index = rows.stage()
    nest.store(result, index, nest.op("div", nest.load(kept, index), total))
    ctx.add(nest)
    return result


def _torch(dtype: DType) -> torch.dtype:
    return torch.float64 if dtype is DType.F64 else torch.float32


@TABLE.lowers(aten._log_softmax.default)
def log_softmax(ctx: LoweringContext, node: Node, x: View, dim: int, half_to_float: bool) -> View:
    """``x - max - log(sum(exp(x - max)))``."""
    result = ctx.declare(node.name, node.meta["val"])
    rows = RowNest(ctx, node, result.buffer, x.sizes, [dim])
    nest, dtype = rows.nest, compute_dtype(x.dtype)

    def value(index: tuple[Expr, ...]) -> Value:
        return nest.cast(nest.load(x, index), dtype)

    top = nest.reduce("max", value(rows.stage()))
    total = nest.reduce("sum", nest.op("exp", nest.op("sub", value(rows.stage()), top)))
    nest.stage()
    log = nest.op("log", total)
    index = rows.stage()
    nest.store(result, index, nest.op("sub", nest.op("sub", value(index), top), log))
    ctx.add(nest)
    return result


@TABLE.lowers(aten._softmax_backward_data.default)
def softmax_backward(ctx: LoweringContext, node: Node, grad: View, y: View, dim: int, input_dtype: torch.dtype) -> View:
    """``(grad - sum(grad*y)) * y``."""

    def term(nest: ViewBuilder, g: Value, v: Value) -> Value:
        return nest.op("mul", g, v)

    def last(nest: ViewBuilder, g: Value, v: Value, total: Value) -> Value:
        return nest.op("mul", nest.op("sub", g, total), v)

    return _backward(ctx, node, grad, y, dim, term, last)


@TABLE.lowers(aten._log_softmax_backward_data.default)
def log_softmax_backward(
    ctx: LoweringContext, node: Node, grad: View, y: View, dim: int, input_dtype: torch.dtype
) -> View:
    """``grad - exp(y) * sum(grad)``."""

    def term(nest: ViewBuilder, g: Value, v: Value) -> Value:
        return g

    def last(nest: ViewBuilder, g: Value, v: Value, total: Value) -> Value:
        return nest.op("sub", g, nest.op("mul", nest.op("exp", v), total))

    return _backward(ctx, node, grad, y, dim, term, last)


def _backward(
    ctx: LoweringContext,
    node: Node,
    grad: View,
    y: View,
    dim: int,
    term: Callable[[ViewBuilder, Value, Value], Value],
    last: Callable[[ViewBuilder, Value, Value, Value], Value],
) -> View:
    result = ctx.declare(node.name, node.meta["val"])
    rows = RowNest(ctx, node, result.buffer, y.sizes, [dim])
    nest, dtype = rows.nest, compute_dtype(y.dtype)
    index = rows.stage()
    g, v = (nest.cast(nest.load(t, index), dtype) for t in (grad, y))
    total = nest.reduce("sum", term(nest, g, v))
    index = rows.stage()
    g, v = (nest.cast(nest.load(t, index), dtype) for t in (grad, y))
    nest.store(result, index, last(nest, g, v, total))
    ctx.add(nest)
    return result


# -- negative log likelihood ----------------------------------------------------------------------------


def _target_class(
    nest: ViewBuilder, target: View, index: tuple[Expr, ...], classes: Expr, ignore: int | Expr
) -> tuple[Value, Value, Expr]:
    """(target, whether it counts, index of its class). A negative target that is not ignored is out of range."""
    wanted = nest.cast(nest.load(target, index), DType.I64)
    counts = nest.op("ne", wanted, nest.scalar(ignore, DType.I64))
    zero = nest.const(0, DType.I64)
    refused = nest.where(nest.op("lt", wanted, zero), nest.index_value(classes), wanted)
    return wanted, counts, nest.check_index(nest.where(counts, refused, zero), classes)


def _check_known(x: View, reduction: int | Expr) -> None:
    """Raises :class:`Fallback` for what ATen computes. Compiled autograd gives whole numbers as dynamic sizes."""
    if len(x.sizes) == 1:
        raise Fallback("the loss of a single sample is left to ATen")
    if not isinstance(reduction, int):
        raise Fallback("how the loss is reduced is known at run time only")


@TABLE.lowers(aten.nll_loss_forward.default, aten.nll_loss2d_forward.default)
def nll_loss(
    ctx: LoweringContext,
    node: Node,
    x: View,
    target: View,
    weight: View | None,
    reduction: int | Expr,
    ignore: int | Expr,
) -> NodeValue:
    """``-weight[t] * x[.., t, ..]`` of every target; summed, or averaged by the weights that count."""
    _check_known(x, reduction)
    vals = node.meta["val"]
    loss, weights = (ctx.declare(f"{node.name}_{k}", val) for k, val in enumerate(vals))
    dtype = compute_dtype(x.dtype)
    samples = (x.sizes[0], *x.sizes[2:])
    rows = RowNest(ctx, node, loss.buffer, samples, range(len(samples)) if reduction else ())
    nest = rows.nest
    index = rows.stage()
    _, counts, chosen = _target_class(nest, target, index, x.sizes[1], ignore)
    share = nest.cast(nest.load(weight, (chosen,)), dtype) if weight is not None else nest.const(1, dtype)
    value = nest.cast(nest.load(x, (index[0], chosen, *index[1:])), dtype)
    zero = nest.const(0, dtype)
    part = nest.where(counts, nest.op("neg", nest.op("mul", value, share)), zero)
    if not reduction:
        nest.store(loss, nest.index, part)
        ctx.add(nest)
        zeros = ctx.nest(weights.buffer, node, ())
        zeros.store(weights, (), zeros.const(0, dtype))
        ctx.add(zeros)
        return [loss, weights]
    total, total_weight = nest.reduce("sum", part), nest.reduce("sum", nest.where(counts, share, zero))
    nest.stage()
    nest.store(loss, (), nest.op("div", total, total_weight) if reduction == 1 else total)
    nest.store(weights, (), total_weight)
    ctx.add(nest)
    return [loss, weights]


@TABLE.lowers(aten.nll_loss_backward.default, aten.nll_loss2d_backward.default)
def nll_loss_backward(
    ctx: LoweringContext,
    node: Node,
    grad: View,
    x: View,
    target: View,
    weight: View | None,
    reduction: int | Expr,
    ignore: int | Expr,
    total_weight: View,
) -> View:
    """``-weight[t] * grad`` at the target's class, 0 elsewhere."""
    _check_known(x, reduction)
    dtype = compute_dtype(x.dtype)

    def compute(nest: ViewBuilder) -> Value:
        index = nest.index
        sample = (index[0], *index[2:])
        wanted, counts, chosen = _target_class(nest, target, sample, x.sizes[1], ignore)
        g = nest.cast(nest.load(grad, sample if reduction == 0 else ()), dtype)
        if weight is not None:
            g = nest.op("mul", g, nest.cast(nest.load(weight, (chosen,)), dtype))
        if reduction == 1:
            g = nest.op("div", g, nest.cast(nest.load(total_weight, ()), dtype))
        here = nest.op("eq", nest.index_value(index[1]), wanted)
        here = nest.op("logical_and", here, counts)
        return nest.where(here, nest.op("neg", g), nest.const(0, dtype))

    return ctx.pointwise(node, [], compute, dtype)
