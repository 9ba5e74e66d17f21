"""What index expressions lie between: intervals from what loops run over, quick and without proofs; and what sizes that
are not known count as."""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..symbolic import Call, Expr, Symbol, SymbolKind, build_call, estimate, has_calls, to_expr

__all__ = ["bounds", "drop_divisions", "hint", "lower_bound"]

SIZE_HINT = 64  # what an unknown size counts as in cost estimates


def hint(expr: Expr, unknown: int = SIZE_HINT) -> int:
    """A plausible value for cost estimates."""
    constant = expr.constant
    return constant if constant is not None else estimate(expr, unknown)


def lower_bound(expr: Expr) -> float:
    """A lower bound: indices and sizes are not negative, computed values may be anything."""
    return bounds(expr, {})[0]


def drop_divisions(expr: Expr, upper: Mapping[Symbol, int]) -> Expr:
    """``x // d -> 0`` and ``x % d -> x`` where ``0 <= x < d`` follows from the largest values of the symbols."""
    if not has_calls(expr):
        return expr
    total = to_expr(0)
    for monomial, factor in expr.terms:
        product = to_expr(factor)
        for atom in monomial:
            product = product * (_drop_division(atom, upper) if isinstance(atom, Call) else to_expr(atom))
        total = total + product
    return total


def _drop_division(call: Call, upper: Mapping[Symbol, int]) -> Expr:
    args = tuple(drop_divisions(arg, upper) for arg in call.args)
    divisor = args[1].constant if call.fn in ("floordiv", "mod") else None
    if divisor and divisor > 0:
        low, high = bounds(args[0], upper)
        if low >= 0 and high < divisor:
            return to_expr(0) if call.fn == "floordiv" else args[0]
    return build_call(call.fn, args)


def bounds(expr: Expr, upper: Mapping[Symbol, int]) -> tuple[float, float]:
    """Numbers that an expression lies between, both included, with indices and sizes from 0 to ``upper``."""
    low = high = 0.0
    for monomial, factor in expr.terms:
        a, b = float(factor), float(factor)
        for atom in monomial:
            x, y = _atom_bounds(atom, upper)
            products = [_times(p, q) for p in (a, b) for q in (x, y)]
            a, b = min(products), max(products)
        low, high = low + a, high + b
    return low, high


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _atom_bounds(atom: Symbol | Call, upper: Mapping[Symbol, int]) -> tuple[float, float]:
    if isinstance(atom, Symbol):
        if atom.kind is SymbolKind.VALUE:
            return -math.inf, math.inf
        return 0.0, float(upper.get(atom, math.inf))
    args = [bounds(arg, upper) for arg in atom.args]
    if atom.fn == "min":
        return min(a for a, _ in args), min(b for _, b in args)
    if atom.fn == "max":
        return max(a for a, _ in args), max(b for _, b in args)
    if atom.fn == "isqrt":
        return 0.0, math.sqrt(max(args[0][1], 0.0))
    (low, high), (divisor_low, divisor_high) = args
    if atom.fn == "mod":
        return (0.0, divisor_high) if divisor_low >= 0 else (-math.inf, math.inf)
    if divisor_low > 0:
        return (0.0 if low >= 0 else low), (high if high >= 0 else 0.0)
    return -math.inf, math.inf
