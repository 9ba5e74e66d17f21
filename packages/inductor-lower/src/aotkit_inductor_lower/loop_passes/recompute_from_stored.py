"""Pass: what follows from other results of its kernel is not stored beside them, but computed again where it is read.

Note [What follows from other results]
    A layer norm of a training step stores the sums that it normalizes, their means and deviations, since the backward
    needs them; the next residual sum reads what it makes of these. That is as wide as the sums, and elementwise in
    them, so the next kernel reads the sums instead, and the result is never stored::

        %x = ..                                   reads x[i, r], mean[i], rstd[i], w[r], b[r]
        store x[i, r] = %x                        and computes x * rstd .. itself
        store mean[i] = %m
        store y[i, r] = (%x - %m) * %rstd .. w[r] + b[r]      gone

    The kernel stored what it computed, with the type that it computed in, so the bits are the same. A result is worth
    it where what is read instead takes no more bytes than the result did. Requires that those buffers exist anyway, and
    that nothing overwrites them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..analysis.dependencies import Dependencies
from ..analysis.nests import body_size, buffer_bytes, has_division, heavy_count, hint, iteration_count, numel
from ..ir import Buffer, BufferKind, CheckedIndex, Instr, Load, LoopNest, Program, Range, Reduce, Stage, Step, Store
from ..ir.inlining import Inlinable
from ..ir.walk import buffers_of, definitions, instructions, loads, operands, stores, value_types
from ..passes import Decision, Pass, PassContext, fuses
from ..symbolic import SymbolKind
from .drop_dead_steps import drop_dead_steps
from .inline_producers import expand

__all__ = ["PASS", "recompute_from_stored"]

_READERS = 3
_SIZE = 40  # instructions


def recompute_from_stored(program: Program, ctx: PassContext) -> Program:
    """The program without such results in memory."""
    dependencies, buffers = Dependencies.of(program), buffers_of(program)
    steps: list[Step] = list(program.steps)
    for position in range(len(steps)):
        nest = steps[position]  # which may have taken in what it reads
        if not isinstance(nest, LoopNest) or len(nest.writes) < 2:
            continue
        kept = _kept(nest, dependencies, buffers)
        for name in nest.writes:
            readers = [k for k in dependencies.readers.get(name, []) if k != position]
            producer = _producer(nest, name, kept, dependencies, buffers, ctx) if name not in kept.buffers else None
            if producer is None or not _pays(producer, name, [steps[k] for k in readers], buffers, ctx):
                continue
            if not ctx.fuel.take():
                return drop_dead_steps(replace(program, steps=tuple(steps)))
            for k in readers:
                steps[k] = expand(_nest(steps[k]), buffers, {name: producer})
            if name not in nest.reads:
                steps[position] = _without_store(_nest(steps[position]), name)
            said = f"{name} follows from {', '.join(producer.nest.reads)}"
            ctx.decisions.append(Decision("inline", nest.name, ", ".join(steps[k].name for k in readers), True, said))
    return drop_dead_steps(replace(program, steps=tuple(steps)))


def _nest(step: Step) -> LoopNest:
    assert isinstance(step, LoopNest)
    return step


@dataclass(frozen=True, slots=True)
class _Kept:
    """What a nest stores in memory that exists anyway: names of ``buffers``, and ``values`` with the store of each."""

    values: Mapping[str, Store]
    buffers: frozenset[str]


def _kept(nest: LoopNest, dependencies: Dependencies, buffers: Mapping[str, Buffer]) -> _Kept:
    found: dict[str, Store] = {}
    stored = stores(instructions(nest.stages))
    for store in stored:
        name = store.buffer
        alone = len(dependencies.writers[name]) == 1 == sum(other.buffer == name for other in stored)
        needed = name in dependencies.escapes and _is_stable(name, dependencies)
        if alone and needed and _loops_of(store, nest, buffers) is not None:
            found[store.value] = store
    return _Kept(found, frozenset(store.buffer for store in found.values()))


def _is_stable(name: str, dependencies: Dependencies) -> bool:
    return dependencies.root[name] == name and name not in dependencies.unstable


def _loops_of(store: Store, nest: LoopNest, buffers: Mapping[str, Buffer]) -> dict[str, Range] | None:
    """The loops that a plain store goes through, one for each dimension of its buffer, which it fills."""
    if not store.plain:
        return None
    sizes = {r.symbol: r for r in (*nest.outer, *(r for s in nest.stages if store in s.body for r in s.ranges))}
    found: dict[str, Range] = {}
    for index, size in zip(store.indices, buffers[store.buffer].sizes, strict=True):
        symbol = index.symbol
        if symbol is None:
            if index.constant != 0 or size != 1:
                return None
            continue
        loop = sizes.pop(symbol.name, None) if symbol.kind is SymbolKind.INDEX else None
        if loop is None or loop.size != size:
            return None
        found[symbol.name] = loop
    return found


def _producer(
    nest: LoopNest,
    name: str,
    kept: _Kept,
    dependencies: Dependencies,
    buffers: Mapping[str, Buffer],
    ctx: PassContext,
) -> Inlinable | None:
    """What computes the elements of a buffer from what is kept, and from what the nest reads itself."""
    own = stores(instructions(nest.stages), name)
    alone = name not in dependencies.escapes and len(dependencies.writers[name]) == 1
    if buffers[name].kind is not BufferKind.TEMPORARY or not alone or len(own) != 1:
        return None
    (store,) = own
    loops = _loops_of(store, nest, buffers)
    if loops is None:
        return None
    made = definitions(instructions(nest.stages))
    body = _body(store, made, kept, dependencies, loops, nest)
    if body is None:
        return None
    stage = Stage((), (*body, store))
    found = LoopNest(nest.name, tuple(loops.values()), (stage,), nest.origin)
    symbols = tuple(index.symbol for index in store.indices)
    cheap = heavy_count(found) <= ctx.target.capabilities.recomputes and body_size(found) <= _SIZE
    return Inlinable(found, symbols) if cheap and not has_division(found) else None


def _body(
    store: Store,
    made: Mapping[str, Instr],
    kept: _Kept,
    dependencies: Dependencies,
    loops: Mapping[str, Range],
    nest: LoopNest,
) -> list[Instr] | None:
    """The instructions before the store, in order, with a load in place of each value that is kept."""
    types = value_types(instructions(nest.stages))
    names = {symbol for r in (nest.outer, *(s.ranges for s in nest.stages)) for symbol in (each.symbol for each in r)}
    body: list[Instr] = []
    done: set[str] = set()

    def moves_within(instr: Load | Store) -> bool:
        return all(s.name in loops for index in instr.indices for s in index.symbols if s.name in names)

    def add(value: str) -> bool:
        if value in done:
            return True
        done.add(value)
        stored = kept.values.get(value)
        if stored is not None and moves_within(stored):
            body.append(Load(value, stored.buffer, stored.indices, types[value]))
            return True
        instr = made[value]
        if isinstance(instr, Reduce | CheckedIndex):
            return False
        if isinstance(instr, Load):
            own = instr.buffer in nest.writes and instr.buffer not in kept.buffers
            written = own or not _is_stable(instr.buffer, dependencies)
            if written or instr.mask is not None or not moves_within(instr):
                return False
        if not all(add(operand) for operand in operands(instr)):
            return False
        body.append(instr)
        return True

    return body if add(store.value) else None


def _pays(
    producer: Inlinable, name: str, readers: Sequence[Step], buffers: Mapping[str, Buffer], ctx: PassContext
) -> bool:
    """Whether as much is read as before, or less, by few readers that go through it once."""
    nests = [reader for reader in readers if isinstance(reader, LoopNest)]
    if not nests or len(nests) > _READERS or len(nests) != len(readers):
        return False
    if any(body_size(r) + body_size(producer.nest) > ctx.options.max_fusion_instructions for r in nests):
        return False
    wide = sum(_share(buffers[n], buffers[name]) for n in producer.nest.reads)
    return wide <= 1.1 and all(_reads_once(reader, name, buffers[name]) for reader in nests)


def _share(read: Buffer, result: Buffer) -> float:
    return buffer_bytes(read) / max(1, buffer_bytes(result))


def _reads_once(reader: LoopNest, name: str, buffer: Buffer) -> bool:
    """Whether a nest loads elements unmasked, in few places, each about as often as there are elements."""
    places = [(stage, i) for stage in reader.stages for i in loads(stage.body, name)]
    if len(places) > _READERS or any(stage.scans or load.mask is not None for stage, load in places):
        return False
    elements, outer = hint(numel(buffer)), iteration_count(reader.outer)
    return all(outer * iteration_count(stage.ranges) <= 2 * elements for stage, _ in places)


def _without_store(nest: LoopNest, name: str) -> LoopNest:
    def left(body: Iterable[Instr]) -> tuple[Instr, ...]:
        return tuple(i for i in body if not (isinstance(i, Store) and i.buffer == name))

    stages = tuple(stage.with_body(left(stage.body)) for stage in nest.stages)
    return replace(nest, stages=tuple(stage for stage in stages if stage.body))


def _wanted(ctx: PassContext) -> bool:
    return fuses(ctx) and ctx.target.capabilities.recomputes > 0


PASS = Pass(
    "recompute-from-stored",
    recompute_from_stored,
    why="what other results tell already is not worth the memory that it would move",
    after=("fuse-mixed-order-reductions",),
    when=_wanted,
)
