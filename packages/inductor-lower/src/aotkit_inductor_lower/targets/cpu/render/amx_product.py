"""A product as one LLVM function that uses the tile registers of AMX, with what comes before and after it.

Note [Products in tile registers]
    A unit of work is a block of rows by a strip of columns. Of the left factor the block is packed (Note [Packed
    factors] in :mod:`.amx_tiles`), as many steps of the sum as fit in the second-level cache; the units of one block
    follow each other, so that it is packed once if that is all of them. Then the strip is taken a few panels at a time:
    a panel of the right factor is packed into memory that stays in the cache, and multiplied by all panels of the
    block. What becomes of the sums is computed row by row, of a few panels at a time, as long as they are in the cache.
    Where more is summed than fits, the sums of the whole strip wait in memory, from which tiles take and to which they
    return them.

    A right factor that was packed before (Note [Panels of pieces]) is read where it lies, and only looked over for the
    check of sums.

    What is computed of a factor on the way (a cast, a scale) is computed as it is packed. Factors may have several
    loops of lines and of summed numbers: a convolution's rows are images and places, its sums go over the window and
    channels, and what lies outside of the image is a mask of the load.

    No sum depends on how the work is split: results are the same on one thread and on many.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

from ....ir import Instr, Load
from ....kernel_ir.launches import KernelText
from ....kernel_ir.nodes import Kernel, Loop
from ....kernel_ir.product_site import ProductSite
from ....symbolic import Expr, Symbol, product
from ..machine import Machine
from ..products import TiledProduct
from ..tile_forms import PANEL, TILE_BYTES
from .amx_check import TileCheck
from .amx_pack import (
    GROUP,
    STATS_BYTES,
    Packing,
    carried_stats,
    look_over,
    pack_step,
    room_for_squares,
    store_stats,
)
from .amx_pack_plain import pack_function
from .amx_tiles import CORNERS, configure, micro_function, release
from .body import emit_body
from .context import Value, Vector
from .emitter import Carried, Ssa, imm, vector_type
from .kernel import KernelEmitter
from .types import memory_type

__all__ = ["TiledProductEmitter"]

STEP_PIECES = 72  # pieces of steps that are packed at once
BLOCK_BYTES = 5 << 18  # of the packed block: it stays in the second-level cache
BLOCK = 512  # rows of a block, at most
SUMS_BYTES = 1 << 20  # of a strip, where they have to wait
CACHE_BYTES = 7 << 18  # of the second-level cache: a block, panels of the other factor, and sums
GROUP_BYTES, GROUP_MOST = 1 << 17, 1 << 20  # of sums that are finished at once, at least and at most
PACKED, PACKED_BYTES = (
    4,
    5 << 16,
)  # of panels that are packed at once where they are neighbors in memory: one alone is short pieces
FEW, FEWER = 8, 2  # units that keep a machine busy; the same where each strip packs the block anew
ALIGNED = 64
FLOATS = vector_type("float", GROUP)


@dataclass(frozen=True, slots=True)
class _Factor:
    """One factor, as it is packed: its value, what computes it, and its lines."""

    value: str
    body: tuple[Instr, ...]
    lines: tuple[Loop, ...]
    packing: Packing


class TiledProductEmitter(KernelEmitter):
    """Writes a kernel that :func:`~..products.tiled_product` knows, see Note [Products in tile registers]."""

    def __init__(self, kernel: Kernel, found: TiledProduct, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, target, declarations)
        site = found.site
        self.site: ProductSite = site
        self.form = found.form
        self.inner = [Symbol(loop.symbol) for loop in site.inner]
        self.columns = Symbol(site.columns[-1].symbol)
        self.after = tuple(stmt for stmt in kernel.body if not isinstance(stmt, Loop))
        self.left, self.right = (
            _Factor(side.value, side.body, lines, Packing(found.form, side.dtype, side.along, right))
            for side, lines, right in ((found.left, site.rows, False), (found.right, site.columns, True))
        )
        #: Whether the summed loops are one, or a step may end in the middle of any of them.
        self.flat = len(site.inner) == 1 or not (found.left.along or found.right.along)
        last = product(loop.extent for loop in site.inner) if self.flat else site.inner[-1].extent
        assert last.constant is not None
        self.panels = found.right.panels  # of a right factor that was packed before
        self.depth = last.constant  # numbers after which a step may not be full
        self.steps = -(-self.depth // self.form.depth) * (1 if self.flat else _count(site.inner[:-1]))
        self._divide()
        self.check = TileCheck(self.em, self.form, _count(site.inner)) if self.right.packing.checked else None

    # -- how the work is shared out ------------------------------------------------------------------------

    def _divide(self) -> None:
        """Blocks of rows, strips of columns, and how many steps are summed at once: all as equal as they can be."""
        rows, columns = _count(self.site.rows), _count(self.site.columns)
        outer = product(loop.extent for loop in self.site.batch).constant or FEW
        step = self.form.step_bytes
        chunks = -(-self.steps // (STEP_PIECES // self.form.pieces))
        self.chunk = -(-self.steps // chunks)  # steps that are summed at once
        self.part = -(-self.chunk // -(-self.chunk // self.form.steps))
        self.once = chunks == 1
        fits = max(1, BLOCK_BYTES // (self.chunk * step)) * PANEL
        self.blocks = -(-rows // min(BLOCK, fits))
        self.block = _whole(-(-rows // self.blocks))
        self.blocks = -(-rows // self.block)
        panels = -(-columns // PANEL)
        row_bytes = self.block * PANEL * 4  # of the sums of a panel of columns
        most = panels if self.once else max(1, SUMS_BYTES // row_bytes)
        wanted = FEW if self.once else FEWER
        strips = max(-(-panels // most), min(panels, -(-wanted // (outer * self.blocks))))
        self.strip = -(-panels // strips) * PANEL
        self.strips = -(-columns // self.strip)
        several = (
            1 if self.right.packing.along or self.panels else min(PACKED, max(1, PACKED_BYTES // (self.chunk * step)))
        )
        self.packed = min(several, self.strip // PANEL)
        # Rows of the result are written in pieces, each to other pages of memory: the longer, the fewer.
        room = CACHE_BYTES - (self.block // PANEL + self.packed) * self.chunk * step
        sums = max(GROUP_BYTES, min(GROUP_MOST, room)) // row_bytes
        self.group = min(self.strip, max(1, sums, self.packed) * PANEL) if self.once else self.strip

    def units(self) -> tuple[Expr, int | None]:
        """Blocks of rows by strips, of each product of a batch."""
        return product(loop.extent for loop in self.site.batch) * (self.blocks * self.strips), None

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Packed factors, sums, and what is kept of panels."""
        em = self.em
        self.panel_bytes = self.chunk * self.form.step_bytes
        block, group = self.block // PANEL, self.group // PANEL
        sizes = [
            0 if self.panels else self.packed * self.panel_bytes,
            block * self.panel_bytes,
            block * group * CORNERS * TILE_BYTES,
        ]
        sizes += [block * STATS_BYTES, group * STATS_BYTES]
        memory = self.large_memory(sum(sizes))
        places = [em.element("i8", memory, imm(sum(sizes[:k]))) for k in range(len(sizes))]
        self.right_panels, self.left_panels, self.sums, self.left_stats, self.right_stats = places
        self.held = em.pure("ptr", "alloca i64 ; the block that is packed")
        em.effect(f"store i64 -1, ptr {self.held.text}")
        self.rooms = {factor.value: room_for_squares(em, factor.packing) for factor in (self.left, self.right)}
        configure(em)

    def emit(self) -> KernelText:
        """The kernel's text; the tile registers are given back in the end."""
        self.micro = micro_function(self.em, self.form, by_rows=self.panels is not None)
        return super().emit()

    def finish(self) -> None:
        """The tile registers as they were."""
        release(self.em)

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """One block by one strip."""
        em, site = self.em, self.site
        self.ctx.values.clear()
        own = em.unsigned("udiv", unit, imm(self.strips))  # the block, of all products of the batch
        first = em.mul(em.unsigned("urem", unit, imm(self.strips)), imm(self.strip))
        top = em.mul(em.unsigned("urem", own, imm(self.blocks)), imm(self.block))
        self.place(site.batch, em.unsigned("udiv", own, imm(self.blocks)))
        end = em.minimum(em.add(first, imm(self.strip)), imm(_count(site.columns)))
        bottom = em.minimum(em.add(top, imm(self.block)), imm(_count(site.rows)))
        if self.once:
            self._pack_block_once(own, top, bottom)
        elif self.check is not None:
            self.check.clear(self.left_stats, self.block // PANEL)

        def group(low: Ssa, _: list[Ssa]) -> list[Ssa]:
            high = em.minimum(em.add(low, imm(self.group)), end)
            if self.check is not None:
                self.check.clear(self.right_stats, self.group // PANEL)
            sum_ = functools.partial(self._sum, (low, high, top, bottom))
            em.loop(imm(0), imm(self.steps), self.chunk, [], sum_, "steps")
            self._finish(low, high, top, bottom)
            return []

        em.loop(first, end, self.group, [], group, "group")
        return []

    # -- sums ----------------------------------------------------------------------------------------------

    def _pack_block_once(self, own: Ssa, top: Ssa, bottom: Ssa) -> None:
        em = self.em
        held = em.here("i64", f"load i64, ptr {self.held.text}")
        other = em.here("i1", f"icmp ne i64 {held.text}, {own.text}")

        def pack() -> None:
            if self.check is not None:
                self.check.clear(self.left_stats, self.block // PANEL)
            self._pack_block(top, bottom, imm(0), imm(self.steps))
            em.effect(f"store i64 {own.text}, ptr {self.held.text}")

        em.choose(other, None, pack, lambda: None)

    def _pack_block(self, top: Ssa, bottom: Ssa, low: Ssa, high: Ssa) -> None:
        self.em.comment(f"rows of {self.left.value} in panels")
        self._pack(self.left, (top, bottom), (low, high), self.left_panels, self.left_stats)

    def _sum(self, place: tuple[Ssa, ...], low: Ssa, _: list[Ssa]) -> list[Ssa]:
        """Some steps of the sums of a group of panels."""
        em = self.em
        first, end, top, bottom = place
        high = em.minimum(em.add(low, imm(self.chunk)), imm(self.steps))
        if not self.once:
            self._pack_block(top, bottom, low, high)
        count, rows = em.sub(high, low), em.sub(bottom, top)

        def columns(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            number = em.unsigned("udiv", em.sub(at, first), imm(PANEL))
            stop = em.minimum(em.add(at, imm(self.packed * PANEL)), end)
            stats = em.element("i8", self.right_stats, em.mul(number, imm(STATS_BYTES)))
            if self.panels is None:
                em.comment(f"columns of {self.right.value} in panels")
                self._pack(self.right, (at, stop), (low, high), self.right_panels, stats)
            elif self.check is not None:
                look_over(em, self._packed_panel(at, low), count, self.form.step_bytes, stats)

            def column(down: Ssa, _: list[Ssa]) -> list[Ssa]:
                panel = em.unsigned("udiv", down, imm(PANEL))
                own = em.element("i8", self.right_panels, em.mul(panel, imm(self.panel_bytes)))
                own = own if self.panels is None else self._packed_panel(em.add(at, down), low)
                return self._multiply(em.add(number, panel), own, rows, low, count)

            return em.loop(imm(0), em.sub(stop, at), PANEL, [], column, "column")

        em.loop(first, end, self.packed * PANEL, [], columns, "columns")
        return []

    def _packed_panel(self, column: Ssa, step: Ssa) -> Ssa:
        """Where the panel of a column lies that was packed before, from a step on."""
        em, load = self.em, next(instr for instr in self.right.body if isinstance(instr, Load))
        panel = em.mul(em.unsigned("udiv", column, imm(PANEL)), imm(self.steps))
        at = em.mul(em.add(panel, step), imm(self.form.step_bytes))
        return em.element("i8", self.ctx.pointers[load.buffer], at)

    def _multiply(self, panel: Ssa, own: Ssa, rows: Ssa, low: Ssa, count: Ssa) -> list[Ssa]:
        """Some steps of a panel of the right factor, which are at ``own``, by all of the left one."""
        em = self.em

        def part(begin: Ssa, _: list[Ssa]) -> list[Ssa]:
            steps = em.minimum(em.sub(count, begin), imm(self.part))
            skipped = em.mul(begin, imm(self.form.step_bytes))
            right = em.element("i8", own, skipped)
            starts = em.pure("i1", f"icmp eq i64 {em.add(low, begin).text}, 0", low, begin)

            def row(down: Ssa, _: list[Ssa]) -> list[Ssa]:
                line = em.unsigned("udiv", down, imm(PANEL))
                left = em.element("i8", self.left_panels, em.add(em.mul(line, imm(self.panel_bytes)), skipped))
                given = (left, right, self._block_of_sums(line, panel), steps, starts)
                em.effect(f"call void @{self.micro}({', '.join(value.typed for value in given)})")
                return []

            return em.loop(imm(0), rows, PANEL, [], row, "rows")

        return em.loop(imm(0), count, self.part, [], part, "part")

    def _block_of_sums(self, row: Ssa, column: Ssa) -> Ssa:
        """The sums of two panels, by their numbers in the block and in the group."""
        number = self.em.add(self.em.mul(row, imm(self.group // PANEL)), column)
        return self.em.element("i8", self.sums, self.em.mul(number, imm(CORNERS * TILE_BYTES)))

    # -- packing -------------------------------------------------------------------------------------------

    def _pack(self, factor: _Factor, lines: tuple[Ssa, Ssa], steps: tuple[Ssa, Ssa], to: Ssa, stats: Ssa) -> None:
        """Lines and steps of a factor, from the first ones to the ends."""
        load = self._plain(factor)
        if load is not None:
            self._pack_plain(factor, load, lines, steps, to, stats)
            return
        em = self.em
        count = em.mul(em.unsigned("udiv", em.add(em.sub(lines[1], lines[0]), imm(PANEL - 1)), imm(PANEL)), imm(PANEL))

        def group(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            half = em.unsigned("udiv", em.unsigned("urem", at, imm(PANEL)), imm(GROUP))
            number = em.unsigned("udiv", at, imm(PANEL))
            own = em.element("i8", to, em.add(em.mul(number, imm(self.panel_bytes)), em.mul(half, imm(TILE_BYTES))))
            kept = em.element("i8", stats, em.mul(number, imm(STATS_BYTES)))
            reader = _Reader(self, factor, em.add(lines[0], at), lines[1])

            def step(at: Ssa, now: list[Ssa]) -> list[Ssa]:
                into = em.element("i8", own, em.mul(em.sub(at, steps[0]), imm(self.form.step_bytes)))
                read, before = functools.partial(reader.read, at), [Carried(value.type, value) for value in now]
                return pack_step(em, factor.packing, read, into, self.rooms[factor.value], before)

            checked = factor.packing.checked
            now = em.loop(*steps, 1, carried_stats(em, kept) if checked else [], step, "k")
            if checked:
                store_stats(em, kept, now)
            return []

        em.loop(imm(0), count, GROUP, [], group, "lines")

    def _plain(self, factor: _Factor) -> Load | None:
        """The load that a factor is, if it is nothing else and has one loop of lines, as the sum has one."""
        load = factor.body[0] if len(factor.body) == 1 else None
        one = len(factor.lines) == 1 and len(self.inner) == 1
        return load if isinstance(load, Load) and load.mask is None and one else None

    def _pack_plain(
        self,
        factor: _Factor,
        load: Load,
        lines: tuple[Ssa, Ssa],
        steps: tuple[Ssa, Ssa],
        to: Ssa,
        stats: Ssa,
    ) -> None:
        """By the module's function for factors of which nothing is computed."""
        em, ctx, offset = self.em, self.ctx, load.indices[0]
        line, (inner,) = Symbol(factor.lines[0].symbol), self.inner
        first = em.mul(steps[0], imm(self.form.depth))
        ctx.symbols[line], ctx.symbols[inner] = lines[0], first
        element = memory_type(load.dtype)
        start = em.element(element, ctx.pointers[load.buffer], ctx.scalar(offset))
        by = [offset.coefficient(symbol) for symbol in (line, inner)]
        assert by[0] is not None and by[1] is not None
        exact = self.depth % self.form.depth == 0
        stop = em.minimum(em.mul(steps[1], imm(self.form.depth)), imm(self.depth))
        name = pack_function(em, factor.packing, exact)
        given = (
            start,
            *(ctx.scalar(step) for step in by if step is not None),
            em.sub(lines[1], lines[0]),
            em.sub(stop, first),
            to,
            imm(self.panel_bytes),
            stats,
        )
        em.effect(f"call void @{name}({', '.join(value.typed for value in given)})")

    # -- what becomes of the sums --------------------------------------------------------------------------

    def _finish(self, first: Ssa, end: Ssa, top: Ssa, bottom: Ssa) -> None:
        em = self.em
        limit = None
        if self.check is not None:
            panels = [(self.left_stats, self.block // PANEL), (self.right_stats, self.group // PANEL)]
            limit = self.check.limit(panels)
        em.loop(top, bottom, 1, [], functools.partial(self._finish_row, first, end, top, limit), "row")

    def _finish_row(self, first: Ssa, end: Ssa, top: Ssa, limit: Ssa | None, row: Ssa, _: list[Ssa]) -> list[Ssa]:
        em = self.em
        down = em.sub(row, top)
        panel = em.unsigned("udiv", down, imm(PANEL))
        line = em.unsigned("urem", down, imm(PANEL))
        half, low = em.unsigned("udiv", line, imm(GROUP)), em.unsigned("urem", line, imm(GROUP))
        inside = em.add(em.mul(half, imm(2 * TILE_BYTES)), em.mul(low, imm(64)))
        self.place(self.site.rows, row)
        symbols = dict(self.ctx.symbols)

        def some(vectors: int, stop: Ssa | None, at: Ssa, _: list[Ssa]) -> list[Ssa]:
            ctx = self.ctx
            ctx.symbols.update(symbols)
            across = em.sub(at, first)
            number = em.unsigned("udiv", across, imm(PANEL))
            part = em.unsigned("udiv", em.unsigned("urem", across, imm(PANEL)), imm(GROUP))
            sums = em.element("i8", self._block_of_sums(panel, number), inside)
            sums = em.element("i8", sums, em.mul(part, imm(TILE_BYTES)))
            self.place(self.site.columns, at)
            vector = Vector(self.columns, ctx.symbols[self.columns], GROUP, vectors)
            if stop is not None:
                vector = ctx.some(vector, stop)
            if limit is not None and self.check is not None:
                kept = [
                    em.element("i8", stats, em.mul(where, imm(STATS_BYTES)))
                    for stats, where in ((self.left_stats, panel), (self.right_stats, number))
                ]
                again = functools.partial(self._again, sums, vector)
                self.check.repair(self._load_sums(sums, vectors), limit, kept, again)
            floor = self.go_to({}, vector)
            result = self.site.reduce
            ctx.values[result.result] = Value(result.dtype, tuple(self._load_sums(sums, vectors)), varying=True)
            emit_body(ctx, self.after)
            self.go_back(floor)
            return []

        whole = self._whole_columns()
        if whole:
            em.loop(first, end, whole * GROUP, [], functools.partial(some, whole, None), "columns")
            return []
        stop = em.add(first, em.round_down(em.sub(end, first), PANEL))
        em.loop(first, stop, PANEL, [], functools.partial(some, PANEL // GROUP, None), "columns")
        em.loop(stop, end, GROUP, [], functools.partial(some, 1, end), "columns")
        return []

    def _whole_columns(self) -> int:
        """How many whole vectors fit in the innermost loop of columns without rest: 2, 1, or 0 for none."""
        size = self.site.columns[-1].extent.constant or 1
        return next((vectors for vectors in (2, 1) if size % (vectors * GROUP) == 0), 0)

    def _load_sums(self, sums: Ssa, vectors: int) -> list[Ssa]:
        places = [self.em.element("i8", sums, imm(TILE_BYTES * k)) for k in range(vectors)]
        kind = vector_type(self.form.sums, GROUP)
        return [self.em.here(kind, f"load {kind}, ptr {place.text}, align 64") for place in places]

    # -- sums that are computed again ----------------------------------------------------------------------

    def _again(self, sums: Ssa, vector: Vector) -> None:
        """A piece of a row, by fused multiply-add of the factors as they are."""
        em, ctx = self.em, self.ctx
        symbol = f"llvm.fma.v{GROUP}f32"
        em.declare(symbol, FLOATS, [FLOATS] * 3)
        places = [em.element("i8", sums, imm(TILE_BYTES * k)) for k in range(vector.interleave)]
        for place in places:
            em.effect(f"store {FLOATS} zeroinitializer, ptr {place.text}, align 64")

        def add(loops: tuple[Loop, ...]) -> None:
            if loops:
                loop, *others = loops

                def step(k: Ssa, _: list[Ssa]) -> list[Ssa]:
                    ctx.symbols[Symbol(loop.symbol)] = k
                    add(tuple(others))
                    return []

                em.loop(imm(0), ctx.scalar(loop.extent), 1, [], step, "k")
                return
            floor = self.go_to({}, vector)
            emit_body(ctx, self.left.body)
            emit_body(ctx, self.right.body)
            for k, place in enumerate(places):
                a, b = (ctx.part(factor.value, k, GROUP) for factor in (self.left, self.right))
                old = em.here(FLOATS, f"load {FLOATS}, ptr {place.text}, align 64")
                new = em.here(FLOATS, f"call {FLOATS} @{symbol}({a.typed}, {b.typed}, {old.typed})")
                em.effect(f"store {new.typed}, ptr {place.text}, align 64")
            self.go_back(floor)

        add(self.site.inner)


class _Reader:
    """Reads 16 lines of a factor, from ``first`` on, those before ``end``, step by step."""

    def __init__(self, emitter: TiledProductEmitter, factor: _Factor, first: Ssa, end: Ssa) -> None:
        self.emitter, self.factor, self.first, self.end = emitter, factor, first, end
        em, ctx = emitter.em, emitter.ctx
        self.inside: Ssa | None = None  # the lanes that are lines, where lanes are lines
        self.line = Symbol(factor.lines[-1].symbol)
        if factor.packing.along:
            return
        if len(factor.lines) == 1:
            ctx.symbols[self.line] = first
            self.inside = ctx.some(Vector(self.line, first, GROUP, 1), end).tail
        else:  # sixteen lines are in one innermost loop, or none of them is a line
            there = em.pure("i1", f"icmp slt i64 {first.text}, {end.text}", first, end)
            self.inside = em.splat(there, GROUP)

    def read(self, step: Ssa, index: Ssa, half: int) -> Ssa:
        """A vector of the step, see :func:`.pack_step`."""
        emitter, factor, packing = self.emitter, self.factor, self.factor.packing
        em, ctx, depth = emitter.em, emitter.ctx, emitter.depth
        at, there = self._place(step, imm(GROUP * half) if packing.along else packing.place(em, index, half))
        if packing.along:
            emitter.place(factor.lines, em.minimum(em.add(self.first, index), em.sub(self.end, imm(1))))
            vector = Vector(emitter.inner[-1], at, GROUP, 1)
            vector = vector if depth % emitter.form.depth == 0 else ctx.some(vector, imm(depth))
        else:
            one = len(factor.lines) == 1
            first = self.first if one else em.minimum(self.first, em.sub(self.end, imm(GROUP)))
            emitter.place(factor.lines, first)
            tail = self.inside
            if there is not None and tail is not None:
                lanes = em.splat(there, GROUP)
                tail = em.pure(lanes.type, f"and {lanes.typed}, {tail.text}", lanes, tail)
            vector = Vector(self.line, ctx.symbols[self.line], GROUP, 1, tail=tail)
        floor = emitter.go_to({}, vector)
        emit_body(ctx, factor.body)
        value = ctx.part(factor.value, 0, GROUP)
        if vector.tail is not None:
            value = ctx.ops.select(vector.tail, value, Ssa("zeroinitializer", value.type))
        emitter.go_back(floor)
        return value

    def _place(self, step: Ssa, number: Ssa) -> tuple[Ssa, Ssa | None]:
        """Go to a number of a step. Gives where it is in the innermost summed loop, and for a number of all lines
        whether there is one; if not, this is another one."""
        emitter = self.emitter
        em, loops, depth = emitter.em, emitter.site.inner, emitter.depth
        per = imm(-(-depth // emitter.form.depth))
        inside = step if emitter.flat else em.unsigned("urem", step, per)
        at = em.add(em.mul(inside, imm(emitter.form.depth)), number)
        there = None
        if not self.factor.packing.along and depth % emitter.form.depth:
            there = em.pure("i1", f"icmp slt i64 {at.text}, {depth}", at)
            at = em.minimum(at, imm(depth - 1))
        if emitter.flat:
            emitter.place(loops, at)
        else:
            emitter.place(loops[:-1], em.unsigned("udiv", step, per))
            emitter.ctx.symbols[emitter.inner[-1]] = at
        return at, there


def _count(loops: tuple[Loop, ...]) -> int:
    """How many iterations loops of known sizes have together."""
    count = product(loop.extent for loop in loops).constant
    assert count is not None
    return count


def _whole(lines: int) -> int:
    """So many lines in whole panels."""
    return -(-lines // PANEL) * PANEL
