"""Squares around a mean that read back what the pass of the sum stored are taken of the values themselves.

Note [Squares of what was stored]
    A batch norm of a convolution with a bias sums what it stores, the convolution with its bias, and takes squares of
    what it loads from there. Computed once more from what the first pass read, the squares are those of the values that
    it sums, so both can be taken in one pass, which leaves nothing to read back.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..analysis.reduction_patterns import welford_pair
from ..ir import Buffer, CheckedIndex, Instr, Load, LoopNest, Reduce, Store
from ..ir.builder import NestBuilder
from ..symbolic import Expr, Symbol, sym

__all__ = ["squares_of_stored"]


def squares_of_stored(nest: LoopNest, buffers: Mapping[str, Buffer]) -> LoopNest:
    """The nest with such squares in one pass with their sum, or as it was."""
    ranged = [k for k, stage in enumerate(nest.stages) if stage.ranges]
    if len(ranged) < 2 or welford_pair(nest.stages, ranged[0]) is not None:
        return nest
    made = _again(nest, ranged[0], ranged[1], buffers)
    return made if made is not None and welford_pair(made.stages, ranged[0]) is not None else nest


def _again(nest: LoopNest, position: int, place: int, buffers: Mapping[str, Buffer]) -> LoopNest | None:
    first, later = nest.stages[position], nest.stages[place]
    if [r.size for r in first.ranges] != [r.size for r in later.ranges]:
        return None
    loops: dict[Symbol, Expr] = {
        Symbol(a.symbol): sym(b.symbol) for a, b in zip(first.ranges, later.ranges, strict=True)
    }
    stored: dict[str, list[Store]] = {}
    for i in first.body:
        if isinstance(i, Store):
            stored.setdefault(i.buffer, []).append(i)
    builder = NestBuilder(nest.name, nest.outer, nest.origin, buffers)
    names: dict[str, str] = {}
    found = False
    for number, stage in enumerate(nest.stages):
        builder.begin_stage(stage.ranges)
        for i in stage.body:
            chain = _chain(i, stored, loops, first.body) if number == place and isinstance(i, Load) else None
            if chain is None:
                builder.copy([i], {}, names)
                continue
            own = dict(names)
            builder.copy(chain[0], dict(loops), own)
            names[i.result] = own[chain[1]]  # type: ignore[union-attr]
            found = True
    return builder.finish() if found else None


def _chain(
    load: Load, stored: Mapping[str, list[Store]], loops: Mapping[Symbol, Expr], body: tuple[Instr, ...]
) -> tuple[list[Instr], str] | None:
    """What makes the value that a load reads back, and its name; ``None`` where it reads something else."""
    stores = stored.get(load.buffer, [])
    if len(stores) != 1 or not stores[0].plain or load.mask is not None:
        return None
    (store,) = stores
    if tuple(index.substitute(loops) for index in store.indices) != load.indices:
        return None
    made = {i.result: i for i in body if not isinstance(i, Store)}
    wanted, pending = set[str](), [store.value]
    while pending:
        name = pending.pop()
        i = made.get(name)
        if i is None or name in wanted:
            continue  # made before the loops
        if isinstance(i, Reduce | CheckedIndex) or (isinstance(i, Load) and i.buffer in stored):
            return None
        wanted.add(name)
        pending += getattr(i, "args", ())
        pending += [i.mask] if isinstance(i, Load) and i.mask else []
    return [i for i in body if not isinstance(i, Store) and i.result in wanted], store.value
