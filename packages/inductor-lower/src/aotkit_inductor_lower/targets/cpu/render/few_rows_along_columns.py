"""Products of few rows with a matrix whose rows lie along the columns, see Note [Products of few rows]."""

from __future__ import annotations

import functools
import itertools

from ....ir import Load
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel
from ....kernel_ir.walk import loops_of_values
from ....symbolic import to_expr
from ..machine import Machine
from .body import emit_body
from .context import Vector
from .emitter import Ssa, imm
from .few_rows import FewRowsEmitter

__all__ = ["FewRowsAlongColumns"]

PART = 1 << 8  # rows of the matrix whose products are added to a strip's sums, before these are added to others
STRIP = 1024  # columns, at most
STRIP_OF_BLOCKS = 256  # so that the sums of all rows, and parts of some rows of the matrix, are in the first cache
STEPS = 8  # of the summed loop at once
TOGETHER = 5  # rows: of more, fewer steps are added before sums go back to memory


class FewRowsAlongColumns(FewRowsEmitter):
    """Some rows of the matrix at a time, each a piece as long as a strip."""

    def __init__(self, kernel: Kernel, site: FewRowsSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, site, target, declarations)
        columns = site.columns.extent.constant
        strip = STRIP if len(self.blocks) == 1 else STRIP_OF_BLOCKS
        self.strip = strip if columns is None else min(strip, -(-columns // self.across) * self.across)
        self.steps = max(1, min(STEPS, self.registers // 2 // self.together))

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Another strip of sums, if there is more than one part."""
        super().allocate(pointers)
        summed = self.summed()
        self.part = self.sums if summed is not None and summed <= PART else self.strip_of_sums("part")

    def most_together(self) -> int:
        """So many that some steps of each are added at once."""
        return TOGETHER

    def loads_left(self) -> bool:
        """If it is nothing but a load: numbers are needed one at a time."""
        load = self.left[0] if len(self.left) == 1 else None
        return isinstance(load, Load) and load.mask is None and load.dtype is self.dtype

    def left_offset(self, row: Ssa, k: Ssa) -> Ssa:
        """One row after the other."""
        em = self.em
        place = em.add(em.mul(row, self.before(imm(1))), self.outer_steps())
        return em.add(em.mul(place, self.padded()), k)

    def sum_strip(self, first: Ssa, end: Ssa) -> None:
        """Parts of the summed loop, some steps at a time, into the strip's sums."""
        self.over_parts(PART, functools.partial(self._sum_part, first, end))

    def _sum_part(self, first: Ssa, end: Ssa, low: Ssa, high: Ssa) -> None:
        em = self.em
        if self.part is not self.sums:
            self.clear(self.part, self.joined)

        def steps(low: Ssa, high: Ssa, _: list[Ssa]) -> list[Ssa]:
            whole = em.add(low, em.round_down(em.sub(high, low), self.steps))
            em.loop(low, whole, self.steps, [], functools.partial(self._add_rows, self.steps, first, end), "k")
            return em.loop(whole, high, 1, [], functools.partial(self._add_rows, 1, first, end), "k")

        self.within(low, high, [], steps)
        if self.part is self.sums:
            return

        def add(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            total = self.ops.op("fadd", self.load(self.sums, at), self.load(self.part, at))
            self.store(total, self.sums, at)
            return []

        em.loop(imm(0), imm(self.count * self.strip), self.across, [], add, "add")

    def _add_rows(self, steps: int, first: Ssa, end: Ssa, k: Ssa, _: list[Ssa]) -> list[Ssa]:
        """``steps`` rows of the matrix, each times a number of each row of the left factor, if a row's condition holds,
        or a number times 0 would not be 0."""

        def add() -> None:
            self._add_products(steps, first, end, k)

        if self.condition is None or self.site.columns.symbol in loops_of_values(self.nests[0])[self.condition]:
            add()
            return []
        em, always = self.em, Ssa("true", "i1")
        holds = self.holds([{self.inner: em.add(k, imm(step))} for step in range(steps)])
        wanted = em.choose(holds, "i1", lambda: always, lambda: self._not_finite(steps, k))
        assert wanted is not None
        em.choose(wanted, None, add, lambda: None)
        return []

    def _not_finite(self, steps: int, k: Ssa) -> Ssa:
        """Whether one of the numbers of the left factor is an infinity or a nan."""
        em, zero = self.em, Ssa("0.0", self.element)
        total = zero
        for step, row in itertools.product(range(steps), range(self.count)):
            none = em.here(self.element, f"fmul {self._number(row, em.add(k, imm(step))).typed}, 0.0")
            total = em.here(self.element, f"fadd {none.typed}, {total.text}")
        return em.here("i1", f"fcmp uno {total.typed}, {zero.text}")

    def _add_products(self, steps: int, first: Ssa, end: Ssa, k: Ssa) -> None:
        for rows in self.blocks:
            self._add_products_of(rows, steps, first, end, k)

    def _add_products_of(self, rows: range, steps: int, first: Ssa, end: Ssa, k: Ssa) -> None:
        em, ctx, across = self.em, self.ctx, self.across
        places = list(itertools.product(range(steps), rows))
        numbers = [em.splat(self._number(row, em.add(k, imm(step))), across) for step, row in places]

        def add(vectors: int, end: Ssa | None, at: Ssa, _: list[Ssa]) -> list[Ssa]:
            vector = self.some(Vector(self.columns, at, across, vectors), end)
            each = list(itertools.product(rows, range(vectors)))
            offsets = [em.add(em.sub(at, first), imm(row * self.strip + copy * across)) for row, copy in each]
            sums = [self.load(self.part, offset) for offset in offsets]
            for step in range(steps):
                self.enter(None, vector, em.add(k, imm(step)))
                emit_body(ctx, self.right)
                if rows.start == 0:
                    self.prefetch(to_expr(steps), vectors, 2)
                for position, (row, copy) in enumerate(each):
                    right = ctx.part(self.site.right, copy, across)
                    sums[position] = self.multiply(numbers[step * len(rows) + row - rows.start], right, sums[position])
            for offset, value in zip(offsets, sums, strict=True):
                self.store(value, self.part, offset)
            self.leave()
            return []

        self.over_columns(first, end, add)

    def _number(self, row: int, k: Ssa) -> Ssa:
        """One number of the left factor."""
        if self.copied is not None:
            place = self.at(self.copied, self.left_offset(imm(row), k))
            return self.em.here(self.element, f"load {self.element}, ptr {place.text}")
        self.enter(imm(row), None, k)
        emit_body(self.ctx, self.left)
        (value,) = self.ctx.values[self.site.left].parts
        self.leave()
        return value
