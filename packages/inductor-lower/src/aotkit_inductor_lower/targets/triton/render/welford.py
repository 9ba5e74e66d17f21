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

from ....analysis.reduction_patterns import WelfordPair
from ....ir import Reduce
from ....kernel_ir.walk import PerfectNest
from .body import BodyEmitter
from .ops import TYPE_NAMES
from .reductions import Reducer

__all__ = ["WelfordLoop"]


class WelfordLoop(Reducer):
    """The loop of sums, and of the squares of another nest."""

    def __init__(self, kernel: BodyEmitter, nest: PerfectNest, position: int, pair: WelfordPair) -> None:
        super().__init__(kernel, nest, position)
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
        """What is counted for all sums of the nest, in the type of one of them."""
        return text if i.dtype is self.counting.dtype else f"{text}.to({TYPE_NAMES[i.dtype]})"

    def _end(self, i: Reduce, number: int) -> None:
        super()._end(i, number)
        if i.result in self.squares:
            name, every = self._accumulator(number), frozenset(range(self.axis))
            shape = self.kernel.shape(frozenset(range(self.axis + 1)))
            count = self._own_type(i, f"tl.broadcast_to({self.count}, {shape})")
            found = f"reduce_squares({name}_mean, {name}_squares, {count}, {self.axis})"
            self.kernel.define(self.squares[i.result].result, found, every)
