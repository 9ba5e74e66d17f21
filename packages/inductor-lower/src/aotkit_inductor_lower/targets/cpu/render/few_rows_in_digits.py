"""Products of one row of bfloat16 with a matrix of 4 bits in panels, in whole numbers, four steps of the sum at a time.

Note [Sums in whole numbers]
    ``vpdpbusd`` multiplies bytes and adds the products up in groups of four, exactly. Numbers of 4 bits are bytes; a
    group of the left factor is turned into whole numbers of 23 bits by a power of two, and these into three digits to
    the base of 256, each a signed byte. The first two are multiplied with all numbers, the last one only with those of
    the steps where it is not 0 (Note [Digits of groups]). So two instructions multiply 64 pairs, as many as products of
    bfloat16 need, which take twice the time each, and bytes need not be looked up in a table. The sum of a group is
    exact but for one rounding. Each number is 8 too large, which the sums begin with.

    Two lines of memory have four steps of a panel. Interleaved they have two vectors with all steps of 16 columns each:
    the first and the third eight of 32, and the second and the fourth. Sums are put into order behind each group.

    A byte is ``16 * upper + lower``. It is multiplied as it is, and with its last bits cleared, which is 16 times the
    product with the upper number, and the product with the lower one is the difference: no bits are moved.

    A bfloat16 has 8 bits, so what is at least 2**-15 of the largest of its group, or 0, is a whole number then. Where
    one is smaller, the group is multiplied as in Note [Pairs of steps].
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....kernel_ir.matmul_site import FewRowsSite
from ....symbolic import Symbol
from ..machine import Machine
from .context import Vector
from .digits import dot_bytes, whole_sum
from .emitter import Ssa, imm
from .few_rows import LINE, carried
from .few_rows_in_pairs import BYTES, FewRowsInPairs, multiplies_pairs
from .few_rows_in_panels import Place
from .groups_in_digits import DIGITS, FOUR, MOST, GroupsInDigits

__all__ = ["FewRowsInDigits", "multiplies_digits", "suits_digits"]

REORDER = "llvm.x86.avx512.permvar.qi.512"
STEPS = FOUR  # of the sum in one instruction
FACTORS = 17, 16  # of the lower and the upper number in both products of a byte: lower + 16 * upper, 16 * upper


def multiplies_digits(target: Machine) -> bool:
    """Whether there are instructions for products of bytes as well."""
    return multiplies_pairs(target) and target.has("avx512vnni")


def suits_digits(site: FewRowsSite) -> bool:
    """Whether one row is multiplied, and groups are whole vectors of floats, and not too many."""
    group = site.inner[-1].extent.constant or 1
    return site.count == 1 and group % 16 == 0 and group <= MOST


class FewRowsInDigits(GroupsInDigits, FewRowsInPairs):
    """Panel by panel, in whole numbers where these are exact."""

    bits, of_digit = 22, 8

    # -- sums ----------------------------------------------------------------------------------------------

    def whole_sums(self, vector: Vector, each: Sequence[Place], begins: Sequence[Ssa], unit: Ssa) -> list[Ssa]:
        """Sums by groups of four steps, of each digit: of the bytes, vector by vector, and of the upper numbers."""
        em, ops, count = self.em, self.ops, len(each)
        first = [self._begin(begin, factor) for begin in begins for factor in FACTORS for _ in range(count // 2)]
        body = functools.partial(self._add_first_digits, vector)
        size = self.ctx.scalar(self.site.inner[-1].extent)
        sums = em.loop(imm(0), size, 2 * STEPS, carried(first[count:]), body, "k")
        sums = [*self._sums_of_last_digits(vector, first[:count]), *sums]
        by_digit = [self._parts(sums[digit * count :][:count]) for digit in range(DIGITS)]
        return self._in_order([ops.op("fmul", whole_sum(ops, digits), unit) for digits in zip(*by_digit, strict=True)])

    def _begin(self, begin: Ssa, factor: int) -> Ssa:
        return self.em.splat(self.em.here("i32", f"mul {begin.typed}, {factor}"), self.across)

    def _add_first_digits(self, vector: Vector, k: Ssa, sums: list[Ssa]) -> list[Ssa]:
        for some in range(2):
            sums = self._add_digits(vector, range(1, DIGITS), self.em.add(k, imm(some * STEPS)), sums)
        return sums

    def _sums_of_last_digits(self, vector: Vector, first: Sequence[Ssa]) -> list[Ssa]:
        """Those of the steps where one is not 0."""
        em, group = self.em, self.ctx.symbols[Symbol(self.site.inner[0].symbol)]
        with_last = em.here("i64", f"load i64, ptr {em.element('i64', self.with_last, group).text}")
        em.declare("llvm.ctpop.i64", "i64", ["i64"])
        em.declare("llvm.cttz.i64", "i64", ["i64", "i1"])

        def add(_: Ssa, before: list[Ssa]) -> list[Ssa]:
            left, *sums = before
            place = em.here("i64", f"call i64 @llvm.cttz.i64({left.typed}, i1 true)")
            less = em.here("i64", f"sub {left.typed}, 1")
            others = em.here("i64", f"and {left.typed}, {less.text}")
            return [others, *self._add_digits(vector, range(1), em.mul(place, imm(STEPS)), sums)]

        count = em.here("i64", f"call i64 @llvm.ctpop.i64({with_last.typed})")
        return em.loop(imm(0), count, 1, carried([with_last, *first]), add, "last")[1:]

    def _add_digits(self, vector: Vector, digits: Sequence[int], k: Ssa, sums: Sequence[Ssa]) -> list[Ssa]:
        """Four steps of the sum, of some digits."""
        numbers = self._bytes_of_numbers(vector, k)
        left = [self._steps_of_left(digit, k) for digit in digits]
        products = ((number, steps) for steps in left for number in numbers)
        return [dot_bytes(self.ops, total, *pair) for total, pair in zip(sums, products, strict=True)]

    def _bytes_of_numbers(self, vector: Vector, k: Ssa) -> list[Ssa]:
        """Four steps of each of 16 columns: bytes by vector, and their upper numbers. See Note [Sums in whole numbers]
        for the order of columns."""
        em, both = self.em, list[Ssa]()
        lines = [self.line_of(em.add(k, imm(step))) for step in (0, STEPS // 2)]
        em.declare(REORDER, BYTES, [BYTES, BYTES])
        for copy in range(vector.interleave):
            halves = [lane + byte for lane in range(0, LINE, 16) for byte in range(8 * copy, 8 * copy + 8)]
            pairs = em.shuffle(lines[0], lines[1], "i8", [place for byte in halves for place in (byte, LINE + byte)])
            both.append(em.pure(BYTES, f"call {BYTES} @{REORDER}({pairs.typed}, {self._order().typed})", pairs))
        return [*both, *(self.ops.op("and", byte, em.splat(imm(-16, "i8"), LINE)) for byte in both)]

    def _parts(self, sums: Sequence[Ssa]) -> list[Ssa]:
        """The sums of both parts of a panel, 8 too large, of those of bytes and upper numbers."""
        ops, count, by = self.ops, len(sums) // 2, self.em.splat(imm(4, "i32"), self.across)
        lower = [ops.op("sub", *pair) for pair in zip(sums[:count], sums[count:], strict=True)]
        return [*lower, *(ops.op("ashr", upper, by) for upper in sums[count:])]

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
