"""Cheap values are computed again where they are read, instead of kept in scratch memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import CheckedIndex, Compute, Index, Instr, Load, Reduce, Store
from ..ir.walk import operands
from ..kernel_ir.nodes import Kernel
from ..kernel_ir.walk import PerfectNest, perfect_nests, with_nests
from ..symbolic import Expr, Symbol, sym

__all__ = ["recompute_scratch"]

_MOST_READS = 2  # along the row, of a value that is computed again rather than kept
_MOST_INSTRUCTIONS = 40


def recompute_scratch(kernel: Kernel) -> Kernel:
    """The kernel with cheap values computed again in later loops, instead of kept in scratch memory."""
    for scratch in kernel.scratch:
        changed = _without(kernel, scratch.name)
        kernel = changed if changed is not None else kernel
    return kernel


def _without(kernel: Kernel, row: str) -> Kernel | None:
    nests = list(perfect_nests(kernel))
    stores = [(k, i) for k, n in enumerate(nests) for i in n.body if isinstance(i, Store) and i.buffer == row]
    loads = [(k, i) for k, n in enumerate(nests) for i in n.body if isinstance(i, Load) and i.buffer == row]
    if len(stores) != 1 or stores[0][1].mask is not None or stores[0][1].accumulates:
        return None
    position, store = stores[0]
    source = nests[position]
    chain = _chain(source, store.value, {i.buffer for n in nests for i in n.body if isinstance(i, Store)})
    sizes, place = [loop.extent for loop in source.loops], _place(source, store)
    for k, load in loads:
        nest = nests[k]
        if k <= position or [loop.extent for loop in nest.loops] != sizes or _place(nest, load) != place:
            return None
    if chain is None or any(load.mask is not None for _, load in loads):
        return None
    nests[position] = PerfectNest(source.loops, tuple(i for i in source.body if i is not store))
    for k in {k for k, _ in loads}:
        nests[k] = _recomputed(nests[k], row, source, chain, store.value)
    return replace(with_nests(kernel, nests), scratch=tuple(r for r in kernel.scratch if r.name != row))


def _place(nest: PerfectNest, access: Load | Store) -> tuple[str, ...]:
    places = {Symbol(r.symbol): sym(f"r#{k}") for k, r in enumerate(nest.loops)}
    return tuple(str(index.substitute(places)) for index in access.indices)


def _chain(nest: PerfectNest, value: str, written: set[str]) -> list[Instr] | None:
    """The instructions that make ``value`` in its nest, if that is cheap and gives the same later."""
    made = {i.result: i for i in nest.body if not isinstance(i, Store)}
    wanted: set[str] = {value}
    chain: list[Instr] = []
    for i in reversed(nest.body):
        if isinstance(i, Store) or i.result not in wanted:
            continue
        if isinstance(i, Reduce | CheckedIndex) or (isinstance(i, Load) and i.buffer in written):
            return None
        if isinstance(i, Load) and {s.name for index in i.indices for s in index.symbols} & made.keys():
            return None  # it reads where another value of the nest says
        wanted |= made.keys() & set(operands(i))
        chain.append(i)
    # What is the same for the whole row is found in a cache.
    along = {Symbol(loop.symbol) for loop in nest.loops}
    reads = [i for i in chain if isinstance(i, Load) and any(not along.isdisjoint(e.symbols) for e in i.indices)]
    return chain[::-1] if len(reads) <= _MOST_READS and len(chain) <= _MOST_INSTRUCTIONS else None


def _recomputed(nest: PerfectNest, row: str, source: PerfectNest, chain: list[Instr], value: str) -> PerfectNest:
    places = {Symbol(old.symbol): sym(new.symbol) for old, new in zip(source.loops, nest.loops, strict=True)}
    body: list[Instr] = []
    for number, i in enumerate(nest.body):
        if not (isinstance(i, Load) and i.buffer == row):
            body.append(i)
            continue
        names = {made.result: f"{made.result}_again{number}" for made in chain if not isinstance(made, Store)}
        names[value] = i.result
        body += [_renamed(made, names, places) for made in chain]
    return PerfectNest(nest.loops, tuple(body))


def _renamed(i: Instr, names: Mapping[str, str], places: Mapping[Symbol, Expr]) -> Instr:
    assert not isinstance(i, Store)
    result = names[i.result]
    if isinstance(i, Load):
        indices = tuple(index.substitute(places) for index in i.indices)
        return replace(i, result=result, indices=indices, mask=names.get(i.mask, i.mask) if i.mask else None)
    if isinstance(i, Index):
        return replace(i, result=result, expr=i.expr.substitute(places))
    if isinstance(i, Compute):
        return replace(i, result=result, args=tuple(names.get(a, a) for a in i.args))
    return replace(i, result=result)
