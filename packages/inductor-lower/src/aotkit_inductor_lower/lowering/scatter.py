"""Writing by computed indices: a copy of the tensor, then one nest of stores to where the indices point.

Note [Collisions]
    Stores that accumulate run in order on one thread, so equal indices add up in eager's order and no atomics are
    needed. Of plain stores to one place any may win, as in eager. Where eager combines float16 in float32 and rounds
    once, a copy of the tensor in float32 is written to (:func:`_combined`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import BufferKind, DType
from ..ops.aten import is_creation
from ..symbolic import Expr, product, reshape_indices, to_expr
from .access import Value, ViewBuilder, broadcast_index
from .context import LoweringContext
from .indexing import index_layout, no_negative
from .promotion import compute_dtype, ir_dtype, refuse_narrowing, refuse_overflow
from .registry import RuleTable, aten
from .values import FloatExpr, View

__all__ = ["TABLE"]

TABLE = RuleTable("scatter")
Indices = Sequence[Expr]
_LOWEST = {"prod": 1, "amax": float("-inf"), "amin": float("inf")}
_MODES = {"sum": "add", "add": "add", "mean": "add", "prod": "mul", "multiply": "mul", "amax": "max", "amin": "min"}


def _filled(ctx: LoweringContext, node: Node, fill: Callable[[ViewBuilder, Indices], Value]) -> View:
    """The result, with start values."""
    result = ctx.declare(node.name, node.meta["val"])
    nest = ctx.nest(f"{result.buffer}_start", node, result.sizes)
    nest.store(result, nest.index, fill(nest, nest.index))
    ctx.add(nest)
    return result


def _combined(ctx: LoweringContext, node: Node, x: View, write: Callable[[View], None]) -> View:
    """A copy of ``x`` that ``write`` combines elements into; of 16-bit floats the copy is in float32, rounded then."""
    if x.dtype not in (torch.float16, torch.bfloat16):
        result = _copied(ctx, node, x)
        write(result)
        return result
    wide = ctx.declare(f"{node.name}_wide", node.meta["val"], dtype=torch.float32)
    nest = ctx.nest(f"{wide.buffer}_start", node, wide.sizes)
    nest.store(wide, nest.index, nest.load(x, nest.index))
    ctx.add(nest)
    write(wide)
    return ctx.pointwise(node, [wide], lambda _, total: total)


def _copied(ctx: LoweringContext, node: Node, x: View) -> View:
    return _filled(ctx, node, lambda nest, index: nest.load(x, index))


def _zeros(ctx: LoweringContext, node: Node, dtype: torch.dtype) -> View:
    return _filled(ctx, node, lambda nest, _: nest.const(0, ir_dtype(dtype)))


def _source(nest: ViewBuilder, source: object, index: Indices, dtype: torch.dtype) -> Value:
    """The element to write: of a tensor (broadcast), or a number."""
    if isinstance(source, View):
        return nest.cast(nest.load_broadcast(source, index), ir_dtype(dtype))
    return nest.scalar(source, ir_dtype(dtype))


def _number(value: object, dtype: torch.dtype) -> object:
    refuse_overflow(dtype, value)
    if isinstance(value, View | bool | int | float | Expr | FloatExpr):
        return value
    raise Fallback("a complex number is left to ATen")


# -- index_put -------------------------------------------------------------------------------------------


@TABLE.lowers(aten.index_put.default, aten._unsafe_index_put.default)
def index_put(
    ctx: LoweringContext, node: Node, x: View, indices: Sequence[View | None], values: View, accumulate: bool = False
) -> View:
    """``x`` with ``x[i, j, ...] = values`` (or ``+=``)."""
    if len(indices) == 1 and indices[0] is not None and indices[0].dtype is torch.bool:
        return _masked_put(ctx, node, x, indices[0], values, accumulate)
    layout = index_layout(x, indices)
    result = _copied(ctx, node, x)
    nest = ctx.nest(result.buffer, node, layout.sizes)
    value = _source(nest, values, nest.index, x.dtype)
    nest.store(result, layout.place(nest, nest.index), value, mode="add" if accumulate else "set")
    ctx.add(nest)
    return result


def _masked_put(ctx: LoweringContext, node: Node, x: View, mask: View, values: View, accumulate: bool) -> View:
    if accumulate or any(size != 1 for size in values.sizes):
        raise Fallback("indexing by masks makes sizes that depend on data")

    def compute(nest: ViewBuilder, old: Value) -> Value:
        chosen = nest.load(mask, nest.index[: len(mask.sizes)])
        return nest.where(chosen, nest.cast(nest.load_broadcast(values, nest.index), old.dtype), old)

    return ctx.pointwise(node, [x], compute, ir_dtype(x.dtype))


# -- scatter ---------------------------------------------------------------------------------------------


def _scatter(
    ctx: LoweringContext, node: Node, x: View, dim: int, index: View, source: object, mode: str = "set"
) -> View:
    if mode != "set":
        return _combined(ctx, node, x, lambda into: _scatter_into(ctx, node, into, dim, index, source, mode))
    result = _copied(ctx, node, x)
    _scatter_into(ctx, node, result, dim, index, source, mode)
    return result


def _one_place_each(x: View, dim: int, index: View) -> bool:
    """Whether each row of ``x`` along ``dim`` gets one element, and has room for it."""
    if not x.sizes or len(index.sizes) != len(x.sizes):
        return False
    along = dim % len(x.sizes)
    room = x.sizes[along].constant
    return room is not None and room > 0 and index.sizes == (*x.sizes[:along], to_expr(1), *x.sizes[along + 1 :])


def _selected(ctx: LoweringContext, node: Node, x: View, along: int, index: View, source: object) -> View:
    """A scatter of one element per row into a constant: each element asks whether it is the one."""
    dtype = compute_dtype(x.dtype)

    def compute(nest: ViewBuilder) -> Value:
        place = (*nest.index[:along], to_expr(0), *nest.index[along + 1 :])
        wanted = nest.cast(nest.load(index, place), DType.I64)
        chosen = nest.check_index(no_negative(nest, wanted, x.sizes[along]), x.sizes[along])
        here = nest.op("eq", nest.index_value(nest.index[along]), nest.index_value(chosen))
        new = nest.load(source, place) if isinstance(source, View) else nest.scalar(source, dtype)
        return nest.where(here, nest.cast(new, dtype), nest.cast(nest.load(x, nest.index), dtype))

    return ctx.pointwise(node, [], compute, dtype)


def _scatter_into(
    ctx: LoweringContext,
    node: Node,
    result: View,
    dim: int,
    index: View,
    source: object,
    mode: str,
) -> None:
    """``result[.., index[p], ..] = source[p]`` for each place ``p`` of ``index``. Mode ``clear`` sets start values in a
    nest of its own name."""
    if bool(result.sizes) != bool(index.sizes):
        raise Fallback("a scatter between a scalar and a vector is left to ATen")
    nest = ctx.nest(f"{result.buffer}_clear" if mode == "clear" else result.buffer, node, index.sizes)
    place = list(nest.index)
    along = dim % len(result.sizes) if place else 0
    size = result.sizes[along] if place else to_expr(1)
    checked = nest.check_index(no_negative(nest, nest.load(index, nest.index), size), size)
    if place:
        place[along] = checked
    value = (
        nest.cast(nest.load(source, nest.index), ir_dtype(result.dtype))
        if isinstance(source, View)
        else nest.scalar(source, ir_dtype(result.dtype))
    )
    nest.store(result, place, value, mode="set" if mode == "clear" else mode)
    ctx.add(nest)


@TABLE.lowers(aten.scatter.src, aten.scatter.value, aten.scatter.reduce, aten.scatter.value_reduce)
def scatter(
    ctx: LoweringContext, node: Node, x: View, dim: int, index: View, source: object, reduce: str | None = None
) -> View:
    """``x`` with the elements of ``source`` where ``index`` says."""
    start = node.args[0]
    if reduce is None and isinstance(start, Node) and is_creation(start) and _one_place_each(x, dim, index):
        return _selected(ctx, node, x, dim % len(x.sizes), index, _number(source, x.dtype))
    return _scatter(ctx, node, x, dim, index, _number(source, x.dtype), _MODES[reduce] if reduce else "set")


@TABLE.lowers(aten.scatter_add.default)
def scatter_add(ctx: LoweringContext, node: Node, x: View, dim: int, index: View, source: View) -> View:
    """``x`` plus the elements of ``source`` where ``index`` says."""
    return _scatter(ctx, node, x, dim, index, source, "add")


@TABLE.lowers(aten.scatter_reduce.two)
def scatter_reduce(
    ctx: LoweringContext,
    node: Node,
    x: View,
    dim: int,
    index: View,
    source: View,
    reduce: str,
    include_self: bool = True,
) -> View:
    """``x`` combined with the elements of ``source`` where ``index`` says. Without ``include_self`` those places start
    from the identity."""
    if not x.dtype.is_floating_point and (reduce == "mean" or not include_self):
        raise Fallback("means of integers, and their reductions without the tensor itself, are left to ATen")

    def write(into: View) -> None:
        if not include_self:
            _scatter_into(ctx, node, into, dim, index, _LOWEST.get(reduce, 0), "clear")
        _scatter_into(ctx, node, into, dim, index, source, _MODES[reduce])

    result = _combined(ctx, node, x, write)
    if reduce != "mean":
        return result
    return _divided_by_counts(
        ctx,
        node,
        result,
        lambda counts: _scatter_into(ctx, node, counts, dim, index, 1, "add"),
        1 if include_self else 0,
    )


def _divided_by_counts(ctx: LoweringContext, node: Node, sums: View, count: Callable[[View], None], start: int) -> View:
    """Sums over how many elements went into each, at least 1. ``count`` adds 1 to a tensor's places."""
    counts = ctx.declare_dense(f"{node.name}_count", sums.sizes, torch.int64)
    nest = ctx.nest(f"{counts.buffer}_start", node, counts.sizes)
    nest.store(counts, nest.index, nest.const(start, DType.I64))
    ctx.add(nest)
    count(counts)

    def mean(nest: ViewBuilder, total: Value) -> Value:
        number = nest.op("maximum", nest.load(counts, nest.index), nest.const(1, DType.I64))
        return nest.op("div", total, nest.cast(number, total.dtype))

    return ctx.pointwise(node, [sums], mean, compute_dtype(sums.dtype))


