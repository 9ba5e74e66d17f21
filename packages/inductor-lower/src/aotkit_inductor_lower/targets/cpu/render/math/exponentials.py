"""Vector arithmetic written out inline where a call costs more than the work: exp, erf, tanh, and float16 without F16C.

Every function takes any lane count and is exact to the bounds stated; the tests sweep them against float64.
See Note [Where the approximations come from].
"""

from __future__ import annotations

import math

from .....ir import DType
from ..arithmetic import Ops
from ..emitter import Ssa
from .erf_table import erf_by_table, has_table
from .polynomials import (
    LEAST_POWER,
    LN2_HIGH,
    LN2_LOW,
    ROUND,
    horner,
    multiply_add,
    polynomial,
    scale_in_one_step,
    scale_in_two_steps,
)

__all__ = ["erf_f32", "exp_f32", "f32_to_half", "half_to_f32", "large_hyperbolic", "tanh_f32"]

# Coefficients are minimax fits (iteratively reweighted least squares in 40-digit arithmetic), rounded to f32.
_EXP = (1.0, 1.0, 0.5, 0.166665181517601, 0.04166620597243309, 0.008368953131139278, 0.0013950602151453495)
_LOG2_E = 1.4426950408889634

_ERF_SPLIT = 0.905
_ERF_SMALL = (
    0.12837916612625122,
    -0.3761252164840698,
    0.11282096803188324,
    -0.026776744052767754,
    0.005008017644286156,
    -0.0006066610803827643,
)
_ERF_LARGE = (
    0.00017749573453329504,
    1.1277495622634888,
    0.63705974817276,
    0.10403735190629959,
    -0.02227708324790001,
    0.003055606735870242,
    -0.00019718163821380585,
)

_TANH_SPLIT = 0.625
_TANH_SMALL = (
    -0.33333277702331543,
    0.13331328332424164,
    -0.05372922867536545,
    0.02060200832784176,
    -0.0056607890874147415,
)


def _exp_parts(ops: Ops, x: Ssa) -> tuple[Ssa, Ssa]:
    """``(p, s)`` with ``exp(x) = p * 2^n``: p in about [0.7, 1.42], and n, the integer nearest x/ln2, in the low bits
    of the float ``s``, see :data:`.polynomials.ROUND`."""
    magic = ops.const(ROUND, DType.F32, x)
    shifted = multiply_add(ops, x, ops.const(_LOG2_E, DType.F32, x), magic)
    n = ops.op("fsub", shifted, magic)
    rest = multiply_add(ops, n, ops.const(-LN2_HIGH, DType.F32, x), x)
    rest = multiply_add(ops, n, ops.const(-LN2_LOW, DType.F32, x), rest)
    return horner(ops, rest, _EXP), shifted


def exp_f32(ops: Ops, x: Ssa) -> Ssa:
    """``exp`` in f32, below 1.5 ulp. Scaled in two steps, so that subnormal results are rounded once.

    What is far below the least subnormal is multiplied by 0: a processor takes a hundred times as long to scale a
    number down to 0, and a masked softmax has many.
    """
    high = ops.const(89.0, DType.F32, x)
    bounded = ops.select(ops.compare("fcmp ogt", x, high), high, x)  # comparisons let a nan through
    if ops.target.vector_bits == 512 and ops.lanes(x) == 16:
        none = ops.compare("fcmp olt", x, ops.const(-104.0, DType.F32, x))
        part, shifted = _exp_parts(ops, bounded)
        n = ops.op("fsub", shifted, ops.const(ROUND, DType.F32, x))
        return _scale(ops, ops.select(none, ops.const(0.0, DType.F32, x), part), n)
    low = ops.const(LEAST_POWER * math.log(2) + 0.2, DType.F32, x)
    part, shifted = _exp_parts(ops, ops.select(ops.compare("fcmp olt", bounded, low), low, bounded))
    return scale_in_two_steps(ops, part, shifted)


def _scale(ops: Ops, x: Ssa, power: Ssa) -> Ssa:
    """``x * 2^power`` rounded once, by AVX-512's instruction for it."""
    symbol = "llvm.x86.avx512.mask.scalef.ps.512"
    ops.em.declare(symbol, x.type, [x.type, x.type, x.type, "i16", "i32"])
    text = f"call {x.type} @{symbol}({x.typed}, {power.typed}, {x.type} zeroinitializer, i16 -1, i32 4)"
    return ops.em.pure(x.type, text, x, power)


def _exp_moderate(ops: Ops, x: Ssa) -> Ssa:
    """``exp`` for x in about [-80, 80]: one scaling step, no bounds."""
    return scale_in_one_step(ops, *_exp_parts(ops, x))


def _bounded_size(ops: Ops, x: Ssa, limit: float) -> Ssa:
    """``min(|x|, limit)``, nan kept."""
    size, bound = ops.intrinsic("fabs", x), ops.const(limit, DType.F32, x)
    return ops.select(ops.compare("fcmp ogt", size, bound), bound, size)


def erf_f32(ops: Ops, x: Ssa) -> Ssa:
    """``erf`` in f32, below 2 ulp: x + x*P(x^2) near zero, else 1 - exp(-Q(|x|)) with Q = -log(erfc)."""
    if has_table(ops, x):
        return erf_by_table(ops, x)
    size = _bounded_size(ops, x, 4.0)  # erf(4) rounds to 1
    near = multiply_add(ops, x, polynomial(ops, ops.op("fmul", x, x), _ERF_SMALL), x)
    exponent = polynomial(ops, size, [-c for c in _ERF_LARGE])
    far = ops.op("fsub", ops.const(1.0, DType.F32, x), _exp_moderate(ops, exponent))
    far = ops.intrinsic("copysign", far, x)
    return ops.select(ops.compare("fcmp ogt", size, ops.const(_ERF_SPLIT, DType.F32, x)), far, near)


def tanh_f32(ops: Ops, x: Ssa) -> Ssa:
    """``tanh`` in f32, below 2 ulp: x + x^3*P(x^2) near zero, else 1 - 2/(exp(2|x|) + 1)."""
    size = _bounded_size(ops, x, 10.0)  # tanh(10) rounds to 1
    one, two = ops.const(1.0, DType.F32, x), ops.const(2.0, DType.F32, x)
    square = ops.op("fmul", x, x)
    cubic = ops.op("fmul", ops.op("fmul", square, x), polynomial(ops, square, _TANH_SMALL))
    near = ops.op("fadd", x, cubic)
    grown = ops.op("fadd", _exp_moderate(ops, ops.op("fadd", size, size)), one)
    far = ops.op("fsub", one, ops.op("fdiv", two, grown))
    result = ops.select(ops.compare("fcmp ogt", size, ops.const(_TANH_SPLIT, DType.F32, x)), far, near)
    return ops.intrinsic("copysign", result, x)  # near too: x + cubic makes 0 of -0


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


def large_hyperbolic(ops: Ops, name: str, x: Ssa, dtype: DType) -> Ssa:
    """``sinh`` or ``cosh`` of the math library, and where that overflows early half the square of ``exp(|x|/2)``."""
    size = ops.intrinsic("fabs", x)
    root = ops.math("exp", [ops.op("fmul", size, ops.const(0.5, dtype, x))], dtype)
    large = ops.op("fmul", ops.op("fmul", root, ops.const(0.5, dtype, x)), root)
    if name == "sinh":
        large = ops.intrinsic("copysign", large, x)
    beyond = ops.compare("fcmp ogt", size, ops.const(80.0 if dtype is DType.F32 else 700.0, dtype, x))
    return ops.select(beyond, large, ops.math(name, [x], dtype))
