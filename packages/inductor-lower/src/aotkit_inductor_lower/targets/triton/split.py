"""Long reductions with few results become two kernels, as loop IR: the interpreter checks it like any other pass.

Note [Split reductions]
    A sum over a million elements, or the gradient of a norm's weight (a sum over all rows, per column), has too few
    results to keep a device busy. The reduced loop ``r < n`` becomes ``k * c + r`` with ``k`` an outer loop: a first
    kernel writes partial results ``[.., k]``, a second reduces them and goes on. The order of additions is fixed, so
    results repeat; nothing is added atomically. Where ``c`` does not divide ``n``, the last chunk is masked.

    A length that is known at run time only is taken for a long one: its number of chunks is fixed, and ``c`` is that
    part of it, rounded up. An argmax keeps the extreme and its place in the chunk; the second kernel picks the first
    chunk that holds the extreme, and reads the place there.

    Squared distances from a mean (see Note [Welford]) are taken in each chunk from the chunk's own mean. The second
    kernel adds, per chunk, the squared distance of its mean from the common one times its length: one reading of
    memory, and no large numbers subtracted.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ...ir import (
    Buffer,
    BufferKind,
    CheckedIndex,
    Compute,
    Const,
    DType,
    Index,
    Instr,
    Load,
    LoopNest,
    Program,
    Range,
    Reduce,
    Stage,
    Step,
    Store,
)
from ...ir.walk import instructions, value_types
from ...loop_passes.rfactor import (
    CHUNK,
    ReductionSplit,
    arg_reduces,
    combine_partial_results,
    extreme,
    extreme_kind,
    partial_buffers,
)
from ...ops.reductions import identity, is_positional
from ...passes import Pass, PassContext
from ...symbolic import Expr, Symbol, floordiv, sym, to_expr
from .cut import fission
from .map_loops import next_power_of_two, size_hint
from .render.welford import WelfordPair, welford_pair
from .split_squares import means_of_chunk, stands_alone, uneven, with_common_squares

__all__ = ["PASS", "SplitLimits", "split_reductions"]

_UNKNOWN_LENGTH = 1 << 14  # what a length that is not known counts as


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """``programs``: so many instances keep a device busy. ``length``: shorter reductions stay whole. ``shortest``: the
    least a first kernel's instance reduces. ``columns``: results that one instance of an unsplit kernel computes where
    they lie side by side."""

    programs: int = 256
    length: int = 1024
    shortest: int = 128
    columns: int = 64


_LIMITS = SplitLimits()


def split_reductions(program: Program, ctx: PassContext, limits: SplitLimits = _LIMITS) -> Program:
    """The program with long reductions of few results in two steps each."""
    buffers = list(program.buffers)
    names = {b.name for b in buffers}
    declared = {b.name: b for b in buffers}
    steps: list[Step] = []
    whole: list[Step] = []
    for step in program.steps:
        cut = fission(step, declared, names, limits.programs // 4) if isinstance(step, LoopNest) else None
        cut = cut if cut is not None and ctx.fuel.take() else None
        whole += cut[0] if cut is not None else [step]
        buffers += cut[1] if cut is not None else []
    declared |= {b.name: b for b in buffers}
    for step in whole:
        parts = _split(step, declared, names, limits) if isinstance(step, LoopNest) else None
        if parts is None or not ctx.fuel.take():
            steps.append(step)
            continue
        steps += parts[0]
        buffers += parts[1]
    return replace(program, steps=tuple(steps), buffers=tuple(buffers))


def _split(
    nest: LoopNest, declared: Mapping[str, Buffer], names: set[str], limits: SplitLimits
) -> tuple[list[Step], list[Buffer]] | None:
    found = _candidate(nest, declared)
    if found is None:
        return None
    position, loop, squares = found
    chunks = _chunks(nest, declared, position, loop, limits)
    if chunks is None:
        return None
    cut = ReductionSplit(loop, to_expr(chunks), floordiv(loop.size + (chunks - 1), chunks))
    device = next(declared[name].device for name in nest.reads)
    partial = partial_buffers(nest, position, cut, names, device)
    if squares is not None:
        partial |= partial_buffers(nest, squares.position, cut, names, device)
    second = combine_partial_results(nest, position, cut, partial)
    if squares is not None:
        second = with_common_squares(second, nest, position, cut, squares, partial)
    return [_first(nest, position, cut, squares, partial), second], list(partial.values())


def _candidate(nest: LoopNest, declared: Mapping[str, Buffer]) -> tuple[int, Range, WelfordPair | None] | None:
    """The only stage with loops (with that of its squares), and the loop to cut: the longest; for places in it the
    outermost, whose chunks are in the order of places."""
    ranged = [k for k, stage in enumerate(nest.stages) if stage.ranges]
    squares = welford_pair(nest.stages, ranged[0]) if len(ranged) == 2 else None
    if len(ranged) != (2 if squares else 1) or not nest.reads:
        return None
    if squares is not None and not stands_alone(nest, ranged[0], squares):
        return None
    stage = nest.stages[ranged[0]]
    reduces = [i for i in stage.body if isinstance(i, Reduce)]
    if not reduces or any(i.running for i in reduces):
        return None
    before = [i for s in nest.stages[: ranged[0]] for i in s.body]
    stores = [i for s in nest.stages for i in s.body if isinstance(i, Store)]
    if any(isinstance(i, Store) for i in before) or any(i.accumulates for i in stores):
        return None
    if any(isinstance(i, CheckedIndex) for i in (*before, *stage.body)):
        return None
    if any(declared[name].kind is BufferKind.SCRATCH for name in (*nest.reads, *nest.writes)):
        return None
    if set(nest.reads) & set(nest.writes):
        return None
    return ranged[0], stage.ranges[0] if arg_reduces(stage.body) else max(stage.ranges, key=_length), squares


def _length(loop: Range) -> int:
    """How long a reduced loop is, or is taken to be."""
    return loop.size.constant if loop.size.constant is not None else _UNKNOWN_LENGTH


def _chunks(
    nest: LoopNest, declared: Mapping[str, Buffer], position: int, loop: Range, limits: SplitLimits
) -> int | None:
    results = reduced = 1
    for r in nest.outer:
        results *= size_hint(r.size)
    for r in nest.stages[position].ranges:
        reduced *= _length(r)
    if reduced < limits.length or not results:
        return None
    programs = results if _moves_along(nest, declared, position) else -(-results // limits.columns)
    wanted = min(next_power_of_two(limits.programs // programs), _length(loop), reduced // limits.shortest)
    return wanted if wanted > 1 else None


def _moves_along(nest: LoopNest, declared: Mapping[str, Buffer], position: int) -> bool:
    """Whether the reduced elements lie side by side in what is read."""
    inner = {Symbol(r.symbol) for r in nest.stages[position].ranges}
    for instr in nest.stages[position].body:
        if isinstance(instr, Load):
            for index, stride in zip(instr.indices, declared[instr.buffer].strides, strict=True):
                if stride == 1 and not inner.isdisjoint(index.symbols):
                    return True
    return False


# -- the two nests ---------------------------------------------------------------------------------------------


def _first(
    nest: LoopNest, position: int, cut: ReductionSplit, squares: WelfordPair | None, partial: Mapping[str, Buffer]
) -> LoopNest:
    """Partial results of each chunk."""
    outer, old = (*nest.outer, Range(CHUNK, cut.chunks)), nest.stages[position]
    stages = [*nest.stages[:position], _piece(nest, old, cut.loop, cut, {})]
    if squares is not None:
        later = nest.stages[squares.position]
        renamed, means = means_of_chunk(nest, position, cut, squares)
        stages += [means, _piece(nest, later, later.ranges[old.ranges.index(cut.loop)], cut, renamed)]
    index = tuple(sym(r.symbol) for r in outer)
    stores: tuple[Instr, ...] = tuple(Store(buffer.name, index, result) for result, buffer in partial.items())
    return LoopNest(f"{nest.name}_partial", outer, (*stages, Stage((), stores)), nest.origin)


def _piece(nest: LoopNest, stage: Stage, loop: Range, cut: ReductionSplit, renamed: Mapping[str, str]) -> Stage:
    """A stage with the chunk of ``loop`` instead of the whole, and some values called otherwise."""
    at = sym(CHUNK) * cut.length + sym(loop.symbol)
    body: list[Instr] = []
    mask = None
    if uneven(cut):
        mask = f"in_chunk_{loop.symbol}"
        body += [
            Index(f"{mask}_at", at, DType.I64),
            Index(f"{mask}_end", loop.size, DType.I64),
            Compute(mask, "lt", (f"{mask}_at", f"{mask}_end"), DType.BOOL),
        ]
    types = value_types(instructions(nest.stages))
    for instr in stage.body:
        if isinstance(instr, Compute):
            instr = replace(instr, args=tuple(renamed.get(a, a) for a in instr.args))
        body += _in_chunk(instr, {Symbol(loop.symbol): at}, mask, types)
    return Stage(tuple(Range(r.symbol, cut.length) if r is loop else r for r in stage.ranges), tuple(body))


def _in_chunk(
    instr: Instr, env: Mapping[Symbol, Expr], mask: str | None, types: Mapping[str, DType]
) -> Iterator[Instr]:
    """An instruction of the cut stage, for a place that may lie past the end."""
    if isinstance(instr, Index):
        yield replace(instr, expr=instr.expr.substitute(env))
    elif isinstance(instr, Load | Store):
        indices = tuple(i.substitute(env) for i in instr.indices)
        own = instr.mask
        if mask is not None and own is not None:
            own = f"{instr.mask}_{instr.result if isinstance(instr, Load) else instr.buffer}_in_chunk"
            yield Compute(own, "logical_and", (mask, instr.mask or mask), DType.BOOL)
        yield replace(instr, indices=indices, mask=own or mask)
    elif isinstance(instr, Reduce):
        dtype, chosen = types[instr.value], instr.value
        if mask is not None:
            yield Const(f"{instr.result}_nothing", identity(instr.kind, dtype), dtype)
            chosen = f"{instr.result}_chosen"
            yield Compute(chosen, "where", (mask, instr.value, f"{instr.result}_nothing"), dtype)
        yield replace(instr, value=chosen)
        if is_positional(instr.kind):
            yield Reduce(extreme(instr), extreme_kind(instr), chosen, dtype)
    else:
        yield instr


PASS = Pass(
    "split-reductions",
    split_reductions,
    why="a long reduction with few results leaves a device idle, its chunks do not",
)
