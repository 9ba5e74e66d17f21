"""Make index expressions simpler by what their ranges prove; reshape indices; take strides apart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd

from .expr import (
    Atom,
    Call,
    Expr,
    Monomial,
    Symbol,
    SymbolKind,
    build_call,
    divide_by_sum,
    floordiv,
    mod,
    smax,
    smin,
    to_expr,
)
from .ranges import Ranges, bounds, prove_le, prove_lt, prove_nonnegative

__all__ = ["contiguous_strides", "product", "reshape_indices", "simplify", "strides_of"]


def simplify(expr: Expr, ranges: Ranges) -> Expr:
    """An expression equal to ``expr`` wherever its symbols are in ``ranges``, with divisions, remainders, minima and
    maxima dropped or narrowed where that is proven.

    ``i0//s0 -> 0`` and ``(s0*i0 + i1) % s0 -> i1`` for i0, i1 in ``[0, s0)``; ``(64*i0 + i1)//128 -> i0//2`` for i1 in
    ``[0, 64)``.
    """
    if not any(isinstance(atom, Call) for monomial, _ in expr.terms for atom in monomial):
        return expr
    total = to_expr(0)
    for monomial, factor in expr.terms:
        result = to_expr(factor)
        for atom in monomial:
            result = result * (to_expr(atom) if isinstance(atom, Symbol) else _simplify_call(atom, ranges))
        total = total + result
    return total


def _simplify_call(call: Call, ranges: Ranges) -> Expr:
    args = [simplify(arg, ranges) for arg in call.args]
    if call.fn == "min":
        return smin(*_undominated(args, ranges, smallest=True))
    if call.fn == "max":
        return smax(*_undominated(args, ranges, smallest=False))
    built = build_call(call.fn, args)
    atom = _lone_call(built)
    if atom is None:  # the canonical form already changed it; what is left inside may be new
        return built if built == _call_expr(call) else simplify(built, ranges)
    x, d = atom.args
    narrowed = _narrow_floordiv(x, d, ranges) if atom.fn == "floordiv" else _narrow_mod(x, d, ranges)
    return built if narrowed is None else narrowed


def _lone_call(expr: Expr) -> Call | None:
    if len(expr.terms) == 1 and expr.terms[0][1] == 1 and len(expr.terms[0][0]) == 1:
        atom = expr.terms[0][0][0]
        return atom if isinstance(atom, Call) and atom.fn in ("floordiv", "mod") else None
    return None


def _call_expr(call: Call) -> Expr:
    return Expr((((call,), 1),))


def _narrow_floordiv(x: Expr, d: Expr, ranges: Ranges) -> Expr | None:
    quotient = _known_quotient(x, d, ranges)
    if quotient is not None:
        return quotient
    for coarse, unit in _coarse_parts(x, d, ranges):
        return simplify(floordiv(floordiv(coarse, unit), floordiv(d, unit)), ranges)
    return None


def _narrow_mod(x: Expr, d: Expr, ranges: Ranges) -> Expr | None:
    quotient = _known_quotient(x, d, ranges)
    if quotient is not None:
        return x - d * quotient
    for coarse, unit in _coarse_parts(x, d, ranges):
        return simplify(mod(floordiv(coarse, unit), floordiv(d, unit)), ranges) * unit + (x - coarse)
    return None


def _known_quotient(x: Expr, d: Expr, ranges: Ranges) -> Expr | None:
    """``x // d`` if it is proven to be one integer, or for ``d`` a sum what ``x`` has as a multiple of it:
    ``(i0*(s0 + 1) + i1) // (s0 + 1) -> i0`` for i1 in ``[0, s0]``."""
    found, divisor = bounds(x, ranges), d.constant
    if divisor is not None and divisor > 0 and found.low is not None and found.high is not None:
        low, high = found.low // divisor, found.high // divisor
        return to_expr(low) if low == high else None
    if prove_nonnegative(x, ranges) and prove_lt(x, d, ranges):
        return to_expr(0)
    if prove_lt(x, 0, ranges) and prove_nonnegative(x + d, ranges):
        return to_expr(-1)
    whole, rest = divide_by_sum(x, d) if len(d.terms) > 1 else (to_expr(0), x)
    return whole if whole.terms and prove_nonnegative(rest, ranges) and prove_lt(rest, d, ranges) else None


def _coarse_parts(x: Expr, d: Expr, ranges: Ranges) -> Iterable[tuple[Expr, Expr]]:
    """``(c, u)``: ``u > 1`` divides ``d`` and ``c``, the larger part of ``x``, and ``x - c`` is proven in ``[0, u)``.

    Then ``x // d == (c/u) // (d/u)`` and ``x % d == ((c/u) % (d/u))*u + (x - c)``.
    """
    if len(d.terms) != 1:
        return
    tried = set()
    for monomial, factor in x.terms:
        unit = _shared_unit(monomial, factor, d)
        if unit is None or unit in tried:
            continue
        tried.add(unit)
        coarse = to_expr(0)
        for other, amount in x.terms:
            term = Expr(((other, amount),))
            if mod(term, unit) == 0:
                coarse = coarse + term
        fine = x - coarse
        if fine.terms and coarse.terms and prove_nonnegative(fine, ranges) and prove_lt(fine, unit, ranges):
            yield coarse, unit


