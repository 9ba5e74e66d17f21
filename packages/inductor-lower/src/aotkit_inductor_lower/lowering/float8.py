"""Conversions from and to the 8-bit floats, by arithmetic on their bits: the same on every target.

Note [8-bit floats]
    The loop IR holds an 8-bit float as its bits, a u8, and only conversions and copies are generated: eager computes
    hardly anything else in these types, and devices before sm_89 do not convert them. Both formats lie within float16,
    subnormal numbers included: ``float8_e5m2`` is its upper byte, and ``float8_e4m3fn`` has an exponent of one bit
    less, so that its bits are those of the number divided by 256. A float32 becomes one by dropping mantissa bits,
    rounded to nearest with ties to even: half of the dropped part, less one, plus the last bit that stays, is added
    first. A result below the smallest normal one is rounded by adding a power of two whose last mantissa bit is the
    smallest subnormal. ``float8_e4m3fn`` has no infinities: what is too large becomes the largest value, as in eager
    from torch 2.13 on, and nan before; in ``float8_e5m2`` it becomes infinite.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .._torch_compat import large_numbers_become_float8
from ..ir import DType
from ..ir.builder import NestBuilder, Value

__all__ = ["FLOAT8", "Float8", "decode", "encode", "narrowed"]

_BIAS, _MANTISSA = 127, 23  # of float32


@dataclass(frozen=True, slots=True)
class Float8:
    """A format: bits of the mantissa, the exponent's bias, the code of what is too large, and the least float32 that
    is (as bits)."""

    mantissa: int
    bias: int
    overflow: int
    limit: int

    @property
    def shift(self) -> int:
        """Mantissa bits that a float32 has more."""
        return _MANTISSA - self.mantissa


FLOAT8: Mapping[torch.dtype, Float8] = {
    torch.float8_e4m3fn: Float8(3, 7, 0x7E, 0x43E00000),  # 448
    torch.float8_e5m2: Float8(2, 15, 0x7C, 0x47800000),  # 65536
}
_NAN = 0x7F
_BIAS_OF_HALF = 15
_SIGN_AND_NUMBER = -0x4080  # bits of a float16: all but the upper one of the exponent, and those that stay empty
_NAN_IF_LARGE = Float8(3, 7, _NAN, 0x43E80001)  # above 464, which is rounded to 448
_INFINITE = 0x7F800000


def encode(nest: NestBuilder, value: Value, format_: Float8) -> Value:
    """The u8 of an f32."""
    if format_.overflow == 0x7E and not large_numbers_become_float8():
        format_ = _NAN_IF_LARGE

    def number(n: int) -> Value:
        return nest.const(n, DType.I32)

    bits = nest.op("bitcast", value, to=DType.I32)
    size = nest.op("bitwise_and", bits, number(0x7FFFFFFF))
    sign = nest.op("bitwise_and", nest.op("shr", bits, number(24)), number(0x80))
    shift, rebias = format_.shift, (format_.bias - _BIAS) << _MANTISSA
    last = nest.op("bitwise_and", nest.op("shr", size, number(shift)), number(1))
    rounded = nest.op("add", nest.op("add", size, number(rebias + (1 << (shift - 1)) - 1)), last)
    normal = nest.op("shr", rounded, number(shift))
    step = (_BIAS + shift + 1 - format_.bias) << _MANTISSA  # a float whose last bit is the smallest subnormal
    small = nest.op("add", nest.op("bitcast", size, to=DType.F32), nest.op("bitcast", number(step), to=DType.F32))
    subnormal = nest.op("sub", nest.op("bitcast", small, to=DType.I32), number(step))
    is_small = nest.op("lt", size, number((_BIAS + 1 - format_.bias) << _MANTISSA))
    code = nest.where(is_small, subnormal, normal)
    code = nest.where(nest.op("ge", size, number(format_.limit)), number(format_.overflow), code)
    code = nest.where(nest.op("gt", size, number(_INFINITE)), number(_NAN), code)
    return nest.cast(nest.op("bitwise_or", code, sign), DType.U8)


def decode(nest: NestBuilder, code: Value, format_: Float8) -> Value:
    """The f16 or f32 of a u8: exact."""
    if format_.overflow == 0x7C:
        return nest.op("bitcast", nest.op("shl", nest.cast(code, DType.I16), nest.const(8, DType.I16)), to=DType.F16)
    wide = nest.cast(nest.op("bitcast", code, to=DType.I8), DType.I16)  # the sign is in all upper bits
    moved = nest.op("shl", wide, nest.const(10 - format_.mantissa, DType.I16))
    small = nest.op("bitwise_and", moved, nest.const(_SIGN_AND_NUMBER, DType.I16))
    scale = nest.const(2.0 ** (_BIAS_OF_HALF - format_.bias), DType.F32)
    number = nest.op("mul", nest.cast(nest.op("bitcast", small, to=DType.F16), DType.F32), scale)
    size = nest.op("bitwise_and", wide, nest.const(_NAN, DType.I16))
    return nest.where(nest.op("eq", size, nest.const(_NAN, DType.I16)), nest.const(math.nan, DType.F32), number)


def narrowed(nest: NestBuilder, value: Value) -> Value:
    """The bf16 of a number that :func:`decode` gave: its upper half, since bfloat16 has them all."""
    bits = nest.op("bitcast", nest.cast(value, DType.F32), to=DType.I32)
    upper = nest.cast(nest.op("shr", bits, nest.const(16, DType.I32)), DType.I16)
    return nest.op("bitcast", upper, to=DType.BF16)
