"""Reading by computed indices. Every index is checked as eager checks it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.fx import Node

from ..ir import DType
from ..symbolic import Expr
from .context import LoweringContext
from .nest_builder import NestBuilder, Value, broadcast_index
from .promotion import ir_dtype
from .registry import Decline, RuleTable, aten
from .values import View

__all__ = ["TABLE"]

TABLE = RuleTable("indexing")
_INDEX_TYPES = (torch.int64, torch.int32, torch.int16, torch.int8)


@TABLE.lowers(aten.embedding.default)
def embedding(ctx: LoweringContext, node: Node, weight: View, indices: View, *_: object) -> View:
    """``weight[indices]``: a row per index. Eager refuses negative indices here, so they are made out of range."""

    def compute(nest: NestBuilder) -> Value:
        *place, column = nest.index
        wanted = nest.load(indices, place)
        row = nest.check_index(_no_negative(nest, wanted, weight.sizes[0]), weight.sizes[0])
        return nest.load(weight, (row, column))

    return ctx.pointwise(node, [], compute, ir_dtype(weight.dtype))


def _no_negative(nest: NestBuilder, value: Value, size: Expr) -> Value:
    value = nest.cast(value, DType.I64)
    negative = nest.op("lt", value, nest.const(0, DType.I64))
    return nest.where(negative, nest.index_value(size), value)


@TABLE.lowers(aten.gather.default)
def gather(ctx: LoweringContext, node: Node, x: View, dim: int, index: View, sparse_grad: bool = False) -> View:
    """``x`` with one coordinate replaced by ``index``. Eager refuses negative indices."""
    if len(index.sizes) != len(x.sizes) and index.sizes and x.sizes:
        raise Decline("a gather by an empty index of another rank is left to ATen")

    def compute(nest: NestBuilder) -> Value:
        if not x.sizes:
            return nest.load(x, ())
        along = dim % len(x.sizes)
        wanted = _no_negative(nest, nest.load(index, nest.index if index.sizes else ()), x.sizes[along])
        place = list(nest.index)
        place[along] = nest.check_index(wanted, x.sizes[along])
        return nest.load(x, place)

    return ctx.pointwise(node, [], compute, ir_dtype(x.dtype))


@TABLE.lowers(aten.index_select.default)
def index_select(ctx: LoweringContext, node: Node, x: View, dim: int, index: View) -> View:
    """Rows (of any dimension) by index. Eager refuses negative indices."""
    if not x.sizes or not index.sizes:
        raise Decline("index_select on scalars is left to ATen")
    dim %= len(x.sizes)

    def compute(nest: NestBuilder) -> Value:
        wanted = _no_negative(nest, nest.load(index, (nest.index[dim],)), x.sizes[dim])
        place = list(nest.index)
        place[dim] = nest.check_index(wanted, x.sizes[dim])
        return nest.load(x, place)

    return ctx.pointwise(node, [], compute, ir_dtype(x.dtype))


@TABLE.lowers(aten.index.Tensor, aten._unsafe_index.Tensor)
def index_tensor(ctx: LoweringContext, node: Node, x: View, indices: Sequence[View | None]) -> View:
    """``x[i, j, ...]`` with integer tensors, negatives from the end; their dimensions stand where the first of them
    stood if they are neighbours, else first."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if any(index.dtype not in _INDEX_TYPES for _, index in given):
        raise Decline("indexing by masks makes sizes that depend on data")
    dims = [dim for dim, _ in given]
    adjacent = dims == list(range(dims[0], dims[0] + len(dims)))
    shape = max((index.sizes for _, index in given), key=len)
    first = dims[0] if adjacent else 0

    def compute(nest: NestBuilder) -> Value:
        chosen = nest.index[first : first + len(shape)]
        rest = iter((*nest.index[:first], *nest.index[first + len(shape) :]))
        place = [next(rest) if dim not in dims else None for dim in range(len(x.sizes))]
        for dim, index in given:
            at = index.sizes
            wanted = nest.load(index, broadcast_index(at, chosen))
            place[dim] = nest.check_index(wanted, x.sizes[dim])
        return nest.load(x, [p for p in place if p is not None])

    return ctx.pointwise(node, [], compute, ir_dtype(x.dtype))
