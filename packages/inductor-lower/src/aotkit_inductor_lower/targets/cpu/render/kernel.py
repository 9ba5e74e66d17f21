"""One loop nest to one LLVM function.

Note [Shape of a kernel]
    ``i32 kernel(ptr frame, ptr slots, i64 low, i64 high)`` computes the units ``[low, high)`` of its iteration
    space and returns its error status. A unit is one iteration of the collapsed outer loops, except the vector
    variable, which is cut into chunks. ``frame`` holds all pointers and sizes of a call, ``slots`` says which
    entries are this kernel's, so equal kernels share one function.
"""

from __future__ import annotations

import functools
from dataclasses import replace

from ....ir import Buffer, CheckedIndex, DType, Origin, Range, Reduce, Store
from ....kernel_ir.launches import KernelText
from ....kernel_ir.nests import LENGTH, FlatNest, hint, steps_grain
from ....launch_plan.status import INDEX_ERROR
from ....ops.dtypes import dtype_from_torch_name
from ....symbolic import Expr, Symbol, floordiv, to_expr
from ..machine import Machine
from ..map_loops import VectorPlan, choose_vectors, outer_tail, version_loops
from .arithmetic import Ops
from .body import emit_body
from .context import KernelContext, Value, Vector
from .emitter import Emitter, Ssa, imm, origin_comment
from .loops import StageEmitter, iterations
from .types import memory_type, width

__all__ = ["KernelText", "emit_kernel"]

STACK_ROW_BYTES = 1 << 18  # larger scratch rows come from malloc


