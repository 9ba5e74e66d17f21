"""Logarithms, ``expm1``, ``exp2`` and ``pow`` in f32, written out inline.

Note [Where the approximations come from]
    Ranges are reduced as Cody and Waite do (a number split into 2^n and a factor near 1, constants split so that
    products are exact). On what is left a polynomial is fitted by iteratively reweighted least squares for the least
    largest relative error, its coefficients rounded to f32 one after the other, each time fitting the rest again.
    ``pow`` needs its logarithm to 36 bits, which f64 has without tricks. Bounds are proven by tests against float64.
"""

from __future__ import annotations

import math

from .....ir import DType
from ..arithmetic import Ops
from ..emitter import Ssa
from .polynomials import (
    LEAST_POWER,
    LN2_HIGH,
    LN2_LOW,
    ROUND,
    ROUND_BITS,
    multiply_add,
    polynomial,
    power_of_two,
    scale_in_two_steps,
    split_float,
)

__all__ = ["exp2_f32", "expm1_f32", "log1p_f32", "log2_f32", "log10_f32", "log_f32", "pow_f32"]

_F32 = DType.F32
_SMALLEST_NORMAL = 2.0**-126

# log(1 + f) = f - f^2/2 + f^3 * P(f) on [sqrt(1/2) - 1, sqrt(2) - 1]
_LOG = (
    0.3333333134651184,
    -0.2500081956386566,
    0.20001238584518433,
    -0.16623400151729584,
    0.1420167088508606,
    -0.1315985471010208,
    0.12761572003364563,
    -0.07634767889976501,
)
# expm1(r) = r + r^2 * P(r) on [-ln(2)/2, ln(2)/2]
_EXPM1 = (0.5, 0.1666666567325592, 0.04166649281978607, 0.008333544246852398, 0.0013932327274233103, 0.0001976333296624)
# 2^r = 1 + r * P(r) on [-1/2, 1/2]
_EXP2 = (
    0.6931471824645996,
    0.24022650718688965,
    0.055504050105810165,
    0.009618086740374565,
    0.001333796652033925,
    0.00015452111256308854,
    1.4322521565190982e-05,
)
# In f64: log2(1 + f) = f * P(f) on the range of _LOG, 2^r = P(r) on [-1/2, 1/2].
_LOG2_WIDE = (
    1.4426950408686972,
    -0.7213475208702042,
    0.4808983614019771,
    -0.360673674527233,
    0.2885372928083516,
    -0.24045318289867937,
    0.20617538928596266,
    -0.18030019550020351,
    0.15876912149577632,
    -0.1431606405157985,
    0.1447558899117159,
    -0.14282356729540235,
    0.07733983555000262,
)
_EXP2_WIDE = (
    1.0000000005541876,
    0.6931472057371986,
    0.2402264689048041,
    0.05550328777074222,
    0.009618488973727458,
    0.0013399931184244064,
    0.00015345807541703192,
)


def _const(ops: Ops, value: float, like: Ssa) -> Ssa:
    return ops.const(value, _F32, like)


def _split_any(ops: Ops, x: Ssa) -> tuple[Ssa, Ssa]:
    """``(n, f)`` in f32 with ``x = (1 + f) * 2^n``, subnormal numbers too. Zero, negative and infinite x: anything."""
    tiny = ops.compare("fcmp olt", x, _const(ops, _SMALLEST_NORMAL, x))
    scaled = ops.select(tiny, ops.op("fmul", x, _const(ops, 2.0**23, x)), x)
    n, m = split_float(ops, scaled)
    n = ops.select(tiny, ops.op("sub", n, ops.const(23, DType.I32, n)), n)
    return ops.convert("sitofp", n, "float"), ops.op("fsub", m, _const(ops, 1.0, x))


def _log_rest(ops: Ops, f: Ssa) -> Ssa:
    """``log(1 + f) - f``."""
    square = ops.op("fmul", f, f)
    cubic = ops.op("fmul", ops.op("fmul", square, f), polynomial(ops, f, _LOG))
    return multiply_add(ops, square, _const(ops, -0.5, f), cubic)


def _log_ends(ops: Ops, x: Ssa, result: Ssa, zero: float) -> Ssa:
    """The logarithm's values outside its domain; it has its pole at ``zero`` and is infinite at infinity."""
    pole, infinity = _const(ops, zero, x), _const(ops, math.inf, x)
    outside = ops.compare("fcmp oeq", x, pole)
    ends = ops.select(outside, _const(ops, -math.inf, x), _const(ops, math.nan, x))
    result = ops.select(ops.compare("fcmp ogt", x, pole), result, ends)
    return ops.select(ops.compare("fcmp oeq", x, infinity), x, result)


