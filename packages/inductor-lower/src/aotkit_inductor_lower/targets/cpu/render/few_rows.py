"""A product of a few rows with a matrix as one LLVM function, with what comes before and after it.

Note [Products of few rows]
    Each number of the matrix is used once per row, so what a product of one row takes is the time to read the matrix,
    and it is read once, where it lies, in the order of memory. What is computed of it on the way (a cast, a scale) is
    computed in registers. A unit of work is a strip of columns.

    Where the summed dimension is contiguous (the weight of a linear layer), columns are summed in vectors along it,
    for all rows, and each sum is added up across its lanes in the end. Where the columns are, the strip's sums lie in
    memory of the first-level cache, and a few steps of the summed dimension are added to them at once, so that whole
    pieces of the matrix's rows are read one after the other. What becomes of the sums is computed of a strip's.

    Where the matrix is ``where(condition, x, 0)``, and the condition is one of a column, or of a step of the sum,
    parts of it whose conditions do not hold are not read (:func:`condition_of`): of a cache of keys and values, those
    that are not there yet.

    Which matrix of several a product of a batch is with may be loaded from memory: the experts that a router chose.
    That is loaded and checked once for a unit. An index out of range leads to the first matrix, and is reported.

    Of more than :data:`BLOCK` rows the sums do not fit the registers. Such rows are blocks of as many each, one after
    the other for the same columns, which are in the first cache when the second block reads them.

    A long sum is added up in parts, which depend on its length only; the split of work does not depend on the number
    of threads, nor any sum on the split: results are the same on one thread and on many.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from ....ir import Compute, Const, DType, Instr, Load, Store
from ....ir.walk import operands, places_in
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel, Loop
from ....kernel_ir.walk import loops_of_values
from ....symbolic import Expr, Symbol, floordiv, product, to_expr
from ..machine import Machine
from ..products import computed_by
from .body import address_of, emit_body
from .context import Value, Vector
from .emitter import Carried, Ssa, imm, vector_type
from .kernel import KernelEmitter
from .tile import ALIGNED, fma_of
from .types import memory_type, width

__all__ = ["BLOCK", "LINE", "FewRowsEmitter", "blocks_of", "carried", "condition_of"]

LINE = 64  # bytes that are fetched at once
BLOCK = 8  # rows whose sums are in registers together


class FewRowsEmitter(KernelEmitter):
    """What both ways of Note [Products of few rows] share. ``strip``: columns of a unit, whole vectors. ``joined``: how
    many units that follow each other are computed as one, if a call has so many."""

    strip: int
    joined = 1
    known: Mapping[str, Value] = MappingProxyType({})  # places that are the same for all of a unit

    def __init__(self, kernel: Kernel, site: FewRowsSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, target, declarations)
        self.site, self.count = site, site.count
        self.dtype: DType = site.reduce.dtype
        self.element = memory_type(self.dtype)
        self.across = target.lanes(width(self.dtype))
        self.vector_type = vector_type(self.element, self.across)
        self.columns, self.inner = Symbol(site.columns.symbol), Symbol(site.inner[-1].symbol)
        self.left, self.right = computed_by(kernel, site.left), computed_by(kernel, site.right)
        self.places = places_in(self.nests[0].body)
        self.condition = condition_of(self.right, site.right)
        self.after = tuple(stmt for stmt in kernel.body if not isinstance(stmt, Loop))
        self.outer = [loop for loop in kernel.grid[:-1] if loop is not site.rows]
        self.registers = 32 if target.vector_bits == 512 or target.triple.startswith("aarch64") else 16
        self.blocks = blocks_of(self.count, self.most_together())
        self.together = len(self.blocks[0])  # of each block at most
        varies = loops_of_values(self.nests[0])[site.left] & {loop.symbol for loop in self.outer}
        self.copied_before = not self.places and not varies  # all units have the same left factor

    # -- what differs --------------------------------------------------------------------------------------

    def most_together(self) -> int:
        """Rows of a block."""
        return BLOCK

    def loads_left(self) -> bool:
        """Whether the left factor is read where it lies, and not copied before."""
        raise NotImplementedError

    def left_offset(self, row: Ssa, k: Ssa) -> Ssa:
        """Where the copy of the left factor has step ``k``, and so many more as a vector has lanes."""
        raise NotImplementedError

    def sum_strip(self, first: Ssa, end: Ssa) -> None:
        """The sums of a strip's columns, added to the zeros in memory."""
        raise NotImplementedError

    # -- how the work is shared out ------------------------------------------------------------------------

    def units(self) -> tuple[Expr, int | None]:
        """Strips, of each product of a batch."""
        return product(loop.extent for loop in self.outer) * self._strips(), None

    def _strips(self) -> Expr:
        return floordiv(self.site.columns.extent + (self.strip - 1), self.strip)

    def over_units(self, low: Ssa, high: Ssa, chunk: int | None) -> None:
        """As many at once as are joined."""
        self.behind = high
        self.em.loop(low, high, self.joined, [], lambda unit, _: self.unit(unit, chunk), "unit")

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """The sums of a strip, and the left factor, where it is copied: here, if all units have the same."""
        self.ctx.pointers = pointers
        self.sums = self.strip_of_sums("sums")
        self.copied = None if self.loads_left() else self._room_for_left()
        if self.copied is not None and self.copied_before:
            low = Ssa("%low", "i64")
            once = self.em.minimum(self.em.add(low, imm(1)), Ssa("%high", "i64"))  # or not at all
            self.em.loop(low, once, 1, [], lambda at, _: self._copy_left(), "left")

    def strip_of_sums(self, name: str) -> Ssa:
        """Memory for the sums of a strip, row by row."""
        type_ = f"[{self.count * self.strip * self.joined} x {self.element}]"
        return self.em.pure("ptr", f"alloca {type_}, align {ALIGNED} ; {name}")

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """One strip, or some, joined."""
        em, ctx = self.em, self.ctx
        ctx.values.clear()
        strip, iteration = self._placed(unit)
        first = em.mul(strip, imm(self.strip))
        self.place(self.outer, iteration)
        emit_body(ctx, self.places)
        self.known = dict(ctx.values)
        end = em.minimum(em.add(first, imm(self.strip * self.joined)), ctx.scalar(self.site.columns.extent))
        if self.joined > 1:
            end = em.minimum(end, em.mul(self.behind, imm(self.strip)))
        if self.copied is not None and not self.copied_before:
            self._copy_left()
        self.clear(self.sums, self.joined)
        self.sum_strip(first, end)
        em.loop(imm(0), imm(self.count), 1, [], functools.partial(self._finish_row, first, end), "row")
        return []

    def _placed(self, unit: Ssa) -> tuple[Ssa, Ssa]:
        """Which strip a unit is, and of which product of a batch. Where matrices are chosen by what is loaded, products
        of one strip follow each other: those of the same matrix find it in the second cache."""
        em, first = self.em, self._strips()
        if self.places:
            first = product(loop.extent for loop in self.outer)
        size = self.ctx.scalar(first)
        inner, outer = em.unsigned("urem", unit, size), em.unsigned("udiv", unit, size)
        return (outer, inner) if self.places else (inner, outer)

    # -- places and vectors --------------------------------------------------------------------------------

    def enter(self, row: Ssa | None = None, vector: Vector | None = None, k: Ssa | None = None) -> None:
        """A place within loops. What is loaded there moves out of a loop only if that certainly runs."""
        ctx = self.ctx
        ctx.values.clear()
        ctx.values.update(self.known)
        ctx.vector = vector
        if row is not None and self.site.rows is not None:
            ctx.symbols[Symbol(self.site.rows.symbol)] = row
        if k is not None:
            ctx.symbols[self.inner] = k
        certain = all((loop.extent.constant or 0) > 0 for loop in self.site.inner)
        ctx.hoist_depth = 1 if certain else self.em.depth

    def leave(self) -> None:
        """The end of what :meth:`enter` begins."""
        self.ctx.vector, self.ctx.hoist_depth = None, 0
        self.ctx.values.clear()

    def some(self, vector: Vector, end: Ssa | None) -> Vector:
        """A vector of which only the lanes before ``end`` are there, if that is given."""
        return vector if end is None else self.ctx.some(vector, end)

    def at(self, pointer: Ssa, offset: Ssa) -> Ssa:
        """The address of an element of the type that is summed."""
        return self.em.element(self.element, pointer, offset)

    def load(self, pointer: Ssa, offset: Ssa) -> Ssa:
        """A vector of memory of this function."""
        type_, align = self.vector_type, self._alignment()
        return self.em.here(type_, f"load {type_}, ptr {self.at(pointer, offset).text}, align {align}")

    def store(self, value: Ssa, pointer: Ssa, offset: Ssa) -> None:
        """A vector to memory of this function."""
        self.em.effect(f"store {value.typed}, ptr {self.at(pointer, offset).text}, align {self._alignment()}")

    def _alignment(self) -> int:
        return min(ALIGNED, self.across * width(self.dtype) // 8)

    def zero(self) -> Ssa:
        """No product yet."""
        return Ssa("zeroinitializer", self.vector_type)

    def clear(self, sums: Ssa, strips: int) -> None:
        """Some strips of zeros."""

        def clear(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self.store(self.zero(), sums, at)
            return []

        self.em.loop(imm(0), imm(self.count * self.strip * strips), self.across, [], clear, "clear")

    def multiply(self, a: Ssa, b: Ssa, total: Ssa) -> Ssa:
        """``a * b + total`` of vectors, rounded once."""
        name = fma_of(self.element, self.across)
        self.em.declare(name, self.vector_type, [self.vector_type] * 3)
        text = f"call {self.vector_type} @{name}({a.typed}, {b.typed}, {total.typed})"
        return self.em.pure(self.vector_type, text, a, b, total)

    def over_lanes(self, op: str, value: Ssa) -> Ssa:
        """All lanes of a vector of i32, added up or joined by another operator."""
        symbol = f"llvm.vector.reduce.{op}.v{self.across}i32"
        self.em.declare(symbol, "i32", [value.type])
        return self.em.here("i32", f"call i32 @{symbol}({value.typed})")

    def prefetch(self, ahead: Expr, copies: int, locality: int) -> None:
        """The matrix's lines that will be read ``ahead`` of the place entered, where they lie along its vector. The
        processor's own prefetching does not follow short pieces of rows, nor narrow numbers far enough."""
        em, ctx = self.em, self.ctx
        for load in (i for i in self.right if isinstance(i, Load)):
            slope = ctx.slope(load.indices[0])
            if slope is None or slope != 1:
                continue
            moved = load.indices[0].substitute({self.inner: self.inner + ahead})
            each = max(1, LINE * 8 // width(load.dtype) // self.across)
            for copy in range(0, copies, each):
                pointer = address_of(ctx, load, moved, copy)
                em.declare("llvm.prefetch.p0", "void", ["ptr", "i32", "i32", "i32"])
                em.effect(f"call void @llvm.prefetch.p0(ptr {pointer.text}, i32 0, i32 {locality}, i32 1)")

    def made_by(self, *values: str) -> list[Instr]:
        """What values of the right factor are computed by."""
        wanted = set(values)
        kept: list[Instr] = []
        for instr in reversed(self.right):
            if not isinstance(instr, Store) and instr.result in wanted:
                kept.append(instr)
                wanted.update(operands(instr))
        return kept[::-1]

    def holds(self, places: Sequence[Mapping[Symbol, Ssa]]) -> Ssa:
        """Whether the condition of the right factor holds at one of some places."""
        assert self.condition is not None
        found = Ssa("false", "i1")
        for place in places:
            self.ctx.symbols.update(place)
            self.enter()
            emit_body(self.ctx, self.made_by(self.condition))
            found = self.ops.op("or", self.ctx.values[self.condition].parts[0], found)
            self.leave()
        return found

    # -- the summed loops ----------------------------------------------------------------------------------

    def summed(self) -> int | None:
        """How many numbers are summed, if that is known."""
        return product(loop.extent for loop in self.site.inner).constant

    def over_parts(self, most: int, sum_part: Callable[[Ssa, Ssa], None]) -> None:
        """The outermost summed loop in parts, each of ``most`` numbers if that can be."""
        outermost, *others = self.site.inner
        size, rest = self.ctx.scalar(outermost.extent), product(loop.extent for loop in others).constant
        each = max(1, most // (rest or 1))

        def part(low: Ssa, _: list[Ssa]) -> list[Ssa]:
            sum_part(low, self.em.minimum(self.em.add(low, imm(each)), size))
            return []

        self.em.loop(imm(0), size, each, [], part, "part")

    def within(
        self, low: Ssa, high: Ssa, values: list[Ssa], last: Callable[[Ssa, Ssa, list[Ssa]], list[Ssa]], depth: int = 0
    ) -> list[Ssa]:
        """``values`` carried through the summed loops, of which the outermost runs from ``low`` to ``high``; ``last``
        is the innermost one."""
        loops = self.site.inner
        if depth == len(loops) - 1:
            return last(low, high, values)
        symbol, size = Symbol(loops[depth].symbol), self.ctx.scalar(loops[depth + 1].extent)

        def step(at: Ssa, inside: list[Ssa]) -> list[Ssa]:
            self.ctx.symbols[symbol] = at
            return self.within(imm(0), size, inside, last, depth + 1)

        return self.em.loop(low, high, 1, carried(values), step, "k")

    # -- a copy of the left factor -------------------------------------------------------------------------

    def _room_for_left(self) -> Ssa:
        count = self.em.mul(self.before(imm(self.count)), imm(width(self.dtype) // 8))
        memory = self.memory(self.em.add(self.em.mul(count, self.padded()), imm(ALIGNED)))
        return self.em.aligned(memory, ALIGNED)

    def padded(self) -> Ssa:
        """Steps of the innermost summed loop, in whole vectors."""
        size = self.em.add(self.ctx.scalar(self.site.inner[-1].extent), imm(self.across - 1))
        return self.em.round_down(size, self.across)

    def before(self, count: Ssa) -> Ssa:
        """``count`` times the iterations of the summed loops around the innermost one."""
        return self.em.mul(self.ctx.scalar(product(loop.extent for loop in self.site.inner[:-1])), count)

    def outer_steps(self) -> Ssa:
        """Which of these iterations the present one is."""
        place = to_expr(0)
        for loop in self.site.inner[:-1]:
            place = place * loop.extent + Symbol(loop.symbol)
        return self.ctx.scalar(place)

    def _copy_left(self) -> list[Ssa]:
        """All rows of the left factor as they will be needed; what fills vectors up is 0."""
        em, ctx = self.em, self.ctx
        em.comment(f"{self.site.left}, as it is needed")

        def copy(end: Ssa | None, row: Ssa, k: Ssa, _: list[Ssa]) -> list[Ssa]:
            vector = self.some(Vector(self.inner, k, self.across, 1), end)
            self.enter(row, vector, k)
            emit_body(ctx, self.left)
            value = ctx.part(self.site.left, 0, self.across)
            if vector.tail is not None:
                value = ctx.ops.select(vector.tail, value, self.zero())
            assert self.copied is not None
            self.store(value, self.copied, self.left_offset(row, k))
            self.leave()
            return []

        def copy_row(row: Ssa, _: list[Ssa]) -> list[Ssa]:
            def steps(low: Ssa, high: Ssa, _: list[Ssa]) -> list[Ssa]:
                whole = em.round_down(high, self.across)
                em.loop(low, whole, self.across, [], functools.partial(copy, None, row), "k")
                return em.loop(whole, high, self.across, [], functools.partial(copy, high, row), "k")

            return self.within(imm(0), ctx.scalar(self.site.inner[0].extent), [], steps)

        return em.loop(imm(0), imm(self.count), 1, [], copy_row, "row")

    # -- columns of a strip --------------------------------------------------------------------------------

    def over_columns(self, first: Ssa, end: Ssa, body: Callable[[int, Ssa | None, Ssa, list[Ssa]], list[Ssa]]) -> None:
        """Two vectors of columns at a time, then single ones, of the last of which some lanes are not there."""
        em, step = self.em, 2 * self.across
        size = self.site.columns.extent.constant
        exact = size is not None and size % step == 0
        whole = end if exact else em.add(first, em.round_down(em.sub(end, first), step))
        em.loop(first, whole, step, [], functools.partial(body, 2, None), "columns")
        if not exact:
            em.loop(whole, end, self.across, [], functools.partial(body, 1, end), "columns")

    def _finish_row(self, first: Ssa, end: Ssa, row: Ssa, _: list[Ssa]) -> list[Ssa]:
        """What becomes of the sums of a row."""
        em, ctx = self.em, self.ctx
        sums = em.mul(row, imm(self.strip * self.joined))

        def finish(vectors: int, end: Ssa | None, at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self.enter(row, self.some(Vector(self.columns, at, self.across, vectors), end))
            place = em.add(sums, em.sub(at, first))
            parts = [self.load(self.sums, em.add(place, imm(copy * self.across))) for copy in range(vectors)]
            ctx.values[self.site.reduce.result] = Value(self.dtype, tuple(parts), varying=True)
            emit_body(ctx, self.after)
            self.leave()
            return []

        self.over_columns(first, end, finish)
        return []


def blocks_of(count: int, most: int) -> tuple[range, ...]:
    """Rows in as few blocks as can be, the first of which are the largest."""
    number = -(-count // most)
    ends = [-(-count * block // number) for block in range(number + 1)]
    return tuple(range(low, high) for low, high in itertools.pairwise(ends))


def condition_of(body: Sequence[Instr], value: str) -> str | None:
    """The condition of a factor that is ``where(condition, x, 0)``, whatever it is cast to."""
    made = {instr.result: instr for instr in body if not isinstance(instr, Store)}
    found = made.get(value)
    while isinstance(found, Compute) and found.op == "cast":
        found = made.get(found.args[0])
    if not isinstance(found, Compute) or found.op != "where":
        return None
    other = made.get(found.args[2])
    return found.args[0] if isinstance(other, Const) and other.value == 0 else None


def carried(values: Sequence[Ssa]) -> list[Carried]:
    """Values as a loop takes them."""
    return [Carried(value.type, value) for value in values]
