"""Pass: what is joined (``cat``, ``stack``) is computed where it belongs, or where it is read.

Note [Joined tensors]
    Lowering stores each part into its place in the joined buffer, and by now what makes a part is computed in the nest
    that stores it. That is right where the whole is needed in memory. Where kernels read it there are two others:

    *split*: the only reader is pointwise and its result is needed in memory. Its loop is cut at the borders; each piece
    computes what it reads of its own part. Nothing is stored but the result, nothing computed twice.

    *masked*: the parts are cheap to make. One nest computes, for each element, the part that it is in, the loads of the
    others masked off; it is computed where the reader reads, or fused with readers that walk over rows.

    Otherwise the parts are stored. Each choice leaves a record.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ..analysis.dependencies import Dependencies
from ..analysis.nests import body_size, has_division, heavy_count, iteration_count
from ..ir import (
    Buffer,
    BufferKind,
    Compute,
    DType,
    Index,
    Instr,
    Load,
    LoopNest,
    Program,
    Range,
    Reduce,
    Step,
    Store,
)
from ..ir.builder import NestBuilder
from ..ir.inlining import Inlinable, under_mask, without_store
from ..ir.walk import access_at, accesses, buffers_of, computes, contains, instructions, loads, stores
from ..ops.dtypes import dtype_from_torch_name
from ..ops.scalar import WORK
from ..options import LowerOptions
from ..passes import NO_FUEL, Decision, Pass, PassContext, fuses
from ..symbolic import Expr, Symbol, SymbolKind, to_expr
from .drop_dead_steps import drop_dead_steps
from .inline_producers import expand, join_origins

__all__ = ["PASS", "fuse_concats"]

MOST_MASKED = 8
_SHORTEST_RUN = 32  # elements of a part that follow each other; shorter ones are not worth loops of their own,
_SHORTEST_WHOLE = 256  # and if the whole is shorter, picking the part costs less


@dataclass(frozen=True, slots=True)
class _Part:
    """A nest that stores ``size`` entries of the joined dimension from ``start`` on. ``symbols``: its loop for each
    dimension of the joined buffer."""

    position: int
    nest: LoopNest
    start: Expr
    size: Expr
    symbols: tuple[Symbol | None, ...]


@dataclass(frozen=True, slots=True)
class _Concat:
    """A buffer of which several nests each store a part along ``dim``, together all of it."""

    buffer: Buffer
    dim: int
    parts: tuple[_Part, ...]


def _concat(buffer: Buffer, positions: Sequence[int], steps: Sequence[Step | None]) -> _Concat | None:
    parts: list[_Part] = []
    dims: set[int] = set()
    end = to_expr(0)
    for position in positions:
        step = steps[position]
        found = _part(position, step, buffer) if isinstance(step, LoopNest) else None
        if found is None or found[1].start != end:
            return None
        dims.add(found[0])
        parts.append(found[1])
        end = end + found[1].size
    (dim,) = dims if len(dims) == 1 else (-1,)
    return _Concat(buffer, dim, tuple(parts)) if dim >= 0 and end == buffer.sizes[dim] else None


def _part(position: int, nest: LoopNest, buffer: Buffer) -> tuple[int, _Part] | None:
    """(joined dimension, part) of a pointwise nest with one store into a range of one dimension of the buffer."""
    stored = stores(instructions(nest.stages))
    if not _pointwise(nest) or len(stored) != 1 or buffer.name in nest.reads:
        return None
    loops = {loop.symbol: loop.size for loop in nest.outer}
    symbols: list[Symbol | None] = []
    place: tuple[int, Expr, Expr] | None = None
    for dim, (index, size) in enumerate(zip(stored[0].indices, buffer.sizes, strict=True)):
        own = [s for s in index.symbols if s.kind is SymbolKind.INDEX]
        if any(s.kind is SymbolKind.VALUE for s in index.symbols) or len(own) > 1:
            return None
        symbol = own[0] if own else None
        extent = loops.pop(symbol.name, None) if symbol is not None else to_expr(1)
        start = index - to_expr(symbol) if symbol is not None else index
        if extent is None or not start.symbols.isdisjoint(own):
            return None
        symbols.append(symbol)
        if start == 0 and extent == size:
            continue
        if place is not None:
            return None
        place = (dim, start, extent)
    if place is None or loops:
        return None
    return place[0], _Part(position, nest, place[1], place[2], tuple(symbols))


def _pointwise(nest: LoopNest) -> bool:
    """Whether a nest is one stage without ranges whose stores are plain."""
    if len(nest.stages) != 1 or nest.stages[0].ranges:
        return False
    body = nest.stages[0].body
    return all(i.plain for i in stores(body)) and not contains(body, Reduce)


def fuse_concats(program: Program, ctx: PassContext) -> Program:
    """The program with each joined tensor stored, split or masked, see Note [Joined tensors]."""
    deps = Dependencies.of(program)
    joined = {name: at for name, at in deps.writers.items() if len(at) > 1}
    buffers = buffers_of(program) if joined else {}
    steps: list[Step | None] = list(program.steps)
    split: dict[int, list[LoopNest]] = {}
    for name, writers in joined.items():
        concat = _concat(buffers[name], writers, steps)
        if concat is None:
            continue
        readers = deps.readers.get(name, [])
        names = ", ".join(program.steps[r].name for r in readers[:4]) or "the caller"
        form, reason = "stored", _not_movable(concat, deps)
        if reason is None:
            form, reason = _choose(concat, readers, steps, deps, joined, ctx.options)
        if form != "stored" and not ctx.fuel.take():
            form, reason = "stored", NO_FUEL
        ctx.decisions.append(Decision("concat", name, names, form != "stored", reason or ""))
        _apply(form, concat, readers, steps, split, buffers)
    done = [s for position, step in enumerate(steps) for s in split.get(position, [step])]
    return drop_dead_steps(replace(program, steps=_named_apart([s for s in done if s is not None])))


def _named_apart(steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps, kernels with names of their own."""
    taken: set[str] = set()
    renamed: list[Step] = []
    for step in steps:
        name, number = step.name, 0
        while isinstance(step, LoopNest) and name in taken:
            name, number = f"{step.name}_{number}", number + 1
        taken.add(name)
        renamed.append(step if name == step.name else replace(step, name=name))
    return tuple(renamed)


