"""Products of few rows of bytes with a matrix of bytes, in whole numbers.

Note [Products of bytes]
    ``vpdpbusd`` multiplies 64 bytes with 64 others and adds the products up in groups of four, exactly. The bytes of
    one side have no sign, so the copy of the left factor has 128 added to each, and

        sum over k of x[k] * w[k]  =  sum of (x[k] + 128) * w[k]  -  sum of 128 * w[k]

    The last sum is the same for all rows. It is computed with the others, of bytes that are in a register anyway, so
    no sums of weights are kept, or read. Whole numbers have no order: results are those of eager.

    On AMD's processors columns are read one after the other: of four at once, 8 KiB ahead of which memory is asked for,
    the processor's own prefetching sees no order, and one row takes 1.4 times as long (1024 numbers summed, 2816
    columns, Zen 4).
"""

from __future__ import annotations

import functools

from ....ir import Load
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel
from ....symbolic import to_expr
from ..choose_few_rows import IN_PAGES
from ..machine import Machine
from ..products import bytes_of
from .body import emit_body
from .context import Vector
from .digits import dot_bytes
from .emitter import Ssa, imm, vector_type
from .few_rows import FewRowsEmitter, carried
from .tile import ALIGNED

__all__ = ["FewRowsOfBytes"]

BYTES = 64  # of a vector
STRIP = 64
AHEAD = 1 << 13  # bytes
AHEAD_IN_ORDER = 1 << 10  # where columns are read one after the other
MOST_IN_ORDER = 2  # rows


