"""Value conversions with eager's rules, see the op table's row ``cast``."""

from __future__ import annotations

from ....ir import DType
from .arithmetic import Ops
from .emitter import Ssa
from .math import exponentials
from .types import FLOAT_TYPES, register_type, width

__all__ = ["emit_cast"]


_EXACT = (DType.I8, DType.U8, DType.BOOL)  # bfloat16 has all their values, so nothing is rounded


def _zero_like(x: Ssa) -> Ssa:
    return Ssa("zeroinitializer" if x.type[0] == "<" else "0", x.type)


def emit_cast(ops: Ops, x: Ssa, source: DType, to: DType) -> Ssa:
    """Value conversion with eager's rules, see the op table's row ``cast``."""
    if source is to:
        return x
    if source in (DType.F16, DType.BF16):
        single = _half_to_f32(ops, x) if source is DType.F16 else _bfloat_to_f32(ops, x)
        return emit_cast(ops, single, DType.F32, to)
    if to in (DType.F16, DType.BF16):
        single = emit_cast(ops, x, source, DType.F32)
        if to is DType.BF16 and source in _EXACT:
            bits = ops.convert("bitcast", single, "i32")
            return ops.convert("trunc", ops.op("lshr", bits, ops.const(16, DType.I32, x)), "i16")
        return _f32_to_half(ops, single) if to is DType.F16 else _f32_to_bfloat(ops, single)
    if source in FLOAT_TYPES:
        return _cast_from_float(ops, x, source, to)
    if to in FLOAT_TYPES:
        word = "uitofp" if source in (DType.U8, DType.BOOL) else "sitofp"
        return ops.convert(word, x, register_type(to))
    if to is DType.BOOL:
        return ops.compare("icmp ne", x, _zero_like(x))
    if width(to) > width(source) or source is DType.BOOL:
        return ops.convert("zext" if source in (DType.U8, DType.BOOL) else "sext", x, register_type(to))
    return ops.convert("trunc", x, register_type(to)) if width(to) < width(source) else x


def _cast_from_float(ops: Ops, x: Ssa, source: DType, to: DType) -> Ssa:
    if to in FLOAT_TYPES:
        return ops.convert("fpext" if to is DType.F64 else "fptrunc", x, register_type(to))
    if to is DType.BOOL:
        return ops.compare("fcmp une", x, ops.const(0.0, source, x))
    wide = DType.I64 if to is DType.I64 else DType.I32
    limit = 2.0 ** (width(wide) - 1)
    low = ops.compare("fcmp ogt", x, ops.const(-limit - 1, source, x))
    if source is DType.F32 or wide is DType.I64:  # -limit - 1 rounds to -limit there
        low = ops.compare("fcmp oge", x, ops.const(-limit, source, x))
    inside = ops.op("and", low, ops.compare("fcmp olt", x, ops.const(limit, source, x)))
    safe = ops.select(inside, x, ops.const(0.0, source, x))
    whole = ops.convert("fptosi", safe, register_type(wide))
    whole = ops.select(inside, whole, ops.const(-(1 << (width(wide) - 1)), wide, x))
    return emit_cast(ops, whole, wide, to)


def _bfloat_to_f32(ops: Ops, x: Ssa) -> Ssa:
    wide = ops.convert("zext", x, "i32")
    return ops.convert("bitcast", ops.op("shl", wide, ops.const(16, DType.I32, x)), "float")


def _f32_to_bfloat(ops: Ops, x: Ssa) -> Ssa:
    """Nearest, ties to even, by integer arithmetic; a nan becomes the quiet nan."""
    bits = ops.convert("bitcast", x, "i32")
    sixteen = ops.const(16, DType.I32, x)
    odd = ops.op("and", ops.op("lshr", bits, sixteen), ops.const(1, DType.I32, x))
    rounded = ops.op("add", bits, ops.op("add", odd, ops.const(0x7FFF, DType.I32, x)))
    rounded = ops.op("lshr", rounded, sixteen)
    nan = ops.compare("fcmp uno", x, x)
    return ops.convert("trunc", ops.select(nan, ops.const(0x7FC0, DType.I32, x), rounded), "i16")


def _half_to_f32(ops: Ops, x: Ssa) -> Ssa:
    if ops.target.has("f16c"):
        return ops.convert("fpext", ops.convert("bitcast", x, "half"), "float")
    return exponentials.half_to_f32(ops, x)


def _f32_to_half(ops: Ops, x: Ssa) -> Ssa:
    if ops.target.has("f16c"):
        return ops.convert("bitcast", ops.convert("fptrunc", x, "half"), "i16")
    return exponentials.f32_to_half(ops, x)