def _apply(
    form: str,
    concat: _Concat,
    readers: Sequence[int],
    steps: list[Step | None],
    split: dict[int, list[LoopNest]],
    buffers: Mapping[str, Buffer],
) -> None:
    if form == "stored":
        return
    for part in concat.parts:
        steps[part.position] = None
    if form == "split":
        reader = steps[readers[0]]
        assert isinstance(reader, LoopNest)
        split[readers[0]] = _split(concat, reader, buffers)
        return
    masked, symbols = _masked(concat, buffers)
    if form == "masked":
        steps[concat.parts[-1].position] = masked
        return
    reader = steps[readers[0]]
    assert isinstance(reader, LoopNest)
    steps[readers[0]] = expand(reader, buffers, {concat.buffer.name: Inlinable(masked, symbols)})


# -- which -----------------------------------------------------------------------------------------------


def _not_movable(concat: _Concat, deps: Dependencies) -> str | None:
    name = concat.buffer.name
    if name in deps.escapes or concat.buffer.kind is not BufferKind.TEMPORARY:
        return "the whole is needed in memory by an ATen call or the caller"
    if deps.root[name] in deps.unstable:
        return "the graph overwrites parts of it"
    if any(deps.root[read] in deps.unstable for part in concat.parts for read in part.nest.reads):
        return "a part reads memory that the graph overwrites"
    return None


