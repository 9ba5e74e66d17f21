"""Pass: what no one reads is not stored, scratch that lives for one row is kept to one row, dead code goes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..analysis.alignment import loops_by_weight
from ..analysis.nests import iteration_count, ranges_of
from ..ir import Buffer, BufferKind, BufferRef, CheckedIndex, Instr, Load, LoopNest, Program, Range, Stage, Step, Store
from ..ir.builder import NestBuilder
from ..ir.positions import flat_index
from ..ir.walk import (
    access_at,
    accesses,
    buffers_of,
    contains,
    flat_map,
    instructions,
    loads,
    operands,
    step_reads,
    step_writes,
    stores,
)
from ..passes import Pass, PassContext, fuses
from ..symbolic import Expr, Symbol, contiguous_strides, estimate, sym, to_expr
from .drop_dead_steps import drop_dead_steps

__all__ = ["PASS", "localize_temporaries"]


def localize_temporaries(program: Program, ctx: PassContext) -> Program:
    """The program with temporaries of one kernel as values or scratch of one row; loops get plain names."""
    buffers = buffers_of(program)
    users: dict[str, set[int]] = {}
    for position, step in enumerate(program.steps):
        for name in (*step_reads(step), *step_writes(step)):
            users.setdefault(name, set()).add(position)
    escaping = {out.name for out in program.outputs if isinstance(out, BufferRef)}
    steps: list[Step] = []
    for position, step in enumerate(program.steps):
        if not isinstance(step, LoopNest) or not ctx.fuel.take():
            steps.append(step)
            continue
        private = [
            name
            for name in step.writes
            if buffers[name].kind is BufferKind.TEMPORARY and users[name] == {position} and name not in escaping
        ]
        nest, rows = _localized(step, private, buffers)
        buffers.update((row.name, row) for row in rows)
        cleaned = _without_dead_code(nest)
        if cleaned is not None:
            steps.append(_plain_names(cleaned, buffers))
    return drop_dead_steps(replace(program, steps=tuple(steps), buffers=tuple(buffers.values())))


def _plain_names(nest: LoopNest, buffers: Mapping[str, Buffer]) -> LoopNest:
    """Outer loops ``i0 ..``, each stage's loops ``r0 ..`` numbered through, values ``v0 ..``."""
    env: dict[Symbol, Expr] = {}
    outer = _renamed("i", 0, nest.outer, env)
    builder = NestBuilder(nest.name, outer, nest.origin, buffers)
    count = 0

    def numbered(ranges: Sequence[Range]) -> tuple[Range, ...]:
        nonlocal count
        renamed = _renamed("r", count, ranges, env)
        count += len(renamed)
        return renamed

    builder.copy_stages(nest.stages, env, numbered)
    return builder.finish()


def _renamed(letter: str, first: int, ranges: Sequence[Range], env: dict[Symbol, Expr]) -> tuple[Range, ...]:
    result = tuple(Range(f"{letter}{first + k}", loop.size) for k, loop in enumerate(ranges))
    env.update((Symbol(old.symbol), sym(new.symbol)) for old, new in zip(ranges, result, strict=True))
    return result


def _localized(nest: LoopNest, private: Sequence[str], buffers: Mapping[str, Buffer]) -> tuple[LoopNest, list[Buffer]]:
    """Temporaries that only this nest uses: unread ones are not stored, the others shrink to one row where their
    positions allow. Returns the nest and the new declarations of shrunk buffers."""
    dead = {name for name in private if name not in nest.reads}
    shrunk: dict[str, _Row] = {}
    if iteration_count(nest.outer) > 1:
        for name in private:
            row = None if name in dead else _as_row(nest, name, buffers) or _as_part(nest, buffers[name])
            if row is not None:
                shrunk[name] = row
    if not dead and not shrunk:
        return nest, []

    def localized(i: Instr) -> Iterable[Instr]:
        if isinstance(i, Store) and i.buffer in dead:
            return ()
        if isinstance(i, (Load, Store)) and i.buffer in shrunk:
            return (access_at(i, i.buffer, shrunk[i.buffer].index(i)),)
        return (i,)

    stages = tuple(stage.with_body(flat_map(stage.body, localized)) for stage in nest.stages)
    return replace(nest, stages=stages), [row.buffer for row in shrunk.values()]


