"""Which products of matrices the CPU computes by kernels of its own.

Note [Which products are ours]
    On AMD's processors with 512-bit vectors our products take less time than ATen's call (MKL's kernels are not written
    for them; `python -m tools.bench.products`), so they are generated, with what comes before and after in them. On
    others ATen's are as fast or faster, and stay. Products of float16 are ours on every processor with vectors of 256
    bits that converts float16 and cannot compute with it: ATen has no kernel for those, and takes 4 to 160 times as
    long as ours, which widen both factors as they copy them (the same command with `--dtype float16`).

    Products of bfloat16 are ours where an instruction multiplies pairs (AVX512-BF16) on AMD's processors and both
    factors lie along the sum, as those of linear layers do: about as fast as oneDNN's, and what comes after them is in
    the same kernel (the same command with `--dtype bfloat16`). For each number of rows oneDNN writes code, which takes
    longer than most products, and it keeps the last 1024; ours is written once. So where that number is known at run
    time only, small ones are ours, too (`python -m tools.bench.dynamic --new-lengths 40 --autocast`, on Zen 4).

    On processors without AVX-512 oneDNN has no kernels for bfloat16, and ATen's products of it take 2 to 110 times as
    long as ours, which widen both factors as they copy them (the same command on Zen 3, AVX2 and FMA;
    :data:`~.choose_few_rows.SHORT_AMD`). So small ones and batches are ours, too, from :data:`WORTH_OF_PAIRS`
    multiplications on.

    Products of float32 stay MKL's on AMD's processors without AVX-512, where most take as long as ours. Wide ones whose
    factors both lie along the sum, as the scores of a vocabulary's words do, are ours: from :data:`WIDE` columns on, of
    up to a thousand rows, they take 0.74 to 1.0 of MKL's time, and ATen writes a bias into the whole result before
    (`python -m tools.bench.products --wide`, on Zen 3).

    A matrix that never changes is packed once (Note [Matrices in panels]): of such products no part is copying, so they
    pay for fewer rows, also where their number is known at run time only, and those of bfloat16 whichever way the
    matrix lies.

    A product is ours from :data:`WORTH` multiplications on, so that what it takes to compile pays, and if no side is so
    short that panels and tiles are mostly padding.

    Products in tile registers are another matter, see Note [Which products are tiles], as are those
    of a few rows, see Note [Products of few rows that are ours].
"""

from __future__ import annotations

from collections.abc import Mapping

from ...ir import Buffer, BufferKind, Contraction, DType, Load, Operand
from ...ir.walk import without_single_iterations
from ...options import LowerOptions
from ...symbolic import product
from ...target import Choice
from .choose_few_rows import AMD, LEAST, SHORT_AMD, choose_few_rows, lacks_float16, lies_along
from .choose_tiles import choose_tiles
from .machine import Machine
from .products import GroupedProduct, multiplies_pairs, product_of

__all__ = ["choose_form"]

SHORT = (24, 48, 32)  # rows, columns, summed: less is not ours without being asked for
SHORT_OF_PACKED = (9, 65, 32)
UNKNOWN_ROWS = 64  # what rows count as whose number is known at run time only
WORTH = 1 << 21
WIDE = 8192  # columns of float32, see Note [Which products are ours]
ROWS_OF_WIDE, STEPS_OF_WIDE = (96, 1024), (128, 768)  # for which that was measured
WORTH_OF_PAIRS = 1 << 15  # of bfloat16 where ATen has no vectors for it, or writes code for each size
LONG = 1024  # numbers that are summed: of more a panel of rows and one of columns do not fit the second-level cache

_FASTER = "kernels of ours take less time than ATen's on "