def _choose(
    concat: _Concat,
    readers: Sequence[int],
    steps: Sequence[Step | None],
    deps: Dependencies,
    joined: Mapping[str, Sequence[int]],
    options: LowerOptions,
) -> tuple[str, str]:
    """(``stored``, ``split``, ``masked`` or ``inlined``, why)."""
    name = concat.buffer.name
    size = sum(body_size(part.nest) for part in concat.parts)
    nests = [n for n in (steps[r] for r in readers) if isinstance(n, LoopNest)]
    places = {i.indices for n in nests for i in loads(instructions(n.stages), name)}
    alone = nests[0] if len(nests) == 1 and _pointwise(nests[0]) and len(places) == 1 else None
    cheap = _cheap(concat, steps, deps, options)
    if alone is not None:
        whole = size + len(concat.parts) * body_size(alone) <= options.max_fusion_instructions
        several = sum(read in joined for read in alone.reads) > 1
        run = 0 if several or not whole or _kernels_read(alone, steps, deps) else _run(concat, alone)
        if run >= _SHORTEST_RUN and (cheap is not None or run * len(concat.parts) >= _SHORTEST_WHOLE):
            return "split", "its reader's loop is cut at the borders of the parts"
        if cheap is None and size + body_size(alone) + 8 * len(concat.parts) <= options.max_fusion_instructions:
            return "inlined", "its reader picks the part for each element"
    elif cheap is None and nests:
        return "masked", "one kernel picks the part for each element"
    return "stored", cheap or "its reader cannot take the parts in"


def _kernels_read(reader: LoopNest, steps: Sequence[Step | None], deps: Dependencies) -> bool:
    """Whether kernels read a reader's results and could be fused with it, were it whole."""
    after = (steps[r] for name in reader.writes for r in deps.readers.get(name, ()))
    return any(isinstance(s, LoopNest) for s in after) or any(deps.root[n] in deps.unstable for n in reader.writes)


def _run(concat: _Concat, reader: LoopNest) -> int:
    """How many elements of a part follow each other in the reader, on average; 0 if no loop of it can be cut."""
    symbol = _cut_symbol(concat, reader)
    at = [loop.symbol for loop in reader.outer].index(symbol.name) if symbol is not None else len(reader.outer)
    return iteration_count(reader.outer[at:]) // len(concat.parts) if symbol is not None else 0


def _cut_symbol(concat: _Concat, reader: LoopNest) -> Symbol | None:
    """The reader's loop over the joined dimension."""
    load = loads(instructions(reader.stages), concat.buffer.name)[0]
    symbol = load.indices[concat.dim].symbol
    whole = symbol is not None and Range(symbol.name, concat.buffer.sizes[concat.dim]) in reader.outer
    return symbol if whole else None


def _cheap(concat: _Concat, steps: Sequence[Step | None], deps: Dependencies, options: LowerOptions) -> str | None:
    """Why the parts had better not all be computed for each element, or ``None``."""
    if len(concat.parts) > MOST_MASKED:
        return f"it has more than {MOST_MASKED} parts"
    for part in concat.parts:
        body = instructions(part.nest.stages)
        work = sum(i.op in WORK for i in computes(body))
        wide = len(loads(body))
        if heavy_count(part.nest) or has_division(part.nest) or work > options.max_recompute or wide > 1:
            return "a part is dear to compute for each element"
        if len(accesses(body)) == len(body) and _made_for(part, steps, deps):
            return "a part can be stored by the kernel that makes it"
    return None


def _made_for(part: _Part, steps: Sequence[Step | None], deps: Dependencies) -> bool:
    """Whether a part is a copy of what one kernel makes for it alone."""
    (source,) = part.nest.reads
    made = deps.writers.get(source, [])
    kernels = bool(made) and all(isinstance(steps[w], LoopNest) for w in made)
    return kernels and deps.readers[source] == [part.position] and source not in deps.escapes


# -- how -------------------------------------------------------------------------------------------------


