"""Making the loops of two nests agree through a buffer that both access.

Note [Digits]
    An access covers its buffer if its row-major position is a mixed-radix number whose digits are loop variables:
    ``64*i0 + i1`` with ``i1 < 64`` and ``i0 < numel/64``. Two accesses that cover the same buffer then match digit
    by digit from the least significant one, splitting a loop where one side counts in coarser steps. So
    ``[B*S, H]`` and ``[B, S, H]`` agree after one split, a transposed reader after a permutation, with no search.
    The same holds for accesses of one part of it, a slice: what their digits count in runs without gaps must be alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from ..ir import LoopNest, Range
from ..ir.walk import expressions, instructions
from ..symbolic import Call, Expr, Symbol, SymbolKind, floordiv, has_calls, mod, sym, to_expr
from .nests import ranges_of

__all__ = ["Alignment", "align_digits", "digits_of", "digits_of_part", "loops_by_weight", "split_loops"]


@dataclass(frozen=True, slots=True)
class Alignment:
    """How two nests' loops match. Each map takes a loop's name to the loops that replace it, most significant
    first; loops that are not in a map stay. Shared loops have the first nest's names."""

    first: Mapping[str, tuple[Range, ...]]
    second: Mapping[str, tuple[Range, ...]]


def loops_by_weight(flat: Expr, outer: Set[str] = frozenset()) -> tuple[Expr, dict[Expr, str]] | None:
    """The part of a position that is of ``outer`` loops or of none, and its other loops by weight; ``None`` if it is
    no plain sum. A loop has one weight, which is a sum itself where a stride is one: that of channels of ``h + 1`` by
    ``w + 2`` pixels has four terms."""
    if has_calls(flat):
        return None
    rest, weights = to_expr(0), dict[str, Expr]()
    for monomial, factor in flat.terms:
        loops = [atom for atom in monomial if isinstance(atom, Symbol) and atom.kind is not SymbolKind.SIZE]
        if len(loops) > 1 or any(loop.kind is not SymbolKind.INDEX for loop in loops):
            return None
        if not loops or loops[0].name in outer:
            rest = rest + Expr(((monomial, factor),), False)
        else:
            term = Expr(((tuple(atom for atom in monomial if atom is not loops[0]), factor),), False)
            weights[loops[0].name] = weights.get(loops[0].name, to_expr(0)) + term
    found = {weight: loop for loop, weight in weights.items()}
    return (rest, found) if len(found) == len(weights) else None


def digits_of(flat: Expr, sizes: Mapping[str, Expr], numel: Expr) -> list[tuple[str, Expr]] | None:
    """The loops that count through a buffer's elements, least significant first with their sizes, if ``flat`` passes
    every element exactly once; else ``None``."""
    rest, by_weight = loops_by_weight(flat) or (flat, {})
    if rest != 0:
        return None
    digits: list[tuple[str, Expr]] = []
    seen: set[str] = set()
    weight = to_expr(1)
    while by_weight:
        name = by_weight.pop(weight, None)
        if name is None or name in seen or name not in sizes:
            return None
        seen.add(name)
        digits.append((name, sizes[name]))
        weight = weight * sizes[name]
    return digits if weight == numel else None


def digits_of_part(
    flats: Sequence[Expr], sizes: Sequence[Mapping[str, Expr]]
) -> tuple[list[tuple[str, Expr]], ...] | None:
    """As :func:`digits_of`, of positions that all pass the same part of a buffer, each of its elements once: a slice,
    or rows without their ends. ``None`` where the parts differ, and where sizes are not known."""
    runs = list[list[tuple[int, int, list[tuple[str, Expr]]]]]()
    for flat, own in zip(flats, sizes, strict=True):
        found = _runs(flat, own)
        if found is None or _start(flat) != _start(flats[0]):
            return None
        runs.append(found)
    parts = [[(step, length) for step, length, _ in run] for run in runs]
    if any(part != parts[0] for part in parts):
        return None
    return tuple([digit for _, _, digits in run for digit in digits] for run in runs)


def _start(flat: Expr) -> int:
    return sum(factor for monomial, factor in flat.terms if not monomial)


def _runs(flat: Expr, sizes: Mapping[str, Expr]) -> list[tuple[int, int, list[tuple[str, Expr]]]] | None:
    """The loops of a position in runs that have no gaps, least significant first: the step of each run, how many steps
    it has, and its digits. ``None`` if two iterations may have one position."""
    loops: list[tuple[int, str, int]] = []
    for monomial, factor in flat.terms:
        if not monomial:
            continue
        atom = monomial[0]
        if len(monomial) != 1 or not isinstance(atom, Symbol) or atom.name not in sizes or factor <= 0:
            return None
        size = sizes[atom.name].constant
        if not size:
            return None
        loops.append((factor, atom.name, size))
    found: list[tuple[int, int, list[tuple[str, Expr]]]] = []
    for weight, name, size in sorted(loops):
        step, length, digits = found[-1] if found else (weight, 1, [])
        if weight < step * length:
            return None
        if found and weight == step * length:
            found[-1] = (step, length * size, [*digits, (name, sizes[name])])
        else:
            found.append((weight, size, [(name, sizes[name])]))
    return found


