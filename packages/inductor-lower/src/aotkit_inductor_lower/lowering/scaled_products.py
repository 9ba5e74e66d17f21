"""``_scaled_mm``: products of 8-bit floats, times scales of the whole matrices or of their rows and columns.

Note [Scaled products]
    On a target that multiplies 8-bit floats the call is a contraction, with ATen's call in it. Its factors are the
    numbers that the bytes mean (Note [8-bit floats]), and in the epilogue the sum is multiplied by both scales, a bias
    is added, and the result rounded once. A scale is one number, or one of each row (of the left factor) or column (of
    the right one). What has no such form stays a call: scales of blocks, results that are 8-bit floats themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Node

from ..ir import Arg, Buffer, BufferRef, Contraction, DType, ExternCall, Instr, Literal, Operand, Range
from ..ir.builder import NestBuilder, Value
from ..ir.walk import definitions, rename
from ..ops.dtypes import FLOAT8_NAMES, FLOATS, dtype_from_torch_name
from ..symbolic import Expr, sym, to_expr
from .context import LoweringContext
from .extern import lower_extern
from .float8 import FLOAT8, decode
from .values import NodeValue

__all__ = ["SCALED_PRODUCT", "lower_scaled_product"]

SCALED_PRODUCT = torch.ops.aten._scaled_mm.default
_SCALES, _BIAS, _SCALE_OF_RESULT = (2, 3), 4, 5
_I, _J, _K = map(sym, "ijk")


def lower_scaled_product(ctx: LoweringContext, node: Node, reason: str) -> NodeValue:
    """ATen's call of :data:`SCALED_PRODUCT`, in a contraction where there is one for it. ``reason``: of the call."""
    value = lower_extern(ctx, node, reason)
    call = ctx.steps[-1]
    assert isinstance(call, ExternCall)
    found = _contraction(call, ctx.buffers, ctx.capabilities.device) if ctx.capabilities.float8_products else None
    if found is not None:
        ctx.steps[-1] = found
    return value


def _contraction(call: ExternCall, buffers: Mapping[str, Buffer], device: str) -> Contraction | None:
    """The contraction that a call computes, see Note [Scaled products]."""
    given = dict(call.kwargs)
    args: list[Arg | None] = [*call.args, *[None] * (6 - len(call.args))]
    for place, name in ((_BIAS, "bias"), (_SCALE_OF_RESULT, "scale_result")):
        args[place] = given.get(name, args[place])
    left, right, *scales = (_tensor(arg, buffers) for arg in args[:4])
    bias = _tensor(args[_BIAS], buffers)
    out = buffers[call.results[0] or ""]
    dtype = dtype_from_torch_name(out.dtype)
    if not _is_none(args[_SCALE_OF_RESULT]) or (bias is None and not _is_none(args[_BIAS])):
        return None
    if left is None or right is None or dtype not in FLOATS or dtype is DType.F64:
        return None
    if any(t.dtype not in FLOAT8_NAMES or len(t.sizes) != 2 for t in (left, right)):
        return None
    if any(t is not None and t.device != device for t in (left, right, *scales, bias, out)):
        return None
    epilogue = _epilogue(out, [(s, own) for s, own in zip(scales, (_I, _J), strict=True)], bias)
    if epilogue is None:
        return None
    return Contraction(
        call.name,
        (),
        (Range("i", out.sizes[0]),),
        (Range("j", out.sizes[1]),),
        (Range("k", left.sizes[1]),),
        _factor("left", left, (_I, _K)),
        _factor("right", right, (_K, _J)),
        DType.F32,
        "highest",
        "total",
        epilogue,
        call,
        call.origin,
    )


def _tensor(arg: Arg | None, buffers: Mapping[str, Buffer]) -> Buffer | None:
    return buffers[arg.name] if isinstance(arg, BufferRef) and not arg.number else None


def _is_none(arg: Arg | None) -> bool:
    return arg is None or (isinstance(arg, Literal) and arg.value is None)


def _factor(side: str, buffer: Buffer, place: tuple[Expr, ...]) -> Operand:
    """What a byte means, in f32."""
    builder = NestBuilder(side, (), buffers=None)
    code = builder.load_element(buffer.name, place, DType.U8)
    number = builder.cast(decode(builder, code, FLOAT8[getattr(torch, buffer.dtype)]), DType.F32)
    body, names = _named_apart(builder, side)
    return Operand(body, names[number.name])


def _epilogue(out: Buffer, scales: list[tuple[Buffer | None, Expr]], bias: Buffer | None) -> tuple[Instr, ...] | None:
    """The sum with its scales and bias; ``None`` for scales of another form."""
    builder = NestBuilder("epilogue", (), buffers=None)
    total, both = Value("total", DType.F32), None
    for scale, own in scales:
        place = None if scale is None else _place(scale, own, out.sizes[0 if own == _I else 1])
        if scale is None or place is None or scale.dtype != "float32":
            return None
        factor = builder.load_element(scale.name, place, DType.F32)
        both = factor if both is None else builder.op("mul", both, factor)
    assert both is not None
    total = builder.op("mul", total, both)
    dtype = dtype_from_torch_name(out.dtype)
    assert dtype is not None
    if bias is not None:
        held = dtype_from_torch_name(bias.dtype)
        if held not in FLOATS or list(bias.sizes) != [out.sizes[1]]:
            return None
        assert held is not None
        total = builder.op("add", total, builder.cast(builder.load_element(bias.name, (_J,), held), DType.F32))
    builder.store_element(out.name, (_I, _J), builder.cast(total, dtype))
    return _named_apart(builder, "after")[0]


def _place(scale: Buffer, own: Expr, size: Expr) -> tuple[Expr, ...] | None:
    """Where a scale is: one number, or one of each row (column) in a matrix of one column (row)."""
    if all(n == 1 for n in scale.sizes):
        return tuple(to_expr(0) for _ in scale.sizes)
    along = 0 if own == _I else 1
    if len(scale.sizes) != 2 or scale.sizes[along] != size or scale.sizes[1 - along] != 1:
        return None
    return (own, to_expr(0)) if along == 0 else (to_expr(0), own)


def _named_apart(builder: NestBuilder, side: str) -> tuple[tuple[Instr, ...], dict[str, str]]:
    (stage,) = builder.finish().stages
    names = {name: f"{side}_{name}" for name in definitions(stage.body)}
    return tuple(rename(instr, names) for instr in stage.body), names
