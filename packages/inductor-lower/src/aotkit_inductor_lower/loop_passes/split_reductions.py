"""Pass: long reductions with few results are cut into chunks, which all units of a machine can share.

Note [Chunks of a reduction]
    A sum over a million elements, or the gradient of a norm's weight (a sum over all rows, per column), has too few
    results to keep a machine busy. The reduced loop ``r < n`` becomes ``k * c + r`` with ``k`` an outer loop: a first
    kernel reduces the chunks ``k``, which are its units of work, and a last one combines their results in order:

        part[k] = sum of x[k*c + r]  for r < c
        out = sum of part

    The order of additions is fixed, so results repeat; nothing is added atomically. How many chunks there are is the
    target's policy (:class:`~.target.SplitPolicy`). On a CPU ``c`` depends on the nest alone, so that results do not
    depend on the number of threads; a device has as many chunks as keep it busy. What ``c`` leaves over is a kernel of
    its own, or the last chunk is masked. An argmax keeps the extreme of each chunk beside its place; the first chunk
    that holds the extreme has the place.

    Squared distances from a mean that a target takes in the pass of the sum (see Note [Welford]) are taken in each
    chunk from the chunk's own mean. The last kernel adds, per chunk, the squared distance of its mean from the common
    one times its length: one reading of memory, and no large numbers subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..analysis.few_rows import few_rows
from ..analysis.reduction_patterns import WelfordPair, welford_pair
from ..ir import Buffer, BufferKind, LoopNest, Program, Step
from ..ir.walk import buffers_of, instructions, reduces, stores
from ..passes import Decision, Pass, PassContext
from ..target import Target
from .chunks import choose_chunks
from .interleave_outer_reductions import interleave_outer_reductions
from .rfactor import ReductionSplit, combine_partial_results, partial_buffers
from .rfactor_chunks import chunk_nest, rest_nest
from .split_squares import stands_alone, with_common_squares

__all__ = ["PASS", "split_nest", "split_reductions"]


def split_reductions(program: Program, ctx: PassContext) -> Program:
    """The program with long reductions of few results in chunks."""
    buffers = buffers_of(program)
    steps: list[Step] = []
    for step in program.steps:
        steps += _split(step, buffers, ctx) if isinstance(step, LoopNest) else [step]
    return replace(program, steps=tuple(steps), buffers=tuple(buffers.values()))


def _split(nest: LoopNest, buffers: dict[str, Buffer], ctx: PassContext) -> Iterator[LoopNest]:
    """The nests that do the work of one. Their buffers are added to ``buffers``."""
    position = _reducing_stage(nest, buffers, ctx.target)
    cut = None if position is None else _cut(nest, position, buffers, ctx.target)
    if position is None or cut is None or not ctx.fuel.take():
        yield nest
        return
    first, *others = split_nest(nest, position, cut, buffers, ctx.target)
    if cut.interleaved:
        reason = f"rows of {cut.chunks} at once fill vectors"
    else:
        reason = f"chunks of {cut.length} of {cut.loop.symbol} < {cut.loop.size} can run at once"
    ctx.decisions.append(Decision("split", first.name, nest.name, False, reason))
    yield from _split(first, buffers, ctx) if cut.interleaved else [first]
    yield from others


def _cut(nest: LoopNest, position: int, buffers: Mapping[str, Buffer], target: Target) -> ReductionSplit | None:
    assert target.split_policy is not None
    found = interleave_outer_reductions(nest, buffers) if target.split_policy.interleaves else None
    return found or choose_chunks(nest, nest.stages[position], buffers, target.split_policy)


# -- what may be cut -------------------------------------------------------------------------------------------


def _reducing_stage(nest: LoopNest, buffers: Mapping[str, Buffer], target: Target) -> int | None:
    """The only stage with loops (with that of its squares), if its chunks are independent of each other and nothing is
    done twice that may be done once only."""
    ranged = [k for k, stage in enumerate(nest.stages) if stage.ranges]
    squares = _squares(nest, ranged[0], target) if len(ranged) == 2 else None
    whole = target.split_policy is not None and not target.split_policy.few_rows
    if whole and few_rows(nest.outer, nest.stages) is not None:
        return None
    if len(ranged) != (2 if squares else 1) or nest.combines or set(nest.reads) & set(nest.writes):
        return None
    if squares is not None and not stands_alone(nest, ranged[0], squares):
        return None
    body, before = nest.stages[ranged[0]].body, instructions(nest.stages[: ranged[0]])
    found = reduces(body)
    if not found or any(i.running for i in found) or stores(before):
        return None
    scratch = any(buffers[name].kind is BufferKind.SCRATCH for name in (*nest.reads, *nest.writes))
    return None if scratch else ranged[0]


def _squares(nest: LoopNest, position: int, target: Target) -> WelfordPair | None:
    """The squares around the mean of the stage's sums, if the target takes both in one pass."""
    return welford_pair(nest.stages, position) if target.capabilities.one_pass_rows else None


def _masks_tails(target: Target) -> bool:
    return target.split_policy is not None and target.split_policy.tail == "mask"


# -- the nests -------------------------------------------------------------------------------------------------


def split_nest(
    nest: LoopNest, position: int, cut: ReductionSplit, buffers: dict[str, Buffer], target: Target
) -> list[LoopNest]:
    """A nest whose stage at ``position`` is cut: the chunks, the rest, and what combines them. Their buffers are added
    to ``buffers``."""
    rest = cut.loop.size - cut.chunks * cut.length
    apart = rest != 0 and not _masks_tails(target)
    every = replace(cut, chunks=cut.chunks + 1) if apart else cut
    squares = _squares(nest, position, target)
    device = next((buffers[name].device for name in nest.reads), target.capabilities.device)
    partial: dict[str, Buffer] = {}
    for stage in (position,) if squares is None else (position, squares.position):
        partial |= partial_buffers(nest, stage, every, {*buffers, *(b.name for b in partial.values())}, device)
    buffers.update((b.name, b) for b in partial.values())
    combined = combine_partial_results(nest, position, every, partial)
    if squares is not None:
        combined = with_common_squares(combined, nest, position, cut, squares, partial)
    parts = [chunk_nest(nest, position, cut, partial, squares, masked=_masks_tails(target))]
    if apart:
        parts.append(rest_nest(nest, position, cut, partial, rest))
    return [*parts, combined]


def _shares_out(ctx: PassContext) -> bool:
    return ctx.target.split_policy is not None


PASS = Pass(
    "split-reductions",
    split_reductions,
    why="a long reduction with few results keeps one unit busy, its chunks keep all",
    after=("localize-temporaries", "fission-long-rows"),
    when=_shares_out,
)
