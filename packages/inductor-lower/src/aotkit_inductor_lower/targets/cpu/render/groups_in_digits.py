"""A left factor as digits of whole numbers, for products with a matrix of 4 bits in panels.

Note [Digits of groups]
    A group of the left factor is turned into whole numbers by a power of two, and these into three digits, each a
    signed byte, which instructions for products of bytes multiply exactly. A bfloat16 has 8 bits, so what is not much
    smaller than the largest of its group, or is 0, is a whole number then. Where one is not, the group is multiplied
    in another way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from ....symbolic import Symbol
from .context import Vector
from .digits import digits_of, powers_of
from .emitter import Ssa, imm, vector_type
from .few_rows import LINE, carried
from .few_rows_in_panels import FewRowsInPanels, Place

__all__ = ["DIGITS", "GroupsInDigits"]

DIGITS = 3


class GroupsInDigits(FewRowsInPanels):
    """A left factor of one row whose groups are whole numbers, too, where these are exact. ``bits``: the power of two
    that the largest number of a group becomes, or more; ``of_digit``: bits of a digit, which has a sign."""

    bits: int
    of_digit: int

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
        power, unit = powers_of(ops, em.here("i32", f"bitcast {largest.typed} to i32"), self.bits)
        em.effect(f"store {unit.typed}, ptr {em.element('i32', self.unit_of_group, group).text}")
        scale = em.splat(power, self.across)
        wide = vector_type("i32", self.across)
        none = Ssa("zeroinitializer", wide)

        def write(k: Ssa, before: list[Ssa]) -> list[Ssa]:
            assert self.copied is not None
            place = em.add(start, k)
            scaled = ops.op("fmul", self.load(self.copied, place), scale)
            digits, differs = digits_of(ops, scaled, DIGITS, self.of_digit)
            for digit, value in enumerate(digits):
                self.keep_digit(ops.convert("trunc", value, "i8"), digit, place)
            sums = [ops.op("add", total, value) for total, value in zip(before[1:], digits, strict=True)]
            return [ops.op("or", before[0], differs), *sums]

        seen, *sums = em.loop(imm(0), self.padded(), self.across, carried([none] * (1 + DIGITS)), write, "digits")
        for digit, total in enumerate(sums):
            eightfold = em.here("i32", f"mul {self.over_lanes('add', total).typed}, -8")
            place = em.add(em.mul(group, imm(DIGITS)), imm(digit))
            em.effect(f"store {eightfold.typed}, ptr {em.element('i32', self.begins, place).text}")
        exact = em.here("i1", f"icmp eq {self.over_lanes('or', seen).typed}, 0")
        byte = em.here("i8", f"zext {exact.typed} to i8")
        em.effect(f"store {byte.typed}, ptr {em.element('i8', self.exact, group).text}")

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
