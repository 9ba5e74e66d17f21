"""From torch's sizes (ints and SymInts) to index expressions, each distinct one converted once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..errors import UnsupportedGraphError
from ..symbolic import Expr, UnsupportedExpression, from_symint, to_expr

if TYPE_CHECKING:
    import sympy

__all__ = ["SizeConverter"]


class SizeConverter:
    """Converts sizes and remembers them: sympy is walked once per distinct expression, and not at all for ints."""

    def __init__(self) -> None:
        self._symbolic: dict[sympy.Expr, Expr] = {}
        self._ints: dict[int, Expr] = {}

    def expr(self, size: int | torch.SymInt) -> Expr:
        """One size. Raises :class:`UnsupportedGraphError` for what integer expressions cannot hold."""
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            found = self._symbolic.get(expression)
            if found is None:
                found = self._symbolic[expression] = to_expr(1) if _is_one(size) else _convert(expression)
            return found
        known = self._ints.get(size)
        if known is None:
            known = self._ints[size] = to_expr(int(size))
        return known

    def exprs(self, sizes: Iterable[int | torch.SymInt]) -> tuple[Expr, ...]:
        """Several sizes."""
        return tuple(self.expr(size) for size in sizes)


def _is_one(size: torch.SymInt) -> bool:
    """Whether a size can only be 1, by the guards and the ranges of its symbols: ``Min(1, s - 1)`` with ``s >= 2``.

    The graph was then traced with it broadcast, which the lowering sees by the number alone.
    """
    node = size.node
    if node.expr.is_symbol or not node.has_hint() or node.hint != 1:
        return False
    return statically_known_true(size == 1)


def _convert(expression: sympy.Expr) -> Expr:
    for symbol in expression.free_symbols:
        if symbol_is_type(symbol, (SymT.FLOAT, SymT.UNBACKED_FLOAT)):
            raise UnsupportedGraphError(f"a size that depends on a float ({symbol})", "sizes are integers")
    try:
        return from_symint(expression)
    except UnsupportedExpression as error:
        raise UnsupportedGraphError(f"the size {expression}", str(error)) from error
