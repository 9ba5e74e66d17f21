"""Who reads and writes which memory, and what must come before what.

Aliases share memory: accesses are recorded per root, the buffer that owns it. Steps on roots that something
overwrites keep their program order; everything else is ordered by data alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from ..ir import Alias, Buffer, BufferKind, BufferRef, Contraction, ExternCall, LoopNest, Program, Step, Store
from ..ir.walk import instructions, step_reads, step_writes, stores
from ..ops.aten import call_counts
from ..symbolic import Expr, SymbolKind, has_calls, to_expr
from .collectives import Collectives
from .nests import ranges_of

__all__ = ["Dependencies", "memory_roots"]


@dataclass(slots=True)
class Dependencies:
    """Facts about a program's steps, by position.

    ``before[k]``: positions that must run before step k. ``readers`` and ``writers`` by buffer name.
    ``escapes``: buffers that extern calls, contractions, aliases or the caller see, so they must exist in memory.
    ``unstable``: roots that are overwritten while the program runs (mutated inputs). ``parts``: buffers of which each
    writer stores a part that lies beside the others', so their order does not matter.
    """

    root: dict[str, str]
    before: list[set[int]]
    readers: dict[str, list[int]]
    writers: dict[str, list[int]]
    escapes: set[str]
    unstable: set[str] = field(default_factory=set)
    parts: frozenset[str] = frozenset()

    @staticmethod
    def of(program: Program) -> Dependencies:
        """Analyze a program."""
        root = memory_roots(program)
        readers: dict[str, list[int]] = {}
        writers: dict[str, list[int]] = {}
        escapes = {out.name for out in program.outputs if isinstance(out, BufferRef)}
        for position, step in enumerate(program.steps):
            for name in step_reads(step):
                readers.setdefault(name, []).append(position)
                if not isinstance(step, LoopNest):
                    escapes.add(name)
            for name in step_writes(step):
                writers.setdefault(name, []).append(position)
        kinds = {b.name: b.kind for b in program.buffers}
        unstable = _unstable(program.steps, root, kinds)
        joined = [b for b in program.buffers if len(writers.get(b.name, ())) > 1 and root[b.name] not in unstable]
        steps = program.steps
        parts = frozenset(b.name for b in joined if side_by_side([steps[w] for w in writers[b.name]], b))
        before = _order(steps, root, unstable, parts)
        return Dependencies(root, before, readers, writers, escapes, unstable, parts)


def memory_roots(program: Program) -> dict[str, str]:
    """The buffer that owns the memory of each buffer."""
    root = {b.name: b.name for b in program.buffers}
    for step in program.steps:
        if isinstance(step, Alias):
            root[step.result] = root[step.base]
    return root


def _unstable(steps: Sequence[Step], root: Mapping[str, str], kinds: Mapping[str, BufferKind]) -> set[str]:
    found: set[str] = set()
    for step in steps:
        if isinstance(step, ExternCall):
            found.update(root[name] for name in step.mutates)
        elif isinstance(step, LoopNest | Contraction):
            found.update(
                root[name]
                for name in step.writes
                if root[name] != name or kinds[name] in (BufferKind.INPUT, BufferKind.CONSTANT)
            )
    return found


def side_by_side(writers: Sequence[Step], buffer: Buffer) -> bool:
    """Whether nests each store one range of a dimension of a buffer, where the one before ends the next one begins."""
    candidates = set(range(len(buffer.sizes)))
    ends: list[Expr] = []
    for writer in writers:
        if not isinstance(writer, LoopNest) or buffer.name in (*writer.reads, *writer.combines):
            return False
        own = stores(instructions(writer.stages), buffer.name)
        extents = _extents(own[0], writer) if len(own) == 1 else None
        if extents is None:
            return False
        if ends:
            candidates = {dim for dim in candidates if extents[dim][0] == ends[dim]}
        ends = [end for _, end in extents]
    return bool(candidates)


def _extents(store: Store, nest: LoopNest) -> list[tuple[Expr, Expr]] | None:
    """For each dimension the first place stored and the one past the last, where the places are plain sums."""
    sizes = ranges_of(nest).sizes
    first = dict.fromkeys(sizes, to_expr(0))
    last = {symbol: size - 1 for symbol, size in sizes.items()}
    found = []
    for index in store.indices:
        loops = [s for s in index.symbols if s in sizes]
        slopes = [index.coefficient(s) for s in loops]
        plain = all(slope is not None and (slope.constant or 0) > 0 for slope in slopes)
        if not plain or has_calls(index) or any(s.kind is SymbolKind.VALUE for s in index.symbols):
            return None
        found.append((index.substitute(first), index.substitute(last) + 1))
    return found


def _order(steps: Sequence[Step], root: Mapping[str, str], unstable: set[str], parts: frozenset[str]) -> list[set[int]]:
    before: list[set[int]] = []
    last_writers: dict[str, list[int]] = {}
    readers_since: dict[str, list[int]] = {}
    alias_steps: dict[str, int] = {}
    last_random: int | None = None
    collectives = Collectives.of(steps)
    last_start = {start: before for before, start in pairwise(collectives.starts)}
    for position, step in enumerate(steps):
        read, written = step_reads(step), step_writes(step)
        if position in collectives.waits:  # Note [While a collective runs]
            also_read, also_written = collectives.in_use(steps, position)
            read, written = (*read, *also_read), (*written, *also_written)
        needs = {alias_steps[name] for name in (*read, *written) if name in alias_steps}
        reads = {root[name] for name in read}
        writes = {root[name] for name in written} if not isinstance(step, Alias) else set()
        for name in reads | (writes - parts):
            needs.update(last_writers.get(name, ()))
        for name in writes & unstable:
            needs.update(readers_since.get(name, ()))
        if isinstance(step, ExternCall) and call_counts(step.target):
            if last_random is not None:
                needs.add(last_random)
            last_random = position
        if position in last_start:
            needs.add(last_start[position])
        needs.discard(position)
        before.append(needs)
        if isinstance(step, Alias):
            alias_steps[step.result] = position
        for name in writes:
            if name in unstable:
                last_writers[name] = [position]
                readers_since[name] = []
            else:
                last_writers.setdefault(name, []).append(position)
        for name in reads & unstable:
            readers_since.setdefault(name, []).append(position)
    return before
