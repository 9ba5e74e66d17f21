"""How element types look in LLVM: in registers, in memory, and as literals."""

from __future__ import annotations

import math
import struct

from ....ir import DType

__all__ = ["FLOAT_TYPES", "INT_TYPES", "literal", "memory_type", "register_type", "width"]

# float16 and bfloat16 stay raw 16-bit integers: they are only moved, selected and converted.
_REGISTER = {
    DType.F64: "double",
    DType.F32: "float",
    DType.F16: "i16",
    DType.BF16: "i16",
    DType.I64: "i64",
    DType.I32: "i32",
    DType.I16: "i16",
    DType.I8: "i8",
    DType.U8: "i8",
    DType.BOOL: "i1",
}
_WIDTH = {"double": 64, "float": 32, "i64": 64, "i32": 32, "i16": 16, "i8": 8, "i1": 8}

FLOAT_TYPES = frozenset({DType.F64, DType.F32})
INT_TYPES = frozenset({DType.I64, DType.I32, DType.I16, DType.I8, DType.U8})


def register_type(dtype: DType) -> str:
    """The scalar LLVM type a value of ``dtype`` has in registers."""
    return _REGISTER[dtype]


def memory_type(dtype: DType) -> str:
    """The scalar LLVM type of one element in memory; a bool is a byte."""
    return "i8" if dtype is DType.BOOL else _REGISTER[dtype]


def width(dtype: DType) -> int:
    """Bits of one element in memory."""
    return _WIDTH[_REGISTER[dtype]]


def literal(value: float | int | bool, dtype: DType) -> str:
    """A constant of ``dtype`` in LLVM text."""
    if dtype is DType.BOOL:
        return "true" if value else "false"
    if dtype in FLOAT_TYPES:
        return _float_literal(float(value), dtype)
    if dtype is DType.F16:
        return str(_half_bits(float(value)))
    if dtype is DType.BF16:
        return str(_bfloat_bits(float(value)))
    bits = width(dtype)
    wrapped = int(value) & ((1 << bits) - 1)
    return str(wrapped - (1 << bits) if wrapped >> (bits - 1) else wrapped)


def _float_literal(value: float, dtype: DType) -> str:
    if dtype is DType.F32:
        value = _round_to_f32(value)
    return "0x" + struct.pack(">d", value).hex().upper()


def _round_to_f32(value: float) -> float:
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def _half_bits(value: float) -> int:
    try:
        packed = struct.pack("<e", _round_to_f32(value))
    except OverflowError:
        packed = struct.pack("<e", math.copysign(math.inf, value))
    return int(struct.unpack("<h", packed)[0])


def _bfloat_bits(value: float) -> int:
    if math.isnan(value):
        return 0x7FC0
    bits = struct.unpack("<I", struct.pack("<f", _round_to_f32(value)))[0]
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) & 0xFFFF
    return rounded - 0x10000 if rounded >> 15 else rounded
