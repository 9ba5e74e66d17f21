"""Products of few rows of bfloat16 with a matrix of 4 bits in panels, two steps of the sum at a time.

Note [Pairs of steps]
    ``vdpbf16ps`` multiplies pairs of bfloat16 and adds both products to a float. All numbers of 4 bits are such, and
    two steps of a panel are 64 bytes that follow each other, so a line of memory is turned into pairs by one
    permutation for 16 columns and looked up in a table of bfloat16 as in Note [Panels of few bits]: half as many
    instructions as with one step at a time, which for weights of 4 bits take more time than the memory does. Lines are
    read in order, and nothing is asked for ahead (Zen 4 is slower with it).

    The instruction takes subnormal numbers for 0, and gives 0 for subnormal sums. Where each number of the left factor
    is 0 or at least 2**-100 there are none: products with whole numbers, and so their sums, are multiples of 2**-107.
    Where one is smaller, weights are computed one by one, as where one is infinite.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....ir import Compute, DType, Index, Instr, Load
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel
from ....symbolic import Symbol, to_expr
from ..machine import Machine
from ..products import computed_by
from .body import address_of
from .context import Vector
from .emitter import Ssa, imm, vector_type
from .few_rows import LINE, carried
from .few_rows_in_panels import Panels, Place
from .panels_apart import PanelsApart

__all__ = ["FewRowsInPairs", "is_bfloat16", "multiplies_pairs", "pairs_of"]

LEAST = "0x39B0000000000000"  # 2**-100
DOT, LOOK_UP = "llvm.x86.avx512bf16.dpbf16ps.512", "llvm.x86.avx512.permvar.hi.512"
PAIRS, WORDS, BYTES = (vector_type(*kind) for kind in (("bfloat", 32), ("i16", 32), ("i8", LINE)))
UPPER = range(-8, 8)


def _bfloat16_bits(number: int) -> int:
    """Of a whole number that bfloat16 has."""
    size = abs(number)
    if not size:
        return 0
    exponent = size.bit_length() - 1
    return (number < 0) << 15 | (exponent + 127) << 7 | (size << 7 >> exponent) & 127


TABLE = Ssa(f"<{', '.join(f'i16 {_bfloat16_bits(number)}' for number in (*UPPER, *UPPER))}>", WORDS)


def multiplies_pairs(target: Machine) -> bool:
    """Whether there are instructions for pairs of bfloat16, and for any order of bytes."""
    return target.vector_bits == 512 and target.has("avx512bf16") and target.has("avx512vbmi")


def pairs_of(kernel: Kernel, site: FewRowsSite, panels: Panels, columns: int = LINE // 2) -> Load | None:
    """The load whose bytes have the numbers of both parts of a panel, those of the second in the upper bits, if such a
    part has so many columns that several steps of the sum can be read at once: see Note [Pairs of steps]."""
    width, group = site.columns.extent.constant, site.inner[-1].extent.constant
    if panels.bits is None or panels.parts.extent.constant != 2 or width != columns or group is None or group % 4:
        return None
    byte = _byte_of(computed_by(kernel, panels.bits), panels)
    if byte is None or not is_bfloat16(computed_by(kernel, site.left)):
        return None
    steps = [byte.indices[0].coefficient(Symbol(loop.symbol)) for loop in (site.columns, site.inner[-1])]
    return byte if steps == [1, width] else None


def _byte_of(made: Sequence[Instr], panels: Panels) -> Load | None:
    """The load of ``byte >> 4 * part``."""
    by_name = {i.result: i for i in made if isinstance(i, Compute | Index | Load)}
    moved = by_name.get(panels.bits or "")
    if not isinstance(moved, Compute) or moved.op != "shr":
        return None
    wide, by = (by_name.get(arg) for arg in moved.args)
    whole = isinstance(by, Index) and by.expr == to_expr(Symbol(panels.parts.symbol)) * 4
    if not whole or not isinstance(wide, Compute) or wide.op != "cast":
        return None
    byte = by_name.get(wide.args[0])
    return byte if isinstance(byte, Load) and byte.dtype is DType.U8 and byte.mask is None else None


def is_bfloat16(left: Sequence[Instr]) -> bool:
    """Whether the left factor is bfloat16, widened."""
    types = {i.result: i.dtype for i in left if isinstance(i, Compute | Load)}
    last = left[-1]
    return isinstance(last, Compute) and last.op == "cast" and types.get(last.args[0]) is DType.BF16


class FewRowsInPairs(PanelsApart):
    """Panel by panel, in pairs of steps where all that is multiplied is finite and none of it tiny."""

    def __init__(
        self,
        kernel: Kernel,
        site: FewRowsSite,
        target: Machine,
        declarations: dict[str, str],
        panels: Panels,
        byte: Load,
    ) -> None:
        super().__init__(kernel, site, target, declarations, panels)
        self.byte = byte
        self.sets = 2 if self.count <= 2 else 1  # of sums, which wait for each other else

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """The left factor in bfloat16, beside its copy."""
        self.halves = self.memory(self.em.mul(self.before(imm(2 * self.count)), self.padded()))
        super().allocate(pointers)

    def nothing_seen(self) -> list[Ssa]:
        """The least size of a number but 0, by lanes."""
        return [self.em.splat(Ssa("1.0", "float"), self.across)]

    def watch(self, value: Ssa, place: Ssa, seen: list[Ssa]) -> list[Ssa]:
        """Writes it as bfloat16, too."""
        em, ops, (least,) = self.em, self.ops, seen
        bits = em.pure(vector_type("i32", self.across), f"bitcast {value.typed} to <{self.across} x i32>", value)
        upper = ops.op("lshr", bits, em.splat(imm(16, "i32"), self.across))
        half = ops.convert("trunc", upper, "i16")
        em.effect(f"store {half.typed}, ptr {em.element('i16', self.halves, place).text}, align 16")
        size = ops.intrinsic("fabs", value)
        smaller = ops.op("and", ops.compare("fcmp olt", size, least), ops.compare("fcmp one", size, self.zero()))
        return [ops.select(smaller, size, least)]

    def spoiled(self, checked: Ssa, seen: list[Ssa]) -> Ssa:
        """Where a number is tiny."""
        least = self.em.splat(Ssa(LEAST, "float"), self.across)
        tiny = self.ops.any(self.ops.compare("fcmp olt", seen[0], least))
        return self.em.here("float", f"select {tiny.typed}, float 0x7FF8000000000000, {checked.typed}")

    def group_products(self, vector: Vector, each: Sequence[Place], *, factored: bool) -> list[Ssa]:
        """Sums of pairs of products."""
        if not factored:
            return super().group_products(vector, each, factored=factored)
        size, steps = self.ctx.scalar(self.site.inner[-1].extent), 2 * self.sets
        body = functools.partial(self._add_pairs, vector, each)
        sums = self.em.loop(imm(0), size, steps, carried([self.zero()] * (self.sets * len(each))), body, "k")
        count = len(each)
        return [functools.reduce(functools.partial(self.ops.op, "fadd"), sums[k::count]) for k in range(count)]

    def _add_pairs(self, vector: Vector, each: Sequence[Place], k: Ssa, sums: list[Ssa]) -> list[Ssa]:
        result = []
        for pair in range(self.sets):
            at = self.em.add(k, imm(2 * pair))
            numbers = self._pairs_of_numbers(vector, at)
            left = {row: self._pair_of_row(row, at) for row in dict.fromkeys(row for row, _, _ in each)}
            for (row, part, copy), total in zip(each, sums[pair * len(each) :], strict=False):
                result.append(self._dot(total, left[row], numbers[part, copy]))
        return result

    def _pairs_of_numbers(self, vector: Vector, k: Ssa) -> dict[tuple[int, int], Ssa]:
        """By part and vector: two steps of each of 16 columns."""
        em, start, read = self.em, vector.base.constant or 0, self.line_of(k)
        found = {}
        for copy in range(vector.interleave):
            columns = range(start + copy * self.across, start + (copy + 1) * self.across)
            twice = [place for column in columns for place in (column, column, column + LINE // 2, column + LINE // 2)]
            both = em.shuffle(read, read, "i8", twice)
            words = em.pure(WORDS, f"bitcast {both.typed} to {WORDS}", both)
            found[0, copy] = self._numbers_of(words)
            found[1, copy] = self._numbers_of(self.ops.op("lshr", words, em.splat(imm(4, "i16"), 32)))
        return found

    def line_of(self, k: Ssa) -> Ssa:
        """Two steps of a panel, as they lie in memory."""
        self.enter_part(Vector(self.columns, imm(0), self.across, 1), 0, k)
        line = address_of(self.ctx, self.byte, self.byte.indices[0], 0)
        read = self.em.here(BYTES, f"load {BYTES}, ptr {line.text}, align 1")
        self.leave()
        return read

    def _numbers_of(self, words: Ssa) -> Ssa:
        """What the last 4 bits of each word mean; a bit before them does not matter, since the table has all twice."""
        self.em.declare(LOOK_UP, WORDS, [WORDS, WORDS])
        found = self.em.pure(WORDS, f"call {WORDS} @{LOOK_UP}({TABLE.typed}, {words.typed})", words)
        return self.em.pure(PAIRS, f"bitcast {found.typed} to {PAIRS}", found)

    def _pair_of_row(self, row: int, k: Ssa) -> Ssa:
        em = self.em
        place = em.element("i16", self.halves, self.left_offset(imm(row), k))
        pair = em.splat(em.here("i32", f"load i32, ptr {place.text}, align 4"), self.across)
        return em.pure(PAIRS, f"bitcast {pair.typed} to {PAIRS}", pair)

    def _dot(self, total: Ssa, left: Ssa, right: Ssa) -> Ssa:
        wide = self.vector_type
        self.em.declare(DOT, wide, [wide, PAIRS, PAIRS])
        text = f"call {wide} @{DOT}({total.typed}, {left.typed}, {right.typed})"
        return self.em.pure(wide, text, total, left, right)
