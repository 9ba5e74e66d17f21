"""Joining and padding: masked reads, or one store per piece into its place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from ..errors import Fallback
from ..ir import DType
from ..ops.positions import Number, begin_of, length_of, same_number, select_position
from ..symbolic import Expr, to_expr
from .access import Value, ViewBuilder
from .context import LoweringContext
from .promotion import compute_dtype, ir_dtype
from .registry import RuleTable, aten
from .values import View

__all__ = ["TABLE"]

TABLE = RuleTable("concat")


@TABLE.lowers(aten.cat.default)
def cat(ctx: LoweringContext, node: Node, pieces: Sequence[View], dim: int = 0) -> View:
    """One nest per piece that writes it into its place. Where kernels read them, scheduling has a say."""
    val = node.meta["val"]
    dim %= val.dim()
    result = ctx.declare(node.name, val)
    start = to_expr(0)
    for position, piece in enumerate(_joined(pieces, val.dim(), dim)):
        nest = ctx.nest(f"{result.buffer}_part{position}", node, piece.sizes)
        index = list(nest.index)
        index[dim] = index[dim] + start
        nest.store(result, index, nest.cast(nest.load(piece, nest.index), ir_dtype(result.dtype)))
        ctx.add(nest)
        start = start + piece.sizes[dim]
    return result


def _joined(pieces: Sequence[View], rank: int, dim: int) -> list[View]:
    """The pieces that have elements: eager lets empty vectors stand among tensors of any rank."""
    whole = [p for p in pieces if len(p.sizes) == rank]
    return [p for p in whole if p.sizes[dim] != 0] or whole[:1]


@TABLE.lowers(aten.constant_pad_nd.default)
def constant_pad(ctx: LoweringContext, node: Node, x: View, pad: Sequence[object], value: object = 0) -> View:
    """Masked loads; outside reads nothing and gives ``value``. Negative pads crop."""
    if not isinstance(value, bool | int | float):
        raise Fallback("padding with anything but a plain number is left to ATen")
    rank = len(x.sizes)
    dtype = compute_dtype(x.dtype)
    result = ctx.declare(node.name, node.meta["val"])
    nest = ctx.nest(result.buffer, node, result.sizes)
    index = list(nest.index)
    mask: Value | None = None
    for position in range(len(pad) // 2):
        dim = rank - 1 - position
        low, high = pad[2 * position], pad[2 * position + 1]
        if not isinstance(low, int | Expr) or not isinstance(high, int | Expr):
            raise Fallback("pads must be integers")
        index[dim] = index[dim] - low
        at = nest.index_value(index[dim])
        for condition in _bounds(nest, at, x.sizes[dim], low, high):
            mask = condition if mask is None else nest.op("logical_and", mask, condition)
    fill = nest.const(value, dtype)
    if mask is None:
        loaded = nest.load(x, index)
    else:
        loaded = nest.where(mask, nest.cast(nest.load(x, index, mask=mask), dtype), fill)
    nest.store(result, nest.index, loaded)
    ctx.add(nest)
    return result


def _bounds(nest: ViewBuilder, at: Value, size: Expr, low: object, high: object) -> list[Value]:
    conditions = []
    if not (isinstance(low, int) and low <= 0):
        conditions.append(nest.op("ge", at, nest.const(0, DType.I64)))
    if not (isinstance(high, int) and high <= 0):
        conditions.append(nest.op("lt", at, nest.index_value(size)))
    return conditions


@TABLE.lowers(aten.slice_scatter.default)
def slice_scatter(
    ctx: LoweringContext,
    node: Node,
    x: View,
    source: View,
    dim: int = 0,
    start: object = None,
    end: object = None,
    step: int = 1,
) -> View:
    """``source`` in the slice, ``x`` elsewhere."""
    _expect_slices_sizes(node)
    begin = _begin(ctx, node, 2)
    dim %= len(x.sizes)

    def compute(nest: ViewBuilder, old: Value) -> Value:
        offset = nest.index[dim] - begin
        inside = _in_slice(nest, offset, source.sizes[dim], step)
        index = list(nest.index)
        index[dim] = offset // step
        return nest.where(inside, nest.cast(nest.load(source, index, mask=inside), old.dtype), old)

    return ctx.pointwise(node, [x], compute, ir_dtype(x.dtype))


def _begin(ctx: LoweringContext, node: Node, place: int) -> Expr:
    """Where the slice begins that argument ``place`` and its neighbours (dim, start, end) of a call describe."""
    begin = begin_of(_given(node, place + 1, "start"), node.meta["val"].shape[_given(node, place, "dim", 0)])
    if begin is None:
        raise Fallback("whether the start of this slice counts from the end only a call tells")
    return ctx.sizes.expr(begin)


def _expect_sizes(node: Node, wanted: Sequence[Number | None], place: int = 0) -> None:
    """Eager looks at the sizes of what is put somewhere, or repeats it; fake kernels do not."""
    sizes = node.args[place].meta["val"].shape  # type: ignore[union-attr]
    known = len(sizes) == len(wanted) and all(
        b is not None and same_number(a, b) for a, b in zip(sizes, wanted, strict=True)
    )
    if not known:
        raise Fallback("a tensor of other sizes than what it is put into is left to ATen")


def _given(node: Node, place: int, name: str, default: Any = None) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _expect_slices_sizes(node: Node) -> None:
    dim, shape = _given(node, 2, "dim", 0), list(node.meta["val"].shape)
    start, end, step = _given(node, 3, "start"), _given(node, 4, "end"), _given(node, 5, "step", 1)
    _expect_sizes(node, [*shape[:dim], length_of(start, end, step, shape[dim]), *shape[dim:][1:]], 1)


@TABLE.lowers(aten.select_scatter.default)
def select_scatter(ctx: LoweringContext, node: Node, x: View, source: View, dim: int, position: object) -> View:
    """``source`` at one position of a dimension, ``x`` elsewhere."""
    dim %= len(x.sizes)
    if not isinstance(position, int | Expr):
        raise Fallback("the position must be an integer")
    known = _known_position(node, dim)
    _expect_sizes(node, [n for k, n in enumerate(node.meta["val"].shape) if k != dim], 1)

    def compute(nest: ViewBuilder, old: Value) -> Value:
        at = _position(ctx, nest, known, to_expr(position), x.sizes[dim])
        here = nest.op("eq", nest.index_value(nest.index[dim]), nest.index_value(at))
        index = [e for k, e in enumerate(nest.index) if k != dim]
        return nest.where(here, nest.cast(nest.load(source, index, mask=here), old.dtype), old)

    return ctx.pointwise(node, [x], compute, ir_dtype(x.dtype))


@TABLE.lowers(aten.slice_backward.default)
def slice_backward(
    ctx: LoweringContext, node: Node, grad: View, sizes: object, dim: int, start: object, end: object, step: int
) -> View:
    """The gradient in the slice it came from, 0 elsewhere."""
    dtype = ir_dtype(grad.dtype)
    begin = _begin(ctx, node, 2)
    wanted: list[Number | None] = list(node.meta["val"].shape)
    wanted[dim] = length_of(node.args[3], node.args[4], node.args[5], node.meta["val"].shape[dim])
    _expect_sizes(node, wanted)

    def compute(nest: ViewBuilder) -> Value:
        offset = nest.index[dim] - begin
        inside = _in_slice(nest, offset, grad.sizes[dim], step)
        index = list(nest.index)
        index[dim] = offset // step
        return nest.load(grad, index, mask=inside, other=0)

    return ctx.pointwise(node, [], compute, dtype)


def _in_slice(nest: ViewBuilder, offset: Expr, count: Expr, step: int) -> Value:
    """Whether a position, counted from the slice's start, is one of its ``count`` elements."""
    at = nest.index_value(offset)
    inside = nest.op("ge", at, nest.const(0, DType.I64))
    inside = nest.op("logical_and", inside, nest.op("lt", at, nest.index_value(count * step)))
    if step != 1:
        on_step = nest.op("eq", nest.index_value(offset % step), nest.const(0, DType.I64))
        inside = nest.op("logical_and", inside, on_step)
    return inside


