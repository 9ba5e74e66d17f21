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
from ....symbolic import Symbol
from ..machine import Machine
from .context import Vector
from .emitter import Ssa, imm, vector_type
from .few_rows import LINE, carried
from .few_rows_in_pairs import BYTES, FewRowsInPairs, Place, multiplies_pairs
from .few_rows_of_bytes import DOT

__all__ = ["FewRowsInDigits", "multiplies_digits", "suits_digits"]

DIGITS = 3
REORDER = "llvm.x86.avx512.permvar.qi.512"
STEPS = 4  # of the sum in one instruction
BITS = 21  # the power of two that the largest number of a group becomes, or more
LEAST = 27  # the biased exponent of 2**-100, below which Note [Pairs of steps] computes each weight
FRACTION = 23  # bits of a float behind its exponent


def multiplies_digits(target: Machine) -> bool:
    """Whether there are instructions for products of bytes as well."""
    return multiplies_pairs(target) and target.has("avx512vnni")


def suits_digits(site: FewRowsSite) -> bool:
    """Whether one row is multiplied, and groups are whole vectors of floats."""
    return site.count == 1 and (site.inner[-1].extent.constant or 1) % 16 == 0


class FewRowsInDigits(FewRowsInPairs):
    """Panel by panel, in whole numbers where these are exact."""

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """For each group the digits, what sums begin with, the power of two that undoes the first, and whether the
        digits are the numbers."""
        em, groups = self.em, self.before_first()
        self.plane = em.mul(groups, self.padded())
        self.digits = em.aligned(self.memory(em.add(em.mul(self.plane, imm(DIGITS)), imm(LINE))), LINE)
        self.begins = self.memory(em.mul(groups, imm(4 * DIGITS)))
        self.unit_of_group = self.memory(em.mul(groups, imm(4)))
        self.exact = self.memory(groups)
        super().allocate(pointers)

    # -- the left factor -----------------------------------------------------------------------------------

    def group_copied(self, start: Ssa, group: Ssa, largest: Ssa) -> None:
        """Writes the digits of a group whose copy is at ``start``."""
        em, ops = self.em, self.ops
        bits = em.here("i32", f"bitcast {largest.typed} to i32")
        exponent = em.here("i32", f"and {bits.typed}, {255 << FRACTION}")
        em.declare("llvm.umax.i32", "i32", ["i32", "i32"])
        exponent = em.here("i32", f"call i32 @llvm.umax.i32({exponent.typed}, i32 {LEAST << FRACTION})")
        power = em.here("i32", f"sub i32 {((BITS + 2 * 127) << FRACTION) - (1 << 32)}, {exponent.text}")
        unit = em.here("i32", f"sub {exponent.typed}, {BITS << FRACTION}")
        em.effect(f"store {unit.typed}, ptr {em.element('i32', self.unit_of_group, group).text}")
        scale = em.splat(em.here("float", f"bitcast {power.typed} to float"), self.across)
        wide = vector_type("i32", self.across)
        none = Ssa("zeroinitializer", wide)

        def write(k: Ssa, before: list[Ssa]) -> list[Ssa]:
            assert self.copied is not None
            place = em.add(start, k)
            scaled = ops.op("fmul", self.load(self.copied, place), scale)
            rest = em.pure(wide, f"fptosi {scaled.typed} to {wide}", scaled)
            back = em.pure(self.vector_type, f"sitofp {rest.typed} to {self.vector_type}", rest)
            differs = ops.compare("fcmp une", back, scaled)
            seen = ops.op("or", before[0], em.pure(wide, f"sext {differs.typed} to {wide}", differs))
            sums = []
            for digit, total in enumerate(before[1:]):
                value = rest
                if digit < DIGITS - 1:
                    last = ops.convert("trunc", rest, "i8")
                    value = em.pure(wide, f"sext {last.typed} to {wide}", last)
                    rest = ops.op("ashr", ops.op("sub", rest, value), em.splat(imm(8, "i32"), self.across))
                byte = ops.convert("trunc", value, "i8")
                em.effect(f"store {byte.typed}, ptr {self._digit(digit, place).text}, align {self.across}")
                sums.append(ops.op("add", total, value))
            return [seen, *sums]

        seen, *sums = em.loop(imm(0), self.padded(), self.across, carried([none] * (1 + DIGITS)), write, "digits")
        for digit, total in enumerate(sums):
            eightfold = em.here("i32", f"mul {self._lanes('add', total).typed}, -8")
            place = em.add(em.mul(group, imm(DIGITS)), imm(digit))
            em.effect(f"store {eightfold.typed}, ptr {em.element('i32', self.begins, place).text}")
        exact = em.here("i1", f"icmp eq {self._lanes('or', seen).typed}, 0")
        byte = em.here("i8", f"zext {exact.typed} to i8")
        em.effect(f"store {byte.typed}, ptr {em.element('i8', self.exact, group).text}")

    def _digit(self, digit: int, place: Ssa) -> Ssa:
        return self.em.element("i8", self.digits, self.em.add(self.em.mul(self.plane, imm(digit)), place))

    def _lanes(self, op: str, value: Ssa) -> Ssa:
        symbol = f"llvm.vector.reduce.{op}.v{self.across}i32"
        self.em.declare(symbol, "i32", [value.type])
        return self.em.here("i32", f"call i32 @{symbol}({value.typed})")

    # -- sums ----------------------------------------------------------------------------------------------

    def _sum_group(self, vector: Vector, rows: range, *, factored: bool) -> None:
        if not factored:
            super()._sum_group(vector, rows, factored=False)
            return
        group = self.ctx.symbols[Symbol(self.site.inner[0].symbol)]
        flag = self.em.here("i8", f"load i8, ptr {self.em.element('i8', self.exact, group).text}")
        exact = self.em.here("i1", f"icmp ne {flag.typed}, 0")
        in_pairs = functools.partial(super()._sum_group, vector, rows, factored=True)
        self.em.choose(exact, None, functools.partial(self._sum_whole_group, vector, rows, group), in_pairs)

    def _sum_whole_group(self, vector: Vector, rows: range, group: Ssa) -> None:
        """One group in whole numbers."""
        em, each = self.em, self.places_of(vector, rows)
        begins = []
        for digit in range(DIGITS):
            place = em.element("i32", self.begins, em.add(em.mul(group, imm(DIGITS)), imm(digit)))
            begins += [em.splat(em.here("i32", f"load i32, ptr {place.text}"), self.across)] * len(each)
        size = self.ctx.scalar(self.site.inner[-1].extent)
        body = functools.partial(self._add_digits, vector, each)
        sums = em.loop(imm(0), size, 2 * STEPS, carried(begins), body, "k")
        unit = em.here("float", f"load float, ptr {em.element('float', self.unit_of_group, group).text}")
        by_place = zip(*(sums[digit * len(each) :][: len(each)] for digit in range(DIGITS)), strict=True)
        totals = [self._total(digits, em.splat(unit, self.across)) for digits in by_place]
        self.add_groups(vector, each, self._in_order(totals), factored=True)

    def _add_digits(self, vector: Vector, each: Sequence[Place], k: Ssa, sums: list[Ssa]) -> list[Ssa]:
        for some in range(2):
            at = self.em.add(k, imm(some * STEPS))
            numbers = self._bytes_of_numbers(vector, at)
            left = [self._steps_of_left(digit, at) for digit in range(DIGITS)]
            products = [(numbers[part, copy], left[digit]) for digit in range(DIGITS) for _, part, copy in each]
            sums = [self._dot_bytes(total, *pair) for total, pair in zip(sums, products, strict=True)]
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
        place = self._digit(digit, self.left_offset(imm(0), k))
        steps = em.splat(em.here("i32", f"load i32, ptr {place.text}, align {STEPS}"), self.across)
        return em.pure(BYTES, f"bitcast {steps.typed} to {BYTES}", steps)

    def _dot_bytes(self, total: Ssa, numbers: Ssa, left: Ssa) -> Ssa:
        self.em.declare(DOT, total.type, [total.type, BYTES, BYTES])
        text = f"call {total.type} @{DOT}({total.typed}, {numbers.typed}, {left.typed})"
        return self.em.pure(total.type, text, total, numbers, left)

    def _total(self, digits: Sequence[Ssa], unit: Ssa) -> Ssa:
        """The sum that three of digits are, rounded once, in the left factor's unit."""
        ops, splat = self.ops, functools.partial(self.em.splat, lanes=self.across)
        last, middle, first = digits
        low = ops.op("add", ops.op("shl", middle, splat(imm(8, "i32"))), last)
        high = ops.op("add", first, ops.op("ashr", low, splat(imm(16, "i32"))))
        low = ops.op("and", low, splat(imm(0xFFFF, "i32")))
        parts = [self.em.pure(self.vector_type, f"sitofp {x.typed} to {self.vector_type}", x) for x in (high, low)]
        return ops.op("fmul", self.multiply(parts[0], splat(Ssa("65536.0", "float")), parts[1]), unit)
