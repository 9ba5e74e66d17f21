"""A product of matrices as one LLVM function, with what comes before and after it.

Note [Products in registers]
    A unit of work is a strip of columns by a block of rows. The strip of the right factor is first copied into panels:
    ``[k][width]``, as wide as a tile of the result, one element after the other as they are needed. What is computed of
    the factor on the way (a cast, a scale) is computed there, once for all rows of the block; a factor whose summed
    dimension is contiguous is turned over in registers. Then each tile of a few rows by one panel is summed by a
    function that all products of the module share, in as many registers as there are: per step of ``k`` one row of the
    panel, and one number per row of the left factor, which is read where it lies. Where it does not lie in rows, or is
    computed (a cast from float16, say), it is copied into panels as well, of some tiles' rows. After some hundred steps
    the tile is added to memory, so that no sum is a long chain of additions. What becomes of the sums is computed of
    the tile in memory, row by row. A right factor that lies in such panels already (Note [Matrices in panels]) is read
    where it is.

    The split of work does not depend on the number of threads, nor does any sum on the split: results are the same on
    one thread and on many. (Blocking and packing: Goto and van de Geijn, Anatomy of high-performance matrix
    multiplication, 2008; the sizes are our own measurements.)
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ....ir import DType, Instr, Load
from ....kernel_ir.matmul_site import MatmulSite
from ....kernel_ir.nodes import Kernel, Loop
from ....symbolic import Expr, Symbol, floordiv, product
from ..machine import Machine
from ..products import computed_by, packed_right, panels_of_tiles, plain_left
from .body import emit_body
from .context import Value, Vector
from .emitter import Ssa, imm, vector_type
from .kernel import KernelEmitter
from .tile import ALIGNED, BYTES, FLOATS, fma_of, tile_function
from .turn import turn_function
from .types import memory_type, width

__all__ = ["TURNED", "CopiedFactor", "ProductEmitter"]

ROWS = 6  # of a tile
STRIP = 1 << 17  # elements of the right factor that are copied at once: they stay in the second-level cache
BLOCK = 168 * ROWS  # rows for which a strip is used; a copy of it costs as much as a few of them. Whole tiles.
SMALL_BLOCK = 42 * ROWS  # the same where there are few strips
FEW = 8  # units that keep a machine busy
TURNED = 8  # sides of a square that is turned over: larger ones take as long as all the rest to compile
PANEL_ROWS = 8 * ROWS  # of the left factor, where it is copied: whole tiles, and whole vectors
TRUE = Ssa("true", "i1")

#: What becomes of a row of sums: the row, its first column, and where the sums are.
Finish = Callable[[Ssa, Ssa, Ssa], None]

#: Where a tile's rows begin in memory, how far apart they are, and how far apart steps of the sum are.
Left = Callable[[Ssa], tuple[Ssa, Ssa, Ssa]]


@dataclass(frozen=True, slots=True)
class CopiedFactor:
    """What is copied into panels of ``width``: a value, what computes it, and the loop of the result along a panel."""

    value: str
    body: tuple[Instr, ...]
    along: Symbol
    width: int


class ProductEmitter(KernelEmitter):
    """Writes a kernel that :func:`~..products.is_product` knows, see Note [Products in registers]."""

    panel_rows = PANEL_ROWS  # of a panel of the left factor
    many = 1  # steps of a whole tile that are written out, which LLVM takes longer for

    def __init__(self, kernel: Kernel, site: MatmulSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, target, declarations)
        self.site = site
        self.dtype: DType = site.reduce.dtype
        self.element = memory_type(self.dtype)
        self.across = target.lanes(width(self.dtype))  # lanes of a vector
        panels = panels_of_tiles(site, target)
        self.panel = panels.width  # columns of a tile
        self.vectors = self.panel // self.across
        self.packed = packed_right(kernel, site, panels)
        self.kind = FLOATS.get(self.element, BYTES)
        self.rows, self.columns, self.inner = (Symbol(loop.symbol) for loop in (site.rows, site.columns, site.inner))
        self.right = CopiedFactor(site.right, computed_by(kernel, site.right), self.columns, self.panel)
        self.after = tuple(stmt for stmt in kernel.body if not isinstance(stmt, Loop))
        self.left = self.read_in_place()
        copied = computed_by(kernel, site.left) if self.left is None else ()
        self.rows_of_left = CopiedFactor(site.left, copied, self.rows, self.panel_rows) if copied else None

    def read_in_place(self) -> Load | None:
        """The load that the left factor is, unless neighbours in it are of neighbouring rows: a tile would read a line
        of the cache for a few numbers of it, from places that may all be far apart by the same power of two."""
        left = plain_left(self.kernel, self.site)
        if left is None:
            return None
        row, step = (left.indices[0].coefficient(loop) for loop in (self.rows, self.inner))
        along_rows = row == 1 and step is not None and step.constant not in (0, 1)
        return None if along_rows else left

    # -- how the work is shared out ------------------------------------------------------------------------

    def steps(self) -> Expr:
        """Rows of a panel."""
        return self.site.inner.extent

    def strip(self) -> int:
        """Columns of a strip, whole panels. A left factor that is copied is copied for each."""
        summed, columns = self.steps().constant, self.site.columns.extent.constant
        panels = max(1, STRIP // max(1, (summed or STRIP) * self.panel))
        return self.panel * (panels if columns is None else min(panels, max(1, -(-columns // self.panel))))

    def block(self) -> int:
        """Rows of a block: all, unless there are too few strips for several threads."""
        outer = product(loop.extent for loop in self.kernel.grid[:-2]).constant
        columns = self.site.columns.extent.constant
        few = outer is not None and columns is not None and outer * -(-columns // self.strip()) < FEW
        return SMALL_BLOCK if few else BLOCK

    def _parts(self) -> tuple[Expr, Expr]:
        """How many blocks of rows a product has, and how many strips."""
        parts = (self.site.rows.extent, self.block()), (self.site.columns.extent, self.strip())
        blocks, strips = (floordiv(extent + (size - 1), size) for extent, size in parts)
        return blocks, strips

    def units(self) -> tuple[Expr, int | None]:
        """Strips by blocks of rows, of each product of a batch."""
        return product(loop.extent for loop in self.kernel.grid[:-2]) * product(self._parts()), None

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """The copy of a strip, and a tile of sums."""
        em = self.em
        item = width(self.dtype) // 8
        copied = 0 if self.packed is not None else self.strip()
        wide = copied + (PANEL_ROWS if self.rows_of_left is not None else 0)
        if wide:
            needed = em.mul(self.ctx.scalar(self.steps()), imm(wide * item))
            memory = self.memory(em.add(needed, imm(ALIGNED)))
            em.comment("the strip's panels begin where a cache line does")
            self.panels = em.aligned(memory, ALIGNED)
            strip = em.mul(self.ctx.scalar(self.steps()), imm(copied))
            self.left_panel = self.element_at(self.panels, strip)
        self.tile_of_sums = em.pure("ptr", f"alloca [{ROWS * self.panel} x {self.element}], align {ALIGNED}")

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """One strip by one block."""
        em, ctx, site = self.em, self.ctx, self.site
        ctx.values.clear()
        strip, block = self.strip(), self.block()
        rows, columns = ctx.scalar(site.rows.extent), ctx.scalar(site.columns.extent)
        blocks, strips = (ctx.scalar(count) for count in self._parts())
        first = em.mul(em.unsigned("urem", unit, strips), imm(strip))
        rest = em.unsigned("udiv", unit, strips)
        top = em.mul(em.unsigned("urem", rest, blocks), imm(block))
        self.place(self.kernel.grid[:-2], em.unsigned("udiv", rest, blocks))
        end = em.minimum(em.add(first, imm(strip)), columns)
        bottom = em.minimum(em.add(top, imm(block)), rows)
        if self.packed is None and not self.copies_late():
            self.copy_strip(first, end)
        self.sum_rows(top, bottom, first, end)
        return []

    def copies_late(self) -> bool:
        """Whether panels of the right factor are copied as they are needed: here they are copied before."""
        return False

    # -- the right factor ----------------------------------------------------------------------------------

    def copy_strip(self, first: Ssa, end: Ssa) -> None:
        """The columns from ``first`` to ``end`` as panels. Columns that fill no panel are followed by zeros."""
        em, panel = self.em, self.panel
        whole = self.whole_panels(first, end)
        em.comment(f"columns of {self.right.value} as panels")
        copy = functools.partial(self.copy_panel, self.right)
        em.loop(first, whole, panel, [], lambda at, _: copy(at, self.panel_at(at, first)), "panel")
        if not self.exact():
            self.copy_last(whole, first, end)

    def copy_last(self, whole: Ssa, first: Ssa, end: Ssa) -> None:
        """The columns from ``whole`` to ``end``, which fill no panel, and zeros."""
        em, panel = self.em, self.panel
        last = self.panel_at(whole, first)
        self.copy_some(self.right, whole, end, last)
        if self.last_vectors() < self.vectors:
            return  # which are all that tiles read of it
        count = em.sub(end, whole)
        filled = em.mul(em.unsigned("udiv", em.add(count, imm(self.across - 1)), imm(self.across)), imm(self.across))
        wanted = em.minimum(em.mul(count, imm(panel)), imm(panel))  # none where there are no columns
        em.loop(filled, wanted, self.across, [], lambda at, _: self._clear(last, at), "zeros")

    def exact(self) -> bool:
        """Whether all columns certainly fill panels."""
        columns = self.site.columns.extent.constant
        return columns is not None and columns % self.panel == 0

    def last_vectors(self) -> int:
        """How many vectors of a panel that is not full are multiplied: all of them where it is not known how full."""
        columns = self.site.columns.extent.constant
        return self.vectors if columns is None else -(-(columns % self.panel) // self.across)

    def whole_panels(self, first: Ssa, end: Ssa) -> Ssa:
        """Where the whole panels of a strip end."""
        em = self.em
        return end if self.exact() else em.add(first, em.round_down(em.sub(end, first), self.panel))

    def panel_at(self, at: Ssa, first: Ssa) -> Ssa:
        """The memory of the panel that begins with column ``at``."""
        em, steps = self.em, self.ctx.scalar(self.steps())
        if self.packed is not None:
            return self.element_at(self.ctx.pointers[self.packed.buffer], em.mul(at, steps))
        return self.element_at(self.panels, em.mul(em.sub(at, first), steps))

    def element_at(self, pointer: Ssa, offset: Ssa) -> Ssa:
        return self.em.element(self.element, pointer, offset)

    def turns(self, factor: CopiedFactor) -> bool:
        """Whether a factor has its summed dimension contiguous, and must be turned over."""
        found = [i.indices[0] for i in factor.body if isinstance(i, Load)]
        steps = [(e.coefficient(factor.along), e.coefficient(self.inner)) for e in found]
        return any(a is not None and b is not None and a.constant not in (0, 1, -1) and b == 1 for a, b in steps)

    def copy_panel(self, factor: CopiedFactor, at: Ssa, to: Ssa) -> list[Ssa]:
        em, summed = self.em, self.ctx.scalar(self.steps())
        if not self.turns(factor):
            vector = Vector(factor.along, at, self.across, factor.width // self.across)
            row = functools.partial(self.copy_row, factor, vector, to, imm(0))
            return em.loop(imm(0), summed, 1, [], row, "k")
        load = factor.body[0] if len(factor.body) == 1 else None
        if isinstance(load, Load) and load.mask is None and load.dtype is self.dtype:
            return self._turn_plain(factor, load, at, to)
        whole = em.round_down(summed, self.across)

        def group(column: Ssa, _: list[Ssa]) -> list[Ssa]:
            own = em.add(at, column)
            square = Vector(factor.along, own, self.across, self.across, self.inner)
            row = functools.partial(self.copy_row, factor, square, to, column)
            em.loop(imm(0), whole, self.across, [], row, "k")
            line = Vector(factor.along, own, self.across, 1)
            return em.loop(whole, summed, 1, [], functools.partial(self.copy_row, factor, line, to, column), "k")

        return em.loop(imm(0), imm(factor.width), self.across, [], group, "group")

    def _turn_plain(self, factor: CopiedFactor, load: Load, at: Ssa, to: Ssa) -> list[Ssa]:
        """A factor of which nothing is computed, by the module's function for that."""
        em, ctx, offset = self.em, self.ctx, load.indices[0]
        name = f"turn_{self.element}_{factor.width}"
        if name not in em.declarations:
            lanes = min(self.across, TURNED)
            em.define(name, turn_function(name, self.element, lanes, factor.width, em.declarations))
        ctx.symbols[factor.along], ctx.symbols[self.inner] = at, imm(0)
        start = self.element_at(ctx.pointers[load.buffer], ctx.scalar(offset))
        given = (start, self.step(offset, factor.along), ctx.scalar(self.steps()), to)
        em.effect(f"call void @{name}({', '.join(value.typed for value in given)})")
        return []

    def copy_some(self, factor: CopiedFactor, first: Ssa, end: Ssa, to: Ssa) -> None:
        """A panel that is not full: what there is from ``first`` to ``end``, a vector at a time."""
        em, ctx = self.em, self.ctx

        def group(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            vector = ctx.some(Vector(factor.along, at, self.across, 1), end)
            row = functools.partial(self.copy_row, factor, vector, to, em.sub(at, first))
            return em.loop(imm(0), ctx.scalar(self.steps()), 1, [], row, "k")

        em.loop(first, end, self.across, [], group, "some")

    def copy_row(
        self, factor: CopiedFactor, vector: Vector, to: Ssa, column: Ssa, k: Ssa, carried: Iterable[Ssa]
    ) -> list[Ssa]:
        """What a factor is at step ``k``, or at as many steps as make a square, from the panel's ``column`` on."""
        em, ctx = self.em, self.ctx
        floor = self.go_to({self.inner: k}, vector)
        emit_body(ctx, factor.body)
        for copy in range(vector.interleave):
            part = ctx.part(factor.value, copy, vector.lanes)
            if vector.tail is not None:
                part = ctx.ops.select(vector.tail, part, Ssa("zeroinitializer", part.type))
            row = em.add(k, imm(copy)) if vector.tile is not None else k
            place = em.add(em.mul(row, imm(factor.width)), column)
            if vector.tile is None:
                place = em.add(place, imm(copy * self.across))
            self._store(part, self.element_at(to, place), factor.width)
        self.go_back(floor)
        return []

    def _clear(self, panel: Ssa, column: Ssa) -> list[Ssa]:
        type_ = vector_type(self.element, self.across)

        def row(k: Ssa, _: list[Ssa]) -> list[Ssa]:
            place = self.em.add(self.em.mul(k, imm(self.panel)), column)
            self._store(Ssa("zeroinitializer", type_), self.element_at(panel, place), self.panel)
            return []

        return self.em.loop(imm(0), self.ctx.scalar(self.steps()), 1, [], row, "k")

    def _store(self, value: Ssa, pointer: Ssa, panel: int) -> None:
        align = self._alignment() if panel % self.across == 0 else width(self.dtype) // 8
        self.em.effect(f"store {value.typed}, ptr {pointer.text}, align {align}")

    def _alignment(self) -> int:
        return min(ALIGNED, self.across * width(self.dtype) // 8)

    # -- tiles ---------------------------------------------------------------------------------------------

    def sum_rows(self, top: Ssa, bottom: Ssa, first: Ssa, end: Ssa) -> None:
        """The block's rows, a tile's at a time; of a left factor that lies along rows as many as are copied at once."""
        em, factor = self.em, self.rows_of_left
        if factor is None:
            self._tiles_of(top, bottom, first, end, self.left_in_place(imm(0)))
            return

        def panel(start: Ssa, _: list[Ssa]) -> list[Ssa]:
            stop = em.minimum(em.add(start, imm(PANEL_ROWS)), bottom)
            full = em.add(start, em.round_down(em.sub(stop, start), PANEL_ROWS))
            em.loop(start, full, PANEL_ROWS, [], lambda at, _: self.copy_panel(factor, at, self.left_panel), "rows")
            self.copy_some(factor, full, stop, self.left_panel)

            def copied(at: Ssa) -> tuple[Ssa, Ssa, Ssa]:
                return self.element_at(self.left_panel, em.sub(at, start)), imm(1), imm(PANEL_ROWS)

            self._tiles_of(start, stop, first, end, copied)
            return []

        em.loop(top, bottom, PANEL_ROWS, [], panel, "rows")

    def left_in_place(self, k: Ssa) -> Left:
        """The left factor where it lies, from step ``k`` of the sum on."""
        em, ctx, plain = self.em, self.ctx, self.left
        assert plain is not None
        buffer, offset = plain.buffer, plain.indices[0]
        row, step = (self.step(offset, loop) for loop in (self.rows, self.inner))
        step = em.mul(step, imm(self.kind.group))

        def here(at: Ssa) -> tuple[Ssa, Ssa, Ssa]:
            ctx.symbols[self.rows], ctx.symbols[self.inner] = at, k
            return em.element(self.kind.number, ctx.pointers[buffer], ctx.scalar(offset)), row, step

        return here

    def step_of(self, load: Load, loop: Symbol) -> Ssa:
        """How far neighbors along a loop lie apart in memory."""
        return self.step(load.indices[0], loop)

    def step(self, offset: Expr, loop: Symbol) -> Ssa:
        step = offset.coefficient(loop)
        assert step is not None
        return self.ctx.scalar(step)

    def _tiles_of(self, top: Ssa, bottom: Ssa, first: Ssa, end: Ssa, left: Left) -> None:
        """Rows in tiles, what is left of them in smaller ones. ``left``: where a row's factor is, and its steps."""
        for height, low, high in self.heights(top, bottom):
            row = functools.partial(self._row_of_tiles, height, first, end, left)
            self.em.loop(low, high, height, [], row, "row")

    def heights(self, top: Ssa, bottom: Ssa) -> Iterable[tuple[int, Ssa, Ssa]]:
        """How high tiles are, and from where to where they are that high."""
        em, count = self.em, self.site.rows.extent.constant
        heights = (ROWS, 2, 1) if count is None else (ROWS, count % ROWS)
        for height in (h for h in heights if h):
            exact = height == heights[-1] or (count is not None and count % height == 0)
            stop = bottom if exact else em.add(top, em.round_down(em.sub(bottom, top), height))
            yield height, top, stop
            top = stop
            if exact:
                return

    def _row_of_tiles(
        self,
        height: int,
        first: Ssa,
        end: Ssa,
        left: Left,
        top: Ssa,
        carried: Iterable[Ssa],
    ) -> list[Ssa]:
        em = self.em
        start, row, step = left(top)
        summed = self.whole_steps()

        def tile(vectors: int, finish: Finish, at: Ssa, _: list[Ssa]) -> list[Ssa]:
            sums = self.tile_of_sums
            self.sum_tile(height, vectors, (start, row, step, self.panel_at(at, first), summed, sums, imm(self.panel)))
            self.finish_rows(height, top, at, self.tile_of_sums, finish)
            return []

        whole = self.whole_panels(first, end)
        em.loop(first, whole, self.panel, [], functools.partial(tile, self.vectors, self.finish_all), "tile")
        if not self.exact():
            finish = functools.partial(self.finish_some, end)
            em.loop(whole, end, self.panel, [], functools.partial(tile, self.last_vectors(), finish), "tile")
        return []

    def sum_tile(self, height: int, vectors: int, given: Sequence[Ssa], fresh: Ssa = TRUE) -> None:
        """Call the function of :func:`~.tile.tile_function` for a tile so high and so many vectors wide."""
        for name in ("llvm.smin.i64", "llvm.smax.i64"):
            self.em.declare(name, "i64", ["i64", "i64"])
        values = ", ".join(value.typed for value in (*given, fresh))
        self.em.effect(f"call void @{self._tile_function(height, vectors)}({values})")

    def finish_rows(self, height: int, top: Ssa, at: Ssa, sums: Ssa, finish: Finish) -> None:
        """What becomes of the sums of a tile, row by row."""
        em = self.em

        def row(row: Ssa, _: list[Ssa]) -> list[Ssa]:
            finish(em.add(top, row), at, self.element_at(sums, em.mul(row, imm(self.panel))))
            return []

        em.loop(imm(0), imm(height), 1, [], row, "row")

    def finish_all(self, row: Ssa, at: Ssa, sums: Ssa) -> None:
        """What becomes of a row of a whole panel."""
        self._finish(row, Vector(self.columns, at, self.across, self.vectors), sums)

    def finish_some(self, end: Ssa, row: Ssa, at: Ssa, sums: Ssa) -> None:
        """The same of columns that fill no panel."""
        em, ctx = self.em, self.ctx

        def vector(column: Ssa, _: list[Ssa]) -> list[Ssa]:
            few = ctx.some(Vector(self.columns, column, self.across, 1), end)
            self._finish(row, few, self.element_at(sums, em.sub(column, at)))
            return []

        em.loop(at, end, self.across, [], vector, "columns")

    def _tile_function(self, height: int, vectors: int) -> str:
        """The module's function for tiles of some rows by some vectors of a panel."""
        em, kind, rest = self.em, self.kind, self.rest()
        name = f"tile_{kind.name}_{height}x{vectors * self.across}_of_{self.panel}{f'_and_{rest}' if rest else ''}"
        if name not in em.declarations:
            many = self.many if (height, vectors) == (ROWS, self.vectors) else 1
            text = tile_function(name, kind, self.across, vectors, height, self.panel, rest, many)
            em.define(name, text)
        vector, factor = vector_type(self.element, self.across), kind.item_vector(self.across)
        if kind.group == 1:
            em.declare(fma_of(self.element, self.across), vector, [vector] * 3)
        else:
            em.declare(kind.dot, vector, [vector, factor, factor])
        return name

    def whole_steps(self) -> Ssa:
        """Steps of which a tile reads all numbers."""
        return self.ctx.scalar(self.steps())

    def rest(self) -> int:
        """Numbers of a last step that is not whole."""
        return 0

    def _finish(self, row: Ssa, vector: Vector, sums: Ssa) -> None:
        """What becomes of some sums of a row of a tile, which are at ``sums``."""
        floor = self.go_to({self.rows: row}, vector)
        self.ctx.values[self.site.reduce.result] = self.sums_of(row, sums, vector.interleave)
        emit_body(self.ctx, self.after)
        self.go_back(floor)

    def sums_of(self, row: Ssa, sums: Ssa, vectors: int) -> Value:
        """What is at ``sums``, of a row."""
        type_, align = vector_type(self.element, self.across), self._alignment()
        parts = []
        for copy in range(vectors):
            pointer = self.element_at(sums, imm(copy * self.across))
            parts.append(self.em.here(type_, f"load {type_}, ptr {pointer.text}, align {align}"))
        return Value(self.dtype, tuple(parts), varying=True)
