"""Conversions and copies. A copy keeps its value and takes the strides of its own fake value."""

from __future__ import annotations

import torch
from torch.fx import Node

from ..ir import BufferKind
from .context import LoweringContext
from .promotion import ir_dtype
from .registry import Decline, RuleTable, aten, prims
from .values import View

__all__ = ["TABLE"]

TABLE = RuleTable("casts")


@TABLE.lowers(
    aten._to_copy.default,
    aten.clone.default,
    aten.contiguous.default,
    aten.lift_fresh_copy.default,
    prims.convert_element_type.default,
    prims.clone.default,
)
def convert(ctx: LoweringContext, node: Node, x: View, *_: object, **__: object) -> View:
    """The value in the result's type and strides; the fake value knows both."""
    if str(node.meta["val"].device) != ctx.buffers[x.buffer].device:
        raise Decline("a copy between devices is left to ATen")
    return ctx.pointwise(node, [x], lambda nest, v: v, ir_dtype(x.dtype))


@TABLE.lowers(aten.copy.default)
def copy(ctx: LoweringContext, node: Node, destination: View, source: View, non_blocking: bool = False) -> View:
    """``source`` in the type, shape and strides of ``destination``."""
    return convert(ctx, node, source)


@TABLE.lowers(aten.copy_.default)
def copy_(ctx: LoweringContext, node: Node, destination: View, source: View, non_blocking: bool = False) -> View:
    """Write into an input of the graph: how functional graphs give back mutated inputs."""
    buffer = ctx.buffers[destination.buffer]
    if buffer.kind is not BufferKind.INPUT or not destination.shares:
        raise Decline("only writes to graph inputs are generated")
    if source.buffer == destination.buffer:  # another arrangement of the same memory: read all of it first
        source = ctx.copied(source, node)
    nest = ctx.nest(ctx.unique(node.name), node, destination.sizes)
    nest.store(destination, nest.index, nest.load_broadcast(source, nest.index))
    ctx.add(nest)
    return destination


@TABLE.lowers(aten.view.dtype)
def view_dtype(ctx: LoweringContext, node: Node, x: View, dtype: torch.dtype) -> View:
    """The same bits as another type of the same width; other widths are another view of the memory."""
    if torch.empty((), dtype=dtype).element_size() != torch.empty((), dtype=x.dtype).element_size():
        raise Decline("a view as a type of another width is left to ATen")
    if torch.bool in (dtype, x.dtype):
        raise Decline("reinterpreting bools is left to ATen")
    target = ir_dtype(dtype)
    return ctx.pointwise(node, [x], lambda nest, v: nest.op("bitcast", v, to=target), ir_dtype(x.dtype))


TABLE.add(prims.view_of.default, lambda ctx, node, x: x)
TABLE.add(aten.detach.default, lambda ctx, node, x: x)
TABLE.add(aten.alias.default, lambda ctx, node, x: x)
TABLE.add(aten.lift_fresh.default, lambda ctx, node, x: x)
