"""Whether size expressions stay within the numbers that kernels compute with.

Note [Sizes beyond 64 bits]
    Python computes sizes exactly; kernels and the C++ runner compute them in 64 bits, where ``n ** 12 // 7 % 5`` is
    another number as soon as ``n ** 12`` passes 2**63. What a plan allocates by the one number, a kernel would fill by
    the other. So a plan lists its expressions that may come to this at sizes below 2**32 (``LaunchPlan.wide_sizes``),
    or, where they are made of integers that a call is given, as a seed or a hash, at any that 64 bits hold; and the
    first call with new sizes is refused where a part of one is too large, before anything runs.

    To ask costs next to nothing: up to a size that is known when the program is bound, no part of any of them is
    too large, and only beyond it are they computed.

    The numerator of a quotient ends at 2**53: torch has the same expression for ``n // 7`` and ``int(n / 7)``, and
    beyond that a program's float is rounded. What a root is taken of ends at 2**50, see Note [Roots of sizes].
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set

from .expr import Call, Expr, to_expr
from .terms import Symbol, SymbolKind

__all__ = ["largest_fitting_size", "too_wide", "wide_parts"]

_MOST = 2**63 - 1
_MOST_WITHIN = {"floordiv": 2**53, "isqrt": 2**50}
_ORDINARY, _LARGEST = 32, 63  # bits of a size, and of any number


class _TooWide(Exception):
    pass


def wide_parts(exprs: Iterable[Expr], integers: Set[Symbol] = frozenset()) -> tuple[Expr, ...]:
    """What of these has a part that may be too large at sizes below 2**32, in order and without repetitions; with one
    of ``integers``, which are no sizes of tensors, below 2**63. Loop variables and values are 1 there: what they reach
    is bounded by the sizes of buffers."""
    found: dict[Expr, None] = {}
    for expr in dict.fromkeys(exprs):
        if any(symbol.kind is SymbolKind.SIZE for symbol in expr.symbols):
            others = {symbol: to_expr(1) for symbol in expr.symbols if symbol.kind is not SymbolKind.SIZE}
            sizes = expr.substitute(others)
            ordinary = _ORDINARY if integers.isdisjoint(sizes.symbols) else _LARGEST
            if _fitting_bits(sizes, ordinary) < ordinary:
                found[sizes] = None
    return tuple(found)


def largest_fitting_size(exprs: Iterable[Expr]) -> int:
    """Where no size exceeds this, every part of the expressions fits, as do the sizes themselves."""
    return min([2 ** _fitting_bits(expr, _LARGEST) - 1 for expr in exprs], default=_MOST)


def too_wide(exprs: Iterable[Expr], sizes: Mapping[Symbol, int]) -> str:
    """The first of the sizes and expressions that does not fit for these sizes; ``""`` if there is none."""
    for symbol, value in sizes.items():
        if not -_MOST <= value <= _MOST:
            return str(symbol)
    for expr in exprs:
        try:
            _reach(expr, sizes)
        except _TooWide:
            return str(expr)
    return ""


def _fitting_bits(expr: Expr, most: int) -> int:
    """The largest number up to ``most`` so that no part of ``expr`` is too large where all sizes have so many bits."""
    low, high = 0, most
    while low < high:
        bits = (low + high + 1) // 2
        try:
            _bound(expr, 2**bits - 1)
        except _TooWide:
            high = bits - 1
        else:
            low = bits
    return low


def _bound(expr: Expr, size: int) -> int:
    """What the absolute value of ``expr`` cannot exceed where no symbol exceeds ``size``."""
    total = 0
    for monomial, factor in expr.terms:
        part = abs(factor)
        for atom in monomial:
            part *= size if isinstance(atom, Symbol) else _bound_of_call(atom, size)
        total += part
    return _fitting(total, _MOST)


def _bound_of_call(call: Call, size: int) -> int:
    bounds = [_bound(arg, size) for arg in call.args]
    _fitting(bounds[0], _MOST_WITHIN.get(call.fn, _MOST))
    if call.fn == "floordiv":
        return bounds[0] + 1  # a negative quotient is rounded away from zero
    if call.fn == "mod":
        return bounds[1]
    return math.isqrt(bounds[0]) if call.fn == "isqrt" else max(bounds)


def _reach(expr: Expr, sizes: Mapping[Symbol, int]) -> tuple[int, int]:
    """How far from zero the sum of ``expr`` may come on the way, and its value."""
    reach = total = 0
    for monomial, factor in expr.terms:
        part = factor
        for atom in monomial:
            part *= sizes[atom] if isinstance(atom, Symbol) else _value_of_call(atom, sizes)
        reach += abs(part)
        total += part
    return _fitting(reach, _MOST), total


def _value_of_call(call: Call, sizes: Mapping[Symbol, int]) -> int:
    reached = [_reach(arg, sizes) for arg in call.args]
    _fitting(reached[0][0], _MOST_WITHIN.get(call.fn, _MOST))
    if call.fn in ("floordiv", "mod") and reached[1][1] == 0:
        return 0  # the size of a loop that never runs
    known = tuple(to_expr(value) for _, value in reached)
    return Expr((((Call(call.fn, known),), 1),)).evaluate({})


def _fitting(value: int, most: int) -> int:
    if value > most:
        raise _TooWide
    return value
