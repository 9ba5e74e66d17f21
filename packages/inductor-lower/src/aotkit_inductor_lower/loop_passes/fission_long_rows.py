"""Pass: nests whose few rows are very long become one nest per pass over the row, so that each pass can use all of a
machine.

Note [Loop fission]
    A batch norm of 64 channels is one nest: statistics of a channel, then its normalized values. As one kernel it has
    64 units of work, whatever the size of a channel. Cut before the second pass, the statistics are a reduction
    that is split in turn, and the values a nest with a loop per element. What a later pass
    uses of an earlier one goes through memory, one number per row; constants are made again.

    Where a target reads a row once for a sum and the squares around its mean (see Note [Welford]), these are one pass,
    and other kinds of reductions, which it may join too, stay together.

    Columns of a device, of which a unit of work goes down several, count as long much sooner: a unit goes down them in
    small steps. There one long pass is enough: a short sum before it (the mean of an image's channels) would keep all
    elements of the image in one unit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..analysis.nests import iteration_count
from ..analysis.reduction_patterns import size_of, welford_pair
from ..ir import (
    Buffer,
    BufferKind,
    CheckedIndex,
    Const,
    Index,
    Instr,
    Load,
    LoopNest,
    Program,
    Range,
    Stage,
    Step,
    Store,
)
from ..ir.walk import (
    access_at,
    buffers_of,
    contains,
    definitions,
    instructions,
    map_nest,
    reduces,
    used_values,
    value_types,
)
from ..ops.dtypes import torch_name
from ..passes import Decision, Pass, PassContext
from ..symbolic import contiguous_strides, sym
from ..target import SplitPolicy, Target
from .chunks import goes_along, result_count, size_or, unit_count
from .squares_of_stored import squares_of_stored

__all__ = ["PASS", "fission_long_rows"]

_REASON = "each pass over a long row can use all units of work"


def fission_long_rows(program: Program, ctx: PassContext) -> Program:
    """The program with few long rows in a nest per pass over them."""
    buffers = buffers_of(program)
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, LoopNest) and ctx.target.capabilities.one_pass_rows and ctx.fuel.left > 0:
            step = squares_of_stored(step, buffers)
        starts = _passes(step, buffers, ctx.target) if isinstance(step, LoopNest) else []
        if not isinstance(step, LoopNest) or len(starts) < 2 or not ctx.fuel.take():
            steps.append(step)
            continue
        nests, added = _nest_per_pass(_keep_rows(step, buffers), starts, buffers, set(buffers))
        buffers.update((b.name, b) for b in added)
        ctx.decisions.append(Decision("split", nests[0].name, step.name, False, _REASON))
        steps += nests
    return replace(program, steps=tuple(steps), buffers=tuple(buffers.values()))


# -- which nests -----------------------------------------------------------------------------------------------


def _passes(nest: LoopNest, buffers: Mapping[str, Buffer], target: Target) -> list[int]:
    """The stages before which a nest is cut into passes, see Note [Loop fission]; fewer than two for none."""
    one_pass, policy = target.capabilities.one_pass_rows, target.split_policy
    starts = _starts(nest, one_pass)
    if policy is None or len(starts) < 2 or not _may_be_cut(nest, buffers, one_pass):
        return []
    passes = starts if policy.chunk is None else starts[:1]
    return starts if any(_pays(nest, nest.stages[start], buffers, policy) for start in passes) else []


def _starts(nest: LoopNest, one_pass: bool) -> list[int]:
    """Where each pass over the row begins; a sum and the squares around its mean are one if both are taken at once."""
    found: list[int] = []
    together = -1
    for position, stage in enumerate(nest.stages):
        if stage.ranges and position != together:
            found.append(position)
            pair = welford_pair(nest.stages, position) if one_pass else None
            together = pair.position if pair is not None else -1
    return found


def _may_be_cut(nest: LoopNest, buffers: Mapping[str, Buffer], one_pass: bool) -> bool:
    """Whether passes depend on each other by one number a row, or by scratch that may be kept for all rows."""
    scratch = {name for name in (*nest.reads, *nest.writes) if buffers[name].kind is BufferKind.SCRATCH}
    if not nest.reads or nest.combines:
        return False
    if not one_pass and (set(nest.reads) & set(nest.writes)) - scratch:
        return False
    body = instructions(nest.stages)
    found = reduces(body)
    if contains(body, CheckedIndex) or any(i.running for i in found):
        return False
    return not one_pass or (not scratch and all(i.kind == "sum" for i in found))


def _pays(nest: LoopNest, first: Stage, buffers: Mapping[str, Buffer], policy: SplitPolicy) -> bool:
    """Whether there are few rows, and long ones in a pass: threads wait for each other after each."""
    results = result_count(nest, policy)
    if not results:
        return False
    if policy.chunk is None:
        long = policy.long_row if goes_along(first, buffers, policy) else policy.least
        few = unit_count(results, first, buffers, policy) <= policy.units // 2
        return few and size_or(size_of(first), policy.assume) >= long
    if unit_count(results, first, buffers, policy) != 1:
        return False
    known = all(r.size.constant is not None for r in first.ranges)
    least = policy.long_row if results == 1 else policy.least
    return not known or results * iteration_count(first.ranges) >= least


# -- the nests -------------------------------------------------------------------------------------------------


def _nest_per_pass(
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


def _keep_rows(nest: LoopNest, buffers: dict[str, Buffer]) -> LoopNest:
    """The nest with scratch of one row in memory for all rows, side by side. ``buffers`` changes with it."""
    rows = {name for name in nest.writes if buffers[name].kind is BufferKind.SCRATCH}
    if not rows:
        return nest
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


def _shares_out(ctx: PassContext) -> bool:
    return ctx.target.split_policy is not None


PASS = Pass(
    "fission-long-rows",
    fission_long_rows,
    why="a few long rows keep few units busy, and each pass over them by itself can keep all",
    after=("localize-temporaries",),
    when=_shares_out,
)