# -- whole slices ----------------------------------------------------------------------------------------


def _slices(
    ctx: LoweringContext,
    node: Node,
    x: View,
    dim: int,
    index: View,
    *,
    source: object,
    mode: str,
    negative: bool = False,
) -> View:
    if not x.sizes or len(index.sizes) > 1:
        raise Fallback("slices of a scalar are left to ATen")
    result = _copied(ctx, node, x)
    _slices_into(ctx, node, result, dim, index, source=source, mode=mode, negative=negative)
    return result


def _slices_into(
    ctx: LoweringContext,
    node: Node,
    x: View,
    dim: int,
    index: View,
    *,
    source: object,
    mode: str,
    negative: bool = False,
) -> None:
    """Slices ``index[k]`` of a dimension of ``x`` are replaced by (or combined with) slices ``k`` of ``source``."""
    dim %= len(x.sizes)
    count = index.sizes[0] if index.sizes else to_expr(1)
    nest = ctx.nest(
        f"{x.buffer}_clear" if mode == "clear" else x.buffer, node, [*x.sizes[:dim], count, *x.sizes[dim + 1 :]]
    )
    place = list(nest.index)
    wanted = nest.cast(nest.load(index, (nest.index[dim],) if index.sizes else ()), DType.I64)
    if not negative:
        wanted = no_negative(nest, wanted, x.sizes[dim])
    place[dim] = nest.check_index(wanted, x.sizes[dim])
    nest.store(x, place, _source(nest, source, nest.index, x.dtype), mode="set" if mode == "clear" else mode)
    ctx.add(nest)


