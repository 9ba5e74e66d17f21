"""Products of numbers of which an instruction multiplies several at once.

Note [Products of pairs]
    ``vdpbf16ps`` multiplies 32 pairs of bfloat16 and adds both products of a pair to a float. The product is written as
    in Note [Products in registers], with a pair in the place of a number: a panel has ``[k / 2][width][2]``, and a pair
    of a row of the left factor is read where it lies and put into every lane. A right factor whose neighbors in memory
    are neighbors in the sum is one of pairs as it lies, and turned over as 32-bit numbers are; or it lies in such
    panels already (Note [Matrices in panels]). The last number of an odd sum is multiplied by itself.

    The instruction takes subnormal numbers for 0, as oneDNN's products do, which consist of the same.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

from ....ir import Load
from ....kernel_ir.nodes import Kernel
from ....symbolic import Expr, floordiv
from ..machine import Machine
from ..products import GroupedProduct, packed_right
from .emitter import Ssa, imm
from .product import TURNED, CopiedFactor, ProductEmitter
from .tile import PAIRS
from .turn import turn_function

__all__ = ["GroupedProductEmitter"]


class GroupedProductEmitter(ProductEmitter):
    """Writes a kernel that :func:`~..products.grouped_product` knows, see Note [Products of pairs]."""

    def __init__(self, kernel: Kernel, form: GroupedProduct, target: Machine, declarations: dict[str, str]) -> None:
        self.form = form
        super().__init__(kernel, form.site, target, declarations)
        self.kind, self.panel = PAIRS, form.panels.width
        self.packed = packed_right(kernel, form.site, form.panels)

    def read_in_place(self) -> Load:
        """The left factor, always."""
        return self.form.left

    def steps(self) -> Expr:
        """Pairs of a panel."""
        return floordiv(self.site.inner.extent + 1, 2)

    def whole_steps(self) -> Ssa:
        """Pairs of which both numbers are there."""
        return self.ctx.scalar(floordiv(self.site.inner.extent, 2))

    def rest(self) -> int:
        """Whether there is a number without another."""
        return (self.site.inner.extent.constant or 0) % 2

    def copy_panel(self, factor: CopiedFactor, at: Ssa, to: Ssa) -> list[Ssa]:
        """A panel of columns that are rows of pairs in memory."""
        em, name = self.em, f"turn_pairs_{factor.width}"
        if name not in em.declarations:
            lanes = min(self.across, TURNED)
            em.define(name, turn_function(name, "float", lanes, factor.width, em.declarations, 2))
        row = em.unsigned("udiv", self.step_of(self.form.right, self.columns), imm(2))
        given = (self._column(at), row, self.ctx.scalar(self.steps()), to)
        em.effect(f"call void @{name}({', '.join(value.typed for value in given)})")
        return []

    def copy_some(self, factor: CopiedFactor, first: Ssa, end: Ssa, to: Ssa) -> None:
        """A panel that is not full, pair by pair, and zeros up to where a vector ends."""
        em, steps = self.em, self.ctx.scalar(self.steps())

        def column(at: Ssa, _: Iterable[Ssa]) -> list[Ssa]:
            start, place = self._column(at), em.sub(at, first)

            def pair(k: Ssa, _: Iterable[Ssa]) -> list[Ssa]:
                read = em.here("i32", f"load i32, ptr {em.element('i32', start, k).text}, align 2")
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
        return self.em.element("i16", ctx.pointers[right.buffer], ctx.scalar(right.indices[0]))
