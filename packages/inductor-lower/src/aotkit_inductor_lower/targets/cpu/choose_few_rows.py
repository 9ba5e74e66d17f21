"""Which products of a few rows the CPU computes by kernels of its own.

Note [Products of few rows that are ours]
    With a few rows (:data:`FEW_ROWS`) what takes time is to read the matrix. ATen's calls pack it first, or convert it,
    and take up to 2.7 times as long (`python -m tools.bench.decode --products`, on Zen 4 and on a Xeon with AMX). Where
    they do not, they stay: one row of float32 or float64 along the columns, one of float16 along the sums, and on AMD's
    processors more than eight rows of bfloat16 (twelve along the columns; three and eight of a batch), for which oneDNN
    has instructions that ours have not.

    Of more than :data:`FEW_FOR_TILES` rows what takes time is to multiply, which every library does well. Those of a
    matrix that is computed on the way are ours all the same, since ATen's calls need it in memory, as are those that
    ATen has no kernel for: of float16 where the processor does not compute with it, and of bfloat16 without AVX-512.
    On AMD's processors with vectors of 512 bits ours take 0.4 to 0.8 of MKL's time, but for those of a batch along the
    sums, which are short there. A matrix that is packed once is
    multiplied in tiles (`python -m tools.bench.decode --products --rows 9 12 16`).

    A product of groups of rows with a matrix each (a mixture of experts) reads a matrix for each of its rows, so it is
    ours as long as groups have :data:`ROWS_OF_A_GROUP` rows on average or less; of more, the call's products of whole
    groups are faster (`python -m tools.bench.decode_experts`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir import Buffer, BufferRef, CheckedIndex, Contraction, DType, ExternCall, Load, Operand, Range
from ...ir.walk import contains, loads
from ...options import LowerOptions
from ...symbolic import Symbol, product
from ...target import Choice
from .machine import Machine

__all__ = ["AMD", "FEW_FOR_TILES", "FEW_ROWS", "IN_PAGES", "LEAST", "SHORT_AMD"]
__all__ += ["choose_few_rows", "lacks_float16", "lies_along"]

FEW_ROWS = 16
FEW_FOR_TILES = 8  # rows up to which no tiles are as fast
WORTH_READING = 1 << 14  # elements of the matrix: a product of few rows with less is as fast as a call
UNKNOWN = 1024  # a size that is known at run time only
LEAST = (6, 16, 16)  # rows, columns, summed: less fills no tile
AMD = ("znver4", "znver5")  # with vectors of 512 bits
SHORT_AMD = ("znver3",)  # with vectors of 256 bits, as far as they were measured
IN_PAGES = (*SHORT_AMD, *AMD)  # what fetches ahead up to the end of a page, see Note [Columns that lie apart]
PACKED = "aten._weight_int4pack_mm_for_cpu.default"
FULL = 16  # rows of which tile registers are full
GROUPED = ("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
ROWS_OF_A_GROUP = 4


def choose_few_rows(
    contraction: Contraction,
    buffers: Mapping[str, Buffer],
    options: LowerOptions,
    machine: Machine,
    processor: str,
    packed: bool,
) -> Choice | None:
    """Who computes a product of few rows, ``None`` for any other product, or if it is not faster in another way than
    the others. ``processor``: by LLVM's name, what ATen runs on; ``packed``: the matrix is packed once."""
    sides = contraction.rows, contraction.columns, contraction.reduced
    rows, columns, summed = (product(loop.size for loop in loops).constant for loops in sides)
    of_four_bits = contraction.library is not None and contraction.library.target == PACKED
    if of_four_bits and machine.has("amx-bf16") and machine.vector_bits == 512 and (rows or 0) >= FULL:
        return None
    if of_four_bits and not 1 <= (rows or 0) <= FEW_ROWS:
        return Choice("aten", "a packed weight is read as it lies for a few rows, or into tiles")
    whole = contraction.accumulate is DType.I32
    bytes_ = whole and _is_for_bytes(contraction, buffers, machine)
    many = (rows or 0) > FEW_ROWS and (machine.has("amx-int8") or (bytes_ and machine.has("avx512vnni")))
    if whole and many and options.contractions == "generated":  # oneDNN's are as fast
        return None
    if whole and not (1 <= (rows or 0) <= FEW_ROWS and bytes_):
        return Choice("aten", "products of bytes are ours for a few rows, by instructions for them")
    if rows is None or not 1 <= rows <= FEW_ROWS:
        return None
    if any(size is not None and size < least for size, least in zip((columns, summed), LEAST[1:], strict=True)):
        return Choice("aten", "the product is small") if whole else None
    if rows > FEW_FOR_TILES and not (whole or of_four_bits):
        ours = options.contractions != "generated" and not packed
        if not (ours and _multiplied_as_fast(contraction, buffers, rows, machine, processor)):
            return None
    if options.contractions == "generated":
        return Choice("fma", "every product is generated")
    if machine.vector_bits < 256:
        return Choice("aten", "few rows, and short vectors")
    batch = product(loop.size for loop in contraction.batch).constant
    if contraction.library is not None and contraction.library.target in GROUPED:
        groups = _count_of_groups(contraction.library, buffers)
        if batch is None or batch > ROWS_OF_A_GROUP * groups:
            return Choice("aten", "groups of rows may be so large that products of whole groups are faster")
    if (batch or UNKNOWN) * (columns or UNKNOWN) * (summed or UNKNOWN) < WORTH_READING:
        return Choice("aten", "the product is small")
    taken = _read_as_fast_by_aten(contraction, buffers, rows, machine, processor)
    if taken:
        return Choice("aten", taken)
    if contains(contraction.right.body, CheckedIndex):
        return Choice("fma", "few rows: of all matrices those that are chosen are read, where they lie")
    return Choice("fma", "few rows: the matrix is read once, in the order of memory")