def log_f32(ops: Ops, x: Ssa) -> Ssa:
    """Natural logarithm, below 1 ulp."""
    n, f = _split_any(ops, x)
    low = multiply_add(ops, n, _const(ops, LN2_LOW, x), _log_rest(ops, f))
    result = multiply_add(ops, n, _const(ops, LN2_HIGH, x), ops.op("fadd", low, f))
    return _log_ends(ops, x, result, 0.0)


def log2_f32(ops: Ops, x: Ssa) -> Ssa:
    """Logarithm to base 2, below 1.5 ulp; exact for powers of two."""
    n, f = _split_any(ops, x)
    rest, part = _log_rest(ops, f), _const(ops, math.log2(math.e) - 1, x)
    result = multiply_add(ops, f, part, ops.op("fmul", rest, part))  # log2(e)*(f + rest), added up from the smallest
    result = ops.op("fadd", ops.op("fadd", ops.op("fadd", result, rest), f), n)
    return _log_ends(ops, x, result, 0.0)


def log10_f32(ops: Ops, x: Ssa) -> Ssa:
    """Logarithm to base 10, below 2 ulp."""
    n, f = _split_any(ops, x)
    rest = _log_rest(ops, f)
    high, two_high = 0.43359375, 0.30078125  # few bits of log10(e) and log10(2): products with f and n are (near) exact
    result = ops.op("fmul", rest, _const(ops, math.log10(math.e) - high, x))
    result = multiply_add(ops, f, _const(ops, math.log10(math.e) - high, x), result)
    result = multiply_add(ops, n, _const(ops, math.log10(2.0) - two_high, x), result)
    result = multiply_add(ops, rest, _const(ops, high, x), result)
    result = multiply_add(ops, f, _const(ops, high, x), result)
    return _log_ends(ops, x, multiply_add(ops, n, _const(ops, two_high, x), result), 0.0)


def log1p_f32(ops: Ops, x: Ssa) -> Ssa:
    """``log(1 + x)``, below 1.5 ulp.

    With ``1 + x ~ m * 2^n``, the part ``m - 1`` is taken from x itself, ``x*2^-n + (2^-n - 1)``, which is rounded once.
    """
    one = _const(ops, 1.0, x)
    n, m = split_float(ops, ops.op("fadd", x, one))
    scale = ops.op("sub", ops.const(127, DType.I32, x), n)
    scale = ops.convert("bitcast", ops.op("shl", scale, ops.const(23, DType.I32, x)), "float")
    f = multiply_add(ops, x, scale, ops.op("fsub", scale, one))
    large = ops.compare("fcmp ogt", x, _const(ops, 2.0**60, x))  # there 1 is nothing, and 2^-n may be no normal number
    f = ops.select(large, ops.op("fsub", m, one), f)
    whole = ops.convert("sitofp", n, "float")
    low = multiply_add(ops, whole, _const(ops, LN2_LOW, x), _log_rest(ops, f))
    result = multiply_add(ops, whole, _const(ops, LN2_HIGH, x), ops.op("fadd", low, f))
    result = ops.select(ops.compare("fcmp oeq", x, _const(ops, 0.0, x)), x, result)  # keeps -0
    return _log_ends(ops, x, result, -1.0)


def _bounded(ops: Ops, x: Ssa, low: float, high: float) -> Ssa:
    """``x`` cut to the bounds; nan stays."""
    top, bottom = _const(ops, high, x), _const(ops, low, x)
    cut = ops.select(ops.compare("fcmp ogt", x, top), top, x)
    return ops.select(ops.compare("fcmp olt", cut, bottom), bottom, cut)


def expm1_f32(ops: Ops, x: Ssa) -> Ssa:
    """``exp(x) - 1``, below 1.5 ulp: ``2 * (2^(n-1)*expm1(r) + (2^(n-1) - 1/2))``, exact scalings."""
    bounded, magic = _bounded(ops, x, -20.0, 89.0), _const(ops, ROUND, x)
    shifted = multiply_add(ops, bounded, _const(ops, math.log2(math.e), x), magic)
    n = ops.op("fsub", shifted, magic)
    rest = multiply_add(ops, n, _const(ops, -LN2_HIGH, x), bounded)
    rest = multiply_add(ops, n, _const(ops, -LN2_LOW, x), rest)
    series = multiply_add(ops, ops.op("fmul", rest, rest), polynomial(ops, rest, _EXPM1), rest)
    whole = ops.op("sub", ops.convert("bitcast", shifted, "i32"), ops.const(ROUND_BITS + 1, DType.I32, x))
    scale = power_of_two(ops, whole)
    half = multiply_add(ops, series, scale, ops.op("fsub", scale, _const(ops, 0.5, x)))
    result = ops.op("fadd", half, half)
    small = ops.compare("fcmp olt", ops.intrinsic("fabs", x), _const(ops, 2.0**-26, x))
    return ops.select(small, x, result)


