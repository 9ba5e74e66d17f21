"""Factors that are 8-bit floats, recognised by the arithmetic on their bits that the loop IR writes for them.

Note [Factors of 8 bits]
    The loop IR has an 8-bit float as its byte, and what it means as arithmetic (Note [8-bit floats] in
    ``lowering.float8``). Where both factors of a product are such numbers, as they are or cast to a wider float (which
    is exact), there are two ways to multiply them:

    * Devices from sm_89 on multiply bytes (``dot_float8``), at twice the rate of halves and half their traffic. Their
      sums keep fewer bits than float32, so every step's is added to the whole in float32, and only products whose
      results are stored in 16 bits are computed so: what is lost is less than the rounding of the result.
    * Else as float16, which holds all of them: products are exact then, and sums are of float32.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import torch

from ....ir import Buffer, BufferKind, Compute, Const, DType, Instr, Load, Range, Store
from ....ir.builder import NestBuilder
from ....ir.walk import instructions
from ....kernel_passes.normal_form import kernel_of
from ....lowering.float8 import FLOAT8, decode, narrowed
from ....ops.dtypes import is_half
from ....symbolic import sym, to_expr

__all__ = ["FLOAT8_ARCH", "byte_of"]

FLOAT8_ARCH = 89
#: Triton's names of the formats.
_TYPES = {torch.float8_e4m3fn: "tl.float8e4nv", torch.float8_e5m2: "tl.float8e5"}
Tree = tuple[object, ...]


def byte_of(name: str, body: Sequence[Instr]) -> tuple[str, str] | None:
    """The byte that a value of ``body`` is made of, if it is an 8-bit float and nothing else, and Triton's name of its
    type."""
    made = {i.result: i for i in body if not isinstance(i, Store)}
    bytes_: set[str] = set()
    tree = _tree(name, made, bytes_)
    format_ = None if tree is None else _patterns().get(tree)
    return (*bytes_, format_) if format_ is not None and len(bytes_) == 1 else None  # type: ignore[return-value]


def _tree(name: str, made: Mapping[str, Instr], bytes_: set[str]) -> Tree | None:
    """A value as an expression of one byte, whatever its instructions are called."""
    instr = made.get(name)
    if isinstance(instr, Load) and instr.dtype is DType.U8:
        bytes_.add(name)
        return ("byte",)
    if isinstance(instr, Const):
        return ("const", repr(instr.value), instr.dtype)
    if not isinstance(instr, Compute):
        return None
    parts = [_tree(arg, made, bytes_) for arg in instr.args]
    return None if None in parts else (instr.op, instr.dtype, *parts)


@lru_cache(maxsize=1)
def _patterns() -> Mapping[Tree, str]:
    """What each format looks like in a kernel: as f32, or cast to a half, and that widened again."""
    found: dict[Tree, str] = {}
    for format_, name in _TYPES.items():
        for held in (DType.F32, DType.F16, DType.BF16):
            for value, body in _written(format_, held):
                made = {i.result: i for i in body if not isinstance(i, Store)}
                tree = _tree(value, made, set())
                assert tree is not None
                found[tree] = name
                if is_half(held):
                    found["cast", DType.F32, tree] = name
    return found


def _written(format_: torch.dtype, held: DType) -> list[tuple[str, tuple[Instr, ...]]]:
    """The value and the instructions of a kernel that converts bytes."""
    sizes, index = (to_expr(64),), (sym("i"),)
    one = (to_expr(1),)
    wide = {DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16"}[held]
    buffers = {
        "byte": Buffer("byte", "uint8", sizes, one, BufferKind.INPUT),
        "out": Buffer("out", wide, sizes, one, BufferKind.OUTPUT),
    }
    builder = NestBuilder("convert", (Range("i", sizes[0]),), buffers=None)
    value = decode(builder, builder.load_element("byte", index, DType.U8), FLOAT8[format_])
    value = narrowed(builder, value) if held is DType.BF16 else builder.cast(value, held)
    builder.store_element("out", index, value)
    body = tuple(instructions(kernel_of(builder.finish(), buffers).body))
    return [(i.value, body) for i in body if isinstance(i, Store)]