@dataclass(frozen=True, slots=True)
class _Row:
    """A temporary as scratch of one outer iteration, and the indices of an access to it."""

    buffer: Buffer
    index: Callable[[Load | Store], tuple[Expr, ...]]


def _as_row(nest: LoopNest, name: str, buffers: Mapping[str, Buffer]) -> _Row | None:
    limits = ranges_of(nest)
    sizes = {s.name: size for s, size in limits.sizes.items()}
    body = instructions(nest.stages)
    own = stores(body, name)
    if len(own) != 1 or not own[0].plain:
        return None
    stored = flat_index(buffers[name], own[0].indices, limits)
    written = inner_loops(stored, nest)
    first = {Symbol(r.symbol): to_expr(0) for s in nest.stages for r in s.ranges}
    if not written:
        return None
    ordered = sorted(written.items(), key=lambda item: -_size_hint(item[0]))
    weights = [weight for weight, _ in ordered]
    extents = tuple(sizes[loop] for _, loop in ordered)
    for load in loads(body, name):
        loaded = flat_index(buffers[name], load.indices, limits)
        read = inner_loops(loaded, nest)
        if read is None or loaded.substitute(first) != stored.substitute(first):
            return None
        if any(w not in written or sizes[v] != sizes[written[w]] for w, v in read.items()):
            return None

    def index(access: Load | Store) -> tuple[Expr, ...]:
        """The loop of each of the store's weights, 0 where the access does not move."""
        inner = inner_loops(flat_index(buffers[name], access.indices, limits), nest) or {}
        return tuple(sym(inner[w]) if w in inner else to_expr(0) for w in weights)

    return _Row(_scratch(buffers[name], extents), index)


def _as_part(nest: LoopNest, buffer: Buffer) -> _Row | None:
    """Where places of a row are stored one by one, or read at computed places: the row has the dimensions that no outer
    loop moves in. An iteration reads only what it stored itself, as no nest reads what another iteration stores."""
    outer = {Symbol(r.symbol) for r in nest.outer}
    own = accesses(instructions(nest.stages), buffer.name)
    if any(i.mask is not None or (isinstance(i, Store) and i.accumulates) for i in own):
        return None
    moved = [dim for dim, index in enumerate(own[0].indices) if not outer.isdisjoint(index.symbols)]
    for dim in range(len(buffer.sizes)):
        indices = {i.indices[dim] for i in own}
        if len(indices) > 1 if dim in moved else any(not outer.isdisjoint(index.symbols) for index in indices):
            return None
    dims = [dim for dim in range(len(buffer.sizes)) if dim not in moved]
    row = _scratch(buffer, tuple(buffer.sizes[dim] for dim in dims))
    return _Row(row, lambda access: tuple(access.indices[dim] for dim in dims))


def _scratch(buffer: Buffer, sizes: tuple[Expr, ...]) -> Buffer:
    return replace(buffer, sizes=sizes, strides=contiguous_strides(sizes), kind=BufferKind.SCRATCH)


def _size_hint(weight: Expr) -> int:
    return weight.constant if weight.constant is not None else estimate(weight, 64)


def inner_loops(flat: Expr, nest: LoopNest) -> dict[Expr, str] | None:
    """The inner loops of a row-major position, by weight; ``None`` if it is not a plain sum."""
    found = loops_by_weight(flat, {r.symbol for r in nest.outer})
    return found[1] if found is not None else None


def _without_dead_code(nest: LoopNest) -> LoopNest | None:
    """The nest without instructions that no store needs, or ``None`` if it stores nothing. Index checks stay: the
    elements they lead to may be known without the index, where there is one only, and eager reports errors anyway."""
    live: set[str] = set()
    stages: list[Stage] = []
    for stage in reversed(nest.stages):
        body: list[Instr] = []
        for instr in reversed(stage.body):
            if isinstance(instr, (Store, CheckedIndex)) or instr.result in live:
                body.append(instr)
                live.update(operands(instr))
        if body:
            stages.append(Stage(stage.ranges, tuple(reversed(body))))
    kept = tuple(reversed(stages))
    return replace(nest, stages=kept) if contains(instructions(kept), Store) else None


PASS = Pass(
    "localize-temporaries",
    localize_temporaries,
    why="what one kernel alone uses needs no memory of its own",
    after=("fuse-kernels", "write-through"),
    when=fuses,
)