def emit_kernel(nest: FlatNest, target: Machine, declarations: dict[str, str], origin: Origin) -> KernelText:
    """The kernel of a nest in normal form. External functions it calls are added to ``declarations``."""
    plan = choose_vectors(nest, target)
    kernel = _KernelEmitter(nest, target, declarations, plan).emit(origin)
    other = version_loops(nest, plan, target)
    if other is None:
        return kernel
    size = next(loop.size for loop in nest.outer if loop.symbol == plan.outer)
    short = _KernelEmitter(nest, target, declarations, other).emit(origin)
    return replace(kernel, short=(short, size, plan.lanes // 2))


class _KernelEmitter:
    def __init__(self, nest: FlatNest, target: Machine, declarations: dict[str, str], plan: VectorPlan) -> None:
        self.nest, self.plan = nest, plan
        self.em = Emitter(declarations)
        self.ops = Ops(self.em, target)
        self.ctx = KernelContext(
            self.ops,
            pointers={},
            written=frozenset(i.buffer for s in nest.stages for i in s.body if isinstance(i, Store)),
            scratch={},
            nontemporal=nest.nontemporal if target.triple.startswith("x86_64") else frozenset(),
        )

    # -- frame of the function -----------------------------------------------------------------------------

    def emit(self, origin: Origin) -> KernelText:
        nest, em = self.nest, self.em
        pointers = self._arguments()
        self._scratch(pointers)
        self.ctx.pointers = pointers
        units, chunk = self._units()
        low, high = Ssa("%low", "i64"), Ssa("%high", "i64")
        grain = steps_grain(nest) if self.plan.outer is None else None
        if grain is not None:
            units, steps = nest.outer[0].size, self.ctx.scalar(grain)
            low, high = em.mul(low, steps), em.mul(high, steps)
        low = self._none_of_empty(low, high)
        em.loop(low, high, 1, [], lambda unit, _: self._unit(unit, chunk), "unit")
        lines = [f"(ptr %frame, ptr %slots, i64 %low, i64 %high) {{{origin_comment(origin)}", "entry:"]
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
        work = to_expr(self.plan.work)
        for loop in nest.outer:
            work = work * loop.size
        inner = max((iterations(stage.ranges) for stage in nest.stages), key=hint, default=to_expr(1))
        parallel = not nest.ordered or grain is not None
        return KernelText(
            "\n".join(lines), nest.memories, nest.sizes, units, work * inner, parallel, self.ops.uses_status
        )

    def _arguments(self) -> dict[str, Ssa]:
        em, pointers = self.em, {}
        for position, name in enumerate((*self.nest.memories, *self.nest.sizes)):
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
        if self.nest.length is not None:
            slot = em.pure(
                "ptr", f"getelementptr i32, ptr %slots, i64 {len(self.nest.memories) + len(self.nest.sizes)}"
            )
            narrow = em.pure("i32", f"load i32, ptr {slot.text}", slot)
            self.ctx.symbols[LENGTH] = em.pure("i64", f"zext i32 {narrow.text} to i64", narrow)
        return pointers

    def _scratch(self, pointers: dict[str, Ssa]) -> None:
        """Scratch rows: on the stack if small, one element per lane if the lanes are outer iterations."""
        self._mallocs: list[Ssa] = []
        spread = self.plan.lanes * self.plan.interleave[0] if self.plan.outer is not None else 1
        for row in self.nest.scratch:
            dtype = _dtype(row)
            extent = to_expr(1)
            for size, stride in zip(row.sizes, row.strides, strict=True):
                extent = extent + (size - 1) * stride
            count = self.em.mul(self.ctx.scalar(extent), imm(spread))
            element = memory_type(dtype)
            if count.constant is not None and count.constant * width(dtype) // 8 <= STACK_ROW_BYTES:
                type_ = f"[{max(1, count.constant)} x {element}]"
                pointers[row.name] = self.em.pure("ptr", f"alloca {type_}, align 64 ; {row.name}")
                continue
            self.em.declare("malloc", "ptr", ["i64"])
            self.em.declare("free", "void", ["ptr"])
            needed = self.em.mul(count, imm(width(dtype) // 8))
            pointer = self.em.here("ptr", f"call ptr @malloc(i64 {needed.text})")
            pointers[row.name] = pointer
            self._mallocs.append(pointer)

    def _release(self) -> list[str]:
        return [f"  call void @free(ptr {pointer.text})" for pointer in self._mallocs]

    def _none_of_empty(self, low: Ssa, high: Ssa) -> Ssa:
        """The first unit: none is run where an index leads into a dimension without elements, which has no element 0
        that could be read in the place of one out of range."""
        ops, zero = self.ops, imm(0)
        for stage in self.nest.stages:
            sizes = dict.fromkeys(i.size for i in stage.body if isinstance(i, CheckedIndex))
            for size in (size for size in sizes if size.constant is None or size.constant < 1):
                empty = ops.compare("icmp sle", self.ctx.scalar(size), zero)
                used = ops.compare("icmp sgt", self.ctx.scalar(iterations((*self.nest.outer, *stage.ranges))), zero)
                bad = ops.op("and", ops.op("and", empty, used), ops.compare("icmp slt", low, high))
                ops.flag(bad, INDEX_ERROR)
                low = ops.select(bad, high, low)
                self.ctx.hoist_depth = 1  # within the loop over units: no load of an expanded tensor comes before it
        return low

    # -- units ---------------------------------------------------------------------------------------------

    def _units(self) -> tuple[Expr, int | None]:
        """How many units there are, and the chunk the vector variable is cut into (``None``: not cut)."""
        units = to_expr(1)
        for loop in self.nest.outer:
            if loop.symbol not in (self.plan.outer, self.plan.tile):
                units = units * loop.size
        if self.plan.outer is None:
            return units, None
        size = next(loop.size for loop in self.nest.outer if loop.symbol == self.plan.outer)
        if self.plan.tile is not None:
            chunk = 2 * self.plan.lanes  # two tiles side by side fill cache lines of what is written
            return units * floordiv(size + (chunk - 1), chunk), chunk
        block = self.plan.lanes * self.plan.interleave[0]
        per_element = max(1, max((hint(iterations(s.ranges)) for s in self.nest.stages), default=1))
        chunk = max(block, 4096 // per_element // block * block)
        if size.constant is not None and size.constant <= chunk:
            return units, None
        return units * floordiv(size + (chunk - 1), chunk), chunk

    def _unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        em, ctx = self.em, self.ctx
        ctx.values.clear()
        vector_loop = next((loop for loop in self.nest.outer if loop.symbol == self.plan.outer), None)
        tile_loop = next((loop for loop in self.nest.outer if loop.symbol == self.plan.tile), None)
        rest = unit
        low, high = imm(0), ctx.scalar(vector_loop.size) if vector_loop is not None else imm(0)
        if chunk is not None and vector_loop is not None:
            chunks = ctx.scalar(floordiv(vector_loop.size + (chunk - 1), chunk))
            others = [loop for loop in self.nest.outer if loop is not vector_loop and loop is not tile_loop]
            part = em.unsigned("urem", rest, chunks) if others else rest
            rest = em.unsigned("udiv", rest, chunks) if others else imm(0)
            low = em.mul(part, imm(chunk))
            high = em.minimum(em.add(low, imm(chunk)), high)
        loops = [loop for loop in self.nest.outer if loop is not vector_loop and loop is not tile_loop]
        for position, loop in enumerate(reversed(loops)):
            size = ctx.scalar(loop.size)
            last = position == len(loops) - 1
            ctx.symbols[Symbol(loop.symbol)] = rest if last else em.unsigned("urem", rest, size)
            rest = imm(0) if last else em.unsigned("udiv", rest, size)
        if vector_loop is None:
            self._stages()
        elif tile_loop is not None:
            self._tiles(vector_loop, tile_loop, low, high)
        else:
            self._outer_blocks(vector_loop, low, high)
        return []

    def _tiles(self, vector_loop: Range, tile_loop: Range, low: Ssa, high: Ssa) -> None:
        """Squares of ``lanes`` by ``lanes``; what is left of the tile variable in vectors, of the other in scalars."""
        em, lanes = self.em, self.plan.lanes
        size = self.ctx.scalar(tile_loop.size)
        whole = em.round_down(size, lanes)
        symbol, tile = Symbol(vector_loop.symbol), Symbol(tile_loop.symbol)

        def across(step: int, vectors: int, start: Ssa, stop: Ssa) -> None:
            def at_tile(at: Ssa, _: list[Ssa]) -> list[Ssa]:
                self.ctx.symbols[tile] = at
                body = functools.partial(self._outer_block, symbol, vectors, tile=tile if step > 1 else None)
                divisible = vector_loop.size.constant is not None and vector_loop.size.constant % lanes == 0
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

    def _outer_blocks(self, loop: Range, low: Ssa, high: Ssa) -> None:
        """Blocks of interleaved vectors, then single vectors, then single elements, as far as the size needs them."""
        lanes, interleave = self.plan.lanes, self.plan.interleave[0]
        left = loop.size.constant
        for step, vectors in dict.fromkeys(((lanes * interleave, interleave), (lanes, 1), (1, 0))):
            masked = not vectors and outer_tail(self.nest, loop, lanes, self.ops.target)
            if left is not None and left < step:
                continue
            if masked:  # one vector at most
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
        ctx.vector = Vector(symbol, at, self.plan.lanes, vectors, tile) if vectors else None
        if end is not None:
            here = ctx.ops.compare("icmp slt", ctx.ramp(0), ctx.em.splat(end, self.plan.lanes))
            ctx.vector = Vector(symbol, at, self.plan.lanes, vectors, tile, here)
        spread = self.plan.lanes * self.plan.interleave[0] if vectors else 1
        ctx.scratch = {row.name: spread for row in self.nest.scratch}
        self._stages()
        ctx.vector = None
        return []

    # -- stages --------------------------------------------------------------------------------------------

    def _stages(self) -> None:
        for position, stage in enumerate(self.nest.stages):
            if not stage.ranges:
                emit_body(self.ctx, stage.body, _no_reduce)
                continue
            StageEmitter(self.nest, self.plan, self.ctx, position).emit()


def _no_reduce(reduce: Reduce, value: Value) -> None:
    raise AssertionError(f"reduce {reduce.result} outside a loop")


def _dtype(row: Buffer) -> DType:
    dtype = dtype_from_torch_name(row.dtype)
    assert dtype is not None, f"scratch row {row.name} has no generated type"
    return dtype