def align_digits(
    first: Sequence[tuple[str, Expr]], second: Sequence[tuple[str, Expr]], fresh: Sequence[str]
) -> Alignment | None:
    """Match two digit lists (least significant first). ``fresh`` are unused names. ``None`` if their factors differ."""
    names = iter(fresh)
    left, right = list(first), list(second)
    pieces: list[tuple[str, str, Expr]] = []
    while left and right:
        (a, a_size), (b, b_size) = left[0], right[0]
        if a_size == b_size:
            pieces.append((a, b, a_size))
            left.pop(0)
            right.pop(0)
            continue
        quotient = _exact(a_size, b_size)
        if quotient is not None:
            pieces.append((a, b, b_size))
            left[0] = (a, quotient)
            right.pop(0)
            continue
        quotient = _exact(b_size, a_size)
        if quotient is None:
            return None
        pieces.append((a, b, a_size))
        right[0] = (b, quotient)
        left.pop(0)
    if left or right:
        return None
    count: dict[str, int] = {}
    for a, _, _ in pieces:
        count[a] = count.get(a, 0) + 1
    first_map: dict[str, tuple[Range, ...]] = {}
    second_map: dict[str, tuple[Range, ...]] = {}
    for a, b, size in pieces:
        name = a if count[a] == 1 else next(names)
        loop = Range(name, size)
        if count[a] > 1:
            first_map[a] = (loop, *first_map.get(a, ()))
        second_map[b] = (loop, *second_map.get(b, ()))
    return Alignment(first_map, second_map)


def _exact(a: Expr, b: Expr) -> Expr | None:
    """``a / b`` where that is exact and more than 1 for sure."""
    if a.constant is not None and b.constant is not None:
        if b.constant == 0 or a.constant % b.constant or a.constant <= b.constant:
            return None
        return to_expr(a.constant // b.constant)
    if mod(a, b).constant != 0:
        return None
    quotient = floordiv(a, b)
    return None if has_calls(quotient) else quotient


def digit_env(loops: Mapping[str, tuple[Range, ...]]) -> dict[Symbol, Expr]:
    """The substitution that replaces split loops by their digits."""
    env: dict[Symbol, Expr] = {}
    for name, digits in loops.items():
        value, weight = to_expr(0), to_expr(1)
        for digit in reversed(digits):
            value = value + sym(digit.symbol) * weight
            weight = weight * digit.size
        env[Symbol(name)] = value
    return env


def expand_ranges(ranges: Sequence[Range], loops: Mapping[str, tuple[Range, ...]]) -> tuple[Range, ...]:
    """Ranges with split loops replaced by their digits."""
    return tuple(digit for loop in ranges for digit in loops.get(loop.symbol, (loop,)))


# -- splitting loops that are read through reshapes -------------------------------------------------------


def split_loops(nest: LoopNest, fresh: Sequence[str]) -> Mapping[str, tuple[Range, ...]]:
    """Loops whose variable is only ever used whole or as quotients and remainders of a chain of divisors, with the
    loops that make all those uses plain."""
    cuts: dict[Symbol, set[Expr]] = {}
    for expr in expressions(instructions(nest.stages)):
        if has_calls(expr):
            _collect(expr, cuts)
    if not cuts:
        return {}
    sizes = ranges_of(nest).sizes
    names = iter(fresh)
    result: dict[str, tuple[Range, ...]] = {}
    for symbol, points in cuts.items():
        size = sizes.get(symbol)
        chain = _chain(points, size) if size is not None else None
        if chain is not None:
            result[symbol.name] = tuple(Range(next(names), part) for part in chain)
    return result


def _collect(expr: Expr, cuts: dict[Symbol, set[Expr]]) -> None:
    for monomial, _ in expr.terms:
        for atom in monomial:
            if not isinstance(atom, Call):
                continue
            for arg in atom.args:
                _collect(arg, cuts)
            if atom.fn not in ("floordiv", "mod"):
                continue
            base, divisor = atom.args
            scale = to_expr(1)
            inner = base.terms[0][0][0] if len(base.terms) == 1 and len(base.terms[0][0]) == 1 else None
            if isinstance(inner, Call) and inner.fn == "floordiv" and base.terms[0][1] == 1:
                base, scale = inner.args
            symbol = base.symbol
            if symbol is not None and symbol.kind is SymbolKind.INDEX:
                cuts.setdefault(symbol, set()).add(scale * divisor)


def _chain(points: set[Expr], size: Expr) -> list[Expr] | None:
    """Sizes of the parts, most significant first, if the cuts divide each other and the size."""
    parts: list[Expr] = []
    rest, done = set(points), to_expr(1)
    while rest:
        smallest = next((p for p in rest if all(q == p or _exact(q, p) is not None for q in rest)), None)
        if smallest is None:
            return None
        rest.discard(smallest)
        if smallest == size:
            continue
        part = smallest if done == 1 else _exact(smallest, done)
        if part is None:
            return None
        parts.append(part)
        done = smallest
    top = _exact(size, done) if done != 1 else None
    return [top, *reversed(parts)] if top is not None else None
