"""Element types, facts about them, and the way between :class:`DType` and torch's dtypes.

torch is imported only where a torch dtype is asked for, so that IR can be read and checked without it.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

from ..errors import IRError

if TYPE_CHECKING:
    import torch

__all__ = [
    "ARITHMETIC_INTS",
    "ATOMIC",
    "FLOAT8_NAMES",
    "FLOATS",
    "HALVES",
    "DType",
    "accumulate_dtype",
    "bits",
    "dtype_from_torch_name",
    "from_torch_dtype",
    "int_bounds",
    "is_float",
    "is_half",
    "is_int",
    "is_signed",
    "item_bytes",
    "to_torch_dtype",
    "torch_name",
]


class DType(Enum):
    """Element types of buffers and values; the value is the name printed in IR text."""

    F64 = "f64"
    F32 = "f32"
    F16 = "f16"
    BF16 = "bf16"
    I64 = "i64"
    I32 = "i32"
    I16 = "i16"
    I8 = "i8"
    U8 = "u8"
    BOOL = "bool"


HALVES = frozenset({DType.F16, DType.BF16})
FLOATS = frozenset({DType.F64, DType.F32}) | HALVES
ARITHMETIC_INTS = frozenset({DType.I8, DType.I16, DType.I32, DType.I64, DType.U8})

_TORCH_NAMES = {
    DType.F64: "float64",
    DType.F32: "float32",
    DType.F16: "float16",
    DType.BF16: "bfloat16",
    DType.I64: "int64",
    DType.I32: "int32",
    DType.I16: "int16",
    DType.I8: "int8",
    DType.U8: "uint8",
    DType.BOOL: "bool",
}
FLOAT8_NAMES = frozenset({"float8_e4m3fn", "float8_e5m2"})
_FROM_NAMES = {name: dtype for dtype, name in _TORCH_NAMES.items()} | dict.fromkeys(FLOAT8_NAMES, DType.U8)
_BITS = {
    DType.F64: 64,
    DType.F32: 32,
    DType.F16: 16,
    DType.BF16: 16,
    DType.I64: 64,
    DType.I32: 32,
    DType.I16: 16,
    DType.I8: 8,
    DType.U8: 8,
    DType.BOOL: 8,
}


def torch_name(dtype: DType) -> str:
    """torch's name without the module: ``"float32"``, as :attr:`Buffer.dtype` holds it."""
    return _TORCH_NAMES[dtype]


def dtype_from_torch_name(name: str) -> DType | None:
    """The type in which the loop IR holds elements of torch's dtype, by its name: 8-bit floats as their bits;
    ``None`` if generated code cannot hold them (complex ...)."""
    return _FROM_NAMES.get(name.removeprefix("torch."))


def to_torch_dtype(dtype: DType) -> torch.dtype:
    """The torch dtype of the same values."""
    import torch

    found = getattr(torch, _TORCH_NAMES[dtype])
    assert isinstance(found, torch.dtype)
    return found


def from_torch_dtype(dtype: torch.dtype) -> DType | None:
    """The loop IR's type of the same values, ``None`` if it has none."""
    name = str(dtype).removeprefix("torch.")
    return None if name in FLOAT8_NAMES else dtype_from_torch_name(name)


def is_float(dtype: DType) -> bool:
    """f64, f32, f16 or bf16."""
    return dtype in FLOATS


def is_half(dtype: DType) -> bool:
    """f16 or bf16: loaded, stored, cast, selected and bitcast only, never computed with."""
    return dtype in HALVES


# What threads of a device may combine with memory in any order: (type, mode of the store).
ATOMIC = frozenset({(d, "add") for d in (DType.F32, DType.F64, DType.I32, DType.I64)}) | frozenset(
    (d, mode) for d in (DType.I32, DType.I64) for mode in ("min", "max")
)


def is_int(dtype: DType) -> bool:
    """A signed or unsigned integer; bool is not one."""
    return dtype in ARITHMETIC_INTS


def is_signed(dtype: DType) -> bool:
    """Whether negative values exist."""
    return dtype not in (DType.U8, DType.BOOL)


def bits(dtype: DType) -> int:
    """Width in memory. bool takes one byte."""
    return _BITS[dtype]


def item_bytes(name: str) -> int:
    """Bytes of an element of torch's dtype, by its name: also of one that generated code cannot hold."""
    dtype = dtype_from_torch_name(name)
    if dtype is not None:
        return bits(dtype) // 8
    import torch

    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found.itemsize


def int_bounds(dtype: DType) -> tuple[int, int]:
    """Smallest and largest value of an integer type or bool. Raises :class:`IRError` for floats."""
    if dtype is DType.BOOL:
        return 0, 1
    if dtype not in ARITHMETIC_INTS:
        raise IRError(f"{dtype.value} is not an integer type")
    width = _BITS[dtype]
    return (-(1 << (width - 1)), (1 << (width - 1)) - 1) if is_signed(dtype) else (0, (1 << width) - 1)


def accumulate_dtype(dtype: DType) -> DType:
    """What eager sums ``dtype`` in: f32 for float16 and bfloat16, i64 for integers and bool, else itself."""
    if dtype in HALVES:
        return DType.F32
    return dtype if dtype in FLOATS else DType.I64
