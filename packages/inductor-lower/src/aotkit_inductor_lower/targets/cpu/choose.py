"""Which products of matrices the CPU computes by kernels of its own.

Note [Which products are ours]
    On AMD's processors with 512-bit vectors our products take less time than ATen's call (MKL's kernels are not written
    for them; `python -m tools.bench.products`), so they are generated, with what comes before and after in them. On
    others ATen's are as fast or faster, and stay. Products of float16 are ours on every processor with vectors of 256
    bits that converts float16 and cannot compute with it: ATen has no kernel for those, and takes 4 to 160 times as
    long as ours, which widen both factors as they copy them (the same command with `--dtype float16`).

    A product is ours from :data:`WORTH` multiplications on, so that what it takes to compile pays, and if no side is so
    short that panels and tiles are mostly padding.

    With a few rows (:data:`FEW_ROWS`) what takes time is to read the matrix. ATen's calls pack it first, or convert it,
    and take 1.3 to 2.6 times as long for one row, 1.6 to 2.7 times for four (`python -m tools.bench.decode --products`,
    on Zen 4; that reading is what counts is true of any processor, how much it is has been measured on no other). Where
    they do not, they stay.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir import Buffer, Contraction, DType, Load, Operand, Range
from ...ir.walk import loads
from ...options import LowerOptions
from ...symbolic import Symbol, product
from ...target import Choice
from .machine import Machine

__all__ = ["LEAST", "choose_form"]

FEW_ROWS = 8
WORTH_READING = 1 << 14  # elements of the matrix: a product of few rows with less is as fast as a call
UNKNOWN = 1024  # a size that is known at run time only
LEAST = (6, 16, 16)  # rows, columns, summed: less fills no tile
SHORT = (24, 48, 32)  # the same for products that are ours without being asked for
WORTH = 1 << 21
LONG = 1024  # numbers that are summed: of more a panel of rows and one of columns do not fit the second-level cache
FASTER = ("znver4", "znver5")


def choose_form(
    contraction: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, machine: Machine, processor: str
) -> Choice:
    """``"fma"``, panels and tiles of vectors, or ``"aten"``. ``processor``: by LLVM's name, what ATen runs on."""
    factors = {contraction.left.dtype, contraction.right.dtype}
    few = _choose_few_rows(contraction, buffers, options, machine)
    if few is not None:
        return few
    if factors == {DType.BF16} and options.contractions != "generated":
        return Choice("aten", "products of bfloat16 are left to ATen on the CPU")
    sides = contraction.rows, contraction.columns, contraction.reduced
    sizes = [product(loop.size for loop in loops).constant for loops in sides]
    known = [size for size in sizes if size is not None]
    if any(size is not None and size < least for size, least in zip(sizes, LEAST, strict=True)):
        return Choice("aten", "a side of the product fills no tile")
    if options.contractions == "generated":
        return Choice("fma", "every product is generated")
    halves = factors == {DType.F16}
    faster = _lacks_float16(machine) if halves else processor in FASTER and machine.vector_bits == 512
    if not faster:
        return Choice("aten", f"ATen's products are as fast on {processor}")
    if len(known) < len(sizes):
        return Choice("aten", "a size is known at run time only")
    if any(size < short for size, short in zip(known, SHORT, strict=True)) or _count(contraction, known) < WORTH:
        return Choice("aten", "the product is small")
    if not halves and known[2] > LONG and _lies_along(contraction.rows, contraction.left, buffers):
        return Choice("aten", "long sums of a factor that is turned over")
    return Choice("fma", f"kernels of ours take less time than ATen's on {processor}")


def _choose_few_rows(
    contraction: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, machine: Machine
) -> Choice | None:
    """Who computes a product of few rows, ``None`` for any other product."""
    sides = contraction.rows, contraction.columns, contraction.reduced
    rows, columns, summed = (product(loop.size for loop in loops).constant for loops in sides)
    if rows is None or not 1 <= rows <= FEW_ROWS:
        return None
    if any(size is not None and size < least for size, least in zip((columns, summed), LEAST[1:], strict=True)):
        return None
    if options.contractions == "generated":
        return Choice("fma", "every product is generated")
    if machine.vector_bits < 256:
        return Choice("aten", "few rows, and short vectors")
    batch = product(loop.size for loop in contraction.batch).constant
    if (batch or UNKNOWN) * (columns or UNKNOWN) * (summed or UNKNOWN) < WORTH_READING:
        return Choice("aten", "the product is small")
    taken = _read_as_fast_by_aten(contraction, buffers, rows, machine)
    if taken:
        return Choice("aten", taken)
    return Choice("fma", "few rows: the matrix is read once, in the order of memory")


def _read_as_fast_by_aten(contraction: Contraction, buffers: Mapping[str, Buffer], rows: int, machine: Machine) -> str:
    """Why ATen takes no longer, if it does not."""
    right = contraction.right
    if not all(isinstance(instr, Load) for instr in right.body):
        return ""  # ATen has to have the result in memory
    along_columns = _lies_along(contraction.columns, right, buffers)
    if rows == 1 and not contraction.batch and right.dtype in (DType.F32, DType.F64) and along_columns:
        return "ATen reads one row of factors along the columns as fast"
    if rows == 1 and right.dtype is DType.F16 and not along_columns:
        return "ATen has a kernel for one row of float16"
    most = 4 if along_columns else 3
    if rows > most and right.dtype is DType.BF16 and machine.has("avx512bf16"):
        return "ATen's products of bfloat16 have instructions of their own"
    return ""


def _lacks_float16(machine: Machine) -> bool:
    """Whether products of float16 have to be computed in float32, and casts are instructions."""
    return machine.vector_bits >= 256 and machine.has("f16c") and not machine.has("avx512fp16")


def _count(contraction: Contraction, sizes: list[int]) -> int:
    """Multiplications; a batch whose size is not known counts as one."""
    batch = product(loop.size for loop in contraction.batch).constant or 1
    return batch * sizes[0] * sizes[1] * sizes[2]


def _lies_along(loops: Sequence[Range], operand: Operand, buffers: Mapping[str, Buffer]) -> bool:
    """Whether neighbours of the last loop are neighbours in a factor's memory."""
    along = Symbol(loops[-1].symbol)
    steps = [buffers[load.buffer].offset(load.indices).coefficient(along) for load in loads(operand.body)]
    return any(step is not None and step == 1 for step in steps)
