"""What the approximations share: polynomials, splitting a float, powers of two."""

from __future__ import annotations

from collections.abc import Sequence

from .....ir import DType
from ..arithmetic import Ops
from ..emitter import Ssa

__all__ = ["LN2_HIGH", "LN2_LOW", "ROUND", "ROUND_BITS", "multiply_add", "polynomial", "power_of_two", "split_float"]

LN2_HIGH = 0.693359375  # exact in 10 bits, so that n * LN2_HIGH is exact (Cody and Waite)
LN2_LOW = -2.1219444005e-4
ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, left in the low mantissa bits
ROUND_BITS = 0x4B400000

_ROOT_HALF_BITS = 0x3F3504F3  # sqrt(1/2)


def multiply_add(ops: Ops, a: Ssa, b: Ssa, c: Ssa) -> Ssa:
    """``a*b + c``, rounded once where the processor has it: these are our own algorithms, not eager's operations."""
    if ops.target.has("fma"):
        return ops.intrinsic("fma", a, b, c)
    return ops.op("fadd", ops.op("fmul", a, b), c)


def polynomial(ops: Ops, x: Ssa, coefficients: Sequence[float], dtype: DType = DType.F32) -> Ssa:
    """``c0 + c1*x + c2*x^2 + ...``: Horner's rule, for long ones on even and odd powers side by side."""
    if len(coefficients) > 5:
        square = ops.op("fmul", x, x)
        even = _horner(ops, square, coefficients[::2], dtype)
        odd = _horner(ops, square, coefficients[1::2], dtype)
        return multiply_add(ops, odd, x, even)
    return _horner(ops, x, coefficients, dtype)


def _horner(ops: Ops, x: Ssa, coefficients: Sequence[float], dtype: DType) -> Ssa:
    result = ops.const(coefficients[-1], dtype, x)
    for coefficient in reversed(coefficients[:-1]):
        result = multiply_add(ops, result, x, ops.const(coefficient, dtype, x))
    return result


def power_of_two(ops: Ops, n: Ssa) -> Ssa:
    """``2^n`` in f32 for the integers n (i32) in [-126, 127]."""
    biased = ops.op("add", n, ops.const(127, DType.I32, n))
    return ops.convert("bitcast", ops.op("shl", biased, ops.const(23, DType.I32, n)), "float")


def split_float(ops: Ops, x: Ssa) -> tuple[Ssa, Ssa]:
    """``(n, m)`` with ``x = m * 2^n`` and m in [sqrt(1/2), sqrt(2)), n an i32, for normal numbers x > 0 in f32."""
    bits = ops.convert("bitcast", x, "i32")
    above = ops.op("sub", bits, ops.const(_ROOT_HALF_BITS, DType.I32, x))
    n = ops.op("ashr", above, ops.const(23, DType.I32, x))
    mantissa = ops.op("sub", bits, ops.op("shl", n, ops.const(23, DType.I32, x)))
    return n, ops.convert("bitcast", mantissa, "float")
