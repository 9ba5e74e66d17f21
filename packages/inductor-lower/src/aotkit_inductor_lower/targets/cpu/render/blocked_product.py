"""A product of matrices on vectors of 256 bits, block by block of rows and of the sum.

Note [Products in blocks]
    With sixteen registers a tile is small, and with 512 KiB of second-level cache a strip of the right factor that
    stays there is narrow, so the left factor would be read again and again from farther away. So a unit's work, which
    is otherwise as in Note [Products in registers], is done in blocks: of up to :data:`ROWS_OF_BLOCK` rows, whose part
    of the left factor stays in the second-level cache, and of up to :data:`MOST_STEPS` steps of the sum. Within these,
    one panel of columns after the other comes to the first-level cache and is multiplied with all tiles of rows. Sums
    that are not whole after a block of steps wait in memory, tile by tile, or where the results belong if nothing else
    becomes of them. They are added in the order of memory, in chunks that are the same for all blocks, so that no
    number depends on how work is cut.

    A left factor that is not read in place is copied block by block into panels as high as a tile, ``[k][6]``: a
    vector is stored for each step, and the next step overwrites what of it is too much.

    Where the sum is one block, a panel of the right factor is copied just before the first block of rows is multiplied
    with it, and each tile asks for a part of what is read next: of the next panel's columns, and of the next block's
    rows. So reading from memory and multiplying are at once.

    (Blocking: Van Zee and van de Geijn, BLIS: a framework for rapidly instantiating BLAS functionality, 2015.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

from ....ir import Load, Store
from ....kernel_ir.matmul_site import MatmulSite
from ....kernel_ir.nodes import Kernel
from ....symbolic import Expr, Symbol, product
from ..machine import Machine
from .context import Vector
from .emitter import Ssa, imm
from .product import BLOCK, ROWS, TRUE, CopiedFactor, Finish, Left, ProductEmitter
from .tile import ALIGNED, CHUNK
from .types import width

__all__ = ["BlockedProductEmitter"]

ROWS_OF_BLOCK = 20 * ROWS
MOST_STEPS = 1024  # of a block: a panel of so many is 64 KiB
STEPS_OF_UNKNOWN = 256
BLOCK_OF_LEFT = 1 << 16  # elements of the left factor in a block: half of the second-level cache
STRIP = 1 << 19  # elements of the right factor that are copied by one unit
MANY_STEPS = 1 << 13  # for which a strip is small enough where their number is not known
UNITS = 2  # of a product, so that two threads have work: each copies its part of both factors for itself
LEAST_PANELS = 8  # of a strip that is cut for that
LEAST_ROWS = 96
BEHIND = 8  # elements behind a panel of rows, which its last vector writes to
LINE = 64  # bytes
MOST_LINES = 8  # that a tile asks for of each row


@dataclass(frozen=True, slots=True)
class Part:
    """What is multiplied at once: rows from ``top`` to ``bottom`` by columns from ``first`` to ``end``, ``count`` steps
    of the sum from ``k`` on; ``last``: sums are whole then. ``begins``, ``more``: whether these are the unit's first
    rows, and whether more rows follow."""

    top: Ssa
    bottom: Ssa
    first: Ssa
    end: Ssa
    k: Ssa
    count: Ssa
    last: bool
    begins: Ssa
    more: Ssa


class BlockedProductEmitter(ProductEmitter):
    """Writes a kernel that :func:`~..products.is_product` knows, see Note [Products in blocks]."""

    panel_rows = ROWS
    many = 4

    def __init__(self, kernel: Kernel, site: MatmulSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, site, target, declarations)
        self.result = self._plain_result()

    def _plain_result(self) -> Store | None:
        """The store, where sums are stored as they are, side by side: then they are added up where they belong."""
        store = self.after[0] if len(self.after) == 1 else None
        if not isinstance(store, Store) or not store.plain or store.value != self.site.reduce.result:
            return None
        apart = store.indices[0].coefficient(self.rows)
        side_by_side = store.indices[0].coefficient(self.columns) == 1
        return store if side_by_side and apart is not None and self.columns not in apart.symbols else None

    # -- how the work is shared out ------------------------------------------------------------------------

    def strip(self) -> int:
        """Columns of a strip, whole panels."""
        return self._cut()[0]

    def block(self) -> int:
        """Rows that are one unit, whole tiles."""
        return self._cut()[1]

    def _cut(self) -> tuple[int, int]:
        """Strips and blocks of about the same size, of both together at least :data:`UNITS` where that pays."""
        site = self.site
        rows, columns, steps = (loop.extent.constant for loop in (site.rows, site.columns, site.inner))
        outer = product(loop.extent for loop in self.kernel.grid[:-2]).constant or 1
        most = max(1, STRIP // ((steps or MANY_STEPS) * self.panel))
        panels = most if columns is None else -(-columns // self.panel)
        height = BLOCK if rows is None else -(-rows // ROWS) * ROWS
        strips, blocks = -(-panels // most), -(-height // BLOCK)
        # a strip more is a copy of the left factor more, unless it is read in place; a block more one of the right
        widths, heights = panels >= LEAST_PANELS * UNITS, height >= LEAST_ROWS * UNITS
        wide = self.rows_of_left is None or panels * self.panel >= height
        if outer * strips * blocks < UNITS and (widths or heights):
            if widths and (wide or not heights):
                strips *= UNITS
            else:
                blocks *= UNITS
        return -(-panels // strips) * self.panel, -(-height // blocks // ROWS) * ROWS

    def _steps_of_block(self) -> int:
        """Whole chunks."""
        steps = self.steps().constant
        if steps is None:
            return STEPS_OF_UNKNOWN
        parts = max(1, -(-steps // MOST_STEPS))
        return max(1, -(-steps // parts // CHUNK)) * CHUNK

    def _rows_of_block(self) -> int:
        """Whole tiles, in all blocks about as many."""
        tiles = max(1, min(ROWS_OF_BLOCK, BLOCK_OF_LEFT // self._steps_of_block()) // ROWS)
        all_tiles = self.block() // ROWS
        return -(-all_tiles // -(-all_tiles // tiles)) * ROWS

    def _in_one(self) -> bool:
        """Whether all that is summed is one block."""
        steps = self.steps().constant
        return steps is not None and steps <= self._steps_of_block()

    def copies_late(self) -> bool:
        """Where the sum is one block."""
        return self._in_one()

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """The copy of a strip, sums that wait, and the copy of a block of rows."""
        em, steps = self.em, self.ctx.scalar(self.steps())
        copied = imm(0) if self.packed is not None else em.mul(steps, imm(self.strip()))
        wait = not self._in_one() and (self.result is None or not self.exact())
        waiting = self._rows_of_block() * self.strip() if wait else 0
        left = 0 if self.rows_of_left is None else self._rows_of_block() // ROWS * self._left_panel()
        size = em.add(copied, imm(waiting + left))
        if size.constant != 0:
            memory = self.memory(em.add(em.mul(size, imm(width(self.dtype) // 8)), imm(ALIGNED)))
            em.comment("panels begin where a cache line does")
            self.panels = em.aligned(memory, ALIGNED)
            self.waiting = self.element_at(self.panels, copied)
            self.left_panels = self.element_at(self.panels, em.add(copied, imm(waiting)))
        self.tile_of_sums = em.pure("ptr", f"alloca [{ROWS * self.panel} x {self.element}], align {ALIGNED}")

    def sum_rows(self, top: Ssa, bottom: Ssa, first: Ssa, end: Ssa) -> None:
        """The unit's rows, a block at a time."""
        em, height, size = self.em, self._rows_of_block(), self._steps_of_block()
        steps = self.ctx.scalar(self.steps())

        def block(start: Ssa, _: list[Ssa]) -> list[Ssa]:
            stop = em.minimum(em.add(start, imm(height)), bottom)
            begins = em.pure("i1", f"icmp eq i64 {start.text}, {top.text}", start, top)
            more = em.pure("i1", f"icmp slt i64 {stop.text}, {bottom.text}", stop, bottom)
            whole = imm(0)
            if not self._in_one():
                # at least one step is left for the last block, where sums become results
                whole = em.round_down(em.maximum(em.sub(steps, imm(1)), imm(0)), size)

                def some_steps(k: Ssa, _: list[Ssa]) -> list[Ssa]:
                    self._multiply(Part(start, stop, first, end, k, imm(size), False, begins, more))
                    return []

                em.loop(imm(0), whole, size, [], some_steps, "part")
            self._multiply(Part(start, stop, first, end, whole, em.sub(steps, whole), True, begins, more))
            return []

        em.loop(top, bottom, height, [], block, "block")

    def _multiply(self, part: Part) -> None:
        """One block of rows by all columns of the strip."""
        em = self.em
        left = self.left_in_place(part.k) if self.rows_of_left is None else self._copy_left(part)

        def whole_panel(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self._copy_late(part, lambda: self.copy_panel(self.right, at, self.panel_at(at, part.first)))
            self._tiles_down(part, self.vectors, at, left, self.result, self.finish_all)
            return []

        def last_panel(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self._copy_late(part, lambda: self.copy_last(at, part.first, part.end))
            finish = functools.partial(self.finish_some, part.end)
            self._tiles_down(part, self.last_vectors(), at, left, None, finish)
            return []

        whole = self.whole_panels(part.first, part.end)
        em.loop(part.first, whole, self.panel, [], whole_panel, "panel")
        if not self.exact():
            em.loop(whole, part.end, self.panel, [], last_panel, "panel")

    def _copy_late(self, part: Part, copy: Callable[[], object]) -> None:
        """A panel of the right factor, where the unit's first rows are multiplied with it."""

        def now() -> None:
            copy()

        if self.packed is None and self.copies_late():
            self.em.choose(part.begins, None, now, lambda: None)

    def _tiles_down(self, part: Part, vectors: int, at: Ssa, left: Left, result: Store | None, finish: Finish) -> None:
        """All tiles of a panel that begins with column ``at``. ``result``: where sums belong as they are."""
        em = self.em
        panel = self.element_at(self.panel_at(at, part.first), em.mul(part.k, imm(self.panel)))
        fresh = TRUE if self._in_one() else em.pure("i1", f"icmp eq i64 {part.k.text}, 0", part.k)

        def tile(height: int, top: Ssa, _: list[Ssa]) -> list[Ssa]:
            sums, apart = self._sums_at(part, top, at, result)
            if height == ROWS:
                self._ask_for_columns(part, top, at)
                self._ask_for_rows(part, top, at)
            self.sum_tile(height, vectors, (*left(top), panel, part.count, sums, apart), fresh)
            if part.last and result is None:
                self.finish_rows(height, top, at, sums, finish)
            return []

        for height, low, high in self.heights(part.top, part.bottom):
            em.loop(low, high, height, [], functools.partial(tile, height), "tile")

    def _sums_at(self, part: Part, row: Ssa, column: Ssa, result: Store | None) -> tuple[Ssa, Ssa]:
        """Where a tile's sums are, and how far apart its rows are."""
        em, ctx = self.em, self.ctx
        if result is not None:
            ctx.symbols[self.rows], ctx.symbols[self.columns] = row, column
            place = ctx.scalar(result.indices[0])
            return self.element_at(ctx.pointers[result.buffer], place), self.step(result.indices[0], self.rows)
        if self._in_one():
            return self.tile_of_sums, imm(self.panel)
        before = em.mul(em.sub(column, part.first), imm(self._rows_of_block()))
        tile = em.add(before, em.mul(em.sub(row, part.top), imm(self.panel)))
        return self.element_at(self.waiting, tile), imm(self.panel)

    # -- the left factor -----------------------------------------------------------------------------------

    def _left_panel(self) -> int:
        """Elements of a tile's rows in a block, and those behind."""
        return self._steps_of_block() * ROWS + BEHIND

    def _copy_left(self, part: Part) -> Left:
        """A block of the left factor in panels as high as a tile."""
        em, factor = self.em, self.rows_of_left
        assert factor is not None
        em.comment(f"rows of {factor.value} as panels")
        rows = self.ctx.scalar(self.site.rows.extent)
        # vectors are longer than a tile is high: of the last tiles some of their lanes are no rows
        spread = -(-ROWS // self.across) * self.across
        there = em.sub(em.maximum(em.sub(rows, imm(spread - 1)), part.top), part.top)
        there = em.add(part.top, em.round_down(em.add(there, imm(ROWS - 1)), ROWS))
        there = em.minimum(there, part.bottom)
        self._copy_tiles(factor, part, part.top, there, None)
        self._copy_tiles(factor, part, there, part.bottom, rows)
        return lambda at: (self._row_panel(at, part), imm(1), imm(ROWS))

    def _row_panel(self, at: Ssa, part: Part) -> Ssa:
        """Where the first step of a row is, in the panel of its tile. What is left of a block may be several tiles of
        fewer rows, which share a panel."""
        em, row = self.em, self.em.sub(at, part.top)
        panel = self.element_at(self.left_panels, em.mul(em.unsigned("udiv", row, imm(ROWS)), imm(self._left_panel())))
        return self.element_at(panel, em.unsigned("urem", row, imm(ROWS)))

    def _copy_tiles(self, factor: CopiedFactor, part: Part, low: Ssa, high: Ssa, end: Ssa | None) -> None:
        """Whole tiles of rows from ``low`` on; with ``end``, only lanes before it are read. One step after the other,
        since each overwrites what was too much of the one before."""
        em, k = self.em, part.k
        stop = em.add(k, part.count)
        copy = functools.partial(self._copy_steps, factor, part, end)

        def tiles(step: Ssa, _: list[Ssa]) -> list[Ssa]:
            return em.loop(low, high, ROWS, [], lambda at, _: copy(at, False, step, []), "rows")

        def squares(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            begin = k
            if end is None and self.across >= ROWS:
                begin = em.add(k, em.round_down(part.count, self.across))
                em.loop(k, begin, self.across, [], functools.partial(copy, at, True), "k")
            return em.loop(begin, stop, 1, [], functools.partial(copy, at, False), "k")

        if self.turns(factor):
            em.loop(low, high, ROWS, [], squares, "rows")
        else:  # what lies side by side are rows, so all tiles of a step are near each other
            em.loop(k, stop, 1, [], tiles, "k")

    def _copy_steps(
        self, factor: CopiedFactor, part: Part, end: Ssa | None, at: Ssa, square: bool, step: Ssa, _: list[Ssa]
    ) -> list[Ssa]:
        """A tile's rows from ``at`` on at one step, or at as many as a vector is long."""
        em, ctx = self.em, self.ctx
        to = self.element_at(self._row_panel(at, part), em.mul(part.k, imm(-ROWS)))
        for group in range(0, ROWS, self.across):
            own = em.add(at, imm(group))
            if square:
                lines = Vector(factor.along, own, self.across, self.across, self.inner)
            else:
                lines = Vector(factor.along, own, self.across, 1)
                lines = lines if end is None else ctx.some(lines, end)
            self.copy_row(factor, lines, to, imm(group), step, [])
        return []

    # -- what is read next ---------------------------------------------------------------------------------

    def _ask_for_columns(self, part: Part, top: Ssa, at: Ssa) -> None:
        """A tile's share of the next panel of the right factor, while the unit's first rows are multiplied."""
        load = self.right.body[0] if len(self.right.body) == 1 else None
        steps, columns = self.steps().constant, self.site.columns.extent.constant
        late = self.packed is None and self.copies_late()
        if not late or not isinstance(load, Load) or load.indices[0].coefficient(self.columns) is None:
            return
        if steps is None or columns is None or columns <= self.panel:
            return
        em = self.em
        tile = em.unsigned("udiv", em.sub(top, part.top), imm(ROWS))
        tiles = -(-min(self._rows_of_block(), self.site.rows.extent.constant or ROWS_OF_BLOCK) // ROWS)

        def lines_of_columns() -> None:
            each = -(-self.panel // tiles)
            for column in range(each):
                place = em.add(em.add(at, imm(self.panel + column)), em.mul(tile, imm(each)))
                start = self._place(load, {self.columns: place, self.inner: imm(0)})
                self._ask(start, imm(LINE), -(-steps // self._numbers()))

        def rows_of_columns() -> None:
            each = -(-steps // tiles)
            start = self._place(load, {self.columns: em.add(at, imm(self.panel)), self.inner: em.mul(tile, imm(each))})
            self._ask(start, self._bytes(load.indices[0], self.inner), each)

        turned = self.turns(self.right)
        if turned or load.indices[0].coefficient(self.columns) == 1:
            em.choose(part.begins, None, lines_of_columns if turned else rows_of_columns, lambda: None)

    def _ask_for_rows(self, part: Part, top: Ssa, at: Ssa) -> None:
        """A tile's share of the rows that are multiplied after these: of those as far down, some of their lines."""
        load, steps, columns = self.left, self.steps().constant, self.site.columns.extent.constant
        if load is None or not self._in_one() or steps is None or columns is None:
            return
        if load.indices[0].coefficient(self.inner) != 1:
            return
        em = self.em
        lines, panels = -(-steps // self._numbers()), -(-self.strip() // self.panel)
        each = -(-lines // panels)
        panel = em.unsigned("udiv", em.sub(at, part.first), imm(self.panel))

        def rows() -> None:
            for line in range(min(each, MOST_LINES)):
                k = em.mul(em.add(em.mul(panel, imm(each)), imm(line)), imm(self._numbers()))
                start = self._place(load, {self.rows: em.add(top, imm(self._rows_of_block())), self.inner: k})
                self._ask(start, self._bytes(load.indices[0], self.rows), ROWS)

        em.choose(part.more, None, rows, lambda: None)

    def _numbers(self) -> int:
        """Of a cache line."""
        return LINE * 8 // width(self.dtype)

    def _bytes(self, offset: Expr, loop: Symbol) -> Ssa:
        return self.em.mul(self.step(offset, loop), imm(width(self.dtype) // 8))

    def _place(self, load: Load, at: dict[Symbol, Ssa]) -> Ssa:
        """Where in memory a factor's number is. It may be behind the last one: nothing is read there."""
        self.ctx.symbols.update(at)
        return self.element_at(self.ctx.pointers[load.buffer], self.ctx.scalar(load.indices[0]))

    def _ask(self, start: Ssa, step: Ssa, count: int) -> None:
        """For ``count`` lines, ``step`` bytes apart, to be brought to the second-level cache."""
        em = self.em
        em.declare("llvm.prefetch.p0", "void", ["ptr", "i32", "i32", "i32"])

        def line(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            place = em.element("i8", start, em.mul(at, step))
            em.effect(f"call void @llvm.prefetch.p0(ptr {place.text}, i32 0, i32 2, i32 1)")
            return []

        em.loop(imm(0), imm(count), 1, [], line, "ahead")
