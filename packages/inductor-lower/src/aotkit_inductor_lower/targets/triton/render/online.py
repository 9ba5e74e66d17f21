"""A row's maximum and the sum of exponentials below it in one pass, where the row is too long to be held.

Note [Online softmax]
    ``m = max(x)`` and then ``s = sum(exp(x - m))`` read a long row twice. Each lane keeps its maximum so far and its
    sum below that; where the maximum grows, the sum is scaled (Milakov and Gimelshein, "Online normalizer calculation
    for softmax", 2018). In the end lanes are brought to the common maximum. An infinite maximum gives NaN, as
    ``exp(inf - inf)`` does. The sum is rounded at other places than eager's, as a sum over lanes is anyhow.

    What is stored in a row's scratch memory for a later pass, and costs few reads, is computed again there instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ....analysis.reduction_patterns import OnlinePair
from ....ir import CheckedIndex, Compute, Index, Instr, Load, Reduce, Stage, Store
from ....kernel_ir.nests import FlatNest
from ....symbolic import Expr, Symbol, sym
from .body import BodyEmitter
from .ops import TYPE_NAMES
from .reductions import Reducer

__all__ = ["OnlineSoftmaxLoop", "recompute_scratch"]

_MOST_READS = 2  # of a value that is computed again rather than kept


class OnlineSoftmaxLoop(Reducer):
    """The loop of a maximum, and of the sum of another stage."""

    def __init__(self, kernel: BodyEmitter, stage: Stage, position: int, pair: OnlinePair) -> None:
        super().__init__(kernel, stage, position)
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


# -- rows ------------------------------------------------------------------------------------------------------


def recompute_scratch(nest: FlatNest) -> FlatNest:
    """The nest with cheap values computed again in later stages, instead of kept in a row's scratch memory."""
    for row in nest.scratch:
        changed = _without_row(nest, row.name)
        nest = changed if changed is not None else nest
    return nest


def _without_row(nest: FlatNest, row: str) -> FlatNest | None:
    stores = [(k, i) for k, s in enumerate(nest.stages) for i in s.body if isinstance(i, Store) and i.buffer == row]
    loads = [(k, i) for k, s in enumerate(nest.stages) for i in s.body if isinstance(i, Load) and i.buffer == row]
    if len(stores) != 1 or stores[0][1].mask is not None or stores[0][1].accumulates:
        return None
    position, store = stores[0]
    source = nest.stages[position]
    chain = _chain(source, store.value, {i.buffer for s in nest.stages for i in s.body if isinstance(i, Store)})
    sizes, place = [r.size for r in source.ranges], _place(source, store)
    for k, load in loads:
        stage = nest.stages[k]
        if k <= position or [r.size for r in stage.ranges] != sizes or _place(stage, load) != place:
            return None
    if chain is None or any(load.mask is not None for _, load in loads):
        return None
    stages = list(nest.stages)
    stages[position] = replace(source, body=tuple(i for i in source.body if i is not store))
    for k in {k for k, _ in loads}:
        stages[k] = _recomputed(stages[k], row, source, chain, store.value)
    return replace(nest, stages=tuple(stages), scratch=tuple(r for r in nest.scratch if r.name != row))


def _place(stage: Stage, access: Load | Store) -> tuple[str, ...]:
    places = {Symbol(r.symbol): sym(f"r#{k}") for k, r in enumerate(stage.ranges)}
    return tuple(str(index.substitute(places)) for index in access.indices)


def _chain(stage: Stage, value: str, written: set[str]) -> list[Instr] | None:
    """The instructions that make ``value`` in its stage, if that is cheap and gives the same later."""
    made = {i.result: i for i in stage.body if not isinstance(i, Store)}
    wanted: set[str] = {value}
    chain: list[Instr] = []
    for i in reversed(stage.body):
        if isinstance(i, Store) or i.result not in wanted:
            continue
        if isinstance(i, Reduce | CheckedIndex) or (isinstance(i, Load) and (i.buffer in written or i.mask)):
            return None
        if isinstance(i, Load) and {s.name for index in i.indices for s in index.symbols} & made.keys():
            return None  # it reads where another value of the stage says
        wanted |= {a for a in (i.args if isinstance(i, Compute) else ()) if a in made}
        chain.append(i)
    return chain[::-1] if sum(isinstance(i, Load) for i in chain) <= _MOST_READS else None


def _recomputed(stage: Stage, row: str, source: Stage, chain: list[Instr], value: str) -> Stage:
    places = {Symbol(old.symbol): sym(new.symbol) for old, new in zip(source.ranges, stage.ranges, strict=True)}
    body: list[Instr] = []
    for number, i in enumerate(stage.body):
        if not (isinstance(i, Load) and i.buffer == row):
            body.append(i)
            continue
        names = {made.result: f"{made.result}_again{number}" for made in chain if not isinstance(made, Store)}
        names[value] = i.result
        body += [_renamed(made, names, places) for made in chain]
    return replace(stage, body=tuple(body))


def _renamed(i: Instr, names: Mapping[str, str], places: Mapping[Symbol, Expr]) -> Instr:
    assert not isinstance(i, Store)
    result = names[i.result]
    if isinstance(i, Load):
        return replace(i, result=result, indices=tuple(index.substitute(places) for index in i.indices))
    if isinstance(i, Index):
        return replace(i, result=result, expr=i.expr.substitute(places))
    if isinstance(i, Compute):
        return replace(i, result=result, args=tuple(names.get(a, a) for a in i.args))
    return replace(i, result=result)
