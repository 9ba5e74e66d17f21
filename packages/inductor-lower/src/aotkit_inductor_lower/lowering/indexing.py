"""Reading by computed indices. Every index is checked as eager checks it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import DType
from ..symbolic import Expr, product, reshape_indices, to_expr
from .access import Value, ViewBuilder, broadcast_index
from .context import LoweringContext
from .promotion import ir_dtype
from .registry import RuleTable, aten
from .values import View

__all__ = ["TABLE", "IndexLayout", "index_layout", "no_negative"]

TABLE = RuleTable("indexing")
_INDEX_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


@TABLE.lowers(aten.embedding.default)
def embedding(ctx: LoweringContext, node: Node, weight: View, indices: View, *_: object) -> View:
    """``weight[indices]``: a row per index. Eager refuses negative indices here, so they are made out of range."""

    def compute(nest: ViewBuilder) -> Value:
        *place, column = nest.index
        wanted = nest.load(indices, place)
        row = nest.check_index(no_negative(nest, wanted, weight.sizes[0]), weight.sizes[0])
        return nest.load(weight, (row, column))

    return ctx.pointwise(node, [], compute, ir_dtype(weight.dtype))


def no_negative(nest: ViewBuilder, value: Value, size: Expr) -> Value:
    value = nest.cast(value, DType.I64)
    negative = nest.op("lt", value, nest.const(0, DType.I64))
    return nest.where(negative, nest.index_value(size), value)


@TABLE.lowers(aten.gather.default)
def gather(ctx: LoweringContext, node: Node, x: View, dim: int, index: View, sparse_grad: bool = False) -> View:
    """``x`` with one coordinate replaced by ``index``. Eager refuses negative indices."""
    if len(index.sizes) != len(x.sizes) and index.sizes and x.sizes:
        raise Fallback("a gather by an empty index of another rank is left to ATen")

    def compute(nest: ViewBuilder) -> Value:
        if not x.sizes:
            return nest.load(x, ())
        along = dim % len(x.sizes)
        wanted = no_negative(nest, nest.load(index, nest.index if index.sizes else ()), x.sizes[along])
        place = list(nest.index)
        place[along] = nest.check_index(wanted, x.sizes[along])
        return nest.load(x, place)

    return ctx.pointwise(node, [], compute, ir_dtype(x.dtype))


@TABLE.lowers(aten.index_select.default)
def index_select(ctx: LoweringContext, node: Node, x: View, dim: int, index: View) -> View:
    """Rows (of any dimension) by index. Eager refuses negative indices."""
    if not x.sizes or not index.sizes:
        raise Fallback("index_select on scalars is left to ATen")
    dim %= len(x.sizes)

    def compute(nest: ViewBuilder) -> Value:
        wanted = no_negative(nest, nest.load(index, (nest.index[dim],)), x.sizes[dim])
        place = list(nest.index)
        place[dim] = nest.check_index(wanted, x.sizes[dim])
        return nest.load(x, place)

    return ctx.pointwise(node, [], compute, ir_dtype(x.dtype))


@dataclass(frozen=True, slots=True)
class IndexLayout:
    """What ``x[i, j, ...]`` with integer tensors looks like: ``sizes`` of the result, in which the ``chosen`` sizes of
    the indices stand at ``first``."""

    x: View
    given: tuple[tuple[int, View], ...]
    chosen: tuple[Expr, ...]
    first: int
    sizes: tuple[Expr, ...]

    def place(self, nest: ViewBuilder, index: Sequence[Expr], mask: Value | None = None) -> list[Expr]:
        """The element of ``x`` for a place of the result. Negatives count from the end. Under a ``mask`` an index may
        be anything; what is out of range becomes the nearest that is not, as in eager mode."""
        end = self.first + len(self.chosen)
        chosen = index[self.first : end]
        rest = iter((*index[: self.first], *index[end:]))
        dims = dict(self.given)
        place = []
        for dim, size in enumerate(self.x.sizes):
            if dim not in dims:
                place.append(next(rest))
                continue
            wanted = nest.load(dims[dim], broadcast_index(dims[dim].sizes, chosen))
            if mask is not None and size == 0:
                raise Fallback("there is nothing near an index into nothing")
            if mask is not None:
                wanted, end_value = nest.cast(wanted, DType.I64), nest.index_value(size)
                last = nest.op("sub", end_value, nest.const(1, DType.I64))
                wanted = nest.op("minimum", nest.op("maximum", wanted, nest.op("neg", end_value)), last)
            place.append(nest.check_index(wanted, size))
        return place


def index_layout(x: View, indices: Sequence[View | None]) -> IndexLayout:
    """The layout of an indexing by integer tensors: their dimensions stand where the first of them stood if they are
    neighbours, else first. Raises :class:`Fallback` for masks."""
    given = tuple((dim, index) for dim, index in enumerate(indices) if index is not None)
    if any(index.dtype not in _INDEX_TYPES for _, index in given):
        raise Fallback("indexing by masks makes sizes that depend on data")
    dims = [dim for dim, _ in given]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    rank = max(len(index.sizes) for _, index in given)
    chosen = tuple(_broadcast_size([index for _, index in given], rank, k) for k in range(rank))
    rest = [size for dim, size in enumerate(x.sizes) if dim not in dims]
    first = dims[0] if adjacent else 0
    return IndexLayout(x, given, chosen, first, (*rest[:first], *chosen, *rest[first:]))


def _broadcast_size(indices: Sequence[View], rank: int, position: int) -> Expr:
    for index in indices:
        at = position - (rank - len(index.sizes))
        if at >= 0 and index.sizes[at] != 1:
            return index.sizes[at]
    return to_expr(1)


@TABLE.lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(ctx: LoweringContext, node: Node, x: View, indices: Sequence[View | None]) -> View:
    """``x[i, j, ...]`` with integer tensors."""
    layout = index_layout(x, indices)
    return ctx.pointwise(node, [], lambda nest: nest.load(x, layout.place(nest, nest.index)), ir_dtype(x.dtype))


@TABLE.lowers(aten.take.default)
def take(ctx: LoweringContext, node: Node, x: View, index: View) -> View:
    """Elements of the flattened tensor; negatives count from the end."""
    total = product(x.sizes)

    def compute(nest: ViewBuilder) -> Value:
        at = nest.check_index(nest.load(index, nest.index), total)
        return nest.load(x, reshape_indices((at,), (total,), x.sizes))

    return ctx.pointwise(node, [], compute, ir_dtype(x.dtype))
