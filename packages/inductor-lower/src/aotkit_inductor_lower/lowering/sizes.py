"""From torch's sizes (ints and SymInts) to index expressions, each distinct one converted once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.utils._sympy.symbol import SymT, symbol_is_type

from ..errors import UnsupportedGraphError
from ..symbolic import ComputedSizes, Expr, SymbolKind, UnsupportedExpression, sym, to_expr

if TYPE_CHECKING:
    import sympy
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

__all__ = ["SizeConverter", "halves"]


class SizeConverter:
    """Converts sizes and remembers them: sympy is walked once per distinct expression, and not at all for ints."""

    def __init__(self) -> None:
        self._symbolic: dict[sympy.Expr, Expr] = {}
        self._ints: dict[int, Expr] = {}
        self._sizes: set[sympy.Expr] = set()
        self.computed = ComputedSizes()

    def note_sizes(self, values: Iterable[object]) -> None:
        """Integers that are the size of a tensor among ``values`` are not negative, whatever else is known of them."""
        for value in values:
            if isinstance(value, torch.Tensor) and value.layout is torch.strided:
                for size in (*value.shape, *value.stride()):
                    if isinstance(size, torch.SymInt):
                        self._sizes.add(size.node.expr)

    def expr(self, size: int | torch.SymInt) -> Expr:
        """One size. Raises :class:`UnsupportedGraphError` for what integer expressions cannot hold."""
        if isinstance(size, torch.SymInt):
            expression = size.node.expr
            found = self._symbolic.get(expression)
            if found is None:
                found = self._symbolic[expression] = to_expr(1) if _is_one(size) else self._convert(size)
            return found
        known = self._ints.get(size)
        if known is None:
            known = self._ints[size] = to_expr(int(size))
        return known

    def exprs(self, sizes: Iterable[int | torch.SymInt]) -> tuple[Expr, ...]:
        """Several sizes."""
        return tuple(self.expr(size) for size in sizes)

    def _convert(self, size: torch.SymInt) -> Expr:
        expression = size.node.expr
        for symbol in expression.free_symbols:
            if symbol_is_type(symbol, (SymT.FLOAT, SymT.UNBACKED_FLOAT)):
                raise UnsupportedGraphError(f"a size that depends on a float ({symbol})", "sizes are integers")
        others = expression.free_symbols - self._sizes
        signs = {symbol.name: _signs(symbol, size.node.shape_env) for symbol in others}

        def name_of(name: str) -> str | Expr:
            may_be_above, may_be_below = signs.get(name, (True, False))
            if not may_be_below:
                return name
            above, below = (sym(half, SymbolKind.SIZE) for half in halves(name))
            return above - below if may_be_above else -below

        try:
            return self.computed.convert(expression, name_of, lambda part: self._signed(part, size))
        except UnsupportedExpression as error:
            raise UnsupportedGraphError(f"the size {expression}", str(error)) from error

    def _signed(self, part: sympy.Expr, size: torch.SymInt) -> bool:
        """Whether it may be negative: it is no tensor's size, and the ranges of its symbols do not exclude it."""
        return part not in self._sizes and not bool(size.node.shape_env.bound_sympy(part).lower >= 0)


def _is_one(size: torch.SymInt) -> bool:
    """Whether a size can only be 1, by the guards and the ranges of its symbols: ``Min(1, s - 1)`` with ``s >= 2``.

    The graph was then traced with it broadcast, which the lowering sees by the number alone.
    """
    node = size.node
    if node.expr.is_symbol or not node.has_hint() or node.hint != 1:
        return False
    return statically_known_true(size == 1)


def halves(name: str) -> tuple[str, str]:
    """The names of ``max(n, 0)`` and ``max(-n, 0)`` of an integer that may be negative."""
    return f"{name}_above", f"{name}_below"


def _signs(symbol: sympy.Symbol, env: ShapeEnv) -> tuple[bool, bool]:
    """Whether it may be above 0, and below."""
    known = env.var_to_range.get(symbol)
    return known is None or bool(known.upper > 0), known is None or bool(known.lower < 0)
