"""A product of a few rows with a matrix as one LLVM function, with what comes before and after it.

Note [Products of few rows]
    Each number of the matrix is used once per row, so what a product of one row takes is the time to read the matrix,
    and it is read once, where it lies, in the order of memory. What is computed of it on the way (a cast, a scale) is
    computed in registers. A unit of work is a strip of columns.

    Where the summed dimension is contiguous (the weight of a linear layer), some columns at a time are summed in
    vectors along it, for all rows, and each sum is added up across its lanes in the end. Where the columns are, the
    strip's sums lie in memory of the first-level cache, and a few steps of the summed dimension are added to them at
    once, so that whole pieces of the matrix's rows are read one after the other. The left factor is read where it lies
    if its numbers can be loaded so; else it is copied before. What becomes of the sums is computed of a strip's.

    A long sum is added up in parts, which depend on its length only; the split of work does not depend on the number of
    threads, nor any sum on the split: results are the same on one thread and on many.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence

from ....ir import DType, Instr, Load, Store
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel, Loop
from ....kernel_ir.walk import loops_of_values
from ....symbolic import Expr, Symbol, floordiv, product, to_expr
from ..machine import Machine
from ..products import computed_by
from .body import emit_body
from .context import Value, Vector
from .emitter import Carried, Ssa, imm, vector_type
from .kernel import KernelEmitter
from .tile import ALIGNED, fma_of
from .types import memory_type, width

__all__ = ["FewRowsEmitter"]

PART = 1 << 12  # numbers that are summed in registers before they are added to memory
ROWS_PART = 1 << 8  # rows of the matrix whose products are added to a strip's sums, before these are added to others
STRIP = 64  # columns of a strip that is read along the summed dimension
WIDE_STRIP = 512  # columns of one that is read along its columns
STEPS = 8  # of the summed dimension at once in the latter, for one row
COPIED = "left factor"  # the name of its memory, where it is copied


class FewRowsEmitter(KernelEmitter):
    """Writes a kernel that :func:`~..products.product_form` knows, see Note [Products of few rows]."""

    def __init__(self, kernel: Kernel, site: FewRowsSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, target, declarations)
        self.site, self.count = site, site.count
        self.dtype: DType = site.reduce.dtype
        self.element = memory_type(self.dtype)
        self.across = target.lanes(width(self.dtype))
        self.vector_type = vector_type(self.element, self.across)
        self.fma = fma_of(self.element, self.across)
        self.columns = Symbol(site.columns.symbol)
        self.inner = Symbol(site.inner[-1].symbol)
        self.computed, self.right = computed_by(kernel, site.left), computed_by(kernel, site.right)
        self.left: tuple[Instr, ...] = self.computed
        self.after = tuple(stmt for stmt in kernel.body if not isinstance(stmt, Loop))
        self.outer = [loop for loop in kernel.grid[:-1] if loop is not site.rows]
        self.along_columns = self._contiguous(self.columns) and not self._contiguous(self.inner)
        self.strip = WIDE_STRIP if self.along_columns else STRIP
        registers = 32 if target.vector_bits == 512 or target.triple.startswith("aarch64") else 16
        self.group = max(1, min(4, 3 * registers // 4 // self.count))
        self.steps = max(1, min(STEPS, registers // 2 // self.count))

    def _contiguous(self, loop: Symbol) -> bool:
        """Whether neighbours in the right factor's memory are neighbours in a loop."""
        steps = [i.indices[0].coefficient(loop) for i in self.right if isinstance(i, Load)]
        return any(step is not None and step == 1 for step in steps)

    # -- how the work is shared out ------------------------------------------------------------------------

    def units(self) -> tuple[Expr, int | None]:
        """Strips, of each product of a batch."""
        return product(loop.extent for loop in self.outer) * self._strips(), None

    def _strips(self) -> Expr:
        return floordiv(self.site.columns.extent + (self.strip - 1), self.strip)

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """The sums of a strip, and the left factor, where it is copied: here, if all units have the same."""
        type_ = f"[{self.count * self.strip} x {self.element}]"
        self.sums = self.em.pure("ptr", f"alloca {type_}, align {ALIGNED} ; sums")
        parts = self.along_columns and self._in_parts(ROWS_PART)
        self.part = self.em.pure("ptr", f"alloca {type_}, align {ALIGNED} ; part") if parts else self.sums
        self.ctx.pointers = pointers
        self.ctx.written |= {COPIED}
        self.copies_left = not self._loads_left()
        if self.copies_left:
            item = width(self.dtype) // 8
            pointers[COPIED] = self.memory(self.em.mul(self.ctx.scalar(self._summed()), imm(self.count * item)))
        varies = loops_of_values(self.nests[0])[self.site.left]
        if self.copies_left and not varies & {loop.symbol for loop in self.outer}:
            self._copy_left()
            self.copies_left = False

    def _in_parts(self, most: int) -> bool:
        """Whether more is summed than ``most`` numbers, as far as is known."""
        summed = self._summed().constant
        return summed is None or summed > most

    def _summed(self) -> Expr:
        return product(loop.extent for loop in self.site.inner)

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """One strip."""
        em, ctx = self.em, self.ctx
        ctx.values.clear()
        first = em.mul(em.unsigned("urem", unit, ctx.scalar(self._strips())), imm(self.strip))
        self.place(self.outer, em.unsigned("udiv", unit, ctx.scalar(self._strips())))
        end = em.minimum(em.add(first, imm(self.strip)), ctx.scalar(self.site.columns.extent))
        if self.copies_left:
            self._copy_left()
        self._clear(self.sums)
        if self.along_columns:
            self._over_parts(ROWS_PART, functools.partial(self._sum_along_columns, first, end))
        else:
            self._sum_along_inner(first, end)
        em.loop(imm(0), imm(self.count), 1, [], functools.partial(self._finish_row, first, end), "row")
        return []

    def _enter(self, row: Ssa | None = None, vector: Vector | None = None, k: Ssa | None = None) -> None:
        """A place within loops. What is loaded there moves out of a loop only if that certainly runs."""
        ctx = self.ctx
        ctx.values.clear()
        ctx.vector = vector
        if row is not None and self.site.rows is not None:
            ctx.symbols[Symbol(self.site.rows.symbol)] = row
        if k is not None:
            ctx.symbols[self.inner] = k
        certain = all((loop.extent.constant or 0) > 0 for loop in self.site.inner)
        ctx.hoist_depth = 1 if certain else self.em.depth

    def _leave(self) -> None:
        self.ctx.vector, self.ctx.hoist_depth = None, 0
        self.ctx.values.clear()

    def _masked(self, vector: Vector, end: Ssa | None) -> Vector:
        return vector if end is None else self.ctx.some(vector, end)

    def _element(self, pointer: Ssa, offset: Ssa) -> Ssa:
        text = f"getelementptr {self.element}, ptr {pointer.text}, i64 {offset.text}"
        return pointer if offset.constant == 0 else self.em.pure("ptr", text, pointer, offset)

    def _load(self, pointer: Ssa, offset: Ssa) -> Ssa:
        """A vector of sums; strips are whole vectors long."""
        place = self._element(pointer, offset)
        return self.em.here(self.vector_type, f"load {self.vector_type}, ptr {place.text}, align {self._alignment()}")

    def _store(self, value: Ssa, pointer: Ssa, offset: Ssa) -> None:
        place = self._element(pointer, offset)
        self.em.effect(f"store {value.typed}, ptr {place.text}, align {self._alignment()}")

    def _alignment(self) -> int:
        return min(ALIGNED, self.across * width(self.dtype) // 8)

    def _zero(self) -> Ssa:
        return Ssa("zeroinitializer", self.vector_type)

    def _clear(self, sums: Ssa) -> None:
        def clear(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self._store(self._zero(), sums, at)
            return []

        self.em.loop(imm(0), imm(self.count * self.strip), self.across, [], clear, "clear")

    def _multiply(self, a: Ssa, b: Ssa, total: Ssa) -> Ssa:
        self.em.declare(self.fma, self.vector_type, [self.vector_type] * 3)
        text = f"call {self.vector_type} @{self.fma}({a.typed}, {b.typed}, {total.typed})"
        return self.em.pure(self.vector_type, text, a, b, total)

    # -- the summed loops ----------------------------------------------------------------------------------

    def _over_parts(self, most: int, sum_part: Callable[[Ssa, Ssa], None]) -> None:
        """The outermost summed loop in parts, each of ``most`` numbers if that can be."""
        outermost, *others = self.site.inner
        size, rest = self.ctx.scalar(outermost.extent), product(loop.extent for loop in others).constant
        each = max(1, most // (rest or 1))

        def part(low: Ssa, _: list[Ssa]) -> list[Ssa]:
            sum_part(low, self.em.minimum(self.em.add(low, imm(each)), size))
            return []

        self.em.loop(imm(0), size, each, [], part, "part")

    def _within(
        self, low: Ssa, high: Ssa, values: list[Ssa], last: Callable[[Ssa, Ssa, list[Ssa]], list[Ssa]], depth: int = 0
    ) -> list[Ssa]:
        """``values`` carried through the summed loops, of which the outermost runs from ``low`` to ``high``; ``last``
        is the innermost one."""
        loops, em = self.site.inner, self.em
        if depth == len(loops) - 1:
            return last(low, high, values)
        symbol, size = Symbol(loops[depth].symbol), self.ctx.scalar(loops[depth + 1].extent)

        def step(at: Ssa, inside: list[Ssa]) -> list[Ssa]:
            self.ctx.symbols[symbol] = at
            return self._within(imm(0), size, inside, last, depth + 1)

        return em.loop(low, high, 1, _carried(values), step, "k")

    # -- the left factor -----------------------------------------------------------------------------------

    def _loads_left(self) -> bool:
        """Whether the left factor can be loaded where it lies: any number if one at a time, else whole vectors."""
        load = self.left[0] if len(self.left) == 1 else None
        if not isinstance(load, Load) or load.mask is not None or load.dtype is not self.dtype:
            return False
        step = load.indices[0].coefficient(self.inner)
        return self.along_columns or (step is not None and step == 1)

    def _copy_left(self) -> None:
        """All rows of the left factor, one after the other; it is loaded from there from now on."""
        em, ctx = self.em, self.ctx
        place = to_expr(0)
        rows = () if self.site.rows is None else (self.site.rows,)
        for loop in (*rows, *self.site.inner):
            place = place * loop.extent + Symbol(loop.symbol)
        em.comment(f"{self.site.left}, as it is needed")

        def copy(end: Ssa | None, row: Ssa, k: Ssa, _: list[Ssa]) -> list[Ssa]:
            self._enter(row, self._masked(Vector(self.inner, k, self.across, 1), end), k)
            emit_body(ctx, (*self.computed, Store(COPIED, (place,), self.site.left)))
            self._leave()
            return []

        def copy_row(row: Ssa, _: list[Ssa]) -> list[Ssa]:
            def steps(low: Ssa, high: Ssa, _: list[Ssa]) -> list[Ssa]:
                whole = em.round_down(high, self.across)
                em.loop(low, whole, self.across, [], functools.partial(copy, None, row), "k")
                return em.loop(whole, high, self.across, [], functools.partial(copy, high, row), "k")

            return self._within(imm(0), ctx.scalar(self.site.inner[0].extent), [], steps)

        em.loop(imm(0), imm(self.count), 1, [], copy_row, "row")
        self.left = (Load(self.site.left, COPIED, (place,), self.dtype),)

    # -- a matrix whose columns lie along the summed loop ----------------------------------------------------

    def _sum_along_inner(self, first: Ssa, end: Ssa) -> None:
        """Some columns at a time."""
        em = self.em
        whole = em.add(first, em.round_down(em.sub(end, first), self.group))
        em.loop(first, whole, self.group, [], functools.partial(self._sum_columns, self.group, first), "columns")
        em.loop(whole, end, 1, [], functools.partial(self._sum_columns, 1, first), "column")

    def _sum_columns(self, columns: int, first: Ssa, at: Ssa, _: list[Ssa]) -> list[Ssa]:
        """``columns`` from ``at`` on, for all rows, in vectors along the summed loop."""
        em = self.em
        sums = [(row, column) for row in range(self.count) for column in range(columns)]
        vectors = max(1, min(4, 8 // len(sums)))

        def steps(low: Ssa, high: Ssa, values: list[Ssa]) -> list[Ssa]:
            step = vectors * self.across
            whole = high if self._whole(step) else em.add(low, em.round_down(em.sub(high, low), step))
            body = functools.partial(self._add_vectors, columns, at)
            values = em.loop(low, whole, step, _carried(values), functools.partial(body, vectors, None), "k")
            if self._whole(step):
                return values
            return em.loop(whole, high, self.across, _carried(values), functools.partial(body, vectors, high), "k")

        def part(low: Ssa, high: Ssa) -> None:
            found = self._within(low, high, [self._zero()] * (len(sums) * vectors), steps)
            for position, (row, column) in enumerate(sums):
                total = self._total(found[position * vectors : (position + 1) * vectors])
                offset = em.add(imm(row * self.strip), em.add(em.sub(at, first), imm(column)))
                place = self._element(self.sums, offset)
                before = em.here(self.element, f"load {self.element}, ptr {place.text}")
                after = em.here(self.element, f"fadd {before.typed}, {total.text}")
                em.effect(f"store {after.typed}, ptr {place.text}")

        self._over_parts(PART, part)
        return []

    def _whole(self, step: int) -> bool:
        """Whether the innermost summed loop is certainly whole steps long. Parts of it are."""
        size = self.site.inner[-1].extent.constant
        return size is not None and size % step == 0

    def _add_vectors(
        self, columns: int, at: Ssa, vectors: int, end: Ssa | None, k: Ssa, values: list[Ssa]
    ) -> list[Ssa]:
        """``vectors`` of products for each sum; with ``end`` one, of the lanes before it."""
        ctx, across, result = self.ctx, self.across, list(values)
        copies = vectors if end is None else 1
        vector = self._masked(Vector(self.inner, k, across, copies), end)
        left = []
        for row in range(self.count):
            self._enter(imm(row), vector, k)
            emit_body(ctx, self.left)
            left.append([ctx.part(self.site.left, copy, across) for copy in range(copies)])
        for column in range(columns):
            ctx.symbols[self.columns] = self.em.add(at, imm(column))
            self._enter(None, vector, k)
            emit_body(ctx, self.right)
            right = [ctx.part(self.site.right, copy, across) for copy in range(copies)]
            if vector.tail is not None:
                right = [ctx.ops.select(vector.tail, value, self._zero()) for value in right]
            for row, copy in itertools.product(range(self.count), range(copies)):
                place = (row * columns + column) * vectors + copy
                result[place] = self._multiply(left[row][copy], right[copy], result[place])
        self._leave()
        return result

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

    # -- a matrix whose rows lie along the columns ---------------------------------------------------------

    def _sum_along_columns(self, first: Ssa, end: Ssa, low: Ssa, high: Ssa) -> None:
        """A part of the summed loops, some steps at a time, into the strip's sums."""
        em = self.em
        if self.part is not self.sums:
            self._clear(self.part)

        def steps(low: Ssa, high: Ssa, _: list[Ssa]) -> list[Ssa]:
            whole = em.add(low, em.round_down(em.sub(high, low), self.steps))
            em.loop(low, whole, self.steps, [], functools.partial(self._add_rows, self.steps, first, end), "k")
            return em.loop(whole, high, 1, [], functools.partial(self._add_rows, 1, first, end), "k")

        self._within(low, high, [], steps)
        if self.part is self.sums:
            return

        def add(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self._store(self.ops.op("fadd", self._load(self.sums, at), self._load(self.part, at)), self.sums, at)
            return []

        em.loop(imm(0), imm(self.count * self.strip), self.across, [], add, "add")

    def _add_rows(self, steps: int, first: Ssa, end: Ssa, k: Ssa, _: list[Ssa]) -> list[Ssa]:
        """``steps`` rows of the matrix, each times a number of each row of the left factor."""
        em, ctx, across = self.em, self.ctx, self.across
        numbers = []
        for step, row in itertools.product(range(steps), range(self.count)):
            self._enter(imm(row), None, em.add(k, imm(step)))
            emit_body(ctx, self.left)
            numbers.append(em.splat(ctx.values[self.site.left].parts[0], across))

        def add(vectors: int, end: Ssa | None, at: Ssa, _: list[Ssa]) -> list[Ssa]:
            vector = self._masked(Vector(self.columns, at, across, vectors), end)
            each = list(itertools.product(range(self.count), range(vectors)))
            places = [em.add(em.sub(at, first), imm(row * self.strip + copy * across)) for row, copy in each]
            sums = [self._load(self.part, place) for place in places]
            for step in range(steps):
                self._enter(None, vector, em.add(k, imm(step)))
                emit_body(ctx, self.right)
                for position, (row, copy) in enumerate(each):
                    right = ctx.part(self.site.right, copy, across)
                    sums[position] = self._multiply(numbers[step * self.count + row], right, sums[position])
            for place, value in zip(places, sums, strict=True):
                self._store(value, self.part, place)
            self._leave()
            return []

        self._over_columns(first, end, add)
        return []

    # -- columns of a strip --------------------------------------------------------------------------------

    def _over_columns(self, first: Ssa, end: Ssa, body: Callable[[int, Ssa | None, Ssa, list[Ssa]], list[Ssa]]) -> None:
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
        sums = em.mul(row, imm(self.strip))

        def finish(vectors: int, end: Ssa | None, at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self._enter(row, self._masked(Vector(self.columns, at, self.across, vectors), end))
            place = em.add(sums, em.sub(at, first))
            parts = [self._load(self.sums, em.add(place, imm(copy * self.across))) for copy in range(vectors)]
            ctx.values[self.site.reduce.result] = Value(self.dtype, tuple(parts), varying=True)
            emit_body(ctx, self.after)
            self._leave()
            return []

        self._over_columns(first, end, finish)
        return []


def _carried(values: Sequence[Ssa]) -> list[Carried]:
    return [Carried(value.type, value) for value in values]