@TABLE.lowers(aten.index_fill.int_Scalar, aten.index_fill.int_Tensor)
def index_fill(ctx: LoweringContext, node: Node, x: View, dim: int, index: View, value: object) -> View:
    """``x`` with some slices set to a number; negative indices count from the end."""
    if index.dtype is not torch.int64:
        raise Fallback("indices of another type than int64 are left to ATen, which refuses them")
    refuse_narrowing(x.dtype, value)
    return _slices(ctx, node, x, dim, index, source=_number(value, x.dtype), mode="set", negative=True)


@TABLE.lowers(aten.index_copy.default)
def index_copy(ctx: LoweringContext, node: Node, x: View, dim: int, index: View, source: View) -> View:
    """``x`` with some slices replaced."""
    if len(source.sizes) != len(x.sizes):
        raise Fallback("slices of a scalar are left to ATen")
    return _slices(ctx, node, x, dim, index, source=source, mode="set")


@TABLE.lowers(aten.index_copy_.default)
def index_copy_(ctx: LoweringContext, node: Node, x: View, dim: int, index: View, source: View) -> View:
    """One slice of an input of the graph replaced where it lies, as a static cache gets the keys of a token. Nothing is
    written at a place that there is not."""
    buffer, dim = ctx.buffers[x.buffer], dim % max(1, len(x.sizes))
    if buffer.kind is not BufferKind.INPUT or not x.shares or source.buffer == x.buffer:
        raise Fallback("only writes to graph inputs are generated")
    if len(source.sizes) != len(x.sizes) or not x.sizes or len(index.sizes) > 1 or product(index.sizes) != 1:
        raise Fallback("several slices, of which two may be the same one, are left to ATen")
    if any(step == 0 and size != 1 for size, step in zip(x.sizes, x.strides, strict=True)):
        raise Fallback("ATen refuses to write several elements to one place")
    nest = ctx.nest(ctx.unique(node.name), node, [*x.sizes[:dim], to_expr(1), *x.sizes[dim + 1 :]])
    place, size = list(nest.index), nest.index_value(x.sizes[dim])
    wanted = no_negative(nest, nest.load(index, (nest.index[dim],) if index.sizes else ()), x.sizes[dim])
    value = _source(nest, source, nest.index, x.dtype)
    place[dim] = nest.check_index(wanted, x.sizes[dim])
    nest.store_element(x.buffer, x.at(tuple(place)), value, "set", nest.op("lt", wanted, size))
    ctx.add(nest)
    return x


