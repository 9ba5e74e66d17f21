"""A product of matrices as one LLVM function, with what comes before and after it.

Note [Products in registers]
    A unit of work is a strip of columns by a block of rows. The strip of the right factor is first copied into panels:
    ``[k][width]``, as wide as a tile of the result, one element after the other as they are needed. What is computed of
    the factor on the way (a cast, a scale) is computed there, once for all rows of the block; a factor whose summed
    dimension is contiguous is turned over in registers. Then each tile of a few rows by one panel is summed by a
    function that all products of the module share, in as many registers as there are: per step of ``k`` one row of the
    panel, and one number per row of the left factor, which is read where it lies. After :data:`CHUNK` steps the tile
    is added to memory, so that no sum is a long chain of additions. What becomes of the sums is computed of the tile in
    memory, row by row.

    The split of work does not depend on the number of threads, nor does any sum on the split: results are the same on
    one thread and on many. (Blocking and packing: Goto and van de Geijn, Anatomy of high-performance matrix
    multiplication, 2008; the sizes are our own measurements.)
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ....ir import CheckedIndex, Compute, DType, Instr, Load, Store
from ....ir.walk import operands
from ....kernel_ir.matmul_site import MatmulSite, matmul_site
from ....kernel_ir.nodes import Kernel, Loop
from ....ops.scalar import TRAPPING
from ....symbolic import Expr, Symbol, floordiv, product
from ..machine import Machine
from .body import emit_body
from .context import Value, Vector
from .emitter import Ssa, imm, vector_type
from .kernel import KernelEmitter
from .types import memory_type, width

__all__ = ["ProductEmitter", "is_product", "tile_function"]

ROWS = 6  # of a tile
CHUNK = 256  # steps of the summed loop after which a tile goes to memory
STRIP = 1 << 17  # elements of the right factor that are copied at once: they stay in the second-level cache
BLOCK = 168 * ROWS  # rows for which a strip is used; a copy of it costs as much as a few of them. Whole tiles.
SMALL_BLOCK = 42 * ROWS  # the same where there are few strips
FEW = 8  # units that keep a machine busy
ALIGNED = 64


def is_product(kernel: Kernel, target: Machine) -> MatmulSite | None:
    """The product that a kernel in normal form is, if :class:`ProductEmitter` can write it and it is large enough."""
    site = matmul_site(kernel) if target.has("fma") else None
    if site is None or not _plain_left(kernel, site):
        return None
    for size, least in ((site.rows, ROWS), (site.columns, 16), (site.inner, 16)):
        if (size.extent.constant or least) < least:
            return None
    after = [stmt for stmt in kernel.body if not isinstance(stmt, Loop)]
    return site if all(map(_bears_mask, (*_before(kernel, site.right), *after))) else None


def _before(kernel: Kernel, value: str) -> tuple[Instr, ...]:
    """What one factor is computed by."""
    loop = next(stmt for stmt in kernel.body if isinstance(stmt, Loop))
    wanted, kept = {value}, []
    for instr in reversed([stmt for stmt in loop.body if not isinstance(stmt, Loop)]):
        if not isinstance(instr, Store) and instr.result in wanted:
            kept.append(instr)
            wanted.update(operands(instr))
    return tuple(reversed(kept))


def _plain_left(kernel: Kernel, site: MatmulSite) -> Load | None:
    """The load that the left factor is, if it is nothing else and its elements are evenly spaced both ways."""
    made = _before(kernel, site.left)
    load = made[0] if len(made) == 1 else None
    if not isinstance(load, Load) or load.mask is not None or load.dtype is not site.reduce.dtype:
        return None
    loops = [Symbol(loop.symbol) for loop in (site.rows, site.inner)]
    steps = [load.indices[0].coefficient(symbol) for symbol in loops]
    return load if all(step is not None and not set(loops) & set(step.symbols) for step in steps) else None


def _bears_mask(instr: Instr) -> bool:
    """Whether an instruction may be computed for columns that do not exist."""
    if isinstance(instr, Load | Store):
        return not any(s.kind.name == "VALUE" for s in instr.indices[0].symbols) and not (
            isinstance(instr, Store) and instr.accumulates
        )
    return not (isinstance(instr, CheckedIndex) or (isinstance(instr, Compute) and instr.op in TRAPPING))


class ProductEmitter(KernelEmitter):
    """Writes a kernel that :func:`is_product` knows, see Note [Products in registers]."""

    def __init__(self, kernel: Kernel, site: MatmulSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, target, declarations)
        self.site = site
        self.dtype: DType = site.reduce.dtype
        self.element = memory_type(self.dtype)
        self.across = target.lanes(width(self.dtype))  # lanes of a vector
        self.vectors = 4 if target.vector_bits == 512 or target.triple.startswith("aarch64") else 2
        self.panel = self.across * self.vectors  # columns of a tile
        self.rows, self.columns, self.inner = (Symbol(loop.symbol) for loop in (site.rows, site.columns, site.inner))
        self.right = _before(kernel, site.right)
        self.after = tuple(stmt for stmt in kernel.body if not isinstance(stmt, Loop))
        left = _plain_left(kernel, site)
        assert left is not None
        self.left = left

    # -- how the work is shared out ------------------------------------------------------------------------

    def _strip(self) -> int:
        """Columns of a strip, whole panels."""
        summed, columns = self.site.inner.extent.constant, self.site.columns.extent.constant
        panels = max(1, STRIP // max(1, (summed or STRIP) * self.panel))
        return self.panel * (panels if columns is None else min(panels, max(1, -(-columns // self.panel))))

    def _block(self) -> int:
        """Rows of a block: all, unless there are too few strips for several threads."""
        outer = product(loop.extent for loop in self.kernel.grid[:-2]).constant
        columns = self.site.columns.extent.constant
        few = outer is not None and columns is not None and outer * -(-columns // self._strip()) < FEW
        return SMALL_BLOCK if few else BLOCK

    def units(self) -> tuple[Expr, int | None]:
        """Strips by blocks of rows, of each product of a batch."""
        strip, block = self._strip(), self._block()
        strips = floordiv(self.site.columns.extent + (strip - 1), strip)
        blocks = floordiv(self.site.rows.extent + (block - 1), block)
        return product(loop.extent for loop in self.kernel.grid[:-2]) * blocks * strips, None

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """The copy of a strip, and a tile of sums."""
        self._mallocs = []
        em = self.em
        for name, results in (("malloc", "ptr"), ("free", "void")):
            em.declare(name, results, ["i64" if name == "malloc" else "ptr"])
        item = width(self.dtype) // 8
        needed = em.mul(self.ctx.scalar(self.site.inner.extent), imm(self._strip() * item))
        memory = em.here("ptr", f"call ptr @malloc(i64 {em.add(needed, imm(ALIGNED)).text})")
        self._mallocs.append(memory)
        em.comment("the strip's panels begin where a cache line does")
        place = em.here("i64", f"ptrtoint ptr {memory.text} to i64")
        above = em.here("i64", f"add i64 {place.text}, {ALIGNED - 1}")
        line = em.here("i64", f"and i64 {above.text}, {-ALIGNED}")
        self.panels = em.here("ptr", f"inttoptr i64 {line.text} to ptr")
        self.tile_of_sums = em.pure("ptr", f"alloca [{ROWS * self.panel} x {self.element}], align {ALIGNED}")

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """One strip by one block."""
        em, ctx, site = self.em, self.ctx, self.site
        ctx.values.clear()
        strip, block = self._strip(), self._block()
        rows, columns = ctx.scalar(site.rows.extent), ctx.scalar(site.columns.extent)
        strips = ctx.scalar(floordiv(site.columns.extent + (strip - 1), strip))
        blocks = ctx.scalar(floordiv(site.rows.extent + (block - 1), block))
        first = em.mul(em.unsigned("urem", unit, strips), imm(strip))
        rest = em.unsigned("udiv", unit, strips)
        top = em.mul(em.unsigned("urem", rest, blocks), imm(block))
        rest = em.unsigned("udiv", rest, blocks)
        for loop in reversed(self.kernel.grid[:-2]):
            size = ctx.scalar(loop.extent)
            ctx.symbols[Symbol(loop.symbol)] = em.unsigned("urem", rest, size)
            rest = em.unsigned("udiv", rest, size)
        end = em.minimum(em.add(first, imm(strip)), columns)
        bottom = em.minimum(em.add(top, imm(block)), rows)
        self._copy_strip(first, end)
        self._tiles(top, bottom, first, end)
        return []

    # -- the right factor ----------------------------------------------------------------------------------

    def _copy_strip(self, first: Ssa, end: Ssa) -> None:
        """The columns from ``first`` to ``end`` as panels. Columns that fill no panel are followed by zeros."""
        em, panel = self.em, self.panel
        whole = self._whole(first, end)
        em.comment(f"columns of {self.site.right} as panels")
        em.loop(first, whole, panel, [], lambda at, _: self._copy_panel(at, self._panel(at, first)), "panel")
        if self._exact():
            return
        last = self._panel(whole, first)
        em.loop(whole, end, self.across, [], lambda at, _: self._copy_some(at, end, last, em.sub(at, whole)), "columns")
        count = em.sub(end, whole)
        filled = em.mul(em.unsigned("udiv", em.add(count, imm(self.across - 1)), imm(self.across)), imm(self.across))
        wanted = em.minimum(em.mul(count, imm(panel)), imm(panel))  # none where there are no columns
        em.loop(filled, wanted, self.across, [], lambda at, _: self._clear(last, at), "zeros")

    def _exact(self) -> bool:
        """Whether all columns certainly fill panels."""
        columns = self.site.columns.extent.constant
        return columns is not None and columns % self.panel == 0

    def _whole(self, first: Ssa, end: Ssa) -> Ssa:
        """Where the whole panels of a strip end."""
        em = self.em
        return end if self._exact() else em.add(first, em.round_down(em.sub(end, first), self.panel))

    def _panel(self, at: Ssa, first: Ssa) -> Ssa:
        """The memory of the panel that begins with column ``at``."""
        em = self.em
        offset = em.mul(em.sub(at, first), self.ctx.scalar(self.site.inner.extent))
        return self._element(self.panels, offset)

    def _element(self, pointer: Ssa, offset: Ssa) -> Ssa:
        text = f"getelementptr {self.element}, ptr {pointer.text}, i64 {offset.text}"
        return pointer if offset.constant == 0 else self.em.pure("ptr", text, pointer, offset)

    def _turns(self) -> bool:
        """Whether the right factor has its summed dimension contiguous, and must be turned over."""
        found = [i.indices[0] for i in self.right if isinstance(i, Load)]
        steps = [(e.coefficient(self.columns), e.coefficient(self.inner)) for e in found]
        return any(a is not None and b is not None and a.constant not in (0, 1, -1) and b == 1 for a, b in steps)

    def _copy_panel(self, at: Ssa, to: Ssa) -> list[Ssa]:
        em, summed = self.em, self.ctx.scalar(self.site.inner.extent)
        if not self._turns():
            vector = Vector(self.columns, at, self.across, self.vectors)
            em.loop(imm(0), summed, 1, [], functools.partial(self._copy_row, vector, to, imm(0)), "k")
            return []
        whole = em.round_down(summed, self.across)

        def group(column: Ssa, _: list[Ssa]) -> list[Ssa]:
            own = em.add(at, column)
            square = Vector(self.columns, own, self.across, self.across, self.inner)
            em.loop(imm(0), whole, self.across, [], functools.partial(self._copy_row, square, to, column), "k")
            line = Vector(self.columns, own, self.across, 1)
            return em.loop(whole, summed, 1, [], functools.partial(self._copy_row, line, to, column), "k")

        return em.loop(imm(0), imm(self.panel), self.across, [], group, "group")

    def _copy_some(self, at: Ssa, end: Ssa, to: Ssa, from_first: Ssa) -> list[Ssa]:
        """Of the last columns those that one vector holds, as far as they exist."""
        em, ctx = self.em, self.ctx
        vector = Vector(self.columns, at, self.across, 1)
        ctx.vector = vector
        here = ctx.ops.compare("icmp slt", ctx.ramp(0), em.splat(end, self.across))
        vector = Vector(self.columns, at, self.across, 1, None, here)
        ctx.vector = None
        summed = ctx.scalar(self.site.inner.extent)
        em.loop(imm(0), summed, 1, [], functools.partial(self._copy_row, vector, to, from_first), "k")
        return []

    def _copy_row(self, vector: Vector, to: Ssa, column: Ssa, k: Ssa, carried: Iterable[Ssa]) -> list[Ssa]:
        """What the factor is at step ``k``, or at as many steps as make a square, from the panel's ``column`` on."""
        em, ctx = self.em, self.ctx
        floor = self._enter({self.inner: k}, vector)
        emit_body(ctx, self.right, _no_reduce)
        for copy in range(vector.interleave):
            part = ctx.part(self.site.right, copy, vector.lanes)
            if vector.tail is not None:
                part = ctx.ops.select(vector.tail, part, Ssa("zeroinitializer", part.type))
            row = em.add(k, imm(copy)) if vector.tile is not None else k
            place = em.add(em.mul(row, imm(self.panel)), column)
            if vector.tile is None:
                place = em.add(place, imm(copy * self.across))
            self._store(part, self._element(to, place))
        self._leave(floor)
        return []

    def _clear(self, panel: Ssa, column: Ssa) -> list[Ssa]:
        type_ = vector_type(self.element, self.across)

        def row(k: Ssa, _: list[Ssa]) -> list[Ssa]:
            place = self.em.add(self.em.mul(k, imm(self.panel)), column)
            self._store(Ssa("zeroinitializer", type_), self._element(panel, place))
            return []

        return self.em.loop(imm(0), self.ctx.scalar(self.site.inner.extent), 1, [], row, "k")

    def _store(self, value: Ssa, pointer: Ssa) -> None:
        self.em.effect(f"store {value.typed}, ptr {pointer.text}, align {self._alignment()}")

    def _alignment(self) -> int:
        return min(ALIGNED, self.across * width(self.dtype) // 8)

    def _enter(self, symbols: dict[Symbol, Ssa], vector: Vector | None) -> int:
        """A place within loops: nothing that is loaded there moves out of them. Gives what to leave with."""
        ctx = self.ctx
        ctx.values.clear()
        ctx.symbols.update(symbols)
        ctx.vector = vector
        floor, ctx.hoist_depth = ctx.hoist_depth, self.em.depth
        return floor

    def _leave(self, floor: int) -> None:
        self.ctx.vector, self.ctx.hoist_depth = None, floor
        self.ctx.values.clear()

    # -- tiles ---------------------------------------------------------------------------------------------

    def _tiles(self, top: Ssa, bottom: Ssa, first: Ssa, end: Ssa) -> None:
        """The block's rows, a tile's at a time; what is left of them in smaller tiles."""
        em, count = self.em, self.site.rows.extent.constant
        heights = (ROWS, 2, 1) if count is None else (ROWS, count % ROWS)
        for height in (h for h in heights if h):
            exact = height == heights[-1] or (count is not None and count % height == 0)
            stop = bottom if exact else em.add(top, em.round_down(em.sub(bottom, top), height))
            em.loop(top, stop, height, [], functools.partial(self._row_of_tiles, height, first, end), "row")
            top = stop
            if exact:
                return

    def _row_of_tiles(self, height: int, first: Ssa, end: Ssa, top: Ssa, carried: Iterable[Ssa]) -> list[Ssa]:
        em, ctx, offset = self.em, self.ctx, self.left.indices[0]
        function = tile_function(self.element, self.across, self.vectors, height)
        em.define(*function)
        vector = vector_type(self.element, self.across)
        em.declare(_fma(self.element, self.across), vector, [vector] * 3)
        em.declare("llvm.smin.i64", "i64", ["i64", "i64"])
        ctx.symbols[self.rows], ctx.symbols[self.inner] = top, imm(0)
        steps = [offset.coefficient(loop) for loop in (self.rows, self.inner)]
        row, step = (ctx.scalar(step) for step in steps if step is not None)
        start = self._element(ctx.pointers[self.left.buffer], ctx.scalar(offset))
        summed = ctx.scalar(self.site.inner.extent)

        def tile(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            given = (start, row, step, self._panel(at, first), summed, self.tile_of_sums)
            em.effect(f"call void @{function[0]}({', '.join(value.typed for value in given)})")
            em.loop(imm(0), imm(height), 1, [], functools.partial(self._finish_row, top, at, first, end), "row")
            return []

        return em.loop(first, end, self.panel, [], tile, "tile")

    def _finish_row(self, top: Ssa, at: Ssa, first: Ssa, end: Ssa, row: Ssa, carried: Iterable[Ssa]) -> list[Ssa]:
        """What becomes of one row of a tile."""
        em = self.em
        sums = self._element(self.tile_of_sums, em.mul(row, imm(self.panel)))
        symbols = {self.rows: em.add(top, row)}

        def some(vectors: int, column: Ssa, _: list[Ssa]) -> list[Ssa]:
            vector = Vector(self.columns, column, self.across, vectors)
            if vectors == 1:
                self.ctx.vector = vector
                here = self.ctx.ops.compare("icmp slt", self.ctx.ramp(0), em.splat(end, self.across))
                vector = Vector(self.columns, column, self.across, 1, None, here)
            floor = self._enter(symbols, vector)
            self.ctx.values[self.site.reduce.result] = self._sums(sums, em.sub(column, at), vectors)
            emit_body(self.ctx, self.after, _no_reduce)
            self._leave(floor)
            return []

        if self._exact():
            return some(self.vectors, at, [])
        whole, stop = self._whole(first, end), em.minimum(em.add(at, imm(self.panel)), end)
        em.loop(at, em.minimum(em.add(at, imm(1)), whole), self.panel, [], functools.partial(some, self.vectors), "whole")
        em.loop(em.maximum(at, whole), stop, self.across, [], functools.partial(some, 1), "columns")
        return []

    def _sums(self, row: Ssa, column: Ssa, vectors: int) -> Value:
        type_, align = vector_type(self.element, self.across), self._alignment()
        parts = []
        for copy in range(vectors):
            pointer = self._element(row, self.em.add(column, imm(copy * self.across)))
            parts.append(self.em.here(type_, f"load {type_}, ptr {pointer.text}, align {align}"))
        return Value(self.dtype, tuple(parts), varying=True)


def _no_reduce(reduce: object, value: Value) -> None:
    raise AssertionError("a reduction outside of the product")


def _fma(element: str, lanes: int) -> str:
    return f"llvm.fma.v{lanes}{'f32' if element == 'float' else 'f64'}"


def tile_function(element: str, lanes: int, vectors: int, rows: int) -> tuple[str, str]:
    """Name and text of the function that sums a tile: ``rows`` of the left factor, ``row`` elements apart and ``step``
    from one to the next number, times a panel of ``count`` steps."""
    name = f"tile_{element}_{rows}x{lanes * vectors}"
    type_ = vector_type(element, lanes)
    align = min(ALIGNED, lanes * {"float": 4, "double": 8}[element])
    each = [(r, v) for r in range(rows) for v in range(vectors)]
    fma = _fma(element, lanes)
    lines = [
        f"define internal void @{name}(ptr %left, i64 %row, i64 %step, ptr %panel, i64 %count, ptr %sums) noinline {{",
        "entry:",
    ]
    for r, v in each:
        place = (r * vectors + v) * lanes
        lines.append(f"  %sum.{r}.{v} = getelementptr {element}, ptr %sums, i64 {place}")
        lines.append(f"  store {type_} zeroinitializer, ptr %sum.{r}.{v}, align {align}")
    for r in range(rows):
        lines.append(f"  %at.{r} = mul i64 %row, {r}")
        lines.append(f"  %left.{r} = getelementptr {element}, ptr %left, i64 %at.{r}")
    lines += [
        "  %any = icmp sgt i64 %count, 0",
        "  br i1 %any, label %chunk, label %done",
        "chunk:",
        "  %first = phi i64 [ 0, %entry ], [ %last, %add ]",
        f"  %wanted = add i64 %first, {CHUNK}",
        "  %last = call i64 @llvm.smin.i64(i64 %wanted, i64 %count)",
        "  br label %steps",
        "steps:",
        "  %k = phi i64 [ %first, %chunk ], [ %k.next, %steps ]",
    ]
    for r, v in each:
        lines.append(f"  %acc.{r}.{v} = phi {type_} [ zeroinitializer, %chunk ], [ %new.{r}.{v}, %steps ]")
    lines.append(f"  %from = mul i64 %k, {lanes * vectors}")
    for v in range(vectors):
        lines.append(f"  %from.{v} = add i64 %from, {v * lanes}")
        lines.append(f"  %right.at.{v} = getelementptr {element}, ptr %panel, i64 %from.{v}")
        lines.append(f"  %right.{v} = load {type_}, ptr %right.at.{v}, align {align}")
    lines.append("  %along = mul i64 %k, %step")
    for r in range(rows):
        lines += [
            f"  %number.at.{r} = getelementptr {element}, ptr %left.{r}, i64 %along",
            f"  %number.{r} = load {element}, ptr %number.at.{r}",
            f"  %one.{r} = insertelement {type_} poison, {element} %number.{r}, i64 0",
            f"  %all.{r} = shufflevector {type_} %one.{r}, {type_} poison, <{lanes} x i32> zeroinitializer",
        ]
        for v in range(vectors):
            given = f"{type_} %all.{r}, {type_} %right.{v}, {type_} %acc.{r}.{v}"
            lines.append(f"  %new.{r}.{v} = call {type_} @{fma}({given})")
    lines += [
        "  %k.next = add i64 %k, 1",
        "  %more = icmp slt i64 %k.next, %last",
        "  br i1 %more, label %steps, label %add",
        "add:",
    ]
    for r, v in each:
        lines += [
            f"  %before.{r}.{v} = load {type_}, ptr %sum.{r}.{v}, align {align}",
            f"  %after.{r}.{v} = fadd {type_} %before.{r}.{v}, %new.{r}.{v}",
            f"  store {type_} %after.{r}.{v}, ptr %sum.{r}.{v}, align {align}",
        ]
    lines += ["  %left.over = icmp slt i64 %last, %count", "  br i1 %left.over, label %chunk, label %done"]
    lines += ["done:", "  ret void", "}"]
    return name, "\n".join(lines)
