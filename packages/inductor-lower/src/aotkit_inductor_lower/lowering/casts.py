"""Conversions and copies. A copy keeps its value and takes the strides of its own fake value."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch.fx import Node

from ..errors import Fallback
from ..ir import BufferKind, DType
from .access import Value, ViewBuilder
from .constants import fill
from .context import LoweringContext
from .float8 import FLOAT8, decode, encode, narrowed
from .promotion import ir_dtype
from .registry import RuleTable, aten, prims
from .values import View

__all__ = ["FLOAT8_TARGETS", "TABLE"]

TABLE = RuleTable("casts")
FLOAT8_TARGETS = frozenset(  # what is generated for 8-bit floats: conversions, copies, and views that are no copies
    (
        *(t.default for t in (aten._to_copy, aten.clone, aten.copy, prims.convert_element_type, prims.clone)),
        *(aten.view.default, aten.t.default, aten.transpose.int, aten.permute.default),
        *(aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.squeeze.default),
    )
)


@TABLE.lowers(
    aten._to_copy.default,
    aten.clone.default,
    aten.lift_fresh_copy.default,
    prims.convert_element_type.default,
    prims.clone.default,
)
def convert(ctx: LoweringContext, node: Node, x: View | float, *_: object, **__: object) -> View:
    """The value in the result's type and strides; the fake value knows both. (Under ``vmap`` numbers are converted.)"""
    if not isinstance(x, View):
        return fill(ctx, node, x)
    if str(node.meta["val"].device) != ctx.buffers[x.buffer].device:
        raise Fallback("a copy between devices is left to ATen")
    if x.dtype in FLOAT8 or node.meta["val"].dtype in FLOAT8:
        return _convert_float8(ctx, node, x)
    return ctx.pointwise(node, [x], lambda nest, v: v, ir_dtype(x.dtype))


@TABLE.lowers(aten.contiguous.default)
def contiguous(ctx: LoweringContext, node: Node, x: View, *_: object, **__: object) -> View:
    """The tensor itself where it is laid out so already, which the fake values tell; or a copy."""
    storages = {owner.meta["val"].untyped_storage()._cdata for owner in (node, *node.all_input_nodes)}
    return x if len(storages) == 1 else convert(ctx, node, x)


def _convert_float8(ctx: LoweringContext, node: Node, x: View) -> View:
    """Through float32, as in eager; see Note [8-bit floats]."""
    to = node.meta["val"].dtype
    result = ctx.declare(node.name, node.meta["val"])
    nest = ctx.nest(result.buffer, node, result.sizes)
    value = nest.load_broadcast(_as_bits(x), nest.index)
    if x.dtype is not to:
        value = _to_float8(nest, x, value, to)
    nest.store(_as_bits(result), nest.index, value)
    ctx.add(nest)
    return result


def _to_float8(nest: ViewBuilder, x: View, value: Value, to: torch.dtype) -> Value:
    if x.dtype in FLOAT8:
        value = decode(nest, value, FLOAT8[x.dtype])
        value = narrowed(nest, value) if to is torch.bfloat16 else value
    return encode(nest, nest.cast(value, DType.F32), FLOAT8[to]) if to in FLOAT8 else value


def _as_bits(x: View) -> View:
    """An 8-bit float as the u8 that it is in the loop IR."""
    return replace(x, dtype=torch.uint8) if x.dtype in FLOAT8 else x


@TABLE.lowers(aten.copy.default)
def copy(ctx: LoweringContext, node: Node, destination: View, source: View, non_blocking: bool = False) -> View:
    """``source`` in the type, shape and strides of ``destination``."""
    return convert(ctx, node, source)


@TABLE.lowers(aten.copy_.default)
def copy_(ctx: LoweringContext, node: Node, destination: View, source: View, non_blocking: bool = False) -> View:
    """Write into an input of the graph: how functional graphs give back mutated inputs."""
    buffer = ctx.buffers[destination.buffer]
    if buffer.kind is not BufferKind.INPUT or not destination.shares:
        raise Fallback("only writes to graph inputs are generated")
    if any(step == 0 and size != 1 for size, step in zip(destination.sizes, destination.strides, strict=True)):
        raise Fallback("ATen refuses to write several elements to one place")
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
        raise Fallback("a view as a type of another width is left to ATen")
    if torch.bool in (dtype, x.dtype):
        raise Fallback("reinterpreting bools is left to ATen")
    if x.shares and any(user.op == "output" for user in node.users):
        raise Fallback("a view that is returned is the same memory")
    target = ir_dtype(dtype)
    return ctx.pointwise(node, [x], lambda nest, v: nest.op("bitcast", v, to=target), ir_dtype(x.dtype))


TABLE.add(prims.view_of.default, lambda ctx, node, x: x)
TABLE.add(aten.detach.default, lambda ctx, node, x: x)
TABLE.add(aten.alias.default, lambda ctx, node, x: x)
TABLE.add(aten.lift_fresh.default, lambda ctx, node, x: x)
