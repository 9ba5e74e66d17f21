"""Products of groups of rows, each with a matrix of its own, as contractions with the call in them.

Note [Groups of rows]
    A mixture of experts sorts its rows by expert and multiplies each group of them with the expert's matrix, by
    ``_grouped_mm``, or by transformers' ``grouped_mm_fallback`` where torch has none. ``offsets`` says where groups
    end, so a row's matrix is the one whose number is how many groups end before it or at it. That is counted by a nest
    of its own, and the contraction is a product of one row for each, of a batch, which loads the number of its matrix.
    Rows behind the last group have none: they are 0, which transformers' operator makes them, and of which ATen says
    nothing.

    Only matrices that rows have are read. What several rows have is read for each of them, from a cache where they
    follow each other, as sorted ones do; so a target takes it where groups have few rows, and else the call.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.fx import Node

from ..ir import (
    Buffer,
    CheckedIndex,
    Compute,
    Const,
    Contraction,
    DType,
    ExternCall,
    Index,
    Instr,
    Load,
    Operand,
    Range,
    Store,
)
from ..ops.dtypes import FLOATS, dtype_from_torch_name
from ..symbolic import SymbolKind, sym, to_expr
from .context import LoweringContext
from .extern import lower_extern
from .values import NodeValue, View

__all__ = ["is_grouped_product", "lower_grouped_product"]

_GROUPED = torch.ops.aten._grouped_mm.default
_NAMES = (str(_GROUPED), "transformers.grouped_mm_fallback.default")  # the latter only where transformers is imported


class _Tensors(NamedTuple):
    x: Buffer
    weight: Buffer
    offsets: Buffer
    out: Buffer
    dtype: DType


def is_grouped_product(target: object) -> bool:
    """Whether an operator is one of those of Note [Groups of rows]."""
    return target is _GROUPED or (isinstance(target, torch._ops.OpOverload) and str(target) == _NAMES[1])


def lower_grouped_product(ctx: LoweringContext, node: Node, reason: str) -> NodeValue:
    """The call of a product of groups, in a contraction where there is one for it."""
    value = lower_extern(ctx, node, reason)
    call = ctx.steps[-1]
    assert isinstance(call, ExternCall)
    tensors = _tensors(ctx, node, value) if ctx.capabilities.host_memory else None
    if tensors is not None and call.results == (tensors.out.name,):
        del ctx.steps[-1]
        chosen = _matrix_of_each_row(ctx, node, tensors)
        ctx.steps.append(_contraction(call, tensors, chosen))
    return value


def _tensors(ctx: LoweringContext, node: Node, result: NodeValue) -> _Tensors | None:
    """The operands of a product of one matrix of rows with several matrices, if kernels can take them."""
    given = {**dict(zip(("x", "weight", "offsets", "bias", "type"), node.args, strict=False)), **_named(node)}
    nodes = [given.get(name) for name in ("x", "weight", "offsets")]
    views = [ctx.values.get(each) for each in nodes if isinstance(each, Node)]
    if any(given.get(name) is not None for name in ("bias", "type")) or not isinstance(result, View):
        return None
    names = [ctx.as_buffer(view, node) for view in views if isinstance(view, View)]
    if len(names) != len(nodes):
        return None
    x, weight, offsets = (ctx.buffers[name] for name in names)
    out = ctx.buffers[result.buffer]
    dtype = dtype_from_torch_name(out.dtype)
    if dtype not in FLOATS or {x.dtype, weight.dtype} != {out.dtype} or offsets.dtype not in ("int32", "int64"):
        return None
    ranks = [len(tensor.sizes) for tensor in (x, weight, offsets)]
    if ranks != [2, 3, 1] or weight.sizes[0] != offsets.sizes[0] or not (weight.sizes[0].constant or 0) > 0:
        return None
    if any(tensor.device != ctx.capabilities.device for tensor in (x, weight, offsets, out)):
        return None
    assert dtype is not None
    return _Tensors(x, weight, offsets, out, dtype)


def _named(node: Node) -> dict[str, object]:
    names = {"input": "x", "self": "x", "mat2": "weight", "offs": "offsets", "out_dtype": "type"}
    return {names.get(name, name): value for name, value in node.kwargs.items()}


def _matrix_of_each_row(ctx: LoweringContext, node: Node, tensors: _Tensors) -> Buffer:
    """How many groups end before each row or at it."""
    rows = tensors.x.sizes[0]
    result = ctx.declare_dense(f"{node.name}_chosen", (rows,), torch.int64)
    nest = ctx.nest(result.buffer, node, (rows,))
    (group,) = nest.stage(tensors.offsets.sizes)
    end = nest.cast(nest.load_from(tensors.offsets, (group,)), DType.I64)
    ended = nest.op("le", end, nest.index_value(nest.index[0]))
    total = nest.reduce("sum", nest.where(ended, nest.const(1, DType.I64), nest.const(0, DType.I64)))
    nest.stage()
    nest.store(result, nest.index, total)
    ctx.add(nest)
    return ctx.buffers[result.buffer]


def _contraction(call: ExternCall, tensors: _Tensors, chosen: Buffer) -> Contraction:
    accumulate = DType.F64 if tensors.dtype is DType.F64 else DType.F32
    groups = tensors.weight.sizes[0]
    b, j, k = map(sym, "bjk")
    right: list[Instr] = [
        Load("chosen", chosen.name, (b,), DType.I64),
        Index("last", groups - 1, DType.I64),
        Compute("near", "minimum", ("chosen", "last"), DType.I64),
        CheckedIndex("matrix", "near", groups),
        Load("weight", tensors.weight.name, (sym("matrix", SymbolKind.VALUE), k, j), tensors.dtype),
    ]
    epilogue: list[Instr] = [
        Load("its", chosen.name, (b,), DType.I64),
        Index("groups", groups, DType.I64),
        Compute("there", "lt", ("its", "groups"), DType.BOOL),
        Const("none", 0.0, accumulate),
        Compute("result", "where", ("there", "total", "none"), accumulate),
    ]
    stored = "result"
    if tensors.dtype is not accumulate:
        epilogue.append(Compute("narrow", "cast", ("result",), tensors.dtype))
        stored = "narrow"
    epilogue.append(Store(tensors.out.name, (b, j), stored))
    return Contraction(
        call.name,
        (Range("b", tensors.x.sizes[0]),),
        (Range("i", to_expr(1)),),
        (Range("j", tensors.weight.sizes[2]),),
        (Range("k", tensors.x.sizes[1]),),
        Operand((Load("x", tensors.x.name, (b, k), tensors.dtype),), "x"),
        Operand(tuple(right), "weight"),
        accumulate,
        "highest",
        "total",
        tuple(epilogue),
        call,
        call.origin,
    )
