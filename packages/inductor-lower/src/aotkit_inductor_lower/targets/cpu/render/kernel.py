"""One kernel to one LLVM function.

Note [Shape of a kernel]
    ``i32 kernel(ptr frame, ptr slots, i64 low, i64 high)`` computes the units ``[low, high)`` of its iteration
    space and returns its error status. A unit is one iteration of the collapsed loops of the grid, except the vector
    variable, which is cut into chunks. ``frame`` holds all pointers and sizes of a call, ``slots`` says which
    entries are this kernel's, so equal kernels share one function.

Note [Interiors]
    A window that hangs over the edge of an image reads under a mask. With AVX-512 masks are registers of their own that
    cost nothing; with vectors of 256 or 128 bits a masked load, and a choice between what it adds and what was there,
    take ten instructions in the place of one. But few places are at an edge. So a kernel has two versions of what it
    does in a row: where the whole row is inside (a comparison or two per row), conditions on rows are gone, and what
    lies between the first and the last vectors of the row has no masks; those have theirs, as constants. Elsewhere all
    is as it was. Each element is computed by the same operations in all of them.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from ....ir import CheckedIndex, Instr, Load, Range, Store
from ....ir.independence import checked_sizes, tells_apart
from ....ir.walk import instructions, operands, value_types
from ....kernel_ir.bounds import hint
from ....kernel_ir.interiors import interior
from ....kernel_ir.known_conditions import moved, within
from ....kernel_ir.launches import KernelText
from ....kernel_ir.nodes import LENGTH, SERIAL, Kernel, Loop
from ....kernel_ir.walk import PerfectNest, memories, perfect_nests
from ....launch_plan.status import INDEX_ERROR
from ....memory.huge_pages import HUGE_PAGE, MADV_HUGEPAGE
from ....symbolic import Expr, Symbol, SymbolKind, floordiv, product, to_expr
from ..beside import blocks_of
from ..machine import Machine
from ..map_loops import map_loops, version_loops, work_of
from .arithmetic import Ops
from .body import emit_body
from .context import KernelContext, Vector
from .emitter import Emitter, Ssa, imm, origin_comment
from .loops import NestEmitter
from .types import memory_type, width

__all__ = ["KernelText", "emit_kernel"]

MOST_IN_VERSIONS = 300  # instructions of a body that is written out for the interior and for the edges
STACK_ROW_BYTES = 1 << 18  # larger scratch rows come from malloc


def emit_kernel(kernel: Kernel, target: Machine, declarations: dict[str, str]) -> KernelText:
    """A kernel in normal form as text. External functions it calls are added to ``declarations``."""
    kernel = version_loops(map_loops(kernel, target), target)
    text = KernelEmitter(kernel, target, declarations).emit()
    for condition, version in kernel.versions:
        short = KernelEmitter(version, target, declarations).emit()
        text = replace(text, short=(short, condition))
    return text


def adds_apart(kernel: Kernel, loop: Loop) -> bool:
    """Whether the iterations of a loop of the grid accumulate in different places, so that they may run at once, though
    the others run in order."""
    others = [Range(other.symbol, other.extent) for other in kernel.grid if other is not loop]
    return all(
        tells_apart(
            instr.indices,
            (Range(loop.symbol, loop.extent),),
            (*others, *nest.ranges),
            checked=checked_sizes(nest.body),
        )
        for nest in perfect_nests(kernel)
        for instr in nest.body
        if isinstance(instr, Store) and instr.accumulates
    )


def _strips(loop: Loop | None) -> Expr:
    """How many units of work the rows of a strip are."""
    return to_expr(1) if loop is None else floordiv(loop.extent + (loop.map.width - 1), loop.map.width)


def _ranges(loops: Iterable[Loop]) -> dict[Symbol, tuple[int, int]]:
    """Where loops begin and end, of those whose size is known."""
    sizes = {Symbol(loop.symbol): loop.extent.constant for loop in loops}
    return {symbol: (0, size - 1) for symbol, size in sizes.items() if size}


def _nests_within(nests: Sequence[PerfectNest], places: Mapping[Symbol, tuple[int, int]]) -> tuple[PerfectNest, ...]:
    """The nests where these symbols lie between two numbers, both included."""
    made: list[PerfectNest] = []
    for position, nest in enumerate(nests):
        body = within(nest.body, {**places, **_ranges(nest.loops)})
        others = (instr for other in (*nests[:position], *nests[position + 1 :]) for instr in other.body)
        read = {name for instr in others for name in operands(instr)}
        lost = {i.result for i in nest.body if not isinstance(i, Store)} - {
            i.result for i in body if not isinstance(i, Store)
        }
        made.append(nest if lost & read else replace(nest, body=body))
    return tuple(made)


class KernelEmitter:
    """Writes the function of a kernel whose loops are mapped. What a unit computes is :meth:`unit`."""

    def __init__(self, kernel: Kernel, target: Machine, declarations: dict[str, str]) -> None:
        self.kernel, self.nests = kernel, perfect_nests(kernel)
        self.types = value_types(instructions(kernel.body))
        self.vector = next((loop for loop in kernel.grid if loop.map.kind == "lanes"), None)
        self.tile = next((loop for loop in kernel.grid if loop.map.kind == "tile"), None)
        self.beside = next((loop for loop in kernel.grid if loop.map.kind == "unroll"), None)
        self.stacked = next((loop for loop in kernel.grid if loop.map.kind == "strip"), None)
        self._stacked_rows = (imm(0), imm(0))  # of the strip: where this unit's begin and end
        map_ = self.vector.map if self.vector is not None else SERIAL
        self.lanes, self.interleave = map_.width, map_.interleave
        self._mallocs: list[Ssa] = []
        self._bodies: list[tuple[Instr, ...]] = []  # of iterations beside each other
        self.em = Emitter(declarations)
        self.ops = Ops(self.em, target)
        nontemporal = (param.name for param in kernel.params if param.nontemporal)
        self.ctx = KernelContext(
            self.ops,
            pointers={},
            written=frozenset(i.buffer for i in instructions(kernel.body) if isinstance(i, Store)),
            scratch={},
            nontemporal=frozenset(nontemporal if target.triple.startswith("x86_64") else ()),
        )

    # -- frame of the function -----------------------------------------------------------------------------

    def emit(self) -> KernelText:
        kernel, em = self.kernel, self.em
        pointers = self._arguments()
        self.allocate(pointers)
        self.ctx.pointers = pointers
        units, chunk = self.units()
        low, high = Ssa("%low", "i64"), Ssa("%high", "i64")
        loops = self._loops()
        in_steps = kernel.ordered and len(kernel.grid) > 1 and bool(loops) and adds_apart(kernel, loops[0])
        if in_steps:
            step, _ = self._share(loops[1:])
            units, count = loops[0].extent, self.ctx.scalar(step)
            low, high = em.mul(low, count), em.mul(high, count)
        low = self._none_of_empty(low, high)
        self.over_units(low, high, chunk)
        self.finish()
        assert self.ops.flags_are_set
        lines = [f"(ptr %frame, ptr %slots, i64 %low, i64 %high) {{{origin_comment(kernel.origin)}", "entry:"]
        if self.ops.uses_status:
            lines += ["  %status = alloca i32", "  store i32 0, ptr %status"]
        body = em.lines()
        if any("%discard" in line for line in body):
            lines.append("  %discard = alloca i64")
        lines += body
        if self.ctx.streams:
            self.em.declare("llvm.x86.sse.sfence", "void", [])
            lines.append("  call void @llvm.x86.sse.sfence()")
        if self.ops.uses_status:
            lines += ["  %result = load i32, ptr %status", *self._release(), "  ret i32 %result", "}"]
        else:
            lines += [*self._release(), "  ret i32 0", "}"]
        names = tuple(param.name for param in memories(kernel))
        parallel = not kernel.ordered or in_steps
        return KernelText("\n".join(lines), names, self._sizes(), units, self.work(), parallel, self.ops.uses_status)

    def over_units(self, low: Ssa, high: Ssa, chunk: int | None) -> None:
        """The units of a call, one after the other."""
        self.em.loop(low, high, 1, [], lambda unit, _: self.unit(unit, chunk), "unit")

    def work(self) -> Expr:
        """What a launch costs, in the units of :func:`~..map_loops.work_of`."""
        return work_of(self.kernel)

    def _sizes(self) -> tuple[Symbol, ...]:
        return tuple(Symbol(param.name, SymbolKind.SIZE) for param in self.kernel.params if param.kind == "size")

    def _arguments(self) -> dict[str, Ssa]:
        em, pointers = self.em, {}
        own = (*(param.name for param in memories(self.kernel)), *self._sizes())
        for position, name in enumerate(own):
            slot = em.pure("ptr", f"getelementptr i32, ptr %slots, i64 {position}")
            index = em.pure("i32", f"load i32, ptr {slot.text}", slot)
            entry = em.pure("ptr", f"getelementptr i64, ptr %frame, i32 {index.text}", index)
            kind = "i64" if isinstance(name, Symbol) else "ptr"
            value = em.pure(kind, f"load {kind}, ptr {entry.text}", entry)
            em.comment(f"{value.text} is {name}")
            if isinstance(name, Symbol):
                self.ctx.symbols[name] = value
            else:
                pointers[name] = value
        if any(param.kind == "length" for param in self.kernel.params):
            slot = em.pure("ptr", f"getelementptr i32, ptr %slots, i64 {len(own)}")
            narrow = em.pure("i32", f"load i32, ptr {slot.text}", slot)
            self.ctx.symbols[LENGTH] = em.pure("i64", f"zext i32 {narrow.text} to i64", narrow)
        return pointers

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Scratch rows: on the stack if small, one element per lane if the lanes are outer iterations."""
        for row in self.kernel.scratch:
            count = self.em.mul(self.ctx.scalar(row.extent), imm(self.lanes * self.interleave))
            element, item = memory_type(row.dtype), width(row.dtype) // 8
            if count.constant is not None and count.constant * item <= STACK_ROW_BYTES:
                type_ = f"[{max(1, count.constant)} x {element}]"
                pointers[row.name] = self.em.pure("ptr", f"alloca {type_}, align 64 ; {row.name}")
                continue
            pointers[row.name] = self.memory(self.em.mul(count, imm(item)))

    def finish(self) -> None:
        """What is done once after all units: nothing."""

    def go_to(self, symbols: Mapping[Symbol, Ssa], vector: Vector | None) -> int:
        """A place within loops: nothing that is loaded there moves out of them. Gives what to leave with."""
        ctx = self.ctx
        ctx.values.clear()
        ctx.symbols.update(symbols)
        ctx.vector = vector
        floor, ctx.hoist_depth = ctx.hoist_depth, self.em.depth
        return floor

    def go_back(self, floor: int) -> None:
        """The end of what :meth:`go_to` begins."""
        self.ctx.vector, self.ctx.hoist_depth = None, floor
        self.ctx.values.clear()

    def memory(self, size: Ssa) -> Ssa:
        """As many bytes, until the kernel is done."""
        self.em.declare("malloc", "ptr", ["i64"])
        self.em.declare("free", "void", ["ptr"])
        pointer = self.em.here("ptr", f"call ptr @malloc(i64 {size.text})")
        self._mallocs.append(pointer)
        return pointer

    def large_memory(self, size: int) -> Ssa:
        """The same of some MiB, from where a cache line begins on; in huge pages where the system has them, since what
        is read in another order than it lies in memory needs many translations of addresses."""
        em, huge = self.em, HUGE_PAGE
        if size < huge // 4 or "linux" not in self.ops.target.triple:
            return em.aligned(self.memory(imm(size + 64)), 64)
        whole = -(-size // huge) * huge
        pointer = em.aligned(self.memory(imm(whole + huge)), huge)
        em.declare("madvise", "i32", ["ptr", "i64", "i32"])
        em.here("i32", f"call i32 @madvise(ptr {pointer.text}, i64 {whole}, i32 {MADV_HUGEPAGE})")  # a wish
        return pointer

    def _release(self) -> list[str]:
        return [f"  call void @free(ptr {pointer.text})" for pointer in self._mallocs]

    def _none_of_empty(self, low: Ssa, high: Ssa) -> Ssa:
        """The first unit: none is run where an index leads into a dimension without elements, which has no element 0
        that could be read in the place of one out of range."""
        ops, zero = self.ops, imm(0)
        for nest in self.nests:
            sizes = dict.fromkeys(i.size for i in nest.body if isinstance(i, CheckedIndex))
            for size in (size for size in sizes if size.constant is None or size.constant < 1):
                empty = ops.compare("icmp sle", self.ctx.scalar(size), zero)
                count = product(loop.extent for loop in (*self.kernel.grid, *nest.loops))
                used = ops.compare("icmp sgt", self.ctx.scalar(count), zero)
                bad = ops.op("and", ops.op("and", empty, used), ops.compare("icmp slt", low, high))
                ops.flag(bad, INDEX_ERROR)
                ops.set_flags()
                low = ops.select(bad, high, low)
                self.ctx.hoist_depth = 1  # within the loop over units: no load of an expanded tensor comes before it
        return low

    # -- units ---------------------------------------------------------------------------------------------

    def units(self) -> tuple[Expr, int | None]:
        """How many units there are, and the chunk the vector variable is cut into (``None``: not cut)."""
        return self._share(self._loops())

    def _share(self, loops: Sequence[Loop]) -> tuple[Expr, int | None]:
        """The same of some of the loops that are units by themselves."""
        units = product(loop.extent for loop in loops) * _strips(self.stacked)
        if self.vector is None:
            return units, None
        size = self.vector.extent
        if self.tile is not None:
            chunk = 2 * self.lanes  # two tiles side by side fill cache lines of what is written
            return units * floordiv(size + (chunk - 1), chunk), chunk
        block = self.lanes * self.interleave
        per_element = max(1, max((hint(nest.extent) for nest in self.nests), default=1))
        chunk = max(block, 4096 // per_element // block * block)
        if size.constant is not None and size.constant <= chunk:
            return units, None
        return units * floordiv(size + (chunk - 1), chunk), chunk

    def _loops(self) -> list[Loop]:
        """The loops of the grid that are units by themselves."""
        return [loop for loop in self.kernel.grid if loop.map.kind not in ("lanes", "tile", "unroll", "strip")]

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        em, ctx, vector = self.em, self.ctx, self.vector
        ctx.values.clear()
        rest, loops = self._place_strip(unit), self._loops()
        low, high = imm(0), ctx.scalar(vector.extent) if vector is not None else imm(0)
        if chunk is not None and vector is not None:
            chunks = ctx.scalar(floordiv(vector.extent + (chunk - 1), chunk))
            part = em.unsigned("urem", rest, chunks) if loops else rest
            rest = em.unsigned("udiv", rest, chunks) if loops else imm(0)
            low = em.mul(part, imm(chunk))
            high = em.minimum(em.add(low, imm(chunk)), high)
        self.place(loops, rest)
        if vector is None:
            self._body()
        elif self.tile is not None:
            self._tiles(vector, self.tile, low, high)
        else:
            self._by_places(vector, low, high, chunk is None)
        return []

    def _by_places(self, vector: Loop, low: Ssa, high: Ssa, uncut: bool) -> None:
        """All of the vector variable, in two versions where edges ask for masks, see Note [Interiors]."""
        inside = self._inside()
        columns = inside.pop(Symbol(vector.symbol), None)

        def anywhere() -> None:
            if self.beside is not None:
                self._blocks_beside(vector, self.beside, low, high, {})
            else:
                self._outer_blocks(vector, low, high)

        def within_rows() -> None:
            if self.beside is not None:
                self._blocks_beside(vector, self.beside, low, high, inside)
            else:
                self._in_parts(vector, low, high, inside, columns if uncut else None)

        if inside:
            self.em.choose(self._is_within(inside), None, within_rows, anywhere)
        elif columns is not None and uncut and self.beside is None:
            within_rows()
        else:
            anywhere()

    def _inside(self) -> dict[Symbol, tuple[int, int]]:
        """Where the grid's loops are inside of the image, of those that have edges; see Note [Interiors]."""
        body = [instr for nest in self.nests for instr in nest.body]
        masked = any(isinstance(instr, Load) and instr.mask is not None for instr in body)
        if self.ops.target.vector_bits == 512 or not masked or len(body) > MOST_IN_VERSIONS or self.stacked is not None:
            return {}
        rounds = {symbol: last for nest in self.nests for symbol, (_, last) in _ranges(nest.loops).items()}
        inside = interior(body, _ranges(self.kernel.grid), rounds)
        if self.beside is not None:
            inside.pop(Symbol(self.beside.symbol), None)
        return inside

    def _is_within(self, inside: Mapping[Symbol, tuple[int, int]]) -> Ssa:
        """Whether this unit is."""
        ops, holds = self.ops, Ssa("true", "i1")
        for symbol, (first, last) in inside.items():
            away = ops.op("sub", self.ctx.symbols[symbol], imm(first))
            near = ops.compare("icmp ule", away, imm(last - first))
            holds = near if holds.text == "true" else ops.op("and", holds, near)
        return holds

    def _in_parts(
        self,
        vector: Loop,
        low: Ssa,
        high: Ssa,
        inside: Mapping[Symbol, tuple[int, int]],
        columns: tuple[int, int] | None,
    ) -> None:
        """The vectors within ``columns`` apart from those at both edges, of rows that are inside."""
        nests, size = self.nests, vector.extent.constant or 0
        places = _ranges(self.kernel.grid) | dict(inside)
        ends = [0, size]
        if columns is not None:
            first, last = columns
            ends[1:1] = [-(-first // self.lanes) * self.lanes, (last + 1) // self.lanes * self.lanes]
        if columns is None or ends[1] >= ends[2]:
            self.nests = _nests_within(nests, places)
            self._outer_blocks(vector, low, high)
        else:
            for start, stop in itertools.pairwise(ends):
                self.nests = _nests_within(nests, places | {Symbol(vector.symbol): (start, stop - 1)})
                self._outer_blocks(vector, imm(start), imm(stop), stop - start)
        self.nests = nests

    def _place_strip(self, unit: Ssa) -> Ssa:
        """Which rows of the strip this unit takes, see Note [Strips]; gives what is left of the unit."""
        if self.stacked is None:
            return unit
        em, rows = self.em, self.stacked.map.width
        strips = self.ctx.scalar(_strips(self.stacked))
        low = em.mul(em.unsigned("urem", unit, strips), imm(rows))
        self._stacked_rows = low, em.minimum(em.add(low, imm(rows)), self.ctx.scalar(self.stacked.extent))
        return em.unsigned("udiv", unit, strips)

    def place(self, loops: Sequence[Loop], unit: Ssa) -> None:
        """The iteration of ``loops``, outermost first, that a unit is."""
        for position, loop in enumerate(reversed(loops)):
            size = self.ctx.scalar(loop.extent)
            last = position == len(loops) - 1
            self.ctx.symbols[Symbol(loop.symbol)] = unit if last else self.em.unsigned("urem", unit, size)
            unit = imm(0) if last else self.em.unsigned("udiv", unit, size)

    def _tiles(self, vector: Loop, tile_loop: Loop, low: Ssa, high: Ssa) -> None:
        """Squares of ``lanes`` by ``lanes``; what is left of the tile variable in vectors, of the other in scalars."""
        em, lanes = self.em, self.lanes
        size = self.ctx.scalar(tile_loop.extent)
        whole = em.round_down(size, lanes)
        symbol, tile = Symbol(vector.symbol), Symbol(tile_loop.symbol)

        def across(step: int, vectors: int, start: Ssa, stop: Ssa) -> None:
            def at_tile(at: Ssa, _: list[Ssa]) -> list[Ssa]:
                self.ctx.symbols[tile] = at
                body = functools.partial(self._outer_block, symbol, vectors, tile=tile if step > 1 else None)
                divisible = vector.extent.constant is not None and vector.extent.constant % lanes == 0
                end = high if divisible else em.add(low, em.round_down(em.sub(high, low), lanes))
                em.loop(low, end, lanes, [], body, "i")
                if not divisible:
                    em.loop(at, em.add(at, imm(step)), 1, [], functools.partial(rest, end), "i")
                return []

            def rest(end: Ssa, at: Ssa, _: list[Ssa]) -> list[Ssa]:
                self.ctx.symbols[tile] = at
                return em.loop(end, high, 1, [], functools.partial(self._outer_block, symbol, 0), "i")

            em.loop(start, stop, step, [], at_tile, "i")

        across(lanes, lanes, imm(0), whole)
        across(1, 1, whole, size)

    def _blocks_beside(
        self, vector: Loop, beside: Loop, low: Ssa, high: Ssa, inside: Mapping[Symbol, tuple[int, int]]
    ) -> None:
        """All of a loop whose iterations are beside each other, see Note [Iterations beside each other]."""
        symbol, size, (nest,) = Symbol(beside.symbol), beside.extent.constant or 0, self.nests
        for start, stop, count in blocks_of(size, beside.map.width):
            places = _ranges(self.kernel.grid) | dict(inside) | {symbol: (start, stop - count)}
            bodies = [within(moved(nest.body, symbol, k), places) for k in range(count)]

            def block(at: Ssa, _: list[Ssa]) -> list[Ssa]:
                self.ctx.symbols[symbol] = at
                self._outer_blocks(vector, low, high)
                return []

            self._bodies, self.ctx.beside = bodies, True
            self.em.loop(imm(start), imm(stop), count, [], block, "i")
        self._bodies, self.ctx.beside = [], False

    def _outer_blocks(self, loop: Loop, low: Ssa, high: Ssa, size: int | None = None) -> None:
        """Blocks of interleaved vectors, then single vectors, then single elements, as far as the size needs them;
        ``size``: if not the loop's."""
        lanes, interleave = self.lanes, self.interleave
        left = loop.extent.constant if size is None else size
        for step, vectors in dict.fromkeys(((lanes * interleave, interleave), (lanes, 1), (1, 0))):
            if left is not None and left < step:
                continue
            if not vectors and loop.map.tail == "masked":  # one vector at most
                last = functools.partial(self._outer_block, Symbol(loop.symbol), 1, end=high)
                self.em.loop(low, high, lanes, [], last, "i")
                return
            exact = step == 1 or (left is not None and left % step == 0)
            stop = high if exact else self.em.add(low, self.em.round_down(self.em.sub(high, low), step))
            body = functools.partial(self._outer_block, Symbol(loop.symbol), vectors)
            self.em.loop(low, stop, step, [], body, "i")
            if exact:
                return
            low, left = stop, None if left is None else left % step

    def _outer_block(
        self,
        symbol: Symbol,
        vectors: int,
        at: Ssa,
        carried: list[Ssa],
        tile: Symbol | None = None,
        end: Ssa | None = None,
    ) -> list[Ssa]:
        """One step of the vector variable; with ``end``, of the lanes before it only."""
        ctx = self.ctx
        ctx.values.clear()
        ctx.symbols[symbol] = at
        ctx.vector = Vector(symbol, at, self.lanes, vectors, tile) if vectors else None
        if end is not None and ctx.vector is not None:
            ctx.vector = ctx.some(ctx.vector, end)
        spread = self.lanes * self.interleave if vectors else 1
        ctx.scratch = {row.name: spread for row in self.kernel.scratch}
        self._body()
        ctx.vector = None
        return []

    # -- the body ------------------------------------------------------------------------------------------

    def _body(self) -> None:
        if self.stacked is None:
            self._body_here()
            return
        symbol = Symbol(self.stacked.symbol)

        def at_row(row: Ssa, _: list[Ssa]) -> list[Ssa]:
            self.ctx.values.clear()
            self.ctx.symbols[symbol] = row
            self._body_here()
            return []

        self.em.loop(*self._stacked_rows, 1, [], at_row, "i")

    def _body_here(self) -> None:
        for body in self._bodies:
            self.ctx.values.clear()
            emit_body(self.ctx, body)
        for nest in () if self._bodies else self.nests:
            if nest.loops:
                NestEmitter(nest, self.ctx, self.types).emit()
            else:
                emit_body(self.ctx, nest.body)