def _split(concat: _Concat, reader: LoopNest, buffers: Mapping[str, Buffer]) -> list[LoopNest]:
    """The reader once for each part, over its range of the joined dimension."""
    symbol = _cut_symbol(concat, reader)
    assert symbol is not None
    pieces = []
    for number, part in enumerate(concat.parts):
        fresh = Symbol(f"{symbol.name}_of_part")
        whole = part.symbols[concat.dim] is None
        cut = () if whole else (Range(fresh.name, part.size),)
        outer = [r for loop in reader.outer for r in (cut if loop.symbol == symbol.name else (loop,))]
        own = to_expr(0) if whole else to_expr(fresh)
        origin = join_origins([part.nest.origin, reader.origin])
        inlinable = {concat.buffer.name: Inlinable(part.nest, part.symbols)}
        builder = NestBuilder(f"{reader.name}_part{number}", outer, origin, buffers, inlinable)
        body = [_at(i, concat, to_expr(symbol) - part.start) for i in reader.stages[0].body]
        builder.copy(body, {symbol: own + part.start}, {})
        pieces.append(builder.finish())
    return pieces


def _at(instr: Instr, concat: _Concat, index: Expr) -> Instr:
    """A load of the joined buffer, with another index into the joined dimension."""
    if not isinstance(instr, Load) or instr.buffer != concat.buffer.name:
        return instr
    indices = (*instr.indices[: concat.dim], index, *instr.indices[concat.dim + 1 :])
    return access_at(instr, instr.buffer, indices)


def _masked(concat: _Concat, buffers: Mapping[str, Buffer]) -> tuple[LoopNest, tuple[Symbol | None, ...]]:
    """One nest for the whole, and the loop of each of its dimensions."""
    buffer = concat.buffer
    loops = [Range(f"j{dim}", size) for dim, size in enumerate(buffer.sizes)]
    symbols = tuple(None if loop.size == 1 else Symbol(loop.symbol) for loop in loops)
    index = [to_expr(0) if s is None else to_expr(s) for s in symbols]
    dtype = dtype_from_torch_name(buffer.dtype)
    assert dtype is not None
    origin = join_origins([part.nest.origin for part in concat.parts])
    builder = NestBuilder(buffer.name, [loop for loop in loops if loop.size != 1], origin, buffers)
    names: dict[str, str] = {}
    pick: list[Instr] = []
    value = ""
    for number, part in reversed(list(enumerate(concat.parts))):
        last = number == len(concat.parts) - 1
        mask = f"in {number}"
        builder.copy(_inside(mask, index[concat.dim], part, number > 0, not last), {}, names)
        place = list(index)
        place[concat.dim] = place[concat.dim] - part.start
        env = {s: at for s, at in zip(part.symbols, place, strict=True) if s is not None}
        own: dict[str, str] = {}
        made_in, store = without_store(part.nest.stages[0].body)
        builder.copy(under_mask(made_in, own, names[mask]), env, own)
        made, whole = f"part {number}", f"from {number}"
        names[made] = own[store.value]
        if not last:
            pick.append(Compute(whole, "where", (mask, made, value), dtype))
        value = made if last else whole
    builder.copy([*pick, Store(buffer.name, tuple(index), value)], {}, names)
    return builder.finish(), symbols


def _inside(mask: str, at: Expr, part: _Part, from_start: bool, to_end: bool) -> list[Instr]:
    """Instructions whose result ``mask`` is whether ``at`` lies in the part."""
    borders = ([("ge", part.start)] if from_start else []) + ([("lt", part.start + part.size)] if to_end else [])
    body: list[Instr] = [Index(f"{mask} at", at, DType.I64)]
    for op, border in borders:
        result = f"{mask} {op}" if len(borders) > 1 else mask
        body.append(Index(f"{mask} {op} border", border, DType.I64))
        body.append(Compute(result, op, (f"{mask} at", f"{mask} {op} border"), DType.BOOL))
    if len(borders) > 1:
        body.append(Compute(mask, "logical_and", (f"{mask} ge", f"{mask} lt"), DType.BOOL))
    return body


PASS = Pass(
    "fuse-concats",
    fuse_concats,
    why="what is joined is computed where it belongs or where it is read, and not copied",
    after=("inline-producers",),
    when=fuses,
)
