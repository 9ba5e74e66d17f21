"""Products of few rows with a matrix in panels, two of which take turns, and lie apart in memory.

Note [Panels that lie apart]
    AMD's processors fetch ahead within a page, or a little beyond, so one stream that is read in order waits at each
    end of a page, unless what is computed meanwhile is so little that loads behind it are on their way. Here it is not.
    Of two streams that take turns by group, 2 KiB of 4 bits, what is fetched ahead for one comes while the other is
    computed. So the units of a call are two halves, of which a panel each is computed at once, if all have the same
    left factor; the sums of a group stay in registers, those of both panels in memory of the first cache. Lines are not
    asked for: on Zen 4 each of those keeps one of the few places for what the first cache waits for, and all takes a
    fifth longer.

    Scales of a group lie far from those of the next, but beside those of the same group in the next panel of the
    stream, which are asked for.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ....kernel_ir.matmul_site import FewRowsSite
from ....kernel_ir.nodes import Kernel
from ..choose_few_rows import AMD
from ..machine import Machine
from .context import Vector
from .emitter import Ssa, imm
from .few_rows_in_panels import FewRowsInPanels, Panels

__all__ = ["PanelsApart"]

STREAMS = 2


class PanelsApart(FewRowsInPanels):
    """Panel by panel, or two panels by group, see Note [Panels that lie apart]."""

    def __init__(
        self, kernel: Kernel, site: FewRowsSite, target: Machine, declarations: dict[str, str], panels: Panels
    ) -> None:
        super().__init__(kernel, site, target, declarations, panels)
        apart = self.outer and self.copied_before and target.cpu in AMD
        self.joined = STREAMS if apart else 1

    def over_units(self, low: Ssa, high: Ssa, chunk: int | None) -> None:
        """A panel of each stream at once."""
        em, self.behind = self.em, high
        self.apart = em.unsigned("udiv", em.add(em.sub(high, low), imm(self.joined - 1)), imm(self.joined))
        em.loop(low, em.add(low, self.apart), 1, [], lambda unit, _: self.unit(unit, chunk), "unit")

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """The panels that are computed at once, at the end of a call not one of each stream."""
        em, self.first, self.there = self.em, unit, imm(1)
        if self.joined > 1:
            left = em.sub(em.add(self.behind, self.apart), em.add(unit, imm(1)))
            self.there = em.unsigned("udiv", left, self.apart)
        return super().unit(unit, chunk)

    def over_panels(self, body: Callable[[], None]) -> None:
        """``body`` for each of these panels, with its sums."""
        if self.joined == 1:
            super().over_panels(body)
            return
        self.em.loop(imm(0), self.there, 1, [], functools.partial(self._in_stream, body, self.sums), "stream")
        self.place(self.outer, self.first)

    def _in_stream(self, body: Callable[[], None], sums: Ssa, stream: Ssa, _: list[Ssa]) -> list[Ssa]:
        em = self.em
        self.place(self.outer, em.add(self.first, em.mul(stream, self.apart)))
        self.sums = self.at(sums, em.mul(stream, imm(self.count * self.strip)))
        body()
        self.sums = sums
        return []

    def ask_for_scales(self, vector: Vector) -> None:
        """Those of the same group in the next panel of a stream."""
        if self.joined > 1:
            self.ask_for_scales_beside(vector)
        else:
            super().ask_for_scales(vector)
