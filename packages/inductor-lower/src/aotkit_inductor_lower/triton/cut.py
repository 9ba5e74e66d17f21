"""Nests whose few rows are very long become one nest per pass over the row, so that each pass can use all of a device.

Note [Cut nests]
    A batch norm of 64 channels is one nest: statistics of a channel, then its normalized values. As one kernel it has
    64 program instances, whatever the size of a channel. Cut before the second pass, the statistics are a reduction
    that is split in turn (Note [Split reductions]), and the values a nest with a loop per element. What a later pass
    uses of an earlier one goes through memory, one number per row; constants are made again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import (
    Buffer,
    BufferKind,
    CheckIndex,
    Compute,
    Const,
    IndexValue,
    Instr,
    Load,
    LoopNest,
    Range,
    Reduce,
    Stage,
    Store,
)
from ..ir.dtypes import torch_name
from ..schedule.partials import value_types
from ..symbolic import contiguous_strides, sym
from .tiles import size_hint, stage_size
from .welford import welford_pair

__all__ = ["cut_nest"]

_LONGEST = 1 << 14  # a row that one program instance may walk several times


def cut_nest(
    nest: LoopNest, declared: Mapping[str, Buffer], names: set[str], rows: int
) -> tuple[list[LoopNest], list[Buffer]] | None:
    """The passes of a nest of at most ``rows`` long rows, and the memory between them; ``None`` to leave it whole.
    ``names``: those of buffers that are taken; it grows."""
    starts = _passes(nest)
    if len(starts) < 2 or not _may_cut(nest, declared, starts[0], rows):
        return None
    ends = [*starts[1:], len(nest.stages)]
    pieces = [nest.stages[a:b] for a, b in zip([0, *starts[1:]], ends, strict=True)]
    kept = _kept(pieces)
    types, device = value_types(nest), next(declared[name].device for name in nest.reads)
    sizes, index = tuple(r.size for r in nest.outer), tuple(sym(r.symbol) for r in nest.outer)
    buffers: dict[str, Buffer] = {}
    for value in dict.fromkeys(v for values in kept for v in values):
        name = f"{nest.name}_row_{value}"
        while name in names:
            name += "_"
        names.add(name)
        strides = contiguous_strides(sizes)
        buffers[value] = Buffer(name, torch_name(types[value]), sizes, strides, BufferKind.TEMPORARY, device)
    made: list[LoopNest] = []
    for number, piece in enumerate(pieces):
        own = {i.result for s in piece for i in s.body if not isinstance(i, Store)}
        loads = tuple(Load(v, buffers[v].name, index, types[v]) for v in kept[number])
        again = _again(nest, piece, own)
        stores = tuple(Store(b.name, index, v) for v, b in buffers.items() if v in own)
        stages = (Stage((), (*again, *loads)), *piece, Stage((), stores))
        name = nest.name if number == len(pieces) - 1 else f"{nest.name}_pass{number}"
        stages = tuple(s for s in stages if s.body)
        made.append(_flat(LoopNest(name, nest.outer, stages, nest.origin)))
    return made, list(buffers.values())


def _passes(nest: LoopNest) -> list[int]:
    """Where each pass over the row begins; a sum and the squares around its mean are one."""
    found: list[int] = []
    together = -1
    for position, stage in enumerate(nest.stages):
        if stage.ranges and position != together:
            found.append(position)
            pair = welford_pair(nest.stages, position)
            together = pair.position if pair is not None else -1
    return found


def _may_cut(nest: LoopNest, declared: Mapping[str, Buffer], first: int, rows: int) -> bool:
    """Whether few rows are summed over, long ones, and passes do not depend on each other through memory."""
    results = 1
    for r in nest.outer:
        results *= size_hint(r.size)
    instrs = [i for s in nest.stages for i in s.body]
    if not 0 < results <= rows or size_hint(stage_size(nest.stages[first])) < _LONGEST or not nest.reads:
        return False
    if any(isinstance(i, Reduce) and (i.running or i.kind != "sum") for i in instrs):
        return False
    if any(isinstance(i, CheckIndex) or (isinstance(i, Store) and i.accumulates) for i in instrs):
        return False
    rowwise = any(declared[name].kind is BufferKind.ROW for name in (*nest.reads, *nest.writes))
    return not rowwise and not set(nest.reads) & set(nest.writes)


def _uses(stages: tuple[Stage, ...]) -> set[str]:
    """Names of values that stages read."""
    found: set[str] = set()
    for i in (i for s in stages for i in s.body):
        found |= set(i.args) if isinstance(i, Compute) else {i.value} if isinstance(i, Reduce | Store) else set()
        if isinstance(i, Load | Store):
            found |= {i.mask} if i.mask else set()
            found |= {s.name for index in i.indices for s in index.symbols}
        elif isinstance(i, IndexValue):
            found |= {s.name for s in i.expr.symbols}
    return found


def _kept(pieces: list[tuple[Stage, ...]]) -> list[list[str]]:
    """Per piece the values of former pieces that it loads."""
    found, before = [], list[str]()
    for piece in pieces:
        used = _uses(piece)
        found.append([v for v in before if v in used])
        before += [i.result for s in piece for i in s.body if not isinstance(i, Store | Const | IndexValue)]
    return found


def _again(nest: LoopNest, piece: tuple[Stage, ...], own: set[str]) -> tuple[Instr, ...]:
    """Constants and indices of former pieces."""
    used = _uses(piece) - own
    return tuple(i for s in nest.stages for i in s.body if isinstance(i, Const | IndexValue) and i.result in used)


def _flat(nest: LoopNest) -> LoopNest:
    """A pass that reduces nothing has a loop per element."""
    ranged = [s for s in nest.stages if s.ranges]
    if len(ranged) != 1 or nest.stages[-1] is not ranged[0] or any(isinstance(i, Reduce) for i in ranged[0].body):
        return nest
    outer: tuple[Range, ...] = (*nest.outer, *ranged[0].ranges)
    body = tuple(i for s in nest.stages for i in s.body)
    stored = any(isinstance(i, Store) for s in nest.stages[:-1] for i in s.body)
    return nest if stored else replace(nest, outer=outer, stages=(Stage((), body),))