class FewRowsOfBytes(FewRowsEmitter):
    """A few columns at once, see Note [Products of bytes]. ``step``: bytes of a vector along the sum; ``apart``: sums
    of a column beside those of rows."""

    strip, apart = STRIP, 1

    def __init__(self, kernel: Kernel, site: FewRowsSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, site, target, declarations)
        found = bytes_of(kernel, site)
        assert found is not None
        self.left_byte, self.right_byte = found
        self.left, self.right = (self.left_byte,), (self.right_byte,)
        in_order = target.cpu in IN_PAGES and self.count <= MOST_IN_ORDER
        self.group = 1 if in_order else max(1, min(4, 3 * self.registers // 4 // (self.together + self.apart)))
        self.ahead = AHEAD_IN_ORDER if in_order else AHEAD
        self.step = BYTES
        self.bytes_type = vector_type("i8", self.step)

    def loads_left(self) -> bool:
        """It is copied without signs."""
        return False

    def padded(self) -> Ssa:
        """Steps of the sum, in whole vectors of bytes."""
        size = self.em.add(self.ctx.scalar(self.site.inner[-1].extent), imm(self.step - 1))
        return self.em.round_down(size, self.step)

    def left_offset(self, row: Ssa, k: Ssa) -> Ssa:
        """One row after the other, in bytes."""
        return self.em.add(self.em.mul(row, self.padded()), k)

    def _room_for_left(self) -> Ssa:
        size = self.em.add(self.em.mul(imm(self.count), self.padded()), imm(ALIGNED))
        return self.em.aligned(self.memory(size), ALIGNED)

    def _copy_left(self) -> list[Ssa]:
        em = self.em
        em.comment(f"{self.site.left}, as it is needed")

        def copy(end: Ssa | None, row: Ssa, k: Ssa, _: list[Ssa]) -> list[Ssa]:
            assert self.copied is not None
            value = self.byte_vector(self.left_byte, row, self.some(Vector(self.inner, k, self.step, 1), end), k)
            self.keep(value, self.copied, self.left_offset(row, k))
            return []

        def copy_row(row: Ssa, _: list[Ssa]) -> list[Ssa]:
            size = self.ctx.scalar(self.site.inner[0].extent)
            whole = em.round_down(size, self.step)
            em.loop(imm(0), whole, self.step, [], functools.partial(copy, None, row), "k")
            return em.loop(whole, size, self.step, [], functools.partial(copy, size, row), "k")

        return em.loop(imm(0), imm(self.count), 1, [], copy_row, "row")

    def keep(self, value: Ssa, copied: Ssa, offset: Ssa) -> None:
        """Writes bytes of the left factor as they will be multiplied: without signs."""
        unsigned = self.ops.op("xor", value, self.em.splat(imm(-128, "i8"), self.step))
        place = self.em.element("i8", copied, offset)
        self.em.effect(f"store {unsigned.typed}, ptr {place.text}, align {ALIGNED}")

    def byte_vector(self, load: Load, row: Ssa | None, vector: Vector, k: Ssa) -> Ssa:
        """Bytes along the sum, zeros behind its end."""
        self.enter(row, vector, k)
        emit_body(self.ctx, (load,))
        value = self.ctx.part(load.result, 0, self.step)
        if vector.tail is not None:
            value = self.ops.select(vector.tail, value, Ssa("zeroinitializer", self.bytes_type))
        self.leave()
        return value

    def sum_strip(self, first: Ssa, end: Ssa) -> None:
        """All columns of a strip."""
        em, group = self.em, self.group
        whole = em.add(first, em.round_down(em.sub(end, first), group))
        em.loop(first, whole, group, [], functools.partial(self._sum_columns, first, group), "columns")
        em.loop(whole, end, 1, [], functools.partial(self._sum_columns, first, 1), "column")

    def _sum_columns(self, first: Ssa, columns: int, at: Ssa, _: list[Ssa]) -> list[Ssa]:
        """``columns`` from ``at`` on, for all rows."""
        for rows in self.blocks:
            self._sum_block(first, columns, at, rows)
        return []

    def _sum_block(self, first: Ssa, columns: int, at: Ssa, rows: range) -> None:
        """Some columns, for some rows and for the number that was added to each byte."""
        em, each = self.em, len(rows) + self.apart
        size = self.ctx.scalar(self.site.inner[0].extent)
        whole = em.round_down(size, self.step)
        body = functools.partial(self._add_bytes, columns, at, rows)
        sums = [self.zero()] * (each * columns)
        lines = em.round_down(size, BYTES)
        sums = em.loop(imm(0), lines, BYTES, carried(sums), functools.partial(self._add_line, columns, at, rows), "k")
        if self.step < BYTES:
            sums = em.loop(lines, whole, self.step, carried(sums), functools.partial(body, None), "k")
        sums = em.loop(whole, size, self.step, carried(sums), functools.partial(body, size), "k")
        for column in range(columns):
            totals = [self._total(value) for value in sums[column * each : (column + 1) * each]]
            for row, total in zip(rows, totals, strict=False):
                offset = em.add(imm(row * self.strip), em.add(em.sub(at, first), imm(column)))
                value = em.here(self.element, f"sub {total.typed}, {totals[-1].text}") if self.apart else total
                em.effect(f"store {value.typed}, ptr {self.at(self.sums, offset).text}")

    def _add_line(self, columns: int, at: Ssa, rows: range, k: Ssa, sums: list[Ssa]) -> list[Ssa]:
        """A whole line of each column, in as many vectors as it has; what lies ahead is asked for once."""
        for start in range(0, BYTES, self.step):
            sums = self._add_bytes(columns, at, rows, None, self.em.add(k, imm(start)), sums, ahead=start == 0)
        return sums

    def _add_bytes(
        self, columns: int, at: Ssa, rows: range, end: Ssa | None, k: Ssa, sums: list[Ssa], *, ahead: bool = False
    ) -> list[Ssa]:
        em, each, result = self.em, len(rows) + self.apart, list(sums)
        vector = self.some(Vector(self.inner, k, self.step, 1), end)
        left = self.factors(rows, k)
        for column in range(columns):
            self.ctx.symbols[self.columns] = em.add(at, imm(column))
            right = self.widened(self.byte_vector(self.right_byte, None, vector, k))
            if ahead and rows.start == 0:
                self._ask_ahead(vector, k)
            for row, value in enumerate(left):
                result[column * each + row] = self.dot(result[column * each + row], value, right)
        return result

    def factors(self, rows: range, k: Ssa) -> list[Ssa]:
        """What vectors of the matrix are multiplied with: some rows, and the number that was added to their bytes."""
        return [*(self._copied_bytes(row, k) for row in rows), self.em.splat(imm(-128, "i8"), self.step)]

    def widened(self, right: Ssa) -> Ssa:
        """Bytes of the matrix as they are multiplied."""
        return right

    def _copied_bytes(self, row: int, k: Ssa) -> Ssa:
        assert self.copied is not None
        place = self.em.element("i8", self.copied, self.left_offset(imm(row), k))
        return self.em.here(self.bytes_type, f"load {self.bytes_type}, ptr {place.text}, align {ALIGNED}")

    def _ask_ahead(self, vector: Vector, k: Ssa) -> None:
        self.enter(None, vector, k)
        self.prefetch(to_expr(self.ahead), 1, 2)
        self.leave()

    def dot(self, total: Ssa, unsigned: Ssa, signed: Ssa) -> Ssa:
        """Products of bytes, added to ``total`` in groups of four."""
        return dot_bytes(self.ops, total, unsigned, signed)

    def _total(self, value: Ssa) -> Ssa:
        """All lanes, added up."""
        return self.over_lanes("add", value)
