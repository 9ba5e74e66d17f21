"""Pass, for the CPU: long reductions with few results are cut into chunks that threads can share.

Note [Chunks of a reduction]
    A sum over a whole tensor is one iteration of its nest, so one thread would do it. The reduced loop ``r < n``
    becomes ``k * c + r``: a first kernel reduces the chunks ``k < n // c``, which are its units of work, a second the
    rest that is shorter than ``c``, and a third combines their results in order:

        part[k] = sum of x[k*c + r]  for r < c
        part[n // c] = sum of x[n // c * c + r]  for r < n % c
        out = sum of part

    ``c`` depends on the nest alone: so results do not depend on the number of threads, and where ``n`` is known at run
    time only, a short tensor costs two calls of kernels with nothing to do. An argmax keeps the extreme of each chunk
    beside its place; the first chunk that holds the extreme has the place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..analysis.nests import hint, iteration_count
from ..ir import (
    Buffer,
    BufferKind,
    CheckedIndex,
    Instr,
    LoopNest,
    Program,
    Range,
    Reduce,
    Stage,
    Step,
    Store,
)
from ..ir.walk import (
    buffers_of,
    contains,
    flat_map,
    instructions,
    loads,
    reduces,
    stores,
    substitute,
    value_types,
)
from ..passes import Decision, Pass, PassContext
from ..symbolic import Expr, Symbol, floordiv, product, smax, sym, to_expr
from ..target import NO_MACHINE
from .fission_long_rows import fission_long_rows, keep_rows
from .interleave_outer_reductions import interleave_outer_reductions
from .rfactor import (
    ReductionSplit,
    arg_reduces,
    combine_partial_results,
    extreme,
    extreme_kind,
    partial_buffers,
)

__all__ = ["PASS", "split_reductions"]

LENGTH = 1 << 14  # elements of a chunk
LEAST_WORK = 1 << 16  # elements from which a second thread pays
LEAST_ROW = 1 << 18  # elements of a row from which its passes pay as kernels: threads wait for each other after each
FEW_UNITS = 8  # a kernel with so many units keeps threads busy by itself
COLUMNS = 64  # results that one unit computes where they lie side by side


def split_reductions(program: Program, ctx: PassContext) -> Program:
    """The program with long reductions of few results in chunks."""
    buffers = buffers_of(program)
    steps: list[Step] = []
    for step in program.steps:
        steps += _split(step, buffers, ctx) if isinstance(step, LoopNest) else [step]
    return replace(program, steps=tuple(steps), buffers=tuple(buffers.values()))


def _split(nest: LoopNest, buffers: dict[str, Buffer], ctx: PassContext) -> Iterator[LoopNest]:
    """The nests that do the work of one. Their buffers are added to ``buffers``."""
    starts = _passes(nest, buffers)
    if len(starts) > 1 and ctx.fuel.take():
        nests, added = fission_long_rows(keep_rows(nest, buffers), starts, buffers, set(buffers))
        buffers.update((b.name, b) for b in added)
        reason = "each pass over a long row can use several threads"
        ctx.decisions.append(Decision("split", nests[0].name, nest.name, False, reason))
        for part in nests:
            yield from _split(part, buffers, ctx)
        return
    cut = (interleave_outer_reductions(nest, buffers) or _cut(nest, buffers)) if _legal(nest, buffers) else None
    if cut is None or not ctx.fuel.take():
        yield nest
        return
    first, *others = _parts(nest, cut, buffers)
    if cut.interleaved:
        reason = f"rows of {cut.chunks} at once fill vectors"
    else:
        reason = f"chunks of {cut.length} of {cut.loop.symbol} < {cut.loop.size} can run at once"
    ctx.decisions.append(Decision("split", first.name, nest.name, False, reason))
    yield from _split(first, buffers, ctx) if cut.interleaved else [first]
    yield from others


# -- what to cut -----------------------------------------------------------------------------------------------


def _passes(nest: LoopNest, buffers: Mapping[str, Buffer]) -> list[int]:
    """The stages before which a nest is cut into passes, see Note [Loop fission]; fewer than two for none."""
    starts = [k for k, stage in enumerate(nest.stages) if stage.ranges]
    body = instructions(nest.stages)
    both = [name for name in nest.reads if name in nest.writes and buffers[name].kind is not BufferKind.SCRATCH]
    plain = all(buffers[name].device.startswith("cpu") for name in (*nest.reads, *nest.writes))
    if len(starts) < 2 or nest.combines or both or not nest.reads or not plain:
        return []
    if contains(body, CheckedIndex) or any(i.running for i in reduces(body)):
        return []
    results, units = _results(nest, nest.stages[starts[0]], buffers)
    loops = nest.stages[starts[0]].ranges
    known = all(r.size.constant is not None for r in loops)
    least = LEAST_ROW if results == 1 else LEAST_WORK
    return starts if units == 1 and not (known and results * iteration_count(loops) < least) else []


def _cut(nest: LoopNest, buffers: Mapping[str, Buffer]) -> ReductionSplit | None:
    """How the only stage with loops is cut, if that is possible and pays."""
    stage = next(stage for stage in nest.stages if stage.ranges)
    results, units = _results(nest, stage, buffers)
    known = all(r.size.constant is not None for r in stage.ranges)
    elements = iteration_count(stage.ranges)
    if units is None or units >= FEW_UNITS or (known and results * elements < LEAST_WORK):
        return None
    loop = _outermost(nest, stage, buffers)
    others = product(r.size for r in stage.ranges if r is not loop) * max(1, min(results // units, COLUMNS))
    length = _length(others)
    if known and length.constant is not None and hint(loop.size) < 2 * length.constant:
        return None
    return ReductionSplit(loop, floordiv(loop.size, length), length, place=0)


def _legal(nest: LoopNest, buffers: Mapping[str, Buffer]) -> bool:
    """Whether chunks of the only stage with loops are independent of each other, and nothing is done twice that may be
    done once only."""
    if sum(bool(stage.ranges) for stage in nest.stages) != 1:
        return False
    position = next(k for k, stage in enumerate(nest.stages) if stage.ranges)
    found = reduces(nest.stages[position].body)
    if not found or any(i.running for i in found):
        return False
    if stores(instructions(nest.stages[:position])):
        return False
    if nest.combines or set(nest.reads) & set(nest.writes):
        return False
    used = [buffers[name] for name in (*nest.reads, *nest.writes)]
    return all(b.kind is not BufferKind.SCRATCH and b.device.startswith("cpu") for b in used)


def _results(nest: LoopNest, stage: Stage, buffers: Mapping[str, Buffer]) -> tuple[int, int | None]:
    """How many results the nest has, and in how many units of work it computes them; ``None`` if that is not known."""
    results = 1
    for r in nest.outer:
        if r.size.constant is None:
            return 1, None
        results *= r.size.constant
    if not results:
        return 0, None
    inner = {Symbol(r.symbol) for r in stage.ranges}
    for load in loads(stage.body):
        for index, stride in zip(load.indices, buffers[load.buffer].strides, strict=True):
            if stride == 1 and not inner.isdisjoint(index.symbols):
                return results, results  # the reduced elements lie side by side
    return results, -(-results // COLUMNS)


def _outermost(nest: LoopNest, stage: Stage, buffers: Mapping[str, Buffer]) -> Range:
    """The loop with the widest steps in memory that is long enough to be cut; for places in it the first, whose chunks
    are in the order of places."""
    if arg_reduces(stage.body):
        return stage.ranges[0]
    load = next(iter(loads(stage.body)), None)

    def worth(loop: Range) -> tuple[bool, int, int]:
        step = 0
        if load is not None:
            for index, stride in zip(load.indices, buffers[load.buffer].strides, strict=True):
                factor = index.coefficient(Symbol(loop.symbol))
                step += abs(hint(factor * stride)) if factor is not None else 1
        return loop.size.constant is None or loop.size.constant >= 4 * FEW_UNITS, step, hint(loop.size)

    return max(stage.ranges, key=worth)


def _length(others: Expr) -> Expr:
    """Iterations of the loop that is cut, of which each has ``others`` elements: whole vectors, if there are many."""
    if others.constant is None:
        return smax(1, floordiv(LENGTH, smax(1, others)))
    length = max(1, LENGTH // max(1, others.constant))
    return to_expr(length // 64 * 64 if length > 64 else length)


# -- the nests -------------------------------------------------------------------------------------------------


def _parts(nest: LoopNest, cut: ReductionSplit, buffers: dict[str, Buffer]) -> list[LoopNest]:
    """The chunks, the rest, and what combines them. Their buffers are added to ``buffers``."""
    position = next(k for k, stage in enumerate(nest.stages) if stage.ranges)
    rest = cut.loop.size - cut.chunks * cut.length
    every = replace(cut, chunks=cut.chunks + 1) if rest != 0 else cut
    partial = partial_buffers(nest, position, every, set(buffers), "cpu")
    buffers.update((b.name, b) for b in partial.values())
    parts = [_part(nest, position, cut, partial)]
    if rest != 0:
        parts.append(_part(nest, position, cut, partial, rest))
    return [*parts, combine_partial_results(nest, position, every, partial)]


def _part(
    nest: LoopNest, position: int, cut: ReductionSplit, partial: Mapping[str, Buffer], rest: Expr | None = None
) -> LoopNest:
    """Partial results of each piece, or of the last ``rest`` iterations."""
    stage, types, own = nest.stages[position], value_types(instructions(nest.stages)), sym(cut.symbol)
    if rest is None:
        env, outer = {Symbol(cut.loop.symbol): cut.at(own)}, cut.among(nest.outer, Range(cut.symbol, cut.chunks))
    else:
        env, outer, own = {Symbol(cut.loop.symbol): cut.loop.size - rest + sym(cut.loop.symbol)}, nest.outer, cut.chunks

    def moved(instr: Instr) -> Iterator[Instr]:
        yield substitute(instr, env)
        for i in arg_reduces((instr,)):
            yield Reduce(extreme(i), extreme_kind(i), i.value, types[i.value])

    ranges = tuple(Range(r.symbol, cut.length if rest is None else rest) if r is cut.loop else r for r in stage.ranges)
    place = cut.among([sym(r.symbol) for r in nest.outer], own)
    shares: tuple[Instr, ...] = tuple(Store(buffer.name, place, result) for result, buffer in partial.items())
    stages = (*nest.stages[:position], Stage(ranges, flat_map(stage.body, moved)), Stage((), shares))
    return LoopNest(f"{nest.name}_{'partial' if rest is None else 'rest'}", outer, stages, nest.origin)


def _run(program: Program, ctx: PassContext) -> Program:
    return split_reductions(program, ctx)


def _shares_out(ctx: PassContext) -> bool:
    return ctx.target is not NO_MACHINE and ctx.target.capabilities.arena


PASS = Pass(
    "split-reductions",
    _run,
    why="a long reduction with few results keeps one thread busy, its chunks keep all",
    after=("localize-temporaries",),
    when=_shares_out,
)
