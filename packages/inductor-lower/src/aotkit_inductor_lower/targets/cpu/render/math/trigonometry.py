"""Sine and cosine in f32, written out inline.

Note [Reduction by quarter turns]
    ``x = n*pi/2 + r`` with n the nearest integer; r in about [-pi/4, pi/4] is found with pi/2 in three parts of 24 bits
    (Cody and Waite), the multiply-adds rounding once each, or without them in f64. That is exact enough up to
    ``_LIMIT``; where a lane is beyond (or not finite), which is rare, a branch takes the math library instead.
"""

from __future__ import annotations

import math

from .....ir import DType
from ..arithmetic import Ops
from ..emitter import Ssa
from .polynomials import ROUND, multiply_add, polynomial

__all__ = ["cos_f32", "sin_f32"]

_LIMIT = 32768.0
_HALF_PI = (1.5707963705062866, -4.371138828673793e-08, -1.7151245100058819e-15)
_SIN = (-0.16666653752326965, 0.00833210814744234, -0.00019508243713062257)  # sin(r) = r + r^3 * P(r^2)
_COS = (0.04166664555668831, -0.001388730015605688, 2.4430537450825796e-05)  # cos(r) = 1 - r^2/2 + r^4 * P(r^2)


def sin_f32(ops: Ops, x: Ssa) -> Ssa:
    """Sine, below 2 ulp."""
    return _or_library(ops, "sin", x, 0)


def cos_f32(ops: Ops, x: Ssa) -> Ssa:
    """Cosine, below 2 ulp."""
    return _or_library(ops, "cos", x, 1)


def _or_library(ops: Ops, name: str, x: Ssa, quarters: int) -> Ssa:
    size = ops.intrinsic("fabs", x)
    far = ops.compare("fcmp ugt", size, ops.const(_LIMIT, DType.F32, x))
    result = ops.em.choose(
        ops.any(far), x.type, lambda: ops.math(name, [x], DType.F32), lambda: _near(ops, x, size, quarters)
    )
    assert result is not None
    return result


def _near(ops: Ops, x: Ssa, size: Ssa, quarters: int) -> Ssa:
    """``sin(x + quarters*pi/2)`` for |x| up to the limit: by |x|, so that -0 stays."""
    i32, one = DType.I32, ops.const(1, DType.I32, x)
    n, rest = _reduce(ops, size)
    turn = ops.op("add", n, ops.const(quarters, i32, x)) if quarters else n
    square = ops.op("fmul", rest, rest)
    sine = multiply_add(ops, ops.op("fmul", square, rest), polynomial(ops, square, _SIN), rest)
    cosine = multiply_add(ops, square, ops.const(-0.5, DType.F32, x), ops.const(1.0, DType.F32, x))
    cosine = multiply_add(ops, ops.op("fmul", square, square), polynomial(ops, square, _COS), cosine)
    odd = ops.compare("icmp ne", ops.op("and", turn, one), ops.const(0, i32, x))
    picked = ops.select(odd, cosine, sine)
    flip = ops.op("shl", ops.op("and", turn, ops.const(2, i32, x)), ops.const(30, i32, x))
    if not quarters:
        sign = ops.op("and", ops.convert("bitcast", x, "i32"), ops.const(-(1 << 31), i32, x))
        flip = ops.op("xor", flip, sign)
    return ops.convert("bitcast", ops.op("xor", ops.convert("bitcast", picked, "i32"), flip), "float")


def _reduce(ops: Ops, x: Ssa) -> tuple[Ssa, Ssa]:
    """``(n, r)``: n as i32 (its low bits count), r in f32."""
    magic = ops.const(ROUND, DType.F32, x)
    shifted = multiply_add(ops, x, ops.const(2 / math.pi, DType.F32, x), magic)
    whole = ops.op("fsub", shifted, magic)
    n = ops.convert("bitcast", shifted, "i32")
    if ops.target.has("fma"):
        rest = x
        for part in _HALF_PI:
            rest = multiply_add(ops, whole, ops.const(-part, DType.F32, x), rest)
        return n, rest
    wide, turns = ops.convert("fpext", x, "double"), ops.convert("fpext", whole, "double")
    for part in (1.5707963267341256, 6.077100506506192e-11):  # 33 bits of pi/2, and the rest
        wide = ops.op("fsub", wide, ops.op("fmul", turns, ops.const(part, DType.F64, x)))
    return n, ops.convert("fptrunc", wide, "float")
