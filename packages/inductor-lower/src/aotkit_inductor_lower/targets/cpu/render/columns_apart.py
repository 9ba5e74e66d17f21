"""Products of few rows that read several columns of a strip at once, which may lie apart in memory.

Note [Columns that lie apart]
    AMD's processors fetch ahead in each page that is read, and stop at its end. Four columns next to each other lie in
    one page or two, so at an end nothing is on its way. Four columns that lie a quarter of a strip apart are in pages
    that end at different times. That is a guess at the cause; what was measured is that one row of float32 takes 0.85
    of the time that it took, eight rows 0.69, one row of bfloat16 0.86 and two 0.65 (``python -m tools.bench.decode
    --products``, before and after, Zen 4). Zen 3 reads one row of bfloat16 in two thirds of the time (a token of the
    bench of decode, before and after).

    How far ahead is asked for: of float32 a little ahead in the same column, as its columns are long. Columns of
    narrower numbers are short, and some places ahead would often be in the next column, or, behind the last one of a
    quarter, in the next quarter, which is read already. So the same place is asked for in a column that is read later,
    at least :data:`COLUMNS_AHEAD` bytes from now, which for the last ones of a quarter is in the next strip.

    One row of narrow numbers on Zen 4 does better with long quarters: each strip begins in four other places, which
    nothing was asked for. Units that follow each other are joined to strips of up to sixteen, and what is asked for is
    1 KB ahead, in the next column where the present one ends. A matrix of bfloat16 is read 1.2 times as fast, at the
    speed of a sum. With columns of two pages or more that is no faster.

    So are columns of bytes that are widened, for one row or two; for more rows computing takes longer than reading, and
    products of bytes in whole numbers (``few_rows_of_bytes.py``) are read one column after the other, since in huge
    pages four streams take longer than one, and nothing else is computed there.

    Columns that have a condition, as the keys of a cache, of which the first ones are there, are read next to each
    other: of four that lie apart, the last ones would be read though nothing is in them yet.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from ....symbolic import to_expr
from .emitter import Ssa, imm
from .few_rows import FewRowsEmitter

__all__ = ["APART", "ColumnsApart"]

APART = 4  # columns of a strip that are read together, if they lie apart
COLUMNS_AHEAD = 1 << 11  # bytes
Group = Callable[[Ssa, list[Ssa]], list[Ssa]]


class ColumnsApart(FewRowsEmitter):
    """Columns of a strip in groups, next to each other, or as in Note [Columns that lie apart] where ``spread`` is
    set; then ``later`` is how many columns later is read what is asked for, if that is not a place in the same one."""

    spread, later = False, 0
    apart, asked = imm(1), imm(0)  # columns between those of a group, and from the first one to the one asked for

    def over_groups(self, first: Ssa, end: Ssa, group: int, body: Callable[[int, Ssa, list[Ssa]], list[Ssa]]) -> None:
        """All columns of a strip: ``body`` takes how many there are in a group, and the first of them."""
        em = self.em
        whole = em.add(first, em.round_down(em.sub(end, first), group))
        if self.spread and group > 1:
            self.apart = em.unsigned("udiv", em.sub(end, first), imm(group))
            behind = em.add(first, self.apart)
            some = functools.partial(self._of_quarters, behind, functools.partial(body, group))
            em.loop(first, behind, 1, [], some, "columns")
        else:
            self.asked = imm(self.later)
            em.loop(first, whole, group, [], functools.partial(body, group), "columns")
        self.asked = imm(self.later)
        em.loop(whole, end, 1, [], functools.partial(body, 1), "column")

    def _of_quarters(self, behind: Ssa, body: Group, at: Ssa, _: list[Ssa]) -> list[Ssa]:
        """A group whose first column is ``at``; ``behind`` is where the first quarter ends."""
        if self.later:
            em, ops, later = self.em, self.ops, imm(self.later)
            ends = ops.compare("icmp sge", em.add(at, later), behind)
            self.asked = em.add(later, ops.select(ends, em.sub(imm(self.strip), self.apart), imm(0)))
        return body(at, [])

    def column(self, at: Ssa, number: int) -> Ssa:
        """One of the columns that are read together."""
        return self.em.add(at, self.em.mul(imm(number), self.apart))

    def columns_later(self, nbytes: int) -> int:
        """How many columns of ``nbytes`` make :data:`COLUMNS_AHEAD`."""
        return -(-COLUMNS_AHEAD // max(1, nbytes))

    def ask_ahead(self, ahead: int, column: Ssa, copies: int) -> None:
        """Asks for what is read later, at the place entered: ``ahead`` numbers on in ``column``, or in a later one."""
        symbols = self.ctx.symbols
        symbols[self.columns] = self.em.add(column, self.asked) if self.later else column
        self.prefetch(to_expr(0 if self.later else ahead), copies, 2)
        symbols[self.columns] = column
