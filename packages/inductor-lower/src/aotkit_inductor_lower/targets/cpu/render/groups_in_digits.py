"""A left factor as digits of whole numbers, for products with a matrix of 4 bits in panels.

Note [Digits of groups]
    A group of the left factor is turned into whole numbers by a power of two, and these into three digits, each a
    signed byte, which instructions for products of bytes multiply exactly. A bfloat16 has 8 bits, so what is not much
    smaller than the largest of its group, or is 0, is a whole number then. Where one is not, the group is multiplied
    in another way.

    The last digit is 0 unless a number is below 2**-6 of the largest, as one or two of a usual group of 64 are. So the
    groups have a bit for each four steps that tells whether one of their last digits is not 0.

    The sum of the whole numbers, and the largest, are all that is added up across lanes: the sum of a group follows
    from the first, and whether a product might not be finite from the second.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....symbolic import Symbol
from .context import Vector
from .digits import digits_of, larger_size, next_power, powers_of
from .emitter import Ssa, imm, vector_type
from .few_rows import LINE, carried
from .few_rows_in_panels import FewRowsInPanels, Place

__all__ = ["DIGITS", "FOUR", "MOST", "GroupsInDigits"]

DIGITS = 3
FOUR = 4  # steps of the sum that are multiplied together
MOST = 256  # steps of a group: each four have a bit, and whole numbers a sum of 32


class GroupsInDigits(FewRowsInPanels):
    """A left factor of one row whose groups are whole numbers, too, where these are exact. ``bits``: the power of two
    that the largest number of a group becomes, or more; ``of_digit``: bits of a digit, which has a sign."""

    bits: int
    of_digit: int

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """For each group the digits, what sums begin with, the power of two that undoes the first, whether the digits
        are the numbers, and where last digits are not 0."""
        em, groups = self.em, self.before_first()
        self.plane = em.mul(groups, self.padded())
        self.digits = em.aligned(self.memory(em.add(em.mul(self.plane, imm(DIGITS)), imm(LINE))), LINE)
        self.begins = self.memory(em.mul(groups, imm(4 * DIGITS)))
        self.unit_of_group = self.memory(em.mul(groups, imm(4)))
        self.exact = self.memory(groups)
        self.with_last = self.memory(em.mul(groups, imm(8)))
        super().allocate(pointers)

    # -- the left factor -----------------------------------------------------------------------------------

    def group_copied(self, row: Ssa, group: Ssa, start: Ssa) -> None:
        """Writes the digits of a group, and its sum."""
        em, most = self.em, self._largest(start)
        power, unit = powers_of(self.ops, next_power(self.ops, most), self.bits)
        em.effect(f"store {unit.typed}, ptr {em.element('i32', self.unit_of_group, group).text}")
        total, exact = self._write_digits(start, group, em.splat(power, self.across))
        byte = em.here("i8", f"zext {exact.typed} to i8")
        em.effect(f"store {byte.typed}, ptr {em.element('i8', self.exact, group).text}")

        def of_whole_numbers() -> Ssa:
            whole = em.here("float", f"sitofp {total.typed} to float")
            scale = em.here("float", f"bitcast {unit.typed} to float")
            return em.here("float", f"fmul {whole.typed}, {scale.text}")

        found = em.choose(exact, "float", of_whole_numbers, functools.partial(self._sum, start))
        assert found is not None
        self.keep_sum(row, group, found)

    def _largest(self, start: Ssa) -> Ssa:
        """The bits of the number of a group that is farthest from 0, without a sign, an i32. What else must be known of
        the group is looked at on the way."""
        em, wide = self.em, vector_type("i32", self.across)

        def look(k: Ssa, before: list[Ssa]) -> list[Ssa]:
            assert self.copied is not None
            place = em.add(start, k)
            value = self.load(self.copied, place)
            return [larger_size(self.ops, before[0], value), *self.watch(value, place, before[1:])]

        first = carried([Ssa("zeroinitializer", wide), *self.nothing_seen()])
        most, *seen = em.loop(imm(0), self.padded(), self.across, first, look, "largest")
        largest = self.over_lanes("umax", most)
        size = em.here("float", f"bitcast {largest.typed} to float")
        count = self.site.inner[-1].extent.constant or 0
        self.check(em.here("float", f"fmul {size.typed}, {float(16 * count)}"), seen)
        return largest

    def _write_digits(self, start: Ssa, group: Ssa, scale: Ssa) -> tuple[Ssa, Ssa]:
        """The sum of a group in whole numbers, and whether all of its numbers are such."""
        em, ops, wide = self.em, self.ops, vector_type("i32", self.across)

        def write(k: Ssa, before: list[Ssa]) -> list[Ssa]:
            assert self.copied is not None
            place = em.add(start, k)
            scaled = ops.op("fmul", self.load(self.copied, place), scale)
            whole, digits, differs = digits_of(ops, scaled, DIGITS, self.of_digit)
            bytes_ = [ops.convert("trunc", value, "i8") for value in digits]
            for digit, value in enumerate(bytes_):
                self.keep_digit(value, digit, place)
            with_last = em.here("i64", f"or {before[0].typed}, {self._some_of_four(bytes_[0], k).text}")
            return [with_last, ops.op("or", before[1], differs), ops.op("add", before[2], whole)]

        first = carried([imm(0), *[Ssa("zeroinitializer", wide)] * 2])
        with_last, seen, sums = em.loop(imm(0), self.padded(), self.across, first, write, "digits")
        em.effect(f"store {with_last.typed}, ptr {em.element('i64', self.with_last, group).text}")
        total = self.over_lanes("add", sums)
        rest = total
        for digit in range(DIGITS):  # numbers are 8 too large, so all sums are, which are digits of any size
            last = digit == DIGITS - 1
            value = rest if last else em.here("i32", f"and {rest.typed}, {(1 << self.of_digit) - 1}")
            rest = em.here("i32", f"ashr {rest.typed}, {self.of_digit}")
            eightfold = em.here("i32", f"mul {value.typed}, -8")
            place = em.add(em.mul(group, imm(DIGITS)), imm(digit))
            em.effect(f"store {eightfold.typed}, ptr {em.element('i32', self.begins, place).text}")
        return total, em.here("i1", f"icmp eq {self.over_lanes('or', seen).typed}, 0")

    def _some_of_four(self, bytes_: Ssa, k: Ssa) -> Ssa:
        """A bit for each four steps of a group, of which these begin at ``k``: whether one of them is not 0."""
        em, count = self.em, self.across // FOUR
        fours = em.pure(vector_type("i32", count), f"bitcast {bytes_.typed} to <{count} x i32>", bytes_)
        some = self.ops.compare("icmp ne", fours, em.splat(imm(0, "i32"), count))
        bits = em.here(f"i{count}", f"bitcast {some.typed} to i{count}")
        wide = em.here("i64", f"zext {bits.typed} to i64")
        return em.here("i64", f"shl {wide.typed}, {em.unsigned('udiv', k, imm(FOUR)).text}")

    def _sum(self, start: Ssa) -> Ssa:
        """Of a group in floats."""

        def add(k: Ssa, before: list[Ssa]) -> list[Ssa]:
            assert self.copied is not None
            return [self.ops.op("fadd", before[0], self.load(self.copied, self.em.add(start, k)))]

        return self.total(self.em.loop(imm(0), self.padded(), self.across, carried([self.zero()]), add, "sum")[0])

    def digit(self, digit: int, place: Ssa) -> Ssa:
        """Where a digit of a step of the sum lies."""
        return self.em.element("i8", self.digits, self.em.add(self.em.mul(self.plane, imm(digit)), place))

    def keep_digit(self, bytes_: Ssa, digit: int, place: Ssa) -> None:
        """Writes a digit of as many steps as a vector has lanes."""
        self.em.effect(f"store {bytes_.typed}, ptr {self.digit(digit, place).text}, align {self.across}")

    # -- sums ----------------------------------------------------------------------------------------------

    def _sum_group(self, vector: Vector, rows: range, *, factored: bool) -> None:
        if not factored:
            super()._sum_group(vector, rows, factored=False)
            return
        group = self.ctx.symbols[Symbol(self.site.inner[0].symbol)]
        flag = self.em.here("i8", f"load i8, ptr {self.em.element('i8', self.exact, group).text}")
        exact = self.em.here("i1", f"icmp ne {flag.typed}, 0")
        otherwise = functools.partial(super()._sum_group, vector, rows, factored=True)
        self.em.choose(exact, None, functools.partial(self._sum_whole_group, vector, rows, group), otherwise)

    def _sum_whole_group(self, vector: Vector, rows: range, group: Ssa) -> None:
        """One group in whole numbers."""
        each = self.places_of(vector, rows)
        unit = self.em.here("float", f"load float, ptr {self.em.element('float', self.unit_of_group, group).text}")
        totals = self.whole_sums(vector, each, self._begins_of(group), self.em.splat(unit, self.across))
        self.add_groups(vector, each, totals, factored=True)

    def _begins_of(self, group: Ssa) -> list[Ssa]:
        """What the sums of each digit begin with."""
        em = self.em
        places = (em.element("i32", self.begins, em.add(em.mul(group, imm(DIGITS)), imm(d))) for d in range(DIGITS))
        return [em.here("i32", f"load i32, ptr {place.text}") for place in places]

    def whole_sums(self, vector: Vector, each: Sequence[Place], begins: Sequence[Ssa], unit: Ssa) -> list[Ssa]:
        """Sums over a group, for ``each`` row, part and vector, times ``unit``. Those of a digit begin with one of
        ``begins``, since numbers of 4 bits are 8 too large."""
        raise NotImplementedError
