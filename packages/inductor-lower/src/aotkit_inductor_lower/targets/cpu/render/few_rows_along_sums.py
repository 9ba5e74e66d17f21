"""Products of few rows with a matrix whose columns lie along the summed loop, see Note [Products of few rows]."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from ....ir import Load
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel
from ....kernel_ir.walk import loops_of_values
from ..choose_few_rows import AMD, IN_PAGES
from ..machine import Machine
from .body import emit_body
from .columns_apart import APART, ColumnsApart
from .context import Vector
from .emitter import Ssa, imm
from .few_rows import carried
from .types import width

__all__ = ["AHEAD_APART", "FewRowsAlongSums"]

PART = 1 << 12  # numbers that are summed in registers before they are added to memory
STRIP = 64
AHEAD = 1 << 14  # bytes: behind the columns that are read together
NARROW = 16  # bits
MOST_BYTES_APART = 2  # rows of products with numbers of 8 bits
AHEAD_APART = 1 << 10  # bytes in each of the columns that lie apart, for one row or two
JOINED = 16  # units, see Note [Columns that lie apart]
LONG = 1 << 13  # bytes of columns for which units are not joined


class FewRowsAlongSums(ColumnsApart):
    """A few columns at once, which share the vectors of the left factor; of more than one row a copy has all rows next
    to each other. For one or two rows some vectors of each column are summed apart, so that no sum waits."""

    strip = STRIP

    def __init__(self, kernel: Kernel, site: FewRowsSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, site, target, declarations)
        widest = max((width(i.dtype) for i in self.right if isinstance(i, Load)), default=0)
        bytes_ = any(isinstance(i, Load) and width(i.dtype) == 8 for i in self.right)
        self.group = 2 if bytes_ and self.count <= 2 else max(1, min(4, self._columns_that_fit()))
        few = not bytes_ or self.count <= MOST_BYTES_APART
        self.spread = few and target.cpu in IN_PAGES and self.condition is None
        self.ahead = AHEAD
        if self.spread:
            self.group = APART
            self.ahead = AHEAD_APART if self.count <= 2 else 2 * AHEAD_APART
            steps = min(self.summed() or 0, PART)
            nbytes = steps * widest // 8 if widest <= NARROW else 0
            if self.count == 1 and 0 < nbytes < LONG and target.cpu in AMD:
                self.joined = 1 if self.outer else JOINED
            else:
                self.later = self.columns_later(nbytes) if nbytes else 0
        self.vectors = max(1, self.registers // 2 // self.count // self.group) if self.count <= 2 else 1
        if len(site.inner) > 1 and (short := site.inner[-1].extent.constant):
            self.vectors = min(self.vectors, max(1, short // self.across))  # of short steps, as of groups, none is cut
        self.tail_step = self.across

    def _columns_that_fit(self) -> int:
        """Columns whose sums are in registers together with a vector of each row and one of the matrix: what does not
        fit sixteen of them is stored and loaded in each step, which takes up to 2.2 times as long."""
        if self.registers == 16:
            return (self.registers - 1) // self.together - 1
        return 3 * self.registers // 4 // self.together

    def loads_left(self) -> bool:
        """Of one row whose vectors can be loaded."""
        load = self.left[0] if len(self.left) == 1 and self.count == 1 else None
        if not isinstance(load, Load) or load.mask is not None or load.dtype is not self.dtype:
            return False
        step = load.indices[0].coefficient(self.inner)
        return step is not None and step == 1

    def left_offset(self, row: Ssa, k: Ssa) -> Ssa:
        """A vector of each row, then the next ones."""
        em = self.em
        steps = em.add(em.mul(self.outer_steps(), self.padded()), k)
        return em.add(em.mul(steps, imm(self.count)), em.mul(row, imm(self.across)))

    def sum_strip(self, first: Ssa, end: Ssa) -> None:
        """Parts of the summed loop, each for all columns."""
        self.skips = self.condition is not None and not self._varies(self.condition)
        if self.skips:
            self.infinite = self._has_infinities()
        self.over_parts(PART, functools.partial(self._sum_part, first, end))

    def _sum_part(self, first: Ssa, end: Ssa, low: Ssa, high: Ssa) -> None:
        self.over_groups(first, end, self.group, functools.partial(self._sum_columns, first, low, high))

    def _sum_columns(self, first: Ssa, low: Ssa, high: Ssa, columns: int, at: Ssa, _: list[Ssa]) -> list[Ssa]:
        """``columns`` from ``at`` on, for all rows, in vectors along the summed loop, if a column's condition holds, or
        a number times 0 would not be 0."""

        def add() -> None:
            for rows in self.blocks:
                self._add_columns(first, low, high, columns, at, rows)

        if not self.skips:
            add()
            return []
        places = [{self.columns: self.column(at, column)} for column in range(columns)]
        self.em.choose(self.ops.op("or", self.holds(places), self.infinite), None, add, lambda: None)
        return []

    def _has_infinities(self) -> Ssa:
        """Whether a number of the left factor is an infinity or a nan."""
        em, zero = self.em, self.zero()

        def add(end: Ssa | None, k: Ssa, values: list[Ssa]) -> list[Ssa]:
            vector = self.some(Vector(self.inner, k, self.across, 1), end)
            left = [self._left(row, k, vector)[0] for row in range(self.count)]
            self.leave()
            return [functools.reduce(lambda total, x: self.multiply(x, zero, total), left, values[0])]

        def steps(low: Ssa, high: Ssa, values: list[Ssa]) -> list[Ssa]:
            whole = em.add(low, em.round_down(em.sub(high, low), self.across))
            values = em.loop(low, whole, self.across, carried(values), functools.partial(add, None), "k")
            return em.loop(whole, high, self.across, carried(values), functools.partial(add, high), "k")

        (found,) = self.within(imm(0), self.ctx.scalar(self.site.inner[0].extent), [zero], steps)
        return self.ops.any(self.ops.compare("fcmp uno", found, zero))

    def _varies(self, condition: str) -> bool:
        """Whether it is another one at each step of the sum."""
        varies = loops_of_values(self.nests[0])[condition]
        return not varies.isdisjoint(loop.symbol for loop in self.site.inner)

    def _add_columns(self, first: Ssa, low: Ssa, high: Ssa, columns: int, at: Ssa, rows: range) -> None:
        """Their sums, for some rows."""
        em, vectors = self.em, self.vectors
        sums = [(row, column) for row in rows for column in range(columns)]
        body = functools.partial(self._add_vectors, columns, at, rows)
        step = vectors * self.across
        size = self.site.inner[-1].extent.constant
        exact = size is not None and size % step == 0  # parts are whole steps long as well

        def steps(low: Ssa, high: Ssa, values: list[Ssa]) -> list[Ssa]:
            whole = high if exact else em.add(low, em.round_down(em.sub(high, low), step))
            values = em.loop(low, whole, step, carried(values), functools.partial(body, None), "k")
            if exact:
                return values
            return em.loop(whole, high, self.tail_step, carried(values), functools.partial(body, high), "k")

        found = self.within(low, high, [self.zero()] * (len(sums) * vectors), steps)
        self.keep_sums(first, columns, at, rows, found)

    def keep_sums(self, first: Ssa, columns: int, at: Ssa, rows: range, found: Sequence[Ssa]) -> None:
        """Adds the lanes of as many vectors for each sum to the strip's sums."""
        em, sums = self.em, [(row, column) for row in rows for column in range(columns)]
        vectors = len(found) // len(sums)
        for position, (row, column) in enumerate(sums):
            total = self._total(found[position * vectors : (position + 1) * vectors])
            offset = em.add(imm(row * self.strip * self.joined), em.sub(self.column(at, column), first))
            place = self.at(self.sums, offset)
            before = em.here(self.element, f"load {self.element}, ptr {place.text}")
            after = em.here(self.element, f"fadd {before.typed}, {total.text}")
            em.effect(f"store {after.typed}, ptr {place.text}")

    def _add_vectors(self, columns: int, at: Ssa, rows: range, end: Ssa | None, k: Ssa, values: list[Ssa]) -> list[Ssa]:
        """Some vectors of products for each sum; with ``end`` one, of the lanes before it."""
        ctx, across, result = self.ctx, self.across, list(values)
        copies = self.vectors if end is None else 1
        vector = self.some(Vector(self.inner, k, across, copies), end)
        left = [self._left(row, k, vector) for row in rows]
        for column in range(columns):
            ctx.symbols[self.columns] = self.column(at, column)
            self.enter(None, vector, k)
            emit_body(ctx, self.right)
            if end is None and rows.start == 0:
                self.ask(self.column(at, column), copies)
            right = [ctx.part(self.site.right, copy, across) for copy in range(copies)]
            if vector.tail is not None:
                right = [ctx.ops.select(vector.tail, value, self.zero()) for value in right]
            for row, copy in itertools.product(range(len(rows)), range(copies)):
                place = (row * columns + column) * self.vectors + copy
                result[place] = self.multiply(left[row][copy], right[copy], result[place])
        self.leave()
        return result

    def ask(self, column: Ssa, copies: int) -> None:
        """The processor's own prefetching stops at the end of a page, and columns are shorter than that or read
        together."""
        widths = [width(i.dtype) for i in self.right if isinstance(i, Load)]
        if widths:
            self.ask_ahead(self.ahead * 8 // max(widths), column, copies)

    def _left(self, row: int, k: Ssa, vector: Vector) -> list[Ssa]:
        """Vectors of one row of the left factor."""
        ctx, across = self.ctx, self.across
        if self.copied is not None:
            start = self.left_offset(imm(row), k)
            steps = (imm(copy * across * self.count) for copy in range(vector.interleave))
            return [self.load(self.copied, self.em.add(start, step)) for step in steps]
        self.enter(imm(row), vector, k)
        emit_body(ctx, self.left)
        return [ctx.part(self.site.left, copy, across) for copy in range(vector.interleave)]

    def _total(self, vectors: Sequence[Ssa]) -> Ssa:
        """All lanes of all vectors, added up in pairs."""
        em, ops, found = self.em, self.ops, list(vectors)
        while len(found) > 1:
            pairs = zip(found[::2], found[1::2], strict=False)
            found = [ops.op("fadd", a, b) for a, b in pairs] + found[len(found) // 2 * 2 :]
        (total,), lanes = found, self.across
        while lanes > 1:
            lanes //= 2
            low, high = (em.shuffle(total, total, self.element, range(s, s + lanes)) for s in (0, lanes))
            total = ops.op("fadd", low, high)
        return total
