"""A row's mean and its sum of squared distances from it in one pass, where the row is too long to be held.

Note [Welford]
    ``mean = sum(x) / n`` and then ``sum((x - mean)**2)`` read a long row twice. Each lane keeps the mean of what it saw
    and its squared distances from that; the next element moves both (Welford, "Note on a method for calculating
    corrected sums of squares and products", 1962). In the end lanes are combined by pairs, as Chan, Golub and LeVeque
    do ("Updating formulae and a pairwise algorithm for computing sample variances", 1979). All look at
    differences from the row's first element, so that a mean far from 0 is not rounded again at each step: an offset of
    the whole row costs no digits. A row that is held is read once anyhow and keeps its two passes. The sum itself is
    kept beside, as other things may be made of it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ....ir import CheckedIndex, Compute, Const, DType, Index, Instr, Load, Reduce, Stage, Store
from ....symbolic import Expr
from ..map_loops import stage_size
from .body import BodyEmitter
from .online import numbered
from .ops import TYPE_NAMES
from .reductions import Reducer

__all__ = ["WelfordLoop", "WelfordPair", "welford_pair"]


@dataclass(frozen=True, slots=True)
class WelfordPair:
    """The stage at ``position`` sums squared distances from means that an earlier one sums up. ``squares``: per sum of
    the earlier stage the reduction of the later one; ``means``: per sum the value that is the mean."""

    position: int
    squares: Mapping[str, Reduce]
    means: Mapping[str, str]


def welford_pair(stages: tuple[Stage, ...], position: int) -> WelfordPair | None:
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


def _pair(stages: tuple[Stage, ...], position: int, place: int) -> WelfordPair | None:
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
        if not same or sum_ in squares or not _counts(count, made, stage_size(first)):
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


class WelfordLoop(Reducer):
    """The loop of sums, and of the squares of another stage."""

    def __init__(self, kernel: BodyEmitter, stage: Stage, position: int, pair: WelfordPair) -> None:
        super().__init__(kernel, stage, position)
        self.squares = pair.squares
        self.count = f"seen{position}"
        self.counting = next(i for i in self.reduces if i.result in self.squares)

    def _start(self, i: Reduce, number: int) -> None:
        super()._start(i, number)
        name, type_ = self._accumulator(number), TYPE_NAMES[i.dtype]
        if i is self.counting:
            lanes = self.kernel.shape(frozenset({self.axis}))
            self.scope.line(f"{self.count} = tl.full({lanes}, 0.0, {type_})")
        if i.result in self.squares:
            shape = self.kernel.shape(frozenset(range(self.axis + 1)))
            each_row = self.kernel.shape(frozenset(range(self.axis)))
            self.scope.line(f"{name}_first = tl.full({each_row}, 0.0, {type_})")
            self.scope.line(f"{name}_mean = tl.full({shape}, 0.0, {type_})")
            self.scope.line(f"{name}_squares = tl.full({shape}, 0.0, {type_})")

    def _step(self, i: Reduce, number: int) -> None:
        super()._step(i, number)
        if i.result not in self.squares:
            return
        scope, name, mask = self.scope, self._accumulator(number), self.kernel.masks.get(self.axis)
        if i is self.counting:
            one = f"{mask}.to({TYPE_NAMES[i.dtype]})" if mask else "1.0"
            scope.line(f"{self.count} = {self.count} + {one}")
            seen = f"tl.where({mask}, {self.count}, 1.0)" if mask else self.count
            scope.line(f"{self.count}_share = reciprocal({seen})")
        text, at = self._masked(i)[0], f"tl.arange(0, RBLOCK){self.kernel.along(self.axis)}"
        scope.line(f"if start{self.position} == 0:")
        whole = f"tl.broadcast_to({text}, {self.kernel.shape(frozenset(range(self.axis + 1)))})"
        scope.line(f"    {name}_first = reduce_sum(tl.where({at} == 0, {whole}, 0.0), {self.axis})")
        lane, distance = scope.fresh("lane"), scope.fresh("distance")
        moved = f"{self.kernel.value(i.value).text} - {name}_first"
        scope.line(f"{lane} = {f'tl.where({mask}, {moved}, {name}_mean)' if mask else moved}")
        scope.line(f"{distance} = {lane} - {name}_mean")
        share = self._own_type(i, f"{self.count}_share")
        scope.line(f"{name}_mean = {name}_mean + {distance} * {share}")
        rest = f"{lane} - {name}_mean"
        rest = f"tl.where({mask}, {rest}, 0.0)" if mask else rest
        scope.line(f"{name}_squares = {name}_squares + {distance} * ({rest})")

    def _own_type(self, i: Reduce, text: str) -> str:
        """What is counted for all sums of the stage, in the type of one of them."""
        return text if i.dtype is self.counting.dtype else f"{text}.to({TYPE_NAMES[i.dtype]})"

    def _end(self, i: Reduce, number: int) -> None:
        super()._end(i, number)
        if i.result in self.squares:
            name, every = self._accumulator(number), frozenset(range(self.axis))
            shape = self.kernel.shape(frozenset(range(self.axis + 1)))
            count = self._own_type(i, f"tl.broadcast_to({self.count}, {shape})")
            found = f"reduce_squares({name}_mean, {name}_squares, {count}, {self.axis})"
            self.kernel.define(self.squares[i.result].result, found, every)
