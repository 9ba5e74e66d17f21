"""Products of numbers of which an instruction multiplies several at once.

Note [Products of pairs]
    ``vdpbf16ps`` multiplies 32 pairs of bfloat16 and adds both products of a pair to a float. The product is written as
    in Note [Products in registers], with a pair in the place of a number: a panel has ``[k / 2][width][2]``, and a pair
    of a row of the left factor is read where it lies and put into every lane. A right factor whose neighbors in memory
    are neighbors in the sum is one of pairs as it lies, and turned over as 32-bit numbers are; or it lies in such
    panels already (Note [Matrices in panels]). The last number of an odd sum is multiplied by itself.

    The instruction takes subnormal numbers for 0, as oneDNN's products do, which consist of the same.

Note [Products of bytes]
    ``vpdpbusd`` multiplies 64 bytes and adds four products to a number of 32 bits, nothing of which is lost. It takes
    the first factor's bytes without signs: those of the panel, to which 128 is added as they are copied, and so 128
    times the sum of a row of the left factor is taken from each result of that row.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ....ir import Load
from ....kernel_ir.nodes import Kernel
from ....symbolic import Expr, floordiv
from ..machine import Machine
from ..products import GroupedProduct, packed_right
from .context import Value
from .emitter import Carried, Ssa, imm, vector_type
from .product import TURNED, CopiedFactor, ProductEmitter
from .tile import ALIGNED, BYTES, PAIRS
from .turn import turn_function

__all__ = ["GroupedProductEmitter"]

_SIGNS = -0x7F7F7F80  # the upper bit of each of four bytes


class GroupedProductEmitter(ProductEmitter):
    """Writes a kernel that :func:`~..products.grouped_product` knows, see Note [Products of pairs] and
    Note [Products of bytes]."""

    def __init__(self, kernel: Kernel, form: GroupedProduct, target: Machine, declarations: dict[str, str]) -> None:
        self.form = form
        super().__init__(kernel, form.site, target, declarations)
        self.kind, self.panel = (PAIRS if form.panels.group == PAIRS.group else BYTES), form.panels.width
        self.packed = packed_right(kernel, form.site, form.panels) if self.kind is PAIRS else None

    def read_in_place(self) -> Load:
        """The left factor, always."""
        return self.form.left

    def steps(self) -> Expr:
        """Groups of a panel."""
        return floordiv(self.site.inner.extent + (self.kind.group - 1), self.kind.group)

    def whole_steps(self) -> Ssa:
        """Groups of which all numbers are there."""
        return self.ctx.scalar(floordiv(self.site.inner.extent, self.kind.group))

    def rest(self) -> int:
        """Numbers of a group that is not whole."""
        return (self.site.inner.extent.constant or 0) % self.kind.group

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """The copy of a strip, a tile of sums, and what is taken from a row's sums of bytes."""
        super().allocate(pointers)
        if self.kind is BYTES:
            self.row_sums = self.em.pure("ptr", f"alloca [{self.block()} x i32], align {ALIGNED} ; 128 times a row")

    def copy_panel(self, factor: CopiedFactor, at: Ssa, to: Ssa) -> list[Ssa]:
        """A panel of columns that are rows of groups in memory."""
        em, kind, name = self.em, self.kind, f"turn_{self.kind.name}_{factor.width}"
        if name not in em.declarations:
            lanes = min(self.across, TURNED)
            em.define(name, turn_function(name, "float", lanes, factor.width, em.declarations, kind.bits // 8))
        row = em.unsigned("udiv", self.step_of(self.form.right, self.columns), imm(kind.group))
        given = (self._column(at), row, self.ctx.scalar(self.steps()), to)
        em.effect(f"call void @{name}({', '.join(value.typed for value in given)})")
        if kind is BYTES:
            self._without_signs(to, em.mul(self.ctx.scalar(self.steps()), imm(factor.width)))
        return []

    def _without_signs(self, panel: Ssa, items: Ssa) -> None:
        """Add 128 to the bytes of a panel."""
        em, words = self.em, vector_type("i32", self.across)

        def vector(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            place = em.element("i32", panel, at)
            read = em.here(words, f"load {words}, ptr {place.text}, align {ALIGNED}")
            moved = em.here(words, f"xor {read.typed}, splat (i32 {_SIGNS})")
            em.effect(f"store {moved.typed}, ptr {place.text}, align {ALIGNED}")
            return []

        em.loop(imm(0), items, self.across, [], vector, "without_signs")

    def copy_some(self, factor: CopiedFactor, first: Ssa, end: Ssa, to: Ssa) -> None:
        """A panel that is not full, pair by pair, and zeros up to where a vector ends."""
        em, steps = self.em, self.ctx.scalar(self.steps())

        def column(at: Ssa, _: Iterable[Ssa]) -> list[Ssa]:
            start, place = self._column(at), em.sub(at, first)

            def pair(k: Ssa, _: Iterable[Ssa]) -> list[Ssa]:
                place_ = em.element("i32", start, k)
                read = em.here("i32", f"load i32, ptr {place_.text}, align {self.kind.bits // 8}")
                if self.kind is BYTES:
                    read = em.here("i32", f"xor {read.typed}, {_SIGNS}")
                self._put(read, to, k, place)
                return []

            return em.loop(imm(0), steps, 1, [], pair, "k")

        em.loop(first, end, 1, [], column, "column")
        count = em.sub(end, first)
        filled = em.mul(em.unsigned("udiv", em.add(count, imm(self.across - 1)), imm(self.across)), imm(self.across))

        def zero(place: Ssa, k: Ssa, _: Iterable[Ssa]) -> list[Ssa]:
            self._put(imm(0, "i32"), to, k, place)
            return []

        def zeros(place: Ssa, _: Iterable[Ssa]) -> list[Ssa]:
            return em.loop(imm(0), steps, 1, [], functools.partial(zero, place), "k")

        em.loop(count, filled, 1, [], zeros, "zeros")

    def _put(self, pair: Ssa, panel: Ssa, k: Ssa, place: Ssa) -> None:
        em = self.em
        to = em.element("i32", panel, em.add(em.mul(k, imm(self.panel)), place))
        em.effect(f"store {pair.typed}, ptr {to.text}, align 4")

    def _column(self, at: Ssa) -> Ssa:
        """Where a column of the right factor begins."""
        ctx, right = self.ctx, self.form.right
        ctx.symbols[self.columns], ctx.symbols[self.inner] = at, imm(0)
        return self.em.element(self.kind.number, ctx.pointers[right.buffer], ctx.scalar(right.indices[0]))

    # -- bytes without signs -------------------------------------------------------------------------------

    def sum_rows(self, top: Ssa, bottom: Ssa, first: Ssa, end: Ssa) -> None:
        """The block's rows; before that, what is taken from the sums of each."""
        if self.kind is BYTES:
            self.top = top
            self.em.loop(top, bottom, 1, [], self._sum_of_row, "row")
        super().sum_rows(top, bottom, first, end)

    def _sum_of_row(self, row: Ssa, _: list[Ssa]) -> list[Ssa]:
        """128 times the sum of a row of the left factor."""
        em, ctx, left, lanes = self.em, self.ctx, self.form.left, self.across * BYTES.group
        ctx.symbols[self.rows], ctx.symbols[self.inner] = row, imm(0)
        start = em.element("i8", ctx.pointers[left.buffer], ctx.scalar(left.indices[0]))
        words, bytes_, count = (
            vector_type("i32", self.across),
            vector_type("i8", lanes),
            ctx.scalar(self.site.inner.extent),
        )
        masked = f"llvm.masked.load.v{lanes}i8.p0"
        em.declare(masked, bytes_, ["ptr", vector_type("i1", lanes), bytes_])
        em.declare(BYTES.dot, words, [words, bytes_, bytes_])

        def add(there: Ssa | None, k: Ssa, now: list[Ssa]) -> list[Ssa]:
            place = em.element("i8", start, k)
            if there is None:
                read = em.here(bytes_, f"load {bytes_}, ptr {place.text}, align 1")
            else:
                given = f"ptr align 1 {place.text}, {there.typed}, {bytes_} zeroinitializer"
                read = em.here(bytes_, f"call {bytes_} @{masked}({given})")
            ones = f"{bytes_} splat (i8 1)"
            return [em.here(words, f"call {words} @{BYTES.dot}({now[0].typed}, {ones}, {read.typed})")]

        whole = em.round_down(count, lanes)
        sums = em.loop(
            imm(0), whole, lanes, [Carried(words, Ssa("zeroinitializer", words))], functools.partial(add, None), "k"
        )
        ramp = ", ".join(f"i64 {lane}" for lane in range(lanes))
        left_over = em.splat(em.sub(count, whole), lanes)
        there = em.pure(vector_type("i1", lanes), f"icmp slt <{lanes} x i64> <{ramp}>, {left_over.text}", left_over)
        sums = em.loop(whole, count, lanes, [Carried(words, sums[0])], functools.partial(add, there), "k")
        reduce = f"llvm.vector.reduce.add.v{self.across}i32"
        em.declare(reduce, "i32", [words])
        total = em.here("i32", f"call i32 @{reduce}({sums[0].typed})")
        scaled = em.here("i32", f"shl {total.typed}, 7")
        em.effect(f"store {scaled.typed}, ptr {em.element('i32', self.row_sums, em.sub(row, self.top)).text}, align 4")
        return []

    def sums_of(self, row: Ssa, sums: Ssa, vectors: int) -> Value:
        """The sums of a row of a tile."""
        found = super().sums_of(row, sums, vectors)
        if self.kind is not BYTES:
            return found
        em, words = self.em, vector_type("i32", self.across)
        place = em.element("i32", self.row_sums, em.sub(row, self.top))
        more = em.splat(em.here("i32", f"load i32, ptr {place.text}, align 4"), self.across)
        parts = tuple(em.here(words, f"sub {part.typed}, {more.text}") for part in found.parts)
        return Value(found.dtype, parts, varying=True)