@TABLE.lowers(aten.select_backward.default)
def select_backward(ctx: LoweringContext, node: Node, grad: View, sizes: object, dim: int, position: object) -> View:
    """The gradient at the selected position, 0 elsewhere."""
    rank = node.meta["val"].dim()
    dim %= rank
    if not isinstance(position, int | Expr):
        raise Fallback("the position must be an integer")
    size = node.meta["val"].shape[dim]
    known = _known_position(node, dim)
    _expect_sizes(node, [n for k, n in enumerate(node.meta["val"].shape) if k != dim])

    def compute(nest: ViewBuilder) -> Value:
        at = _position(ctx, nest, known, to_expr(position), ctx.sizes.expr(size))
        here = nest.op("eq", nest.index_value(nest.index[dim]), nest.index_value(at))
        return nest.load(grad, [e for k, e in enumerate(nest.index) if k != dim], mask=here, other=0)

    return ctx.pointwise(node, [], compute, ir_dtype(grad.dtype))


def _known_position(node: Node, dim: int) -> Number | None:
    """The position that argument 3 gives, ``None`` where only the kernel can tell it."""
    shape = node.meta["val"].shape
    known = select_position(node.args[3], shape[dim])
    if known is None and not all(statically_known_true(size > 0) for size in shape):
        raise Fallback("a kernel looks at a position in each element only, and there may be none")
    return known


def _position(ctx: LoweringContext, nest: ViewBuilder, known: Number | None, given: Expr, size: Expr) -> Expr:
    """A position counted from the start; in the kernel, where it is checked, if it is not known before."""
    return nest.check_index(nest.index_value(given), size) if known is None else ctx.sizes.expr(known)


@TABLE.lowers(aten.stack.default)
def stack(ctx: LoweringContext, node: Node, pieces: Sequence[View], dim: int = 0) -> View:
    """One store per piece."""
    val: torch.Tensor = node.meta["val"]
    dim %= val.dim()
    result = ctx.declare(node.name, val)
    for position, piece in enumerate(pieces):
        nest = ctx.nest(f"{result.buffer}_part{position}", node, piece.sizes)
        index = list(nest.index)
        index.insert(dim, to_expr(position))
        nest.store(result, index, nest.load(piece, nest.index))
        ctx.add(nest)
    return result
