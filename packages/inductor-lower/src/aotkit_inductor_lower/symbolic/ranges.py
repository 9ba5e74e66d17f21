"""What can be proven about an index expression from the ranges of its symbols.

Two provers. :func:`bounds` is interval arithmetic on integers. :func:`prove_nonnegative` works on polynomials:
it replaces loop variables, one after the other, by the end of their range that makes the expression smallest,
and then shifts every size symbol by its minimum; if all coefficients of what is left are non-negative, so is the
expression. Both answer "don't know" rather than guess.

Note [Empty loops]
    A statement about an index expression is about iterations that happen. Where a range of size ``n`` is in use,
    its loop variable has a value, so ``n >= 1`` may be assumed: with ``i0`` in ``[0, s0)`` also ``s0 >= 1``.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from .expr import Atom, Call, Expr, Symbol, SymbolKind, floordiv, to_expr

__all__ = ["Bounds", "Ranges", "bounds", "estimate", "prove_le", "prove_lt", "prove_nonnegative"]

_DEPTH = 12  # nested calls and variables followed before the prover gives up
_STEPS = 256  # and expressions looked at: sizes made of quotients of quotients branch at each of them


@dataclass(frozen=True, slots=True)
class Bounds:
    """An inclusive interval of integers; ``None`` is unbounded."""

    low: int | None
    high: int | None


@dataclass(frozen=True, slots=True)
class Ranges:
    """Assumptions: every symbol in ``sizes`` (loop variables, checked indices) runs over ``[0, size)``, every SIZE
    symbol is at least ``size_minimum`` (and within ``bounds``, where given, inclusive)."""

    sizes: Mapping[Symbol, Expr] = field(default_factory=lambda: MappingProxyType({}))
    size_minimum: int = 0
    bounds: Mapping[Symbol, Bounds] = field(default_factory=lambda: MappingProxyType({}))
    _proven: dict[Expr, bool] = field(default_factory=dict, init=False, repr=False, compare=False)

    @staticmethod
    def of(
        sizes: Mapping[str, Expr | int],
        *,
        size_minimum: int = 0,
        bounds: Mapping[Symbol, Bounds] | None = None,
    ) -> Ranges:
        """From names (or INDEX symbols) to range sizes."""
        table = {k if isinstance(k, Symbol) else Symbol(k): to_expr(v) for k, v in sizes.items()}
        return Ranges(table, size_minimum, bounds or {})

    def lower(self, symbol: Symbol) -> int | None:
        """The smallest value of a symbol that is certain."""
        given = self.bounds.get(symbol)
        if symbol.kind is SymbolKind.SIZE:
            low = self.size_minimum
            if given is not None and given.low is not None:
                low = max(low, given.low)
            return max(low, 1) if low == 0 and self._is_range_size(symbol) else low
        if given is not None:
            return given.low
        return 0 if symbol in self.sizes else None

    def upper(self, symbol: Symbol) -> int | None:
        """The largest value of a symbol that is certain."""
        given = self.bounds.get(symbol)
        if given is not None and given.high is not None:
            return given.high
        size = self.sizes.get(symbol)
        if size is None:
            return None
        high = bounds(size, self).high
        return None if high is None else max(high - 1, 0)

    def _is_range_size(self, symbol: Symbol) -> bool:
        """Whether the symbol is a factor of a range in use; then it is at least 1, see Note [Empty loops]."""
        return any(len(size.terms) == 1 and symbol in size.terms[0][0] for size in self.sizes.values())


# -- intervals ---------------------------------------------------------------------------------------


def bounds(expr: Expr | int | Symbol, ranges: Ranges) -> Bounds:
    """The interval that ``expr`` certainly lies in."""
    low: int | None = 0
    high: int | None = 0
    for monomial, factor in to_expr(expr).terms:
        a: int | None = factor
        b: int | None = factor
        for atom in monomial:
            c, d = _atom_bounds(atom, ranges)
            a, b = _multiply(a, b, c, d)
        low = None if low is None or a is None else low + a
        high = None if high is None or b is None else high + b
    return Bounds(low, high)


def _atom_bounds(atom: Atom, ranges: Ranges) -> tuple[int | None, int | None]:
    if isinstance(atom, Symbol):
        return ranges.lower(atom), ranges.upper(atom)
    args = [bounds(arg, ranges) for arg in atom.args]
    if atom.fn == "min":
        highs = [*(a.high for a in args if a.high is not None), *(total // 2 for total in _constant_sums(atom))]
        return _least([a.low for a in args]), min(highs, default=None)
    if atom.fn == "max":
        lows = [*(a.low for a in args if a.low is not None), *(-(-total // 2) for total in _constant_sums(atom))]
        return max(lows, default=None), _greatest([a.high for a in args])
    if atom.fn == "isqrt":
        (x,) = args
        return math.isqrt(max(x.low or 0, 0)), None if x.high is None else math.isqrt(max(x.high, 0))
    x, d = args
    if d.low is None or d.low < 0:
        return None, None
    # A divisor is never zero, see symbolic.expr.
    smallest = max(d.low, 1)
    if atom.fn == "mod":
        tops = [
            t
            for t in (None if d.high is None else d.high - 1, x.high if _nonnegative(x.low) else None)
            if t is not None
        ]
        return 0, min(tops, default=None)
    low = None if x.low is None else x.low // smallest if x.low < 0 else x.low // d.high if d.high else 0
    high = None if x.high is None else x.high // smallest if x.high >= 0 else x.high // d.high if d.high else -1
    return low, high


def _constant_sums(call: Call) -> Iterator[int]:
    """What two arguments are together, where that is a number: one of ``x`` and ``n - x`` is at least ``n / 2``."""
    for one, other in itertools.combinations(call.args, 2):
        total = (one + other).constant
        if total is not None:
            yield total


def _nonnegative(value: int | None) -> bool:
    return value is not None and value >= 0


def _least(values: list[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return min(known) if len(known) == len(values) else None


def _greatest(values: list[int | None]) -> int | None:
    known = [v for v in values if v is not None]
    return max(known) if len(known) == len(values) else None


def _multiply(a: int | None, b: int | None, c: int | None, d: int | None) -> tuple[int | None, int | None]:
    """The product of two intervals."""
    if a is not None and b is not None and c is not None and d is not None:
        corners = (a * c, a * d, b * c, b * d)
        return min(corners), max(corners)
    if a == 0 == b or c == 0 == d:
        return 0, 0
    if _nonnegative(a) and _nonnegative(c):
        return a * c, (None if b is None or d is None else b * d)  # type: ignore[operator]
    if b is not None and b <= 0 and _nonnegative(c):
        return (None if a is None or d is None else a * d), b * c  # type: ignore[operator]
    if d is not None and d <= 0 and _nonnegative(a):
        return (None if b is None or c is None else b * c), a * d  # type: ignore[operator]
    return None, None


# -- polynomials -------------------------------------------------------------------------------------


def estimate(expr: Expr, size: int) -> int:
    """The value where every symbol is ``size``; ``size`` itself where that divides by 0 (``s // (t // 128)``)."""
    try:
        return int(expr.evaluate(dict.fromkeys(expr.symbols, size)))
    except ZeroDivisionError:
        return size


def prove_le(a: Expr | int | Symbol, b: Expr | int | Symbol, ranges: Ranges) -> bool:
    """Whether ``a <= b`` certainly holds. ``False`` means "not proven"."""
    return prove_nonnegative(to_expr(b) - a, ranges)


def prove_lt(a: Expr | int | Symbol, b: Expr | int | Symbol, ranges: Ranges) -> bool:
    """Whether ``a < b`` certainly holds. ``False`` means "not proven"."""
    return prove_nonnegative(to_expr(b) - a - 1, ranges)


def prove_nonnegative(expr: Expr | int | Symbol, ranges: Ranges) -> bool:
    """Whether ``expr >= 0`` certainly holds. ``False`` means "not proven"."""
    expr = to_expr(expr)
    known = ranges._proven.get(expr)
    if known is None:
        low = bounds(expr, ranges).low
        known = _nonnegative(low) or (expr.constant is None and _prove(expr, _Search(ranges), _DEPTH))
        ranges._proven[expr] = known
    return known


@dataclass(slots=True)
class _Search:
    """One question to the prover, and how many steps it may still take."""

    ranges: Ranges
    steps: int = _STEPS


def _prove(expr: Expr, search: _Search, depth: int) -> bool:
    constant = expr.constant
    if constant is not None:
        return constant >= 0
    search.steps -= 1
    if depth == 0 or search.steps < 0:
        return False
    call = next((a for m, _ in expr.terms for a in m if isinstance(a, Call)), None)
    if call is not None:
        return _prove_without_call(expr, call, search, depth)
    for symbol in sorted(expr.symbols):
        if symbol in search.ranges.sizes:
            replaced = _at_smallest(expr, symbol, search.ranges.sizes[symbol] - 1, search, depth)
            return replaced is not None and _prove(replaced, search, depth - 1)
    return _prove_sizes(expr, search.ranges)


def _at_smallest(expr: Expr, symbol: Symbol, highest: Expr, search: _Search, depth: int) -> Expr | None:
    """``expr`` with ``symbol``, in ``[0, highest]``, at the end where it is smallest."""
    coefficient = expr.coefficient(symbol)
    if coefficient is None:
        return None
    if _prove(coefficient, search, depth - 1):
        return expr.substitute({symbol: to_expr(0)})
    if _prove(-coefficient, search, depth - 1):
        return expr.substitute({symbol: highest})
    return None


def _prove_without_call(expr: Expr, call: Call, search: _Search, depth: int) -> bool:
    """Replace ``call`` by a fresh symbol at the end of its range that makes ``expr`` smallest."""
    fresh = Symbol(f".{call}", SymbolKind.INDEX)
    opened = _replace_atom(expr, call, to_expr(fresh))
    coefficient = opened.coefficient(fresh)
    if coefficient is None:
        return False
    if _prove(coefficient, search, depth - 1):
        candidates = _lower_ends(call, search, depth - 1)
        every = call.fn == "min"
    elif _prove(-coefficient, search, depth - 1):
        candidates = _upper_ends(call, search, depth - 1)
        every = call.fn == "max"
    else:
        return False
    proofs = (_prove(opened.substitute({fresh: end}), search, depth - 1) for end in candidates)
    return bool(candidates) and (all(proofs) if every else any(proofs))


def _lower_ends(call: Call, search: _Search, depth: int) -> list[Expr]:
    """Lower bounds of a call; of ``min`` its arguments (each must then do)."""
    if call.fn in ("min", "max"):
        return list(call.args)
    if call.fn == "isqrt":
        return [to_expr(0)]
    x, d = call.args
    if not _prove(d, search, depth):
        return []
    if call.fn == "mod" or _prove(x, search, depth):
        return [to_expr(0)]
    return []


def _upper_ends(call: Call, search: _Search, depth: int) -> list[Expr]:
    """Upper bounds of a call; of ``max`` its arguments (each must then do)."""
    if call.fn in ("min", "max", "isqrt"):
        return list(call.args)
    x, d = call.args
    if not _prove(d, search, depth):
        return []
    if call.fn == "mod":
        return [d - 1, x] if _prove(x, search, depth) else [d - 1]
    if _prove(d - 1 - x, search, depth):
        return [to_expr(0)]
    highest = _highest(x, search, depth)
    ends = [floordiv(highest, d)] if highest is not None else []
    if _prove(x, search, depth):
        ends.append(x)
    return ends


def _highest(expr: Expr, search: _Search, depth: int) -> Expr | None:
    """An upper bound of ``expr`` free of loop variables."""
    for symbol in sorted(expr.symbols):
        if symbol in search.ranges.sizes:
            smallest = _at_smallest(-expr, symbol, search.ranges.sizes[symbol] - 1, search, depth)
            if smallest is None:
                return None
            expr = -smallest
    return expr


def _prove_sizes(expr: Expr, ranges: Ranges) -> bool:
    """Polynomials in size symbols: with each symbol counted from its minimum, no negative coefficient is left."""
    shift: dict[Symbol, Expr] = {}
    for symbol in expr.symbols:
        low = ranges.lower(symbol)
        if low is None:
            return False
        if low:
            shift[symbol] = to_expr(symbol) + low
    return all(factor >= 0 for _, factor in expr.substitute(shift).terms)


def _replace_atom(expr: Expr, old: Atom, new: Expr) -> Expr:
    total = to_expr(0)
    for monomial, factor in expr.terms:
        product = to_expr(factor)
        for atom in monomial:
            product = product * (new if atom == old else Expr((((atom,), 1),)))
        total = total + product
    return total
