"""Nests whose few rows are very long become one nest per pass over the row, so that each pass can use all of a device.

Note [Loop fission]
    A batch norm of 64 channels is one nest: statistics of a channel, then its normalized values. As one kernel it has
    64 units of work, whatever the size of a channel. Cut before the second pass, the statistics are a reduction
    that is split in turn, and the values a nest with a loop per element. What a later pass
    uses of an earlier one goes through memory, one number per row; constants are made again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..ir import Buffer, BufferKind, Const, Index, Instr, Load, LoopNest, Range, Stage, Store
from ..ir.walk import access_at, contains, definitions, instructions, map_nest, used_values, value_types
from ..ops.dtypes import torch_name
from ..symbolic import contiguous_strides, sym

__all__ = ["fission_long_rows", "keep_rows"]


def fission_long_rows(
    nest: LoopNest, starts: Sequence[int], declared: Mapping[str, Buffer], names: set[str]
) -> tuple[list[LoopNest], list[Buffer]]:
    """The nest cut before each stage of ``starts`` but the first, and the memory between the parts. ``names``: those of
    buffers that are taken; it grows."""
    ends = [*starts[1:], len(nest.stages)]
    pieces = [nest.stages[a:b] for a, b in zip([0, *starts[1:]], ends, strict=True)]
    kept = _kept(pieces)
    types, device = value_types(instructions(nest.stages)), next(declared[name].device for name in nest.reads)
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
        own = set(definitions(instructions(piece)))
        loads = tuple(Load(v, buffers[v].name, index, types[v]) for v in kept[number])
        again = _again(nest, piece, own)
        stores = tuple(Store(b.name, index, v) for v, b in buffers.items() if v in own)
        stages = (Stage((), (*again, *loads)), *piece, Stage((), stores))
        name = nest.name if number == len(pieces) - 1 else f"{nest.name}_pass{number}"
        stages = tuple(s for s in stages if s.body)
        made.append(_flat(LoopNest(name, nest.outer, stages, nest.origin)))
    return made, list(buffers.values())


def keep_rows(nest: LoopNest, buffers: dict[str, Buffer]) -> LoopNest:
    """The nest with scratch of one row in memory for all rows, side by side. ``buffers`` changes with it."""
    rows = {name for name in nest.writes if buffers[name].kind is BufferKind.SCRATCH}
    for name in rows:
        sizes = (*buffers[name].sizes, *(r.size for r in nest.outer))
        strides = contiguous_strides(sizes)
        buffers[name] = replace(buffers[name], sizes=sizes, strides=strides, kind=BufferKind.TEMPORARY)
    index = tuple(sym(r.symbol) for r in nest.outer)

    def kept(i: Instr) -> Instr:
        if isinstance(i, (Load, Store)) and i.buffer in rows:
            return access_at(i, i.buffer, (*i.indices, *index))
        return i

    return map_nest(nest, kept)


def _kept(pieces: list[tuple[Stage, ...]]) -> list[list[str]]:
    """Per piece the values of former pieces that it loads."""
    found, before = [], list[str]()
    for piece in pieces:
        body = instructions(piece)
        used = used_values(body)
        found.append([v for v in before if v in used])
        before += [name for name, i in definitions(body).items() if not isinstance(i, (Const, Index))]
    return found


def _again(nest: LoopNest, piece: tuple[Stage, ...], own: set[str]) -> tuple[Instr, ...]:
    """Constants and indices of former pieces."""
    used = used_values(instructions(piece)) - own
    return tuple(i for i in instructions(nest.stages) if isinstance(i, (Const, Index)) and i.result in used)


def _flat(nest: LoopNest) -> LoopNest:
    """A pass that reduces nothing has a loop per element."""
    ranged = [s for s in nest.stages if s.ranges]
    if len(ranged) != 1 or nest.stages[-1] is not ranged[0]:  # what it reduces would be read, or stored, after it
        return nest
    outer: tuple[Range, ...] = (*nest.outer, *ranged[0].ranges)
    body = tuple(instructions(nest.stages))
    stored = contains(instructions(nest.stages[:-1]), Store)
    return nest if stored else replace(nest, outer=outer, stages=(Stage((), body),))