def _count_of_groups(call: ExternCall, buffers: Mapping[str, Buffer]) -> int:
    """How many matrices a product of groups has."""
    _, weight, *_ = (buffers[arg.name] for arg in call.args if isinstance(arg, BufferRef))
    return weight.sizes[0].constant or 0


def _is_for_bytes(contraction: Contraction, buffers: Mapping[str, Buffer], machine: Machine) -> bool:
    """Whether a product of bytes can be written with instructions for them, or for words."""
    along = lies_along(contraction.reduced, contraction.right, buffers)
    return machine.vector_bits >= 256 and along and not contraction.batch


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
    ours = processor in AMD and machine.vector_bits == 512
    if rows == 1 and right.dtype is DType.F16 and not along_columns and not ours:
        return "ATen has a kernel for one row of float16"
    in_pairs = right.dtype is DType.BF16 and machine.has("avx512bf16") and processor in AMD
    if in_pairs and rows > _most_of_bfloat16(contraction, along_columns):
        return "ATen's products of bfloat16 have instructions of their own"
    return ""


def _most_of_bfloat16(contraction: Contraction, along_columns: bool) -> int:
    """Rows that AMD's processors multiply as fast as oneDNN does by instructions for pairs."""
    if contraction.batch:  # whose products are small
        return 8 if along_columns else 3
    return 12 if along_columns else 8


def _multiplied_as_fast(
    contraction: Contraction, buffers: Mapping[str, Buffer], rows: int, machine: Machine, processor: str
) -> bool:
    """Whether more than :data:`FEW_FOR_TILES` rows take no longer than with ATen."""
    right = contraction.right
    if machine.vector_bits < 256 or not all(isinstance(instr, Load) for instr in right.body):
        return machine.vector_bits >= 256
    if right.dtype is DType.F16:
        return lacks_float16(machine)
    if right.dtype is DType.BF16 and machine.has("f16c") and not machine.has("avx512bw"):
        return True
    along_columns = lies_along(contraction.columns, right, buffers)
    if processor not in AMD or machine.vector_bits != 512 or (contraction.batch and not along_columns):
        return False
    return right.dtype is not DType.BF16 or rows <= _most_of_bfloat16(contraction, along_columns)


def lacks_float16(machine: Machine) -> bool:
    """Whether products of float16 have to be computed in float32, and casts are instructions."""
    return machine.vector_bits >= 256 and machine.has("f16c") and not machine.has("avx512fp16")


def lies_along(loops: Sequence[Range], operand: Operand, buffers: Mapping[str, Buffer]) -> bool:
    """Whether neighbours of the last loop are neighbours in a factor's memory."""
    along = Symbol(loops[-1].symbol)
    steps = [buffers[load.buffer].offset(load.indices).coefficient(along) for load in loads(operand.body)]
    return any(step is not None and step == 1 for step in steps)