def choose_form(
    contraction: Contraction, buffers: Mapping[str, Buffer], options: LowerOptions, machine: Machine, processor: str
) -> Choice:
    """``"fma"`` (tiles of vectors), a form in tile registers, or ``"aten"``. ``processor``: what ATen runs on."""
    factors = {contraction.left.dtype, contraction.right.dtype}
    packed = options.pack_constants and is_constant(contraction.right, buffers)
    few = choose_few_rows(contraction, buffers, options, machine, processor, packed)
    if few is not None:
        return few
    tiles = choose_tiles(contraction, buffers, options, machine)
    if tiles is not None:
        return tiles
    emulated = factors == {DType.BF16} and _lacks_bfloat16(machine, processor)
    narrow = factors == {DType.BF16} and not emulated and options.contractions != "generated"
    if narrow and (processor not in AMD or not _multiplies_pairs(contraction, buffers, machine, packed)):
        return Choice("aten", "products of bfloat16 are left to ATen on the CPU")
    sides = contraction.rows, contraction.columns, contraction.reduced
    sizes = [product(loop.size for loop in loops).constant for loops in sides]
    known = [size for size in sizes if size is not None]
    if any(size is not None and size < least for size, least in zip(sizes, LEAST, strict=True)):
        return Choice("aten", "a side of the product fills no tile")
    if options.contractions == "generated":
        return Choice("fma", "every product is generated")
    halves = factors == {DType.F16}
    if emulated:
        large = _count(contraction, [size or UNKNOWN_ROWS for size in sizes]) >= WORTH_OF_PAIRS
        return Choice("fma", _FASTER + processor) if large else Choice("aten", "the product is small")
    faster = lacks_float16(machine) if halves else processor in AMD and machine.vector_bits == 512
    if not (faster or _is_wide(contraction, buffers, sizes, machine, processor)):
        return Choice("aten", f"ATen's products are as fast on {processor}")
    worth = WORTH
    if (packed or narrow) and sizes[0] is None and None not in sizes[1:]:
        sizes[0], known = UNKNOWN_ROWS, [UNKNOWN_ROWS, *known]
        worth = WORTH_OF_PAIRS if narrow else WORTH
    if len(known) < len(sizes):
        return Choice("aten", "a size is known at run time only")
    shortest = SHORT_OF_PACKED if packed else SHORT
    if any(size < short for size, short in zip(known, shortest, strict=True)) or _count(contraction, known) < worth:
        return Choice("aten", "the product is small")
    if not halves and known[2] > LONG and lies_along(contraction.rows, contraction.left, buffers):
        return Choice("aten", "long sums of a factor that is turned over")
    return Choice("fma", _FASTER + processor)


def is_constant(factor: Operand, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a factor is a matrix of the graph's own."""
    (first, *others) = factor.body
    return isinstance(first, Load) and not others and buffers[first.buffer].kind is BufferKind.CONSTANT


def _lacks_bfloat16(machine: Machine, processor: str) -> bool:
    """Whether ATen has no vectors for products of bfloat16 on a processor, and ours have."""
    return processor in SHORT_AMD and machine.vector_bits >= 256 and machine.has("fma")


def _is_wide(
    contraction: Contraction,
    buffers: Mapping[str, Buffer],
    sizes: list[int | None],
    machine: Machine,
    processor: str,
) -> bool:
    """Whether a product of float32 has so many columns that MKL takes longer on processors with vectors of 256 bits."""
    rows, columns, summed = (size or 0 for size in sizes)
    if processor not in SHORT_AMD or machine.vector_bits != 256 or contraction.batch:
        return False
    measured = zip((rows, summed), (ROWS_OF_WIDE, STEPS_OF_WIDE), strict=True)
    if columns < WIDE or not all(least <= size <= most for size, (least, most) in measured):
        return False
    factors = contraction.left, contraction.right
    plain = all(factor.dtype is DType.F32 and len(factor.body) == 1 for factor in factors)
    return plain and all(lies_along(contraction.reduced, factor, buffers) for factor in factors)


def _multiplies_pairs(contraction: Contraction, buffers: Mapping[str, Buffer], machine: Machine, packed: bool) -> bool:
    """Whether a product of bfloat16 is one of pairs that are read as they lie, or packed before."""
    if contraction.batch or not multiplies_pairs(machine):
        return False
    if packed and lies_along(contraction.reduced, contraction.left, buffers):
        return True
    return isinstance(product_of(without_single_iterations(contraction.as_nest()), buffers, machine), GroupedProduct)


def _count(contraction: Contraction, sizes: list[int]) -> int:
    """Multiplications; a batch whose size is not known counts as one."""
    batch = product(loop.size for loop in contraction.batch).constant or 1
    return batch * sizes[0] * sizes[1] * sizes[2]