@TABLE.lowers(aten.index_add.default)
def index_add(
    ctx: LoweringContext, node: Node, x: View, dim: int, index: View, source: View, *, alpha: object = 1
) -> View:
    """``x`` with slices of ``source`` added to some of its slices."""
    if len(source.sizes) != len(x.sizes):
        raise Fallback("slices of a scalar are left to ATen")
    half = x.dtype in (torch.float16, torch.bfloat16)
    if half and alpha != 1:
        raise Fallback("scaled float16 and bfloat16 are added by ATen, which rounds each sum once")
    if not half or len(x.sizes) <= 1:  # of vectors eager rounds each sum
        return _slices(ctx, node, x, dim, index, source=_scaled(ctx, node, source, alpha), mode="add")
    if len(index.sizes) > 1:
        raise Fallback("slices of a scalar are left to ATen")
    return _combined(ctx, node, x, lambda into: _slices_into(ctx, node, into, dim, index, source=source, mode="add"))


def _scaled(ctx: LoweringContext, node: Node, source: View, alpha: object) -> View:
    if alpha == 1:
        return source
    scaled = ctx.declare_dense(f"{node.name}_scaled", source.sizes, source.dtype)
    dtype = compute_dtype(source.dtype)
    nest = ctx.nest(scaled.buffer, node, scaled.sizes)
    factor = nest.scalar(_number(alpha, source.dtype), dtype)
    nest.store(scaled, nest.index, nest.op("mul", nest.cast(nest.load(source, nest.index), dtype), factor))
    ctx.add(nest)
    return scaled


@TABLE.lowers(aten.index_reduce.default)
def index_reduce(
    ctx: LoweringContext,
    node: Node,
    x: View,
    dim: int,
    index: View,
    source: View,
    reduce: str,
    *,
    include_self: bool = True,
) -> View:
    """``x`` with slices of ``source`` combined into some of its slices."""
    if not x.dtype.is_floating_point or len(source.sizes) != len(x.sizes) or not x.sizes:
        raise Fallback("reductions of integer slices are left to ATen")
    result = _copied(ctx, node, x)
    if not include_self:
        _slices_into(
            *(ctx, node, result, dim, index),
            source=_LOWEST.get(reduce, 0),
            mode="clear",
        )
    _slices_into(ctx, node, result, dim, index, source=source, mode=_MODES[reduce])
    if reduce != "mean":
        return result
    return _divided_by_counts(
        ctx,
        node,
        result,
        lambda counts: _slices_into(ctx, node, counts, dim, index, source=1, mode="add"),
        1 if include_self else 0,
    )


