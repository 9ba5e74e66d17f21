"""Products of one row of bfloat16 with a matrix of 4 bits in panels, in whole numbers of 16 bits.

Note [Sums of short digits]
    ``vpmaddubsw`` multiplies bytes without a sign with signed ones, and adds both products of a pair to a number of 16
    bits, which ends at 32767. Numbers of 4 bits are bytes of at most 15. With digits to the base of 128 (Note [Digits
    of groups]) a sum over :data:`CHUNK` steps is at most 32 * 15 * 64 = 30720, so nothing is lost. Then the sums of the
    three digits become one of 32 bits. Those of a group of :data:`LONGEST` steps fit, as a bfloat16 is at most 255 *
    2**12 then: 256 * 8 * 255 * 2**12 is less than 2**31. What is at least 2**-12 of the largest of its group is a whole
    number.

    Thirty-two bytes have two steps of both parts of a panel, as ATen packs it for AVX2. They are interleaved, so that a
    pair is both steps of a column. The left factor's digits are kept in pairs, too, each pair twice, since 32 bits are
    put into all lanes while they are loaded, but 16 bits are not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from ....ir import Load
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel
from ..machine import Machine
from .body import address_of
from .context import Vector
from .emitter import Ssa, imm, vector_type
from .few_rows import carried
from .few_rows_in_panels import Panels, Place
from .groups_in_digits import DIGITS, GroupsInDigits

__all__ = ["COLUMNS", "FewRowsInShortDigits", "multiplies_short_digits", "suits_short_digits"]

COLUMNS = 16  # of a part of a panel
CHUNK = 32  # steps whose sums fit 16 bits
LONGEST = 256  # steps whose sums fit 32 bits
STEPS = 2  # of the sum in one vector
SETS = 4  # of them in an iteration
DOT, WIDEN = "llvm.x86.avx2.pmadd.ub.sw", "llvm.x86.avx2.pmadd.wd"
BYTES, WORDS = vector_type("i8", 32), vector_type("i16", 16)
PAIRS = [place for pair in range(0, 8, 2) for place in (pair, pair + 1) * 2]  # each twice
ORDER = [step + column for column in range(COLUMNS) for step in (0, COLUMNS)]


def multiplies_short_digits(target: Machine) -> bool:
    """Whether vectors are such as this needs."""
    return target.vector_bits == 256 and target.has("avx2")


def suits_short_digits(site: FewRowsSite) -> bool:
    """Whether one row is multiplied, and sums over groups have room."""
    group = site.inner[-1].extent.constant or 1
    return site.count == 1 and group <= LONGEST and group % (STEPS * SETS) == 0


class FewRowsInShortDigits(GroupsInDigits):
    """Panel by panel, in whole numbers where these are exact."""

    bits, of_digit, times = 19, 7, 2

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

    def keep_digit(self, bytes_: Ssa, digit: int, place: Ssa) -> None:
        """Writes each pair twice."""
        super().keep_digit(self.em.shuffle(bytes_, bytes_, "i8", PAIRS), digit, place)

    def whole_sums(self, vector: Vector, each: Sequence[Place], begins: Sequence[Ssa], unit: Ssa) -> list[Ssa]:
        """Sums by chunks, of columns with even numbers apart from the others until the end."""
        em, size, wide = self.em, self.site.inner[-1].extent.constant or 0, self.vector_type
        begin = em.splat(self._joined(begins), self.across)
        found = [[begin, begin] for _ in range(self.count_of_parts)]
        for low in range(0, size, CHUNK):
            found = self._add_chunk(low, min(low + CHUNK, size), found)
        totals = {}
        for part, (even, odd) in enumerate(found):
            for copy in range(vector.interleave):
                lanes = [lane + self.across * other for lane in range(4 * copy, 4 * copy + 4) for other in (0, 1)]
                total = em.shuffle(even, odd, "i32", lanes)
                value = em.pure(wide, f"sitofp {total.typed} to {wide}", total)
                totals[part, copy] = self.ops.op("fmul", value, unit)
        return [totals[part, copy] for _, part, copy in each]

    def _joined(self, digits: Sequence[Ssa]) -> Ssa:
        """The number that digits are."""
        em = self.em
        moved = [em.here("i32", f"shl {value.typed}, {self.of_digit * place}") for place, value in enumerate(digits)]
        return functools.reduce(lambda a, b: em.here("i32", f"add {a.typed}, {b.text}"), moved)

    def _add_chunk(self, low: int, high: int, before: Sequence[Sequence[Ssa]]) -> list[list[Ssa]]:
        """Sums of each part from one step of a group to another, added to those ``before``."""
        none = Ssa("zeroinitializer", WORDS)
        first = carried([none] * (DIGITS * self.count_of_parts))
        sums = self.em.loop(imm(low), imm(high), STEPS * SETS, first, self._add_digits, "k")
        found = []
        for part, totals in enumerate(before):
            for digit, words in enumerate(sums[part * DIGITS : (part + 1) * DIGITS]):
                totals = [self.ops.op("add", t, self._widened(words, digit, odd)) for odd, t in enumerate(totals)]
            found.append(list(totals))
        return found

    def _widened(self, words: Ssa, digit: int, odd: int) -> Ssa:
        """The sums of every other column, times what a digit stands for."""
        wide, by = vector_type("i32", self.across), 1 << self.of_digit * digit
        factors = ", ".join(f"i16 {by if lane % 2 == odd else 0}" for lane in range(COLUMNS))
        self.em.declare(WIDEN, wide, [WORDS, WORDS])
        return self.em.pure(wide, f"call {wide} @{WIDEN}({words.typed}, {WORDS} <{factors}>)", words)

    def _add_digits(self, k: Ssa, sums: list[Ssa]) -> list[Ssa]:
        for some in range(SETS):
            at = self.em.add(k, imm(some * STEPS))
            left = [self._steps_of_left(digit, at) for digit in range(DIGITS)]
            products = itertools.product(self._bytes_of_numbers(at), left)
            sums = [self._dot(total, *pair) for total, pair in zip(sums, products, strict=True)]
        return sums

    def _bytes_of_numbers(self, k: Ssa) -> list[Ssa]:
        """By part: two steps of each column, 8 too large."""
        em, ops, read = self.em, self.ops, self._two_steps(k)
        both = em.shuffle(read, read, "i8", ORDER)
        words = em.pure(WORDS, f"bitcast {both.typed} to {WORDS}", both)
        moved = ops.op("lshr", words, em.splat(imm(4, "i16"), 16))
        upper = em.pure(BYTES, f"bitcast {moved.typed} to {BYTES}", moved)
        return [ops.op("and", bytes_, em.splat(imm(15, "i8"), 32)) for bytes_ in (both, upper)]

    def _two_steps(self, k: Ssa) -> Ssa:
        """Two steps of a panel, as they lie in memory."""
        self.enter_part(Vector(self.columns, imm(0), self.across, 1), 0, k)
        place = address_of(self.ctx, self.byte, self.byte.indices[0], 0)
        read = self.em.here(BYTES, f"load {BYTES}, ptr {place.text}, align 1")
        self.leave()
        return read

    def _steps_of_left(self, digit: int, k: Ssa) -> Ssa:
        """A digit of two steps in every pair."""
        em = self.em
        place = self.digit(digit, self.left_offset(imm(0), k))
        steps = em.splat(em.here("i32", f"load i32, ptr {place.text}, align 4"), self.across)
        return em.pure(BYTES, f"bitcast {steps.typed} to {BYTES}", steps)

    def _dot(self, total: Ssa, numbers: Ssa, left: Ssa) -> Ssa:
        self.em.declare(DOT, WORDS, [BYTES, BYTES])
        pairs = self.em.pure(WORDS, f"call {WORDS} @{DOT}({numbers.typed}, {left.typed})", numbers, left)
        return self.ops.op("add", total, pairs)
