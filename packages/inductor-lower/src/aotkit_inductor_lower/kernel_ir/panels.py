"""Matrices in panels, as products read them: what packs them and what finds them in a kernel.

Note [Matrices in panels]
    The right factor of a product is read in panels of a tile's columns, and within a panel step by step of the sum. A
    matrix that never changes is written that way once, as ``[panels, steps, width]``, with zeros where columns or steps
    end. The product then reads it at ``(j // width, k, j % width)``: plain index arithmetic, which every pass, the
    interpreter and other targets understand. Where an instruction multiplies several steps at once, these lie side by
    side: ``[panels, steps / group, width, group]`` is read at ``(j // width, k // group, j % width, k % group)``.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from ..symbolic import Call, Expr, Symbol, floordiv, mod, to_expr
from .nodes import Loop

__all__ = ["Panels", "panels_at"]


@dataclass(frozen=True, slots=True)
class Panels:
    """A layout: panels of ``width`` columns, in which ``group`` steps of the sum lie side by side."""

    width: int
    group: int = 1

    def sizes(self, columns: int, steps: int) -> tuple[int, ...]:
        """Of the packed tensor."""
        whole = (-(-columns // self.width), -(-steps // self.group), self.width)
        return whole if self.group == 1 else (*whole, self.group)

    def indices(self, column: Expr, step: Expr) -> tuple[Expr, ...]:
        """Where the packed tensor has an element of the matrix."""
        at = (floordiv(column, self.width), floordiv(step, self.group), mod(column, self.width))
        return at if self.group == 1 else (*at, mod(step, self.group))

    def offset(self, column: Expr, step: Expr, steps: int) -> Expr:
        """The same in memory, in elements."""
        at, total = self.indices(column, step), column * 0
        strides = (self.padded(steps) * self.width, self.width * self.group, self.group, 1)
        for index, stride in zip(at, strides, strict=False):
            total = total + index * stride
        return total

    def padded(self, steps: int) -> int:
        """Steps of a panel."""
        return -(-steps // self.group) * self.group


def panels_at(offset: Expr, loops: Sequence[Loop]) -> tuple[Panels, Symbol, Symbol] | None:
    """The layout in which a place is one of a packed matrix, with the loops of its columns and of its steps."""
    divided = [atom for monomial, _ in offset.terms for atom in monomial if isinstance(atom, Call)]
    by = {atom.args[0]: atom.args[1].constant for atom in divided if atom.fn == "floordiv"}
    extents = {Symbol(loop.symbol): loop.extent.constant for loop in loops}
    known = [symbol for symbol in extents if symbol in offset.symbols] if by else []
    for column, step in itertools.permutations(known, 2):
        width, group, steps = by.get(to_expr(column)), by.get(to_expr(step), 1), extents[step]
        if width and group and steps:
            panels = Panels(width, group)
            if panels.offset(to_expr(column), to_expr(step), steps) == offset:
                return panels, column, step
    return None