@TABLE.lowers(aten.embedding_dense_backward.default)
def embedding_backward(
    ctx: LoweringContext, node: Node, grad: View, indices: View, rows: object, padding: int, by_frequency: bool
) -> View:
    """Gradients summed per row of the table, in the order of the indices; none for the padding row, and, as in eager
    mode, none for rows that there are not."""
    if by_frequency:
        raise Fallback("gradients scaled by frequency are left to ATen")
    if grad.sizes[:-1] != indices.sizes:
        raise Fallback("a gradient of another size than its indices is left to ATen")
    result = _zeros(ctx, node, grad.dtype)
    nest = ctx.nest(result.buffer, node, grad.sizes)
    *place, column = nest.index
    wanted = nest.cast(nest.load(indices, place), DType.I64)
    zero = nest.const(0, DType.I64)
    mask = nest.op("lt", wanted, nest.index_value(result.sizes[0]))
    mask = nest.op("logical_and", mask, nest.op("ge", wanted, zero))
    if padding >= 0:
        mask = nest.op("logical_and", mask, nest.op("ne", wanted, nest.const(padding, DType.I64)))
    row = nest.check_index(nest.where(mask, wanted, zero), result.sizes[0])
    nest.store(result, (row, column), nest.load(grad, nest.index), mode="add", mask=mask)
    ctx.add(nest)
    return result


# -- take and put ----------------------------------------------------------------------------------------


@TABLE.lowers(aten._unsafe_masked_index.default)
def masked_index(
    ctx: LoweringContext, node: Node, x: View, mask: View, indices: Sequence[View | None], fill: object
) -> View:
    """``x[i, j, ...]`` where the mask is true, ``fill`` elsewhere; indices there may be anything."""
    layout = index_layout(x, indices)
    number = _number(fill, x.dtype)

    def compute(nest: ViewBuilder) -> Value:
        inside = nest.load_broadcast(mask, nest.index)
        value = nest.load(x, layout.place(nest, nest.index, inside), mask=inside)
        return nest.where(inside, value, nest.scalar(number, ir_dtype(x.dtype)))

    return ctx.pointwise(node, [], compute, ir_dtype(x.dtype))


@TABLE.lowers(aten._unsafe_masked_index_put_accumulate.default)
def masked_index_put(
    ctx: LoweringContext, node: Node, x: View, mask: View, indices: Sequence[View | None], values: View
) -> View:
    """``x[i, j, ...] += values`` where the mask is true."""
    layout = index_layout(x, indices)
    result = _copied(ctx, node, x)
    nest = ctx.nest(result.buffer, node, layout.sizes)
    inside = nest.load_broadcast(mask, nest.index)
    value = _source(nest, values, nest.index, x.dtype)
    nest.store(result, layout.place(nest, nest.index, inside), value, mode="add", mask=inside)
    ctx.add(nest)
    return result


@TABLE.lowers(aten.put.default)
def put(ctx: LoweringContext, node: Node, x: View, index: View, source: View, accumulate: bool = False) -> View:
    """``x`` with elements of the flattened tensor replaced or added to."""
    result = _copied(ctx, node, x)
    total = product(x.sizes)
    nest = ctx.nest(result.buffer, node, index.sizes)
    at = nest.check_index(nest.load(index, nest.index), total)
    from_source = reshape_indices(nest.index, index.sizes, source.sizes)
    value = nest.load(source, from_source)
    place = reshape_indices((at,), (total,), x.sizes)
    nest.store(result, place, value, mode="add" if accumulate else "set")
    ctx.add(nest)
    return result


@TABLE.lowers(aten.diagonal_scatter.default)
def diagonal_scatter(
    ctx: LoweringContext, node: Node, x: View, source: View, offset: int = 0, dim1: int = 0, dim2: int = 1
) -> View:
    """``source`` on a diagonal, ``x`` elsewhere."""
    rank = len(x.sizes)
    first, second = dim1 % rank, dim2 % rank
    rest = [dim for dim in range(rank) if dim not in (first, second)]
    below = max(-offset, 0)
    wanted = node.meta["val"].diagonal(int(offset), int(dim1), int(dim2)).shape
    if source.sizes != ctx.sizes.exprs(wanted):
        raise Fallback("values of another size than the diagonal are left to ATen, which refuses them")

    def compute(nest: ViewBuilder, old: Value) -> Value:
        row, column = nest.index[first], nest.index[second]
        along = row - below
        here = nest.op("eq", nest.index_value(row + offset), nest.index_value(column))
        if not source.sizes:
            return old
        index = [*(nest.index[dim] for dim in rest), along]
        at = broadcast_index(source.sizes, index)
        return nest.where(here, nest.cast(nest.load(source, at, mask=here), old.dtype), old)

    return ctx.pointwise(node, [x], compute, ir_dtype(x.dtype))
