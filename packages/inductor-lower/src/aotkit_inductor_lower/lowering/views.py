"""View ops: index maps, no code. What no map can say is an alias by strides."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ops.positions import select_position
from ..symbolic import Expr, reshape_indices, to_expr
from .context import LoweringContext
from .registry import RuleTable, aten
from .values import NodeValue, View, dim_exprs

__all__ = ["TABLE"]

TABLE = RuleTable("views")

_ZERO = to_expr(0)


def _result(
    ctx: LoweringContext, node: Node, base: View, index: Sequence[Expr], val: torch.Tensor | None = None
) -> View:
    """The node's value: element ``[d0, d1, ..]`` is ``base[index]``."""
    val = node.meta["val"] if val is None else val
    return ctx.shared_view(base, val, base.at(index))


@TABLE.lowers(
    aten.view.default,
    aten._unsafe_view.default,
    aten.view_as.default,
    aten._reshape_alias.default,
    aten.unflatten.int,
)
def reshape(ctx: LoweringContext, node: Node, x: View, *_: object) -> View:
    """Row-major reshape."""
    sizes = ctx.sizes.exprs(node.meta["val"].shape)
    return _result(ctx, node, x, reshape_indices(dim_exprs(len(sizes)), sizes, x.sizes))


@TABLE.lowers(aten.reshape.default, aten.flatten.using_ints)
def reshape_or_copy(ctx: LoweringContext, node: Node, x: View, *_: object) -> View:
    """Row-major reshape; a tensor of its own where the strides of ``x`` allow no view."""
    storages = [owner.meta["val"].untyped_storage()._cdata for owner in (node, *node.all_input_nodes[:1])]
    return replace(reshape(ctx, node, x), shares=x.shares and len(set(storages)) == 1)


@TABLE.lowers(aten.squeeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.unsqueeze.default)
def squeeze(ctx: LoweringContext, node: Node, x: View, *_: object) -> View:
    """Dimensions of size 1 come or go."""
    return reshape(ctx, node, x)


@TABLE.lowers(aten.permute.default)
def permute(ctx: LoweringContext, node: Node, x: View, dims: Sequence[int]) -> View:
    """``y[d0, d1] = x[..]`` with ``x``'s dimension ``dims[k]`` at ``k``."""
    rank = len(x.sizes)
    index = [_ZERO] * rank
    for position, dim in enumerate(dims):
        index[dim % rank] = dim_exprs(rank)[position]
    return _result(ctx, node, x, index)


@TABLE.lowers(aten.transpose.int)
def transpose(ctx: LoweringContext, node: Node, x: View, a: int, b: int) -> View:
    """Two dimensions swapped."""
    rank = len(x.sizes)
    if rank == 0:
        return _result(ctx, node, x, ())
    index = list(dim_exprs(rank))
    a, b = a % rank, b % rank
    index[a], index[b] = index[b], index[a]
    return _result(ctx, node, x, index)


@TABLE.lowers(aten.t.default)
def t(ctx: LoweringContext, node: Node, x: View) -> View:
    """A matrix transposed; vectors stay."""
    return _result(ctx, node, x, tuple(reversed(dim_exprs(len(x.sizes)))))


@TABLE.lowers(aten.expand.default, aten.expand_as.default)
def expand(ctx: LoweringContext, node: Node, x: View, *_: object, **__: object) -> View:
    """Broadcast: dimensions of size 1 are read at 0."""
    val = node.meta["val"]
    skipped = val.dim() - len(x.sizes)
    index = dim_exprs(val.dim())
    return _result(ctx, node, x, [_ZERO if size == 1 else index[skipped + k] for k, size in enumerate(x.sizes)])


@TABLE.lowers(aten.slice.Tensor)
def slice_(
    ctx: LoweringContext, node: Node, x: View, dim: int = 0, start: object = None, end: object = None, step: object = 1
) -> View:
    """``y[.., d, ..] = x[.., start + step*d, ..]``."""
    dim %= len(x.sizes)
    index = list(dim_exprs(len(x.sizes)))
    index[dim] = _start(ctx, node, x, dim, start) + index[dim] * _expr(step)
    return _result(ctx, node, x, index)


