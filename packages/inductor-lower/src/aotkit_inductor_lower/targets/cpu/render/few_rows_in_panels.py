"""Products of few rows with a matrix of few bits in panels of columns.

Note [Panels of few bits]
    Of each step of the sum, the columns of a panel lie side by side in memory, several to a byte (Note [Weights of
    four bits as ATen packs them]). A unit of work is a panel, which is read once from its first byte to its last. The
    sums of its columns stay in registers over a group, within which

        sum over k of x[k] * (number[k] * scale + zero)  =  scale * (sum of x[k] * number[k]) + zero * (sum of x[k])

    so that scales and zeros are needed once per group. The second sum is the same for all columns: it is computed with
    the copy of the left factor. The equation is not one of infinities, nans and sums that overflow, so where the left
    factor's numbers are such, or sums have become such, each weight is computed. On AVX-512 a number of 4 bits is found
    in a table that is a register, which takes one instruction and needs no other bits cleared.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....ir import Compute, Const, DType, Instr, Load
from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel, Loop
from ....kernel_ir.walk import loops_of_values, perfect_nests
from ....symbolic import Symbol, product, to_expr
from ..machine import Machine
from ..products import computed_by
from .body import address_of, emit_body
from .context import Value, Vector
from .emitter import Ssa, imm, vector_type
from .few_rows import BLOCK, LINE, FewRowsEmitter, carried
from .types import width

__all__ = ["FewRowsInPanels", "Panels", "Place", "panels_of"]

MOST = 4  # halves, or other parts, of a panel that share bytes
WIDEST = 64  # columns of a part
AHEAD = 1 << 12  # bytes of a panel
GROUPS_AHEAD = 2
STEPS = 4  # of the sum at once
FEWER = 5  # rows of a block with 16 registers
LARGEST = "16.0"  # is no number of 4 bits
Place = tuple[int, int, int]  # row, part, vector
TABLE = ", ".join(f"float {number - 8}.0" for number in range(16))


@dataclass(frozen=True, slots=True)
class Panels:
    """``parts``: the loop over columns that share bytes. The right factor is ``number * scale + zero``, of which only
    the number varies within a group. ``bits``: the integer whose last 4 bits are the number plus 8, if so made."""

    parts: Loop
    number: str
    scale: str
    zero: str
    bits: str | None


def panels_of(kernel: Kernel, site: FewRowsSite) -> Panels | None:
    """How a product of few rows has its matrix in panels, if it has, see Note [Panels of few bits]."""
    outer = [loop for loop in kernel.grid[:-1] if loop is not site.rows]
    width, made = site.columns.extent.constant, {_result(i): i for i in computed_by(kernel, site.right)}
    weight = made.get(site.right)
    if site.reduce.dtype is not DType.F32 or not outer or len(site.inner) != 2:
        return None
    if not isinstance(weight, Compute) or weight.op != "fma":
        return None
    parts, varies = outer[-1], loops_of_values(perfect_nests(kernel)[0])
    number, scale, zero = weight.args
    within = site.inner[-1].symbol
    if within not in varies[number] or within in varies[scale] | varies[zero]:
        return None
    if not 2 <= (parts.extent.constant or 0) <= MOST or width is None or width > WIDEST or width % 16:
        return None
    loads = [i for i in computed_by(kernel, number) if isinstance(i, Load)]
    if any(Symbol(parts.symbol) in load.indices[0].symbols or load.mask is not None for load in loads):
        return None
    return Panels(parts, number, scale, zero, _four_bits(made, number))


def _result(instr: Instr) -> str:
    return getattr(instr, "result", "")


def _four_bits(made: dict[str, Instr], number: str) -> str | None:
    """``bits`` of ``float((bits & 15) - 8)``."""
    whole = _args(made.get(number), "cast")
    less = _args(made.get(whole[0]), "sub") if whole else ()
    masked = _args(made.get(less[0]), "bitwise_and") if less and _is(made.get(less[1]), 8) else ()
    for bits, mask in (masked, masked[::-1]) if masked else ():
        if _is(made.get(mask), 15):
            return bits
    return None


def _args(instr: Instr | None, op: str) -> tuple[str, ...]:
    return instr.args if isinstance(instr, Compute) and instr.op == op else ()


def _is(instr: Instr | None, value: int) -> bool:
    return isinstance(instr, Const) and instr.value == value


class FewRowsInPanels(FewRowsEmitter):
    """Panel by panel, see Note [Panels of few bits]. ``strip`` counts all columns of a panel, those of its first part
    before those of its second."""

    def __init__(
        self, kernel: Kernel, site: FewRowsSite, target: Machine, declarations: dict[str, str], panels: Panels
    ) -> None:
        super().__init__(kernel, site, target, declarations)
        self.panels = panels
        self.count_of_parts = panels.parts.extent.constant or 1
        self.width = site.columns.extent.constant or 1
        self.strip = self.count_of_parts * self.width
        self.outer = [loop for loop in self.outer if loop is not panels.parts]
        sums = self.registers // 2
        self.vectors = max(1, min(self.width // self.across, sums // (self.together * self.count_of_parts)))
        self.looked_up = panels.bits is not None and self.across == 16 and self.element == "float"

    # -- the left factor -----------------------------------------------------------------------------------

    def most_together(self) -> int:
        """A sum of each for two parts of a panel, and what is multiplied, are in registers."""
        return BLOCK if self.registers == 32 else FEWER

    def loads_left(self) -> bool:
        """Its sums are computed with its copy."""
        return False

    def left_offset(self, row: Ssa, k: Ssa) -> Ssa:
        """One row after the other."""
        em = self.em
        place = em.add(em.mul(row, self.before(imm(1))), self.outer_steps())
        return em.add(em.mul(place, self.padded()), k)

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Sums of the left factor's groups, too, and 0, or nan if they are too large."""
        self.group_sums = self.memory(self.em.mul(imm(self.count * 4), self.before_first()))
        self.checked = self.em.pure("ptr", "alloca float")
        super().allocate(pointers)

    def before_first(self) -> Ssa:
        """How many groups there are."""
        return self.ctx.scalar(product(loop.extent for loop in self.site.inner[:-1]))

    def _copy_left(self) -> list[Ssa]:
        super()._copy_left()
        em, group = self.em, Symbol(self.site.inner[0].symbol)
        zero = Ssa("0.0", "float")
        em.effect(f"store {zero.typed}, ptr {self.checked.text}")

        def of_group(row: Ssa, at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self.ctx.symbols[group] = at
            self.group_copied(row, at, self.left_offset(row, imm(0)))
            return []

        def of_row(row: Ssa, _: list[Ssa]) -> list[Ssa]:
            return em.loop(imm(0), self.before_first(), 1, [], functools.partial(of_group, row), "group")

        return em.loop(imm(0), imm(self.count), 1, [], of_row, "row")

    def group_copied(self, row: Ssa, group: Ssa, start: Ssa) -> None:
        """Comes behind the copy of a group of one row of the left factor, which is at ``start``."""
        copied, ops = self.copied, self.ops
        assert copied is not None

        def add(k: Ssa, sums: list[Ssa]) -> list[Ssa]:
            place = self.em.add(start, k)
            value = self.load(copied, place)
            added = value, ops.intrinsic("fabs", value)
            totals = [ops.op("fadd", total, more) for total, more in zip(sums, added, strict=False)]
            return [*totals, *self.watch(value, place, sums[2:])]

        first = carried([self.zero(), self.zero(), *self.nothing_seen()])
        found = self.em.loop(imm(0), self.padded(), self.across, first, add, "sum")
        total, sizes = map(self.total, found[:2])
        self.keep_sum(row, group, total)
        self.check(self.em.here("float", f"fmul {sizes.typed}, {LARGEST}"), found[2:])

    def keep_sum(self, row: Ssa, group: Ssa, total: Ssa) -> None:
        """Writes the sum of a group of the left factor."""
        place = self.em.element("float", self.group_sums, self.em.add(self.em.mul(row, self.before_first()), group))
        self.em.effect(f"store {total.typed}, ptr {place.text}")

    def check(self, most: Ssa, seen: list[Ssa]) -> None:
        """Writes down if a sum might be as large as ``most``, and that is not finite; or what :meth:`watch` saw."""
        em = self.em
        before = em.here("float", f"load float, ptr {self.checked.text}")
        none = em.here("float", f"fmul {most.typed}, 0.0")
        after = self.spoiled(em.here("float", f"fadd {before.typed}, {none.text}"), seen)
        em.effect(f"store {after.typed}, ptr {self.checked.text}")

    def nothing_seen(self) -> list[Ssa]:
        """What :meth:`watch` begins with."""
        return []

    def watch(self, value: Ssa, place: Ssa, seen: list[Ssa]) -> list[Ssa]:
        """Looks at a vector of the left factor whose copy lies at ``place``."""
        return seen

    def spoiled(self, checked: Ssa, seen: list[Ssa]) -> Ssa:
        """``checked``, or nan if what was seen must not be multiplied with numbers of few bits."""
        return checked

    def total(self, total: Ssa) -> Ssa:
        """All lanes, added up in pairs."""
        lanes = self.across
        while lanes > 1:
            lanes //= 2
            low, high = (self.em.shuffle(total, total, self.element, range(s, s + lanes)) for s in (0, lanes))
            total = self.ops.op("fadd", low, high)
        return total

    # -- sums ----------------------------------------------------------------------------------------------

    def sum_strip(self, first: Ssa, end: Ssa) -> None:
        """All groups of each panel: with factored sums if all that is multiplied is finite."""
        em = self.em
        checked = em.here("float", f"load float, ptr {self.checked.text}")
        finite = em.here("i1", f"fcmp oeq {checked.typed}, 0.0")
        em.choose(finite, None, functools.partial(self._sum_groups, factored=True), lambda: None)
        self.over_panels(functools.partial(self._correct_panel, finite))

    def _correct_panel(self, finite: Ssa) -> None:
        """Computes each weight where sums are not factored or not finite."""
        right = self.em.choose(finite, "i1", self._are_finite, lambda: Ssa("false", "i1"))
        assert right is not None
        self.em.choose(right, None, lambda: None, self._sum_weights)

    def _are_finite(self) -> Ssa:
        """Whether all sums are: no scale and no zero was an infinity or a nan, and no sum of these overflowed."""
        em = self.em

        def add(at: Ssa, totals: list[Ssa]) -> list[Ssa]:
            return [self.multiply(self.load(self.sums, at), self.zero(), totals[0])]

        count = imm(self.count * self.strip)
        (total,) = em.loop(imm(0), count, self.across, carried([self.zero()]), add, "finite")
        none = self.ops.any(self.ops.compare("fcmp uno", total, self.zero()))
        return em.here("i1", f"xor {none.typed}, true")

    def _sum_weights(self) -> None:
        self.clear(self.sums, 1)
        self._sum_groups(factored=False)

    def _sum_groups(self, *, factored: bool) -> None:
        """Factored sums of all panels that are computed at once, or those of one panel."""
        groups, group = self.before_first(), Symbol(self.site.inner[0].symbol)

        def of_group(vectors: int, start: int, at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self.ctx.symbols[group] = at
            some = Vector(self.columns, imm(start), self.across, vectors)
            sum_blocks = functools.partial(self._sum_blocks, some, factored=factored)
            if factored:
                self.over_panels(sum_blocks)
            else:
                sum_blocks()
            return []

        for start in range(0, self.width, self.vectors * self.across):
            vectors = min(self.vectors, (self.width - start) // self.across)
            self.em.loop(imm(0), groups, 1, [], functools.partial(of_group, vectors, start), "group")

    def over_panels(self, body: Callable[[], None]) -> None:
        """``body`` for each of the panels that are computed at once."""
        body()

    def _sum_blocks(self, vector: Vector, *, factored: bool) -> None:
        for rows in self.blocks:
            self._sum_group(vector, rows, factored=factored)

    def _sum_group(self, vector: Vector, rows: range, *, factored: bool) -> None:
        """One group of some columns, in each part of the panel, for some rows."""
        each = self.places_of(vector, rows)
        self.add_groups(vector, each, self.group_products(vector, each, factored=factored), factored=factored)

    def places_of(self, vector: Vector, rows: range) -> list[tuple[int, int, int]]:
        """Each row, part and vector."""
        return list(itertools.product(rows, range(self.count_of_parts), range(vector.interleave)))

    def add_groups(
        self, vector: Vector, each: Sequence[tuple[int, int, int]], sums: Sequence[Ssa], *, factored: bool
    ) -> None:
        """Sums over a group to those of its columns."""
        for part in range(self.count_of_parts):
            if factored:
                self.enter_part(vector, part, imm(0))
                emit_body(self.ctx, self.made_by(self.panels.scale, self.panels.zero))
                if each[0][0] == 0:
                    self.ask_for_scales(vector)
            for position, (row, here, copy) in enumerate(each):
                if here == part:
                    self._add_group(vector, (row, part, copy), sums[position], factored=factored)
        self.leave()

    def group_products(self, vector: Vector, each: Sequence[tuple[int, int, int]], *, factored: bool) -> list[Ssa]:
        """Sums over a group, for ``each`` row, part and vector: of the numbers of few bits, or of weights."""
        size, extent = self.ctx.scalar(self.site.inner[-1].extent), self.site.inner[-1].extent.constant
        steps = STEPS if extent is not None and extent % STEPS == 0 else 1
        body = functools.partial(self._add_steps, vector, each, factored, steps)
        return self.em.loop(imm(0), size, steps, carried([self.zero()] * len(each)), body, "k")

    def enter_part(self, vector: Vector, part: int, k: Ssa) -> None:
        """A place in one part of the panel."""
        self.ctx.symbols[Symbol(self.panels.parts.symbol)] = imm(part)
        self.enter(None, vector, k)

    def _add_steps(
        self, vector: Vector, each: Sequence[tuple[int, int, int]], factored: bool, steps: int, k: Ssa, sums: list[Ssa]
    ) -> list[Ssa]:
        """Some steps of the sum: in each, a number of each row times those of the columns."""
        for step in range(steps):
            at = self.em.add(k, imm(step))
            found: dict[tuple[int, int], Ssa] = {}
            for part in range(self.count_of_parts):
                self.enter_part(vector, part, at)
                for copy, value in enumerate(self._numbers(vector) if factored else self._weights(vector)):
                    found[part, copy] = value
                if part == each[0][0] == 0 and step * self.width % LINE == 0:
                    self._prefetch(vector, self.inner, AHEAD // self.width)
            sums = [
                self.multiply(self._splat(row, at), found[part, copy], total)
                for (row, part, copy), total in zip(each, sums, strict=True)
            ]
        self.leave()
        return sums

    def ask_for_scales(self, vector: Vector) -> None:
        """Those of a group that comes later, of the part of a panel that was entered."""
        self._prefetch(vector, Symbol(self.site.inner[0].symbol), GROUPS_AHEAD)

    def ask_for_scales_beside(self, vector: Vector) -> None:
        """Those of the same group in the next panel, if there are several."""
        if self.outer:
            self._prefetch(vector, Symbol(self.outer[-1].symbol), 1)

    def _prefetch(self, vector: Vector, along: Symbol, steps: int) -> None:
        """What will be loaded so many steps of a loop later, of what was loaded last. Of several loads from one tensor,
        as scales and zeros are, one tells all lines."""
        em, ctx = self.em, self.ctx
        for load in {i.buffer: i for i in self.right if isinstance(i, Load) and i.result in ctx.values}.values():
            if along is not self.inner and self.inner in load.indices[0].symbols:
                continue
            moved, slope = load.indices[0].substitute({along: along + to_expr(steps)}), ctx.slope(load.indices[0])
            bits = width(load.dtype) * (1 if slope is None else slope.constant or 1)
            for copy in range(0, vector.interleave, max(1, LINE * 8 // bits // self.across)):
                pointer = address_of(ctx, load, moved, copy)
                em.declare("llvm.prefetch.p0", "void", ["ptr", "i32", "i32", "i32"])
                em.effect(f"call void @llvm.prefetch.p0(ptr {pointer.text}, i32 0, i32 3, i32 1)")

    def _splat(self, row: int, k: Ssa) -> Ssa:
        assert self.copied is not None
        place = self.at(self.copied, self.left_offset(imm(row), k))
        text = f"load {self.element}, ptr {place.text}"
        return self.em.splat(self.em.pure(self.element, text, place), self.across)

    def _weights(self, vector: Vector) -> list[Ssa]:
        emit_body(self.ctx, self.right)
        return [self.ctx.part(self.site.right, copy, self.across) for copy in range(vector.interleave)]

    def _numbers(self, vector: Vector) -> list[Ssa]:
        """What is multiplied with the scale."""
        ctx, panels = self.ctx, self.panels
        name = panels.bits if self.looked_up and panels.bits is not None else panels.number
        emit_body(ctx, self.made_by(name))
        values = [ctx.part(name, copy, self.across) for copy in range(vector.interleave)]
        if not self.looked_up:
            return values
        table = Ssa(f"<{TABLE}>", self.vector_type)
        return [self._look_up(table, bits) for bits in values]

    def _look_up(self, table: Ssa, bits: Ssa) -> Ssa:
        """The entries of a table that the last 4 bits of each lane tell."""
        symbol, type_ = "llvm.x86.avx512.permvar.sf.512", self.vector_type
        self.em.declare(symbol, type_, [type_, vector_type("i32", self.across)])
        return self.em.pure(type_, f"call {type_} @{symbol}({table.typed}, {bits.typed})", bits)

    def _add_group(self, vector: Vector, place: tuple[int, int, int], total: Ssa, *, factored: bool) -> None:
        """A group's sum to those of its columns."""
        row, part, copy = place
        em, ctx, panels = self.em, self.ctx, self.panels
        start = (vector.base.constant or 0) + copy * self.across
        offset = imm(row * self.strip + part * self.width + start)
        before = self.load(self.sums, offset)
        if factored:
            scale, zero = (ctx.part(name, copy, self.across) for name in (panels.scale, panels.zero))
            at = ctx.symbols[Symbol(self.site.inner[0].symbol)]
            group = em.element("float", self.group_sums, em.add(em.mul(imm(row), self.before_first()), at))
            added = em.splat(em.here("float", f"load float, ptr {group.text}"), self.across)
            self.store(self.multiply(zero, added, self.multiply(scale, total, before)), self.sums, offset)
        else:
            self.store(self.ops.op("fadd", before, total), self.sums, offset)

    # -- afterwards ----------------------------------------------------------------------------------------

    def _finish_row(self, first: Ssa, end: Ssa, row: Ssa, _: list[Ssa]) -> list[Ssa]:
        """What becomes of the sums of a row, panel by panel and part by part."""
        self.over_panels(functools.partial(self._finish_panel, row))
        return []

    def _finish_panel(self, row: Ssa) -> None:
        em, ctx = self.em, self.ctx
        sums, step = em.mul(row, imm(self.strip)), 2 * self.across
        vectors = 2 if self.width % step == 0 else 1
        for part, start in itertools.product(range(self.count_of_parts), range(0, self.width, vectors * self.across)):
            self._enter_row(row, part, Vector(self.columns, imm(start), self.across, vectors))
            places = (imm(part * self.width + start + copy * self.across) for copy in range(vectors))
            parts = [self.load(self.sums, em.add(sums, place)) for place in places]
            ctx.values[self.site.reduce.result] = Value(self.dtype, tuple(parts), varying=True)
            emit_body(ctx, self.after)
            self.leave()

    def _enter_row(self, row: Ssa, part: int, vector: Vector) -> None:
        self.ctx.symbols[Symbol(self.panels.parts.symbol)] = imm(part)
        self.enter(row, vector)
