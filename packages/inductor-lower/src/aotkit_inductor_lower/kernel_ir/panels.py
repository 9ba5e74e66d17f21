"""Matrices in panels, as products read them: what packs them and what finds them in a kernel.

Note [Matrices in panels]
    The right factor of a product is read in panels of a tile's columns, and within a panel step by step of the sum. A
    matrix that never changes is written that way once, as ``[panels, steps, width]``, with zeros where columns or steps
    end. The product then reads it at ``(j // width, k, j % width)``: plain index arithmetic, which every pass, the
    interpreter and other targets understand. Where an instruction multiplies several steps at once, these lie side by
    side: ``[panels, steps / group, width, group]`` is read at ``(j // width, k // group, j % width, k % group)``.

Note [Panels of pieces]
    Where a float32 is multiplied as the exact sum of pieces of bfloat16, the pieces of each ``depth`` steps follow each
    other, and those of a group are ``apart`` steps from one another: ``[panels, steps / depth, pieces, depth / group,
    width, group]``. The product reads all pieces of an element and adds them, largest first, which gives every float32
    that the pieces hold whole; a matrix with others is not packed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ..symbolic import Call, Expr, Symbol, floordiv, mod, to_expr
from .nodes import Loop

__all__ = ["Panels", "panels_at"]

_DEPTHS, _PIECES = (32, 64), 3  # steps that are padded to, and pieces of a number


@dataclass(frozen=True, slots=True)
class Panels:
    """A layout: panels of ``width`` columns, in which ``group`` steps of the sum lie side by side, ``apart`` steps from
    one another, of ``depth`` steps at a time, each in so many ``pieces``."""

    width: int
    group: int = 1
    depth: int = 1
    apart: int = 1
    pieces: int = 1

    @property
    def whole(self) -> int:
        """Steps that are there together."""
        return max(self.depth, self.group)

    def sizes(self, columns: int, steps: int) -> tuple[int, ...]:
        """Of the packed tensor."""
        panels = -(-columns // self.width)
        if self.pieces > 1:
            inside = (self.pieces, self.depth // self.group, self.width, self.group)
            return (panels, self.padded(steps) // self.depth, *inside)
        sizes = (panels, self.padded(steps) // self.group, self.width)
        return sizes if self.group == 1 else (*sizes, self.group)

    def indices(self, column: Expr, step: Expr, piece: int = 0) -> tuple[Expr, ...]:
        """Where the packed tensor has a piece of an element of the matrix."""
        panel, place = floordiv(column, self.width), mod(column, self.width)
        if self.pieces > 1:
            line, number = mod(step, self.apart), mod(floordiv(step, self.apart), self.group)
            return panel, floordiv(step, self.depth), to_expr(piece), line, place, number
        at = (panel, floordiv(step, self.group), place)
        return at if self.group == 1 else (*at, mod(step, self.group))

    def offset(self, column: Expr, step: Expr, steps: int, piece: int = 0) -> Expr:
        """The same in memory, in elements."""
        at, total = self.indices(column, step, piece), column * 0
        stride = 1
        for index, size in zip(reversed(at), reversed(self.sizes(1, steps)), strict=True):
            total, stride = total + index * stride, stride * size
        return total

    def piece_at(self, offset: Expr, column: Symbol, step: Symbol, steps: int) -> int | None:
        """Which piece of the element of a column and a step there is at a place of the packed matrix, if any."""
        made = (self.offset(to_expr(column), to_expr(step), steps, piece) for piece in range(self.pieces))
        return next((piece for piece, own in enumerate(made) if own == offset), None)

    def padded(self, steps: int) -> int:
        """Steps of a panel."""
        return -(-steps // self.whole) * self.whole


def panels_at(offset: Expr, loops: Sequence[Loop]) -> tuple[Panels, Symbol, Symbol] | None:
    """The layout in which a place is one of a packed matrix, with the loops of its columns and of its steps."""
    divided = [atom for monomial, _ in offset.terms for atom in monomial if isinstance(atom, Call)]
    extents = {Symbol(loop.symbol): loop.extent.constant for loop in loops}
    known = [symbol for symbol in extents if symbol in offset.symbols] if divided else []
    for column, step in itertools.permutations(known, 2):
        widths, by = (_divisors(divided, symbol) for symbol in (column, step))
        steps = extents[step]
        for panels in _layouts(max(widths), by) if widths and steps else ():
            if steps and panels.piece_at(offset, column, step, steps) is not None:
                return panels, column, step
    return None


def _divisors(calls: Iterable[Call], symbol: Symbol) -> list[int]:
    """What a loop's variable is divided by."""
    own = to_expr(symbol)
    found = {call.args[1].constant for call in calls if call.fn in ("floordiv", "mod") and call.args[0] == own}
    return sorted(divisor for divisor in found if divisor)


def _layouts(width: int, divisors: Sequence[int]) -> Iterator[Panels]:
    """Those whose steps are divided by these numbers."""
    yield Panels(width, divisors[0] if divisors else 1)
    if len(divisors) > 1:
        apart, depth = divisors[0], divisors[-1]
        yield Panels(width, depth // apart, depth, apart, _PIECES)
    elif divisors:
        yield from (Panels(width, divisors[0], depth) for depth in _DEPTHS)
