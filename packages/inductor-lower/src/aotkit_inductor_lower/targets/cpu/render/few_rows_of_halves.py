"""Products of few rows with a matrix of bfloat16 whose columns lie along the summed loop.

Note [Pairs of halves]
    A word of 32 bits holds two numbers of bfloat16. The second one is a float already, once the bits of the first are
    cleared, and the first one is after a shift: two instructions for as many numbers as a register has bits for, where
    widening takes two for half as many. So even and odd steps of the sum are added up apart, and the left factor is
    copied with the even steps of each pair of vectors before its odd ones. All of it is exact, as a product of two
    bfloat16 is in float32, and so are subnormal numbers, which instructions for bfloat16 take for 0.
"""

from __future__ import annotations

import functools

from ....ir import DType, Load
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel
from ..machine import Machine
from ..products import widened_along_sum
from .body import emit_body
from .context import Vector
from .emitter import Ssa, imm, vector_type
from .few_rows import BLOCK
from .few_rows_along_sums import FewRowsAlongSums

__all__ = ["FewRowsOfHalves", "halves_of"]

UPPER = -(1 << 16)  # the bits of a word's second number


def halves_of(kernel: Kernel, site: FewRowsSite) -> Load | None:
    """The load of the matrix, where that is bfloat16 along the sum, only widened on the way."""
    return widened_along_sum(kernel, site, DType.BF16) if site.reduce.dtype is DType.F32 else None


class FewRowsOfHalves(FewRowsAlongSums):
    """See Note [Pairs of halves]. ``halves`` is the load of the matrix."""

    def __init__(
        self, kernel: Kernel, site: FewRowsSite, target: Machine, declarations: dict[str, str], halves: Load
    ) -> None:
        super().__init__(kernel, site, target, declarations)
        self.halves = halves
        self.pair = 2 * self.across
        self.group = max(1, min(4, 3 * self.registers // 8 // self.together))
        self.vectors = max(2, self.registers // 2 // self.together // self.group // 2 * 2)  # even and odd ones
        self.tail_step = self.pair
        self.words = vector_type("i32", self.across)

    def most_together(self) -> int:
        """Half as many, since even and odd steps are summed apart."""
        return BLOCK // 2

    def loads_left(self) -> bool:
        """It is copied in another order."""
        return False

    def padded(self) -> Ssa:
        """Steps of the sum, in whole pairs of vectors."""
        size = self.em.add(self.ctx.scalar(self.site.inner[0].extent), imm(self.pair - 1))
        return self.em.round_down(size, self.pair)

    def left_offset(self, row: Ssa, k: Ssa) -> Ssa:
        """One row after the other."""
        return self.em.add(self.em.mul(row, self.padded()), k)

    def _copy_left(self) -> list[Ssa]:
        em = self.em
        em.comment(f"{self.site.left}, even steps before odd ones")

        def copy(end: Ssa | None, row: Ssa, k: Ssa, _: list[Ssa]) -> list[Ssa]:
            first, second = (self._left_vector(end, row, em.add(k, imm(start))) for start in (0, self.across))
            for half in (0, 1):
                picked = em.shuffle(first, second, self.element, range(half, self.pair, 2))
                assert self.copied is not None
                self.store(picked, self.copied, em.add(self.left_offset(row, k), imm(half * self.across)))
            return []

        def copy_row(row: Ssa, _: list[Ssa]) -> list[Ssa]:
            size = self.ctx.scalar(self.site.inner[0].extent)
            whole = em.round_down(size, self.pair)
            em.loop(imm(0), whole, self.pair, [], functools.partial(copy, None, row), "k")
            return em.loop(whole, size, self.pair, [], functools.partial(copy, size, row), "k")

        return em.loop(imm(0), imm(self.count), 1, [], copy_row, "row")

    def _left_vector(self, end: Ssa | None, row: Ssa, k: Ssa) -> Ssa:
        """Steps of a row of the left factor, zeros behind its end."""
        vector = self.some(Vector(self.inner, k, self.across, 1), end)
        self.enter(row, vector, k)
        emit_body(self.ctx, self.left)
        value = self.ctx.part(self.site.left, 0, self.across)
        if vector.tail is not None:
            value = self.ctx.ops.select(vector.tail, value, self.zero())
        self.leave()
        return value

    def _add_vectors(self, columns: int, at: Ssa, rows: range, end: Ssa | None, k: Ssa, values: list[Ssa]) -> list[Ssa]:
        em, result = self.em, list(values)
        vectors = self.vectors if end is None else 2
        for column in range(columns):
            self.ctx.symbols[self.columns] = self.column(at, column)
            if end is None and rows.start == 0:
                self.enter(None, Vector(self.inner, k, self.across, vectors), k)
                self.ask(self.column(at, column), vectors)
                self.leave()
            for copy in range(0, vectors, 2):
                place = em.add(k, imm(copy * self.across))
                for half, right in enumerate(self._floats(place, end)):
                    for number, row in enumerate(rows):
                        left = self._copied(row, place, half)
                        position = (number * columns + column) * self.vectors + copy + half
                        result[position] = self.multiply(left, right, result[position])
        return result

    def _copied(self, row: int, k: Ssa, half: int) -> Ssa:
        assert self.copied is not None
        place = self.em.add(self.left_offset(imm(row), k), imm(half * self.across))
        return self.load(self.copied, place)

    def _floats(self, k: Ssa, end: Ssa | None) -> tuple[Ssa, Ssa]:
        """Numbers of the matrix at even steps from ``k`` on, and at odd ones."""
        em, ops = self.em, self.ops
        vector = self.some(Vector(self.inner, k, self.pair, 1), end)
        self.enter(None, vector, k)
        emit_body(self.ctx, (self.halves,))
        value = self.ctx.part(self.halves.result, 0, self.pair)
        if vector.tail is not None:
            value = ops.select(vector.tail, value, Ssa("zeroinitializer", value.type))
        self.leave()
        words = em.pure(self.words, f"bitcast {value.typed} to {self.words}", value)
        even = ops.op("shl", words, em.splat(imm(16, "i32"), self.across))
        odd = ops.op("and", words, em.splat(imm(UPPER, "i32"), self.across))
        first, second = (em.pure(self.vector_type, f"bitcast {w.typed} to {self.vector_type}", w) for w in (even, odd))
        return first, second
