"""Products of one row of bfloat16 with a matrix of 4 bits in panels, in whole numbers, four steps of the sum at a time.

Note [Sums in whole numbers]
    ``vpdpbusd`` multiplies bytes and adds the products up in groups of four, exactly. Numbers of 4 bits are bytes; a
    group of the left factor is turned into whole numbers of 22 bits by a power of two, and these into three digits to
    the base of 256, each a signed byte. So three instructions multiply 64 pairs, where products of bfloat16 need two
    that take twice the time each, and bytes need not be looked up in a table. The sum of a group is exact but for one
    rounding. Each number is 8 too large, which the sums begin with.

    Two lines of memory have four steps of a panel. Interleaved they have two vectors with all steps of 16 columns each:
    the first and the third eight of 32, and the second and the fourth. Sums are put into order behind each group.

    A bfloat16 has 8 bits, so what is at least 2**-14 of the largest of its group, or 0, is a whole number then. Where
    one is smaller, the group is multiplied as in Note [Pairs of steps].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....kernel_ir.matmul_site import FewRowsSite
from ..machine import Machine
from .context import Vector
from .digits import dot_bytes, whole_sum
from .emitter import Ssa, imm, vector_type
from .few_rows import LINE, carried
from .few_rows_in_pairs import BYTES, FewRowsInPairs, multiplies_pairs
from .few_rows_in_panels import Place
from .groups_in_digits import DIGITS, GroupsInDigits

__all__ = ["FewRowsInDigits", "multiplies_digits", "suits_digits"]

REORDER = "llvm.x86.avx512.permvar.qi.512"
STEPS = 4  # of the sum in one instruction


def multiplies_digits(target: Machine) -> bool:
    """Whether there are instructions for products of bytes as well."""
    return multiplies_pairs(target) and target.has("avx512vnni")


def suits_digits(site: FewRowsSite) -> bool:
    """Whether one row is multiplied, and groups are whole vectors of floats."""
    return site.count == 1 and (site.inner[-1].extent.constant or 1) % 16 == 0


class FewRowsInDigits(GroupsInDigits, FewRowsInPairs):
    """Panel by panel, in whole numbers where these are exact."""

    bits, of_digit = 21, 8

    # -- sums ----------------------------------------------------------------------------------------------

    def whole_sums(self, vector: Vector, each: Sequence[Place], begins: Sequence[Ssa], unit: Ssa) -> list[Ssa]:
        """Sums by groups of four steps."""
        first = [self.em.splat(value, self.across) for value in begins for _ in each]
        size = self.ctx.scalar(self.site.inner[-1].extent)
        body = functools.partial(self._add_digits, vector, each)
        sums = self.em.loop(imm(0), size, 2 * STEPS, carried(first), body, "k")
        by_place = zip(*(sums[digit * len(each) :][: len(each)] for digit in range(DIGITS)), strict=True)
        return self._in_order([self.ops.op("fmul", whole_sum(self.ops, digits), unit) for digits in by_place])

    def _add_digits(self, vector: Vector, each: Sequence[Place], k: Ssa, sums: list[Ssa]) -> list[Ssa]:
        for some in range(2):
            at = self.em.add(k, imm(some * STEPS))
            numbers = self._bytes_of_numbers(vector, at)
            left = [self._steps_of_left(digit, at) for digit in range(DIGITS)]
            products = [(numbers[part, copy], left[digit]) for digit in range(DIGITS) for _, part, copy in each]
            sums = [dot_bytes(self.ops, total, *pair) for total, pair in zip(sums, products, strict=True)]
        return sums

    def _bytes_of_numbers(self, vector: Vector, k: Ssa) -> dict[tuple[int, int], Ssa]:
        """By part and vector: four steps of each of 16 columns, 8 too large. See Note [Sums in whole numbers] for the
        order of columns."""
        em, found = self.em, {}
        lines = [self.line_of(em.add(k, imm(step))) for step in (0, STEPS // 2)]
        last = em.splat(imm(15, "i8"), LINE)
        for copy in range(vector.interleave):
            halves = [lane + byte for lane in range(0, LINE, 16) for byte in range(8 * copy, 8 * copy + 8)]
            pairs = em.shuffle(lines[0], lines[1], "i8", [place for byte in halves for place in (byte, LINE + byte)])
            em.declare(REORDER, BYTES, [BYTES, BYTES])
            both = em.pure(BYTES, f"call {BYTES} @{REORDER}({pairs.typed}, {self._order().typed})", pairs)
            words = self.em.pure(vector_type("i16", LINE // 2), f"bitcast {both.typed} to <{LINE // 2} x i16>", both)
            upper = self.ops.op("lshr", words, self.em.splat(imm(4, "i16"), LINE // 2))
            found[0, copy] = self.ops.op("and", both, last)
            found[1, copy] = self.ops.op("and", self.em.pure(BYTES, f"bitcast {upper.typed} to {BYTES}", upper), last)
        return found

    def _in_order(self, totals: Sequence[Ssa]) -> list[Ssa]:
        """Sums of neighbouring columns, of such in which halves of neighbours take turns."""
        half, found = self.across // 2, []
        for first, second in zip(totals[::2], totals[1::2], strict=True):
            for start in (0, half):
                lanes = [*range(start, start + half), *range(self.across + start, self.across + start + half)]
                found.append(self.em.shuffle(first, second, self.element, lanes))
        return found

    def _order(self) -> Ssa:
        """Where the bytes of the steps of each column lie among two lines that were interleaved. LLVM must not know, or
        it makes one permutation of both, which takes longer than the two."""
        places = [2 * column + step % 2 * LINE // 2 + step // 2 for column in range(16) for step in range(STEPS)]
        constant = Ssa(f"<{', '.join(f'i8 {place}' for place in places)}>", BYTES)
        return self.em.pure(BYTES, f'call {BYTES} asm "", "=v,0"({constant.typed})')

    def _steps_of_left(self, digit: int, k: Ssa) -> Ssa:
        em = self.em
        place = self.digit(digit, self.left_offset(imm(0), k))
        steps = em.splat(em.here("i32", f"load i32, ptr {place.text}, align {STEPS}"), self.across)
        return em.pure(BYTES, f"bitcast {steps.typed} to {BYTES}", steps)
