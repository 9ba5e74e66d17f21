"""Vector arithmetic written out inline where a call costs more than the work: exp, erf, tanh, and halves without F16C.

Every function takes any lane count and is exact to the bounds stated; the tests sweep them against float64.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...ir import DType
from .emitter import Ssa

if TYPE_CHECKING:
    from .ops import Ops

__all__ = ["erf_f32", "exp_f32", "f32_to_half", "half_to_f32", "tanh_f32"]

# Coefficients are minimax fits (iteratively reweighted least squares in 40-digit arithmetic), rounded to f32.
_EXP = (0.5, 0.166665181517601, 0.04166620597243309, 0.008368953131139278, 0.0013950602151453495)
_LOG2_E = 1.4426950408889634
_LN2_HIGH = 0.693359375  # exact in 10 bits, so that n * _LN2_HIGH is exact
_LN2_LOW = -2.1219444005e-4
_ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, left in the low mantissa bits
_ROUND_BITS = 0x4B400000

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


def _multiply_add(ops: Ops, a: Ssa, b: Ssa, c: Ssa) -> Ssa:
    """``a*b + c``, rounded once where the processor has it: these are our own algorithms, not eager's operations."""
    if ops.target.has("fma"):
        return ops.intrinsic("fma", a, b, c)
    return ops.op("fadd", ops.op("fmul", a, b), c)


def _polynomial(ops: Ops, x: Ssa, coefficients: Sequence[float]) -> Ssa:
    """``c0 + c1*x + c2*x^2 + ...``: Horner's rule, for long ones on even and odd powers side by side."""
    if len(coefficients) > 5:
        square = ops.op("fmul", x, x)
        even, odd = _polynomial_in(ops, square, coefficients[::2]), _polynomial_in(ops, square, coefficients[1::2])
        return _multiply_add(ops, odd, x, even)
    return _polynomial_in(ops, x, coefficients)


def _polynomial_in(ops: Ops, x: Ssa, coefficients: Sequence[float]) -> Ssa:
    result = ops.const(coefficients[-1], DType.F32, x)
    for coefficient in reversed(coefficients[:-1]):
        result = _multiply_add(ops, result, x, ops.const(coefficient, DType.F32, x))
    return result


def _exp_parts(ops: Ops, x: Ssa) -> tuple[Ssa, Ssa]:
    """``(p, n)`` with ``exp(x) = p * 2^n``: n the integer (as i32) nearest x/ln2, p in about [0.7, 1.42]."""
    magic = ops.const(_ROUND, DType.F32, x)
    shifted = _multiply_add(ops, x, ops.const(_LOG2_E, DType.F32, x), magic)
    n = ops.op("fsub", shifted, magic)
    rest = _multiply_add(ops, n, ops.const(-_LN2_HIGH, DType.F32, x), x)
    rest = _multiply_add(ops, n, ops.const(-_LN2_LOW, DType.F32, x), rest)
    series = ops.op("fmul", ops.op("fmul", rest, rest), _polynomial(ops, rest, _EXP))
    result = ops.op("fadd", ops.op("fadd", series, rest), ops.const(1.0, DType.F32, x))
    whole = ops.op("sub", ops.convert("bitcast", shifted, "i32"), ops.const(_ROUND_BITS, DType.I32, x))
    return result, whole


def _power_of_two(ops: Ops, n: Ssa) -> Ssa:
    """``2^n`` for n in [-126, 127]."""
    biased = ops.op("add", n, ops.const(127, DType.I32, n))
    return ops.convert("bitcast", ops.op("shl", biased, ops.const(23, DType.I32, n)), "float")


def exp_f32(ops: Ops, x: Ssa) -> Ssa:
    """``exp`` in f32, below 1.5 ulp. Scaled in two steps, so that subnormal results are rounded once."""
    high, low = ops.const(89.0, DType.F32, x), ops.const(-104.0, DType.F32, x)
    bounded = ops.select(ops.compare("fcmp ogt", x, high), high, x)  # comparisons let a nan through
    bounded = ops.select(ops.compare("fcmp olt", bounded, low), low, bounded)
    part, n = _exp_parts(ops, bounded)
    half = ops.op("ashr", n, ops.const(1, DType.I32, x))
    first = ops.op("fmul", part, _power_of_two(ops, half))
    return ops.op("fmul", first, _power_of_two(ops, ops.op("sub", n, half)))


def _exp_moderate(ops: Ops, x: Ssa) -> Ssa:
    """``exp`` for x in about [-80, 80]: one scaling step, no bounds."""
    part, n = _exp_parts(ops, x)
    return ops.op("fmul", part, _power_of_two(ops, n))


def _bounded_size(ops: Ops, x: Ssa, limit: float) -> Ssa:
    """``min(|x|, limit)``, nan kept."""
    size, bound = ops.intrinsic("fabs", x), ops.const(limit, DType.F32, x)
    return ops.select(ops.compare("fcmp ogt", size, bound), bound, size)


def erf_f32(ops: Ops, x: Ssa) -> Ssa:
    """``erf`` in f32, below 2 ulp: x + x*P(x^2) near zero, else 1 - exp(-Q(|x|)) with Q = -log(erfc)."""
    size = _bounded_size(ops, x, 4.0)  # erf(4) rounds to 1
    near = _multiply_add(ops, x, _polynomial(ops, ops.op("fmul", x, x), _ERF_SMALL), x)
    exponent = _polynomial(ops, size, [-c for c in _ERF_LARGE])
    far = ops.op("fsub", ops.const(1.0, DType.F32, x), _exp_moderate(ops, exponent))
    far = ops.intrinsic("copysign", far, x)
    return ops.select(ops.compare("fcmp ogt", size, ops.const(_ERF_SPLIT, DType.F32, x)), far, near)


def tanh_f32(ops: Ops, x: Ssa) -> Ssa:
    """``tanh`` in f32, below 2 ulp: x + x^3*P(x^2) near zero, else 1 - 2/(exp(2|x|) + 1)."""
    size = _bounded_size(ops, x, 10.0)  # tanh(10) rounds to 1
    one, two = ops.const(1.0, DType.F32, x), ops.const(2.0, DType.F32, x)
    square = ops.op("fmul", x, x)
    cubic = ops.op("fmul", ops.op("fmul", square, x), _polynomial(ops, square, _TANH_SMALL))
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