def _shared_unit(monomial: Monomial, factor: int, d: Expr) -> Expr | None:
    """The greatest common divisor of one term and ``d``, ``None`` if it is 1."""
    divisor, unit = d.terms[0]
    number = gcd(factor, unit)
    left = list(monomial)
    shared: list[Atom] = []
    for atom in divisor:
        if atom in left:
            left.remove(atom)
            shared.append(atom)
    return Expr(((tuple(shared), number),)) if shared or number > 1 else None


def _undominated(args: list[Expr], ranges: Ranges, *, smallest: bool) -> list[Expr]:
    """Arguments of min or max that no other argument makes superfluous."""
    kept: list[Expr] = []
    for arg in args:
        if any(prove_le(*((k, arg) if smallest else (arg, k)), ranges) for k in kept):
            continue
        kept = [k for k in kept if not prove_le(*((arg, k) if smallest else (k, arg)), ranges)]
        kept.append(arg)
    return kept


# -- strides and shapes ------------------------------------------------------------------------------


def strides_of(expr: Expr, symbols: Sequence[Symbol]) -> tuple[tuple[Expr, ...], Expr] | None:
    """``(strides, offset)`` with ``expr == sum(stride*symbol) + offset``, all free of ``symbols``; ``None`` if
    ``expr`` is not linear in them."""
    strides: list[Expr] = []
    rest = expr
    for symbol in symbols:
        stride = expr.coefficient(symbol)
        if stride is None or not stride.symbols.isdisjoint(symbols):
            return None
        strides.append(stride)
        rest = rest - stride * to_expr(symbol)
    return tuple(strides), rest


def has_calls(expr: Expr) -> bool:
    """Whether a division, remainder, minimum or maximum is in the expression."""
    return any(isinstance(atom, Call) for monomial, _ in expr.terms for atom in monomial)


def product(sizes: Iterable[Expr | int]) -> Expr:
    """The number of elements."""
    total = to_expr(1)
    for size in sizes:
        total = total * size
    return total


def contiguous_strides(sizes: Sequence[Expr | int]) -> tuple[Expr, ...]:
    """Row-major strides in elements; as torch does, a size of 0 counts as 1."""
    strides = [to_expr(1)]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * (1 if size == 0 else size))
    return tuple(reversed(strides)) if sizes else ()


def reshape_indices(
    indices: Sequence[Expr], from_sizes: Sequence[Expr | int], to_sizes: Sequence[Expr | int], *, size_minimum: int = 0
) -> tuple[Expr, ...]:
    """Indices into a tensor of ``to_sizes`` that address the element which ``indices`` address in ``from_sizes``, both
    row-major over equally many elements.

    To lower ``y = x.view(...)``, the reader's indices of ``y`` become indices of ``x`` by
    ``reshape_indices(y_index, y_sizes, x_sizes)``. Dimensions that pass unchanged keep their index, so a
    division appears only where dimensions really split. Every index must lie in its size.
    """
    sources, targets = [to_expr(s) for s in from_sizes], [to_expr(s) for s in to_sizes]
    if len(indices) != len(sources):
        raise ValueError(f"{len(indices)} indices for {len(sources)} dimensions")
    result = [to_expr(0)] * len(targets)
    if any(size == 0 for size in (*sources, *targets)):
        return tuple(result)  # no elements
    # Placeholders have exactly the sizes as ranges, whatever the indices are; they are replaced at the end.
    holders = [Symbol(f".{n}", SymbolKind.INDEX) for n in range(len(indices))]
    ranges = Ranges(dict(zip(holders, sources, strict=True)), size_minimum)
    env = {holder: to_expr(index) for holder, index in zip(holders, indices, strict=True)}
    for merged, split in _matching_groups(sources, targets):
        linear = to_expr(0)
        for position in merged:
            linear = linear * sources[position] + to_expr(holders[position])
        for position, index in zip(split, _split_linear(linear, [targets[p] for p in split], ranges), strict=True):
            result[position] = index.substitute(env)
    return tuple(result)


def _split_linear(linear: Expr, sizes: Sequence[Expr], ranges: Ranges) -> list[Expr]:
    """A row-major position taken apart into one index per size."""
    result: list[Expr] = []
    for position, (size, stride) in enumerate(zip(sizes, contiguous_strides(sizes), strict=True)):
        index = simplify(floordiv(linear, stride), ranges)
        result.append(simplify(mod(index, size), ranges) if position else index)
    return result


def _matching_groups(sources: Sequence[Expr], targets: Sequence[Expr]) -> list[tuple[list[int], list[int]]]:
    """ReductionSplit both shapes into the shortest runs of equal element count. Positions of size 1 are left out."""
    left_positions = [p for p, size in enumerate(sources) if size != 1]
    right_positions = [p for p, size in enumerate(targets) if size != 1]
    groups: list[tuple[list[int], list[int]]] = []
    while left_positions and right_positions:
        merged, split = [left_positions.pop(0)], [right_positions.pop(0)]
        left, right = sources[merged[0]], targets[split[0]]
        while left != right and (left_positions or right_positions):
            if left_positions and (not right_positions or not _is_larger(left, right)):
                merged.append(left_positions.pop(0))
                left = left * sources[merged[-1]]
            else:
                split.append(right_positions.pop(0))
                right = right * targets[split[-1]]
        groups.append((merged, split))
    if groups:  # symbolic sizes whose product must be 1
        groups[-1][0].extend(left_positions)
        groups[-1][1].extend(right_positions)
    return groups


def _is_larger(a: Expr, b: Expr) -> bool:
    """Whether ``a`` is the one that more factors of the other shape should be compared with."""
    if a.constant is not None and b.constant is not None:
        return a.constant > b.constant
    return mod(a, b) == 0
