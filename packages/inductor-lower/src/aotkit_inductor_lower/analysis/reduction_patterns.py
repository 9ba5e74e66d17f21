"""Two passes over a row that one pass may do: a maximum with the sum of exponentials below it, and a sum with the
squared distances from its mean.

They are looked for in stages of the loop IR and in perfect nests of the kernel IR: both are loops around instructions.
What one pass does instead is up to those who ask.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from ..ir import CheckedIndex, Compute, Const, DType, Index, Instr, Load, Range, Reduce, Store
from ..ir.walk import value_types
from ..symbolic import Expr, Symbol, product, sym

__all__ = ["OnlinePair", "Ranged", "WelfordPair", "online_pair", "size_of", "welford_pair"]


class Ranged(Protocol):
    """A stage, or a perfect nest."""

    @property
    def ranges(self) -> tuple[Range, ...]:
        """The loops, outer before inner."""

    @property
    def body(self) -> tuple[Instr, ...]:
        """What the innermost one holds."""


def size_of(nest: Ranged) -> Expr:
    """How many iterations the loops have together."""
    return product(loop.size for loop in nest.ranges)


# -- online softmax ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class OnlinePair:
    """The stage at ``position`` sums exponentials below the maximum of an earlier one; ``total`` is its result."""

    position: int
    total: Reduce


def online_pair(nests: Sequence[Ranged], position: int) -> OnlinePair | None:
    """The stage that may be computed together with the one at ``position``, which takes a maximum."""
    first = nests[position]
    if not first.ranges or any(isinstance(i, CheckedIndex) for i in first.body):
        return None
    maxima = [i for i in first.body if isinstance(i, Reduce)]
    stored = [i for i in first.body if isinstance(i, Store)]
    if (
        len(maxima) != 1
        or not all(i.plain for i in stored)
        or len({i.buffer for i in stored}) < len(stored)
        or maxima[0].kind != "max"
        or maxima[0].running
        or maxima[0].dtype not in (DType.F32, DType.F64)
    ):
        return None
    written = {i.buffer for i in stored}
    for place in range(position + 1, len(nests)):
        later = nests[place]
        if later.ranges:
            found = _sum_below(first, maxima[0], later)
            again = {i.buffer for i in stored}  # a sum of what lies there is one of what was stored
            read = {i.buffer for i in later.body if isinstance(i, Load)} - again
            return OnlinePair(place, found) if found is not None and not read & written else None
        written |= {i.buffer for i in later.body if isinstance(i, Store)}
    return None


def _sum_below(first: Ranged, maximum: Reduce, later: Ranged) -> Reduce | None:
    """The only thing that ``later`` does, if it is ``sum(exp(x - maximum))`` of the ``x`` that ``first`` looked at."""
    if [r.size for r in first.ranges] != [r.size for r in later.ranges] or len(later.body) < 4:
        return None
    *chain, difference, power, total = later.body
    if not (isinstance(difference, Compute) and isinstance(power, Compute) and isinstance(total, Reduce)):
        return None
    if (difference.op, power.op, total.kind, total.running) != ("sub", "exp", "sum", False):
        return None
    if power.args != (difference.result,) or total.value != power.result or difference.args[1] != maximum.result:
        return None
    if any(isinstance(i, Reduce | Store | CheckedIndex) for i in chain):
        return None
    ours = numbered(first)
    theirs = numbered(later, _stored(first, ours))
    same = theirs.get(difference.args[0]) == ours.get(maximum.value)
    return total if same and difference.args[0] in theirs else None


def numbered(stage: Ranged, stored: Mapping[object, object] = MappingProxyType({})) -> dict[str, object]:
    """What each value of a stage is, in terms of loads and of the place in the loops; names do not matter. ``stored``:
    what lies in places that were stored to before; nothing else of their memory is known."""
    places: dict[Symbol, Expr] = {Symbol(r.symbol): sym(f"r#{k}") for k, r in enumerate(stage.ranges)}
    known: dict[str, object] = {}
    for i in stage.body:
        if isinstance(i, Load):
            at = tuple(str(index.substitute(places)) for index in i.indices)
            known[i.result] = ("load", i.buffer, at, known.get(i.mask or "", i.mask), repr(i.other), i.dtype)
            if i.buffer in stored:
                known[i.result] = stored.get((i.buffer, at, i.mask, i.dtype), ("unknown", i.result))
        elif isinstance(i, Const):
            known[i.result] = ("const", repr(i.value), i.dtype)
        elif isinstance(i, Index):
            known[i.result] = ("index", str(i.expr.substitute(places)), i.dtype)
        elif isinstance(i, Compute):
            known[i.result] = (i.op, tuple(known.get(a, a) for a in i.args), i.dtype)
    return known


def _stored(stage: Ranged, known: Mapping[str, object]) -> dict[object, object]:
    """By place what a stage stores; and each memory that it stores to."""
    places: dict[Symbol, Expr] = {Symbol(r.symbol): sym(f"r#{k}") for k, r in enumerate(stage.ranges)}
    types = value_types(stage.body)
    found: dict[object, object] = {}
    for i in stage.body:
        if isinstance(i, Store):
            at = tuple(str(index.substitute(places)) for index in i.indices)
            found[i.buffer] = found[i.buffer, at, None, types.get(i.value)] = known.get(i.value, ("unknown", i.value))
    return found


# -- Welford -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WelfordPair:
    """The stage at ``position`` sums squared distances from means that an earlier one sums up. ``squares``: per sum of
    the earlier stage the reduction of the later one; ``means``: per sum the value that is the mean."""

    position: int
    squares: Mapping[str, Reduce]
    means: Mapping[str, str]


def welford_pair(stages: Sequence[Ranged], position: int) -> WelfordPair | None:
    """The stage that may be computed together with the one at ``position``, which sums."""
    first = stages[position]
    sums = [i for i in first.body if _is_sum(i)]
    if not first.ranges or not sums or any(isinstance(i, CheckedIndex) for i in first.body):
        return None
    written = {i.buffer for i in first.body if isinstance(i, Store)}
    for place in range(position + 1, len(stages)):
        later = stages[place]
        if later.ranges:
            read = {i.buffer for i in later.body if isinstance(i, Load)}
            return _pair(stages, position, place) if not read & written else None
        written |= {i.buffer for i in later.body if isinstance(i, Store)}
    return None


def _is_sum(i: Instr) -> bool:
    return isinstance(i, Reduce) and i.kind == "sum" and not i.running and i.dtype in (DType.F32, DType.F64)


def _pair(stages: Sequence[Ranged], position: int, place: int) -> WelfordPair | None:
    """The sums of one stage with the squares of a later one, if nothing else is done there."""
    first, later = stages[position], stages[place]
    if [r.size for r in first.ranges] != [r.size for r in later.ranges]:
        return None
    if any(isinstance(i, Store | CheckedIndex) for i in later.body):
        return None
    sums = {i.result: i for i in first.body if isinstance(i, Reduce) and _is_sum(i)}
    made = {i.result: i for s in stages for i in s.body if not isinstance(i, Store)}
    ours, theirs = numbered(first), numbered(later)
    squares: dict[str, Reduce] = {}
    means: dict[str, str] = {}
    for total in (i for i in later.body if isinstance(i, Reduce)):
        square = _made_by("mul", total.value, made) if _is_sum(total) else None
        distance = _made_by("sub", square.args[0], made) if square and len(set(square.args)) == 1 else None
        mean = _made_by("div", distance.args[1], made) if distance else None
        if distance is None or mean is None or mean.args[0] not in sums:
            return None
        (sum_, count), value = mean.args, theirs.get(distance.args[0])
        same = value is not None and value == ours.get(sums[sum_].value)
        if not same or sum_ in squares or not _counts(count, made, size_of(first)):
            return None
        squares[sum_], means[sum_] = total, mean.result
    return WelfordPair(place, squares, means) if squares else None


def _made_by(op: str, name: str, made: Mapping[str, Instr]) -> Compute | None:
    i = made.get(name)
    return i if isinstance(i, Compute) and i.op == op else None


def _counts(name: str, made: Mapping[str, Instr], size: Expr) -> bool:
    """Whether a value is the number of iterations."""
    i = made.get(name)
    while isinstance(i, Compute) and i.op == "cast":
        i = made.get(i.args[0])
    if isinstance(i, Index):
        return i.expr == size
    return isinstance(i, Const) and i.value == size.constant
