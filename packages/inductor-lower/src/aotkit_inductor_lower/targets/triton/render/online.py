"""A row's maximum and the sum of exponentials below it in one pass, where the row is too long to be held.

Note [Online softmax]
    ``m = max(x)`` and then ``s = sum(exp(x - m))`` read a long row twice. Each lane keeps its maximum so far and its
    sum below that; where the maximum grows, the sum is scaled (Milakov and Gimelshein, "Online normalizer calculation
    for softmax", 2018). In the end lanes are brought to the common maximum. An infinite maximum gives NaN, as
    ``exp(inf - inf)`` does. The sum is rounded at other places than eager's, as a sum over lanes is anyhow.
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
        part, above, share = scope.fresh("part"), scope.fresh("above"), scope.fresh("share")
        scope.line(f"{part} = {text}")
        scope.line(f"{above} = maximum({name}, {part})")
        scope.line(f"{share} = {_below(part, above)}")
        mask = self.kernel.masks.get(self.axis)
        if mask is not None:
            scope.line(f"{share} = tl.where({mask}, {share}, 0.0)")
        scope.line(f"{name}_sum = {name}_sum * {_below(name, above)} + {share}")
        scope.line(f"{name} = {above}")

    def _end(self, i: Reduce, number: int) -> None:
        super()._end(i, number)
        name, every = self._accumulator(number), frozenset(range(self.axis))
        maximum = self.kernel.value(i.result).text
        total = f"reduce_sum({name}_sum * {_below(name, maximum)}, {self.axis})"
        found = f'tl.where(tl.abs({maximum}) == float("inf"), float("nan"), {total})'
        self.kernel.define(self.total.result, found, every)


def _below(value: str, maximum: str) -> str:
    """``exp(value - maximum)``, 1 where both are the same infinity."""
    return f"tl.where({value} == {maximum}, 1.0, libm.exp({value} - {maximum}))"