def _start(ctx: LoweringContext, node: Node, x: View, dim: int, start: object) -> Expr:
    """Where a slice really begins. The fake values know it: the storage offset moved by start times the stride."""
    if start is None:
        return _ZERO
    size = x.sizes[dim]
    given = _expr(start)
    if given.constant is not None and size.constant is not None:
        begin = given.constant + size.constant if given.constant < 0 else given.constant
        return to_expr(min(max(begin, 0), size.constant))
    if given.constant == 0:
        return _ZERO
    source = node.args[0]
    assert isinstance(source, Node)
    moved = ctx.sizes.expr(node.meta["val"].storage_offset()) - ctx.sizes.expr(source.meta["val"].storage_offset())
    stride = ctx.sizes.expr(source.meta["val"].stride(dim))
    if moved == given * stride:
        return given
    if moved == (given + size) * stride:
        return given + size
    raise Fallback("the start of this slice may or may not be clamped")


def _expr(value: object) -> Expr:
    if isinstance(value, Expr | int):
        return to_expr(value)
    raise Fallback(f"an index of type {type(value).__name__} has no form")


@TABLE.lowers(aten.select.int)
def select(ctx: LoweringContext, node: Node, x: View, dim: int, position: object) -> View:
    """One position of a dimension, which goes."""
    dim %= len(x.sizes)
    source = node.args[0]
    assert isinstance(source, Node)
    place = select_position(node.args[2] if len(node.args) > 2 else position, source.meta["val"].shape[dim])
    if place is None:
        raise Fallback("whether this position counts from the end, and is there, only a call tells")
    at = ctx.sizes.expr(place)
    index = list(dim_exprs(len(x.sizes) - 1))
    index.insert(dim, at)
    return _result(ctx, node, x, index)


@TABLE.lowers(aten.diagonal.default)
def diagonal(ctx: LoweringContext, node: Node, x: View, offset: int = 0, dim1: int = 0, dim2: int = 1) -> View:
    """The diagonal becomes the last dimension."""
    rank = len(x.sizes)
    dim1, dim2 = dim1 % rank, dim2 % rank
    index = list(dim_exprs(rank - 1))
    along = index.pop()
    for dim, at in sorted(((dim1, along + max(-offset, 0)), (dim2, along + max(offset, 0))), key=lambda pair: pair[0]):
        index.insert(dim, at)
    return _result(ctx, node, x, index)


@TABLE.lowers(aten.unfold.default)
def unfold(ctx: LoweringContext, node: Node, x: View, dim: int, size: int, step: int) -> View:
    """Windows of a dimension; the place in the window is the last dimension."""
    rank = len(x.sizes)
    if rank == 0:
        raise Fallback("unfold of a scalar is left to ATen")
    index = list(dim_exprs(rank))
    index[dim % rank] = index[dim % rank] * step + dim_exprs(rank + 1)[rank]
    return _result(ctx, node, x, index)


def _pieces(
    split: Callable[[LoweringContext, View, int, Sequence[torch.Tensor]], list[Expr]],
) -> Callable[..., NodeValue]:
    def rule(ctx: LoweringContext, node: Node, x: View, _sizes: object, dim: int = 0) -> NodeValue:
        dim %= len(x.sizes)
        vals = node.meta["val"]
        pieces: list[NodeValue] = []
        for val, start in zip(vals, split(ctx, x, dim, vals), strict=True):
            index = list(dim_exprs(len(x.sizes)))
            index[dim] = index[dim] + start
            pieces.append(_result(ctx, node, x, index, val))
        return pieces

    return rule


def _running_starts(ctx: LoweringContext, x: View, dim: int, vals: Sequence[torch.Tensor]) -> list[Expr]:
    starts = [_ZERO]
    for val in vals[:-1]:
        starts.append(starts[-1] + ctx.sizes.expr(val.shape[dim]))
    return starts


_SPLIT = _pieces(_running_starts)
TABLE.add(aten.split.Tensor, _SPLIT)
TABLE.add(aten.split_with_sizes.default, _SPLIT)
TABLE.add(aten.chunk.default, _SPLIT)


