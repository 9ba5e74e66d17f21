"""Which products of a few rows the CPU computes by kernels of its own.

Note [Products of few rows that are ours]
    With a few rows (:data:`FEW_ROWS`) what takes time is to read the matrix. ATen's calls pack it first, or convert it,
    and take up to 2.7 times as long (`python -m tools.bench.decode --products`, on Zen 4 and on a Xeon with AMX). Where
    they do not, they stay: one row of float32 or float64 along the columns, one of float16 along the sums, and on AMD's
    processors more than three or four rows of bfloat16, for which oneDNN has instructions that ours have not. On the
    Xeon ours take less time than oneDNN's there, too, since they ask for the matrix early enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir import Buffer, Contraction, DType, Load, Operand, Range
from ...ir.walk import loads
from ...options import LowerOptions
from ...symbolic import Symbol, product
from ...target import Choice
from .machine import Machine

__all__ = ["AMD", "FEW_ROWS", "LEAST", "choose_few_rows", "lies_along"]

FEW_ROWS = 8
WORTH_READING = 1 << 14  # elements of the matrix: a product of few rows with less is as fast as a call
UNKNOWN = 1024  # a size that is known at run time only
LEAST = (6, 16, 16)  # rows, columns, summed: less fills no tile
AMD = ("znver4", "znver5")  # with vectors of 512 bits
PACKED = "aten._weight_int4pack_mm_for_cpu.default"
FULL = 16  # rows of which tile registers are full


def choose_few_rows(
    contraction: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, machine: Machine, processor: str
) -> Choice | None:
    """Who computes a product of few rows, ``None`` for any other product. ``processor``: by LLVM's name, what ATen runs
    on."""
    sides = contraction.rows, contraction.columns, contraction.reduced
    rows, columns, summed = (product(loop.size for loop in loops).constant for loops in sides)
    if contraction.library is not None and contraction.library.target == PACKED and not 1 <= (rows or 0) <= FEW_ROWS:
        tiles = machine.has("amx-bf16") and machine.vector_bits == 512 and (rows or 0) >= FULL
        return None if tiles else Choice("aten", "a packed weight is read as it lies for a few rows, or into tiles")
    whole = contraction.accumulate is DType.I32
    if whole and not (1 <= (rows or 0) <= FEW_ROWS and _is_for_bytes(contraction, buffers, machine)):
        return Choice("aten", "products of bytes are ours for a few rows, by instructions for them")
    if rows is None or not 1 <= rows <= FEW_ROWS:
        return None
    if any(size is not None and size < least for size, least in zip((columns, summed), LEAST[1:], strict=True)):
        return Choice("aten", "the product is small") if whole else None
    if options.contractions == "generated":
        return Choice("fma", "every product is generated")
    if machine.vector_bits < 256:
        return Choice("aten", "few rows, and short vectors")
    batch = product(loop.size for loop in contraction.batch).constant
    if (batch or UNKNOWN) * (columns or UNKNOWN) * (summed or UNKNOWN) < WORTH_READING:
        return Choice("aten", "the product is small")
    taken = _read_as_fast_by_aten(contraction, buffers, rows, machine, processor)
    if taken:
        return Choice("aten", taken)
    return Choice("fma", "few rows: the matrix is read once, in the order of memory")


def _is_for_bytes(contraction: Contraction, buffers: Mapping[str, Buffer], machine: Machine) -> bool:
    """Whether a product of bytes can be written with such instructions."""
    along = lies_along(contraction.reduced, contraction.right, buffers)
    return machine.vector_bits == 512 and machine.has("avx512vnni") and along and not contraction.batch


def _read_as_fast_by_aten(
    contraction: Contraction, buffers: Mapping[str, Buffer], rows: int, machine: Machine, processor: str
) -> str:
    """Why ATen takes no longer, if it does not."""
    right = contraction.right
    if not all(isinstance(instr, Load) for instr in right.body):
        return ""  # ATen has to have the result in memory
    along_columns = lies_along(contraction.columns, right, buffers)
    if rows == 1 and not contraction.batch and right.dtype in (DType.F32, DType.F64) and along_columns:
        return "ATen reads one row of factors along the columns as fast"
    if rows == 1 and right.dtype is DType.F16 and not along_columns:
        return "ATen has a kernel for one row of float16"
    most = 4 if along_columns else 3
    if rows > most and right.dtype is DType.BF16 and machine.has("avx512bf16") and processor in AMD:
        return "ATen's products of bfloat16 have instructions of their own"
    return ""


def lies_along(loops: Sequence[Range], operand: Operand, buffers: Mapping[str, Buffer]) -> bool:
    """Whether neighbours of the last loop are neighbours in a factor's memory."""
    along = Symbol(loops[-1].symbol)
    steps = [buffers[load.buffer].offset(load.indices).coefficient(along) for load in loads(operand.body)]
    return any(step is not None and step == 1 for step in steps)
