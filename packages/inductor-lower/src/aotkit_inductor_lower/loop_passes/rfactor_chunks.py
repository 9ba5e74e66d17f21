"""The first half of a reduction in parts: the kernels that reduce the chunks, see Note [Chunks of a reduction]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..analysis.reduction_patterns import WelfordPair
from ..ir import Buffer, CheckedIndex, Compute, Const, DType, Index, Instr, Load, LoopNest, Range, Reduce, Stage, Store
from ..ir.walk import flat_map, instructions, substitute, value_types
from ..ops.reductions import identity
from ..symbolic import Expr, Symbol, sym
from .rfactor import ReductionSplit, arg_reduces, extreme, extreme_kind
from .split_squares import means_of_chunk, uneven

__all__ = ["chunk_nest", "rest_nest"]


def chunk_nest(
    nest: LoopNest,
    position: int,
    cut: ReductionSplit,
    partial: Mapping[str, Buffer],
    squares: WelfordPair | None = None,
    *,
    masked: bool = False,
) -> LoopNest:
    """Partial results of each piece. ``masked``: the last one may go beyond the end."""
    outer, old = cut.among(nest.outer, Range(cut.symbol, cut.chunks)), nest.stages[position]
    stages = [*nest.stages[:position], _piece(nest, old, cut, masked, {})]
    if squares is not None:
        later = nest.stages[squares.position]
        renamed, means = means_of_chunk(nest, position, cut, squares)
        own = replace(cut, loop=later.ranges[old.ranges.index(cut.loop)])
        stages += [means, _piece(nest, later, own, masked, renamed)]
    stages.append(_stores(nest, cut, sym(cut.symbol), partial))
    return LoopNest(f"{nest.name}_partial", outer, tuple(stages), nest.origin)


def rest_nest(
    nest: LoopNest, position: int, cut: ReductionSplit, partial: Mapping[str, Buffer], rest: Expr
) -> LoopNest:
    """Partial results of the last ``rest`` iterations."""
    stage, symbol = nest.stages[position], cut.loop.symbol
    env = {Symbol(symbol): cut.loop.size - rest + sym(symbol)}
    body = flat_map(stage.body, lambda i: _with_extreme(substitute(i, env), nest))
    stages = (*nest.stages[:position], _cut_stage(stage, cut.loop, rest, body), _stores(nest, cut, cut.chunks, partial))
    return LoopNest(f"{nest.name}_rest", nest.outer, stages, nest.origin)


def _stores(nest: LoopNest, cut: ReductionSplit, piece: Expr, partial: Mapping[str, Buffer]) -> Stage:
    place = cut.among([sym(r.symbol) for r in nest.outer], piece)
    return Stage((), tuple(Store(buffer.name, place, result) for result, buffer in partial.items()))


def _cut_stage(stage: Stage, loop: Range, length: Expr, body: Sequence[Instr]) -> Stage:
    return Stage(tuple(Range(r.symbol, length) if r is loop else r for r in stage.ranges), tuple(body))


def _piece(nest: LoopNest, stage: Stage, cut: ReductionSplit, masked: bool, renamed: Mapping[str, str]) -> Stage:
    """A stage with a piece of the loop instead of the whole, and some values called otherwise."""
    at = cut.at(sym(cut.symbol))
    env = {Symbol(cut.loop.symbol): at}
    mask, body = None, list[Instr]()
    if masked and uneven(cut):
        mask = f"in_chunk_{cut.loop.symbol}"
        body += [
            Index(f"{mask}_at", at, DType.I64),
            Index(f"{mask}_end", cut.loop.size, DType.I64),
            Compute(mask, "lt", (f"{mask}_at", f"{mask}_end"), DType.BOOL),
        ]
    for instr in stage.body:
        if isinstance(instr, Compute) and renamed:
            instr = replace(instr, args=tuple(renamed.get(a, a) for a in instr.args))
        instr = substitute(instr, env)
        body += _with_extreme(instr, nest) if mask is None else _masked(instr, mask, nest)
    return _cut_stage(stage, cut.loop, cut.length, body)


def _with_extreme(instr: Instr, nest: LoopNest) -> Iterator[Instr]:
    """The instruction, and behind one that gives a place the reduction that gives the value there."""
    yield instr
    for i in arg_reduces((instr,)):
        dtype = value_types(instructions(nest.stages))[i.value]
        yield Reduce(extreme(i), extreme_kind(i), i.value, dtype)


def _masked(instr: Instr, mask: str, nest: LoopNest) -> Iterator[Instr]:
    """An instruction for a place that may lie past the end."""
    if isinstance(instr, Load | Store):
        own = instr.mask
        if own is not None:
            own = f"{instr.mask}_{instr.result if isinstance(instr, Load) else instr.buffer}_in_chunk"
            yield Compute(own, "logical_and", (mask, instr.mask or mask), DType.BOOL)
        yield replace(instr, mask=own or mask)
    elif isinstance(instr, Reduce):
        dtype = value_types(instructions(nest.stages))[instr.value]
        chosen = f"{instr.result}_chosen"
        yield Const(f"{instr.result}_nothing", identity(instr.kind, dtype), dtype)
        yield Compute(chosen, "where", (mask, instr.value, f"{instr.result}_nothing"), dtype)
        yield replace(instr, value=chosen)
        for i in arg_reduces((instr,)):
            yield Reduce(extreme(i), extreme_kind(i), chosen, dtype)
    elif isinstance(instr, CheckedIndex):
        # What a place past the end would read is no error: it has the first element, which every place that is there
        # may read.
        inside = f"{instr.result}_in_chunk"
        yield Const(f"{instr.result}_first", 0, DType.I64)
        yield Compute(inside, "where", (mask, instr.value, f"{instr.result}_first"), DType.I64)
        yield replace(instr, value=inside)
    else:
        yield instr