@TABLE.lowers(aten.unbind.int)
def unbind(ctx: LoweringContext, node: Node, x: View, dim: int = 0) -> NodeValue:
    """Every position of a dimension."""
    dim %= len(x.sizes)
    pieces: list[NodeValue] = []
    for position, val in enumerate(node.meta["val"]):
        index = list(dim_exprs(len(x.sizes) - 1))
        index.insert(dim, to_expr(position))
        pieces.append(_result(ctx, node, x, index, val))
    return pieces


def _numbers(node: Node) -> Iterator[object]:
    """The integers among a call's arguments, symbolic or not."""
    found: list[object] = []
    for given in (*node.args[1:], *node.kwargs.values()):
        for item in given if isinstance(given, list | tuple) else (given,):
            found.append(item.meta.get("val") if isinstance(item, Node) else item)
    return iter(found)


@TABLE.lowers(aten.as_strided.default)
def as_strided(ctx: LoweringContext, node: Node, x: View, *_: object) -> View:
    """Any strides over the same memory: an alias that readers then index plainly."""
    if not x.shares:
        raise Fallback("as_strided of a tensor whose memory this graph does not have")
    source = node.args[0]
    assert isinstance(source, Node)
    val = node.meta["val"]
    if any(isinstance(number, torch.SymInt) for number in _numbers(node)):
        raise Fallback("whether this view lies inside of its storage only a call tells")
    same = val.shape == source.meta["val"].shape and val.stride() == source.meta["val"].stride()
    if same and val.storage_offset() == source.meta["val"].storage_offset():
        return x
    whole = ctx.shared_view(x, val, dim_exprs(val.dim()))
    if whole.offset.symbols:
        raise Fallback("where in its storage this tensor begins only a call tells")
    name = ctx.as_buffer(whole, node)
    return ctx.buffer_view(name, val)


@TABLE.lowers(aten.flip.default)
def flip(ctx: LoweringContext, node: Node, x: View, dims: Sequence[int]) -> View:
    """Reversed dimensions. Eager copies; here it is a map, which a reader that needs the tensor copies."""
    rank = len(x.sizes)
    index = list(dim_exprs(rank))
    for dim in dims if rank else ():
        index[dim % rank] = x.sizes[dim % rank] - 1 - index[dim % rank]
    return _computed(ctx, node, x, index)


def _computed(ctx: LoweringContext, node: Node, x: View, index: Sequence[Expr]) -> View:
    """A rearrangement that eager copies: a nest of its own, which scheduling inlines into generated readers."""
    result = ctx.declare(node.name, node.meta["val"])
    nest = ctx.nest(result.buffer, node, result.sizes)
    env = dict(zip(dim_exprs(len(result.sizes)), nest.index, strict=True))
    substituted = [e.substitute({d.symbol: v for d, v in env.items() if d.symbol is not None}) for e in index]
    nest.store(result, nest.index, nest.load(x, substituted))
    ctx.add(nest)
    return result


@TABLE.lowers(aten.repeat.default)
def repeat(ctx: LoweringContext, node: Node, x: View, repeats: Sequence[object]) -> View:
    """``y[d] = x[d mod size]``."""
    if any(size == 0 for size in x.sizes):
        raise Fallback("a repeat of nothing is left to ATen")
    index = dim_exprs(node.meta["val"].dim())
    skipped = len(index) - len(x.sizes)
    return _computed(ctx, node, x, [_ZERO if s == 1 else index[skipped + k] % s for k, s in enumerate(x.sizes)])


@TABLE.lowers(aten.roll.default)
def roll(ctx: LoweringContext, node: Node, x: View, shifts: Sequence[object], dims: Sequence[int] = ()) -> View:
    """Rotated dimensions."""
    if not dims:
        raise Fallback("roll of the flattened tensor is left to ATen")
    index = list(dim_exprs(len(x.sizes)))
    for shift, dim in zip(shifts, dims, strict=True):
        dim %= len(x.sizes)
        if x.sizes[dim] == 0:
            continue
        index[dim] = (index[dim] - _expr(shift)) % x.sizes[dim]
    return _computed(ctx, node, x, index)
