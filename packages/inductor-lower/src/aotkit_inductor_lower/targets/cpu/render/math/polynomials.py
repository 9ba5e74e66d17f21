"""What the approximations share: polynomials, splitting a float, powers of two."""

from __future__ import annotations

from collections.abc import Sequence

from .....ir import DType
from ..arithmetic import Ops
from ..emitter import Ssa

__all__ = [
    "LEAST_POWER",
    "LN2_HIGH",
    "LN2_LOW",
    "ROUND",
    "ROUND_BITS",
    "horner",
    "multiply_add",
    "polynomial",
    "power_of_two",
    "scale_in_one_step",
    "scale_in_two_steps",
    "split_float",
    "whole_part",
]

LN2_HIGH = 0.693359375  # exact in 10 bits, so that n * LN2_HIGH is exact (Cody and Waite)
LN2_LOW = -2.1219444005e-4
ROUND = 12582912.0  # 1.5 * 2^23: adding it rounds to an integer, left in the low mantissa bits
ROUND_BITS = 0x4B400000

LEAST_POWER = -151  # 2^-151 and what is less round to 0 in f32

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
        even = horner(ops, square, coefficients[::2], dtype)
        odd = horner(ops, square, coefficients[1::2], dtype)
        return multiply_add(ops, odd, x, even)
    return horner(ops, x, coefficients, dtype)


def horner(ops: Ops, x: Ssa, coefficients: Sequence[float], dtype: DType = DType.F32) -> Ssa:
    """``c0 + c1*x + c2*x^2 + ...`` by Horner's rule: the fewest instructions, each waiting for the one before."""
    result = ops.const(coefficients[-1], dtype, x)
    for coefficient in reversed(coefficients[:-1]):
        result = multiply_add(ops, result, x, ops.const(coefficient, dtype, x))
    return result


def power_of_two(ops: Ops, n: Ssa) -> Ssa:
    """``2^n`` in f32 for the integers n (i32) in [-126, 127]."""
    biased = ops.op("add", n, ops.const(127, DType.I32, n))
    return ops.convert("bitcast", ops.op("shl", biased, ops.const(23, DType.I32, n)), "float")


def scale_in_one_step(ops: Ops, x: Ssa, shifted: Ssa) -> Ssa:
    """``x * 2^n`` for n in [-126, 127], where ``shifted`` is :data:`ROUND` + n: shifting its bits leaves those of n."""
    power = ops.op("shl", ops.convert("bitcast", shifted, "i32"), ops.const(23, DType.I32, x))
    return ops.op("fmul", x, ops.convert("bitcast", ops.op("add", power, _ones(ops, 0, x)), "float"))


def scale_in_two_steps(ops: Ops, x: Ssa, shifted: Ssa) -> Ssa:
    """``x * 2^n``, rounded once, for x in [1/2, 2) and n in [-150, 160], 0 for :data:`LEAST_POWER`; ``shifted`` is
    :data:`ROUND` + n.

    The first step takes a quarter of n, and so much more that the second factor's exponent is 0 for that n.
    """
    bits, more = ops.convert("bitcast", shifted, "i32"), 127 + LEAST_POWER - (LEAST_POWER >> 2)
    quarter = ops.op("shl", ops.op("ashr", bits, ops.const(2, DType.I32, x)), ops.const(23, DType.I32, x))
    rest = ops.op("sub", ops.op("shl", bits, ops.const(23, DType.I32, x)), quarter)
    first = ops.convert("bitcast", ops.op("add", quarter, _ones(ops, more, x)), "float")
    second = ops.convert("bitcast", ops.op("add", rest, _ones(ops, -more, x)), "float")
    return ops.op("fmul", ops.op("fmul", x, first), second)


def _ones(ops: Ops, power: int, like: Ssa) -> Ssa:
    """The bits of ``2^power``."""
    return ops.const((127 + power) << 23, DType.I32, like)


def split_float(ops: Ops, x: Ssa) -> tuple[Ssa, Ssa]:
    """``(n, m)`` with ``x = m * 2^n`` and m in [sqrt(1/2), sqrt(2)), n an i32, for normal numbers x > 0 in f32."""
    bits = ops.convert("bitcast", x, "i32")
    above = ops.op("sub", bits, ops.const(_ROOT_HALF_BITS, DType.I32, x))
    n = ops.op("ashr", above, ops.const(23, DType.I32, x))
    mantissa = ops.op("sub", bits, ops.op("shl", n, ops.const(23, DType.I32, x)))
    return n, ops.convert("bitcast", mantissa, "float")


def whole_part(ops: Ops, x: Ssa) -> Ssa:
    """As i32 on x86-64, and of nan and infinities some number: of these LLVM's own conversion is undefined."""
    symbol, type_ = {4: ("llvm.x86.sse2.cvttps2dq", "<4 x i32>"), 8: ("llvm.x86.avx.cvtt.ps2dq.256", "<8 x i32>")}[
        ops.lanes(x)
    ]
    ops.em.declare(symbol, type_, [x.type])
    return ops.em.pure(type_, f"call {type_} @{symbol}({x.typed})", x)
