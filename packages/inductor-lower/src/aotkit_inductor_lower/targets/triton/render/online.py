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
from dataclasses import dataclass, replace

from ....ir import CheckedIndex, Compute, Const, DType, Index, Instr, Load, Reduce, Stage, Store
from ....kernel_ir.nests import FlatNest
from ....symbolic import Expr, Symbol, sym
from .body import BodyEmitter
from .ops import TYPE_NAMES
from .reductions import Reducer

__all__ = ["OnlinePair", "OnlineSoftmaxLoop", "online_pair", "recompute_scratch"]

_MOST_READS = 2  # of a value that is computed again rather than kept


@dataclass(frozen=True, slots=True)
class OnlinePair:
    """The stage at ``position`` sums exponentials below the maximum of an earlier one; ``total`` is its result."""

    position: int
    total: Reduce


def online_pair(nest: FlatNest, position: int) -> OnlinePair | None:
    """The stage that may be computed together with the one at ``position``, which takes a maximum."""
    first = nest.stages[position]
    if not first.ranges or any(isinstance(i, Store | CheckedIndex) for i in first.body):
        return None
    maxima = [i for i in first.body if isinstance(i, Reduce)]
    if (
        len(maxima) != 1
        or maxima[0].kind != "max"
        or maxima[0].running
        or maxima[0].dtype not in (DType.F32, DType.F64)
    ):
        return None
    written: set[str] = set()
    for place in range(position + 1, len(nest.stages)):
        later = nest.stages[place]
        if later.ranges:
            found = _sum_below(first, maxima[0], later)
            read = {i.buffer for i in later.body if isinstance(i, Load)}
            return OnlinePair(place, found) if found is not None and not read & written else None
        written |= {i.buffer for i in later.body if isinstance(i, Store)}
    return None


def _sum_below(first: Stage, maximum: Reduce, later: Stage) -> Reduce | None:
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
    ours, theirs = numbered(first), numbered(later)
    same = theirs.get(difference.args[0]) == ours.get(maximum.value)
    return total if same and difference.args[0] in theirs else None


def numbered(stage: Stage) -> dict[str, object]:
    """What each value of a stage is, in terms of loads and of the place in the loops; names do not matter."""
    places: dict[Symbol, Expr] = {Symbol(r.symbol): sym(f"r#{k}") for k, r in enumerate(stage.ranges)}
    known: dict[str, object] = {}
    for i in stage.body:
        if isinstance(i, Load):
            at = tuple(str(index.substitute(places)) for index in i.indices)
            known[i.result] = ("load", i.buffer, at, known.get(i.mask or "", i.mask), repr(i.other), i.dtype)
        elif isinstance(i, Const):
            known[i.result] = ("const", repr(i.value), i.dtype)
        elif isinstance(i, Index):
            known[i.result] = ("index", str(i.expr.substitute(places)), i.dtype)
        elif isinstance(i, Compute):
            known[i.result] = (i.op, tuple(known.get(a, a) for a in i.args), i.dtype)
    return known


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
