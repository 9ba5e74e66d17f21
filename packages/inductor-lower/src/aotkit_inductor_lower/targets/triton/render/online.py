"""A row's maximum and the sum of exponentials below it in one pass, where the row is too long to be held.

Note [Online softmax]
    ``m = max(x)`` and then ``s = sum(exp(x - m))`` read a long row twice. Each lane keeps its maximum so far and its
    sum below that; where the maximum grows, the sum is scaled (Milakov and Gimelshein, "Online normalizer calculation
    for softmax", 2018). Either the sum is scaled or the new share is: one exponential of their distance does for both.
    In the end lanes are brought to the common maximum. An infinite maximum gives NaN, as ``exp(inf - inf)`` does. The
    sum is rounded at other places than eager's, as a sum over lanes is anyhow.
"""

from __future__ import annotations

from ....analysis.reduction_patterns import OnlinePair
from ....ir import Reduce
from ....kernel_ir.walk import PerfectNest
from .body import BodyEmitter
from .ops import TYPE_NAMES
from .reductions import Reducer

__all__ = ["OnlineSoftmaxLoop"]


class OnlineSoftmaxLoop(Reducer):
    """The loop of a maximum, and of the sum of another nest."""

    def __init__(self, kernel: BodyEmitter, nest: PerfectNest, position: int, pair: OnlinePair) -> None:
        super().__init__(kernel, nest, position)
        self.total = pair.total

    def _start(self, i: Reduce, number: int) -> None:
        super()._start(i, number)
        name, shape = self._accumulator(number), self.kernel.shape(frozenset(range(self.axis + 1)))
        self.scope.line(f"{name}_sum = tl.full({shape}, 0.0, {TYPE_NAMES[self._work_type(i)]})")

    def _step(self, i: Reduce, number: int) -> None:
        scope, name = self.scope, self._accumulator(number)
        text, _ = self._masked(i)
        part, far, scaled = scope.fresh("part"), scope.fresh("far"), scope.fresh("scaled")
        scope.line(f"{part} = {text}")
        scope.line(f"{far} = {_below(f'-tl.abs({part} - {name})', part, name)}")
        scope.line(f"{scaled} = tl.where({part} > {name}, {name}_sum * {far} + 1.0, {name}_sum + {far})")
        mask = self.kernel.masks.get(self.axis)
        scope.line(f"{name}_sum = {scaled if mask is None else f'tl.where({mask}, {scaled}, {name}_sum)'}")
        scope.line(f"{name} = maximum({name}, {part})")

    def _end(self, i: Reduce, number: int) -> None:
        super()._end(i, number)
        name, every = self._accumulator(number), frozenset(range(self.axis))
        maximum = self.kernel.value(i.result).text
        total = f"reduce_sum({name}_sum * {_below(f'{name} - {maximum}', name, maximum)}, {self.axis})"
        found = f'tl.where(tl.abs({maximum}) == float("inf"), float("nan"), {total})'
        self.kernel.define(self.total.result, found, every)


def _below(distance: str, value: str, maximum: str) -> str:
    """The exponential of a distance, 1 where both ends are the same infinity."""
    return f"tl.where({value} == {maximum}, 1.0, libm.exp({distance}))"