def exp2_f32(ops: Ops, x: Ssa) -> Ssa:
    """``2^x``, below 1.5 ulp, scaled in two steps, so that subnormal results are rounded once."""
    bounded, magic = _bounded(ops, x, LEAST_POWER, 129.0), _const(ops, ROUND, x)
    shifted = ops.op("fadd", bounded, magic)
    rest = ops.op("fsub", bounded, ops.op("fsub", shifted, magic))
    part = multiply_add(ops, rest, polynomial(ops, rest, _EXP2), _const(ops, 1.0, x))
    return scale_in_two_steps(ops, part, shifted)


# -- pow -------------------------------------------------------------------------------------------------


def pow_f32(ops: Ops, x: Ssa, y: Ssa) -> Ssa:
    """``x^y`` as C defines it, below 1 ulp: ``2^(y * log2|x|)`` in f64, then signs and ends."""
    zero, one, infinity = (_const(ops, value, x) for value in (0.0, 1.0, math.inf))
    size = ops.intrinsic("fabs", x)
    result = ops.convert("fptrunc", _exp2_wide(ops, _log2_wide(ops, size), ops.convert("fpext", y, "double")), "float")
    # -1 to an infinite power is 1, as is everything to the power 0
    unit = ops.op(
        "and",
        ops.compare("fcmp oeq", size, one),
        ops.compare("fcmp oeq", ops.intrinsic("fabs", y), infinity),
    )
    half_y = ops.op("fmul", y, _const(ops, 0.5, y))
    whole = ops.compare("fcmp oeq", ops.intrinsic("trunc", y), y)
    even = ops.compare("fcmp oeq", ops.intrinsic("trunc", half_y), half_y)
    no_root = ops.op("and", ops.compare("fcmp olt", x, zero), ops.compare("fcmp olt", size, infinity))
    no_root = ops.op("and", no_root, ops.compare("fcmp une", ops.intrinsic("trunc", y), y))
    signed = ops.select(ops.op("xor", even, whole), x, one)
    result = ops.intrinsic("copysign", result, signed)
    result = ops.select(no_root, _const(ops, math.nan, x), result)
    result = ops.select(ops.compare("fcmp uno", x, y), ops.op("fadd", x, y), result)
    unit = ops.op("or", unit, ops.compare("fcmp oeq", y, zero))
    return ops.select(ops.op("or", unit, ops.compare("fcmp oeq", x, one)), one, result)


def _log2_wide(ops: Ops, x: Ssa) -> Ssa:
    """``log2(x)`` in f64 to 36 bits, for x >= 0 in f32."""
    n, f = _split_any(ops, x)
    wide_n, wide_f = ops.convert("fpext", n, "double"), ops.convert("fpext", f, "double")
    result = multiply_add(ops, wide_f, polynomial(ops, wide_f, _LOG2_WIDE, DType.F64), wide_n)
    least, most = (ops.const(value, DType.F64, x) for value in (-math.inf, math.inf))
    result = ops.select(ops.compare("fcmp oeq", x, _const(ops, 0.0, x)), least, result)
    return ops.select(ops.compare("fcmp oeq", x, _const(ops, math.inf, x)), most, result)


def _exp2_wide(ops: Ops, log: Ssa, y: Ssa) -> Ssa:
    """``2^(log * y)`` in f64, bounded where f32 is 0 or infinite."""
    power = ops.op("fmul", log, y)
    top, bottom = ops.const(160.0, DType.F64, y), ops.const(-160.0, DType.F64, y)
    power = ops.select(ops.compare("fcmp ogt", power, top), top, power)
    power = ops.select(ops.compare("fcmp olt", power, bottom), bottom, power)
    magic = ops.const(1.5 * 2.0**52, DType.F64, y)
    shifted = ops.op("fadd", power, magic)
    rest = ops.op("fsub", power, ops.op("fsub", shifted, magic))
    part = ops.convert("bitcast", polynomial(ops, rest, _EXP2_WIDE, DType.F64), "i64")
    exponent = ops.op("shl", ops.convert("bitcast", shifted, "i64"), ops.const(52, DType.I64, y))
    return ops.convert("bitcast", ops.op("add", part, exponent), "double")
