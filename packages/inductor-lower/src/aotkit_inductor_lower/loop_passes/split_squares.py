"""Squared distances from a mean, in two kernels; see Note [Chunks of a reduction]."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from ..analysis.reduction_patterns import WelfordPair
from ..ir import Buffer, Compute, Const, DType, Index, Instr, Load, LoopNest, Range, Stage, Store
from ..ir.walk import instructions, value_types
from ..symbolic import Expr, sym, to_expr
from .rfactor import CHUNK, ReductionSplit, arg_reduces

__all__ = ["means_of_chunk", "stands_alone", "uneven", "with_common_squares"]


def uneven(cut: ReductionSplit) -> bool:
    """Whether the last chunk is shorter; those after it are empty."""
    return cut.length * cut.chunks != cut.loop.size


def stands_alone(nest: LoopNest, position: int, squares: WelfordPair) -> bool:
    """Whether the squares need nothing that is made between them and the sums but the means, and no places are asked
    for."""
    stages = nest.stages[position + 1 : squares.position]
    between = {i.result for s in stages for i in s.body if not isinstance(i, Store)}
    later = nest.stages[squares.position].body
    used = {a for i in later if isinstance(i, Compute) for a in i.args}
    used |= {i.mask for i in later if isinstance(i, Load) and i.mask}
    used |= {s.name for i in later if isinstance(i, Load) for index in i.indices for s in index.symbols}
    return used & between <= set(squares.means.values()) and not arg_reduces(nest.stages[position].body)


def means_of_chunk(
    nest: LoopNest, position: int, cut: ReductionSplit, squares: WelfordPair
) -> tuple[dict[str, str], Stage]:
    """What each mean is called in a chunk, and the stage that makes those."""
    types, old = value_types(instructions(nest.stages)), nest.stages[position]
    body: list[Instr] = []
    for sum_ in squares.squares:
        body += _mean(sum_, f"{sum_}_mean", types[sum_], cut, old)
    return {mean: f"{sum_}_mean" for sum_, mean in squares.means.items()}, Stage((), tuple(body))


def with_common_squares(
    second: LoopNest,
    nest: LoopNest,
    position: int,
    cut: ReductionSplit,
    squares: WelfordPair,
    partial: Mapping[str, Buffer],
) -> LoopNest:
    """The second kernel with squares from the partial ones, which do not read what is reduced again."""
    index = cut.among([sym(r.symbol) for r in nest.outer], sym(CHUNK))
    old, stages = nest.stages[position], list(second.stages)
    parts = [i for sum_ in squares.squares for i in _common_squares(sum_, old, cut, squares, partial, index)]
    stages[squares.position] = Stage((Range(CHUNK, cut.chunks),), tuple(parts))
    return replace(second, stages=tuple(stages))


def _mean(sum_: str, mean: str, dtype: DType, cut: ReductionSplit, stage: Stage) -> Iterator[Instr]:
    """A chunk's mean and, as ``<mean>_count``, its number of elements; 0 and 0 for an empty one."""
    inner = to_expr(1)
    for r in stage.ranges:
        inner = inner * (to_expr(1) if r is cut.loop else r.size)
    yield Index(f"{mean}_whole", cut.length * inner, DType.I64)
    yield Index(f"{mean}_rest", (cut.loop.size - sym(CHUNK) * cut.length) * inner, DType.I64)
    yield Const(f"{mean}_none", 0, DType.I64)
    yield Compute(f"{mean}_left", "maximum", (f"{mean}_rest", f"{mean}_none"), DType.I64)
    whole = f"{mean}_whole"
    if uneven(cut):
        whole = f"{mean}_number"
        yield Compute(whole, "minimum", (f"{mean}_left", f"{mean}_whole"), DType.I64)
    yield Compute(f"{mean}_count", "cast", (whole,), dtype)
    divisor = f"{mean}_count"
    if uneven(cut):
        divisor = f"{mean}_divisor"
        yield Const(f"{mean}_one", 1.0, dtype)
        yield Compute(divisor, "maximum", (f"{mean}_count", f"{mean}_one"), dtype)
    yield Compute(mean, "div", (sum_, divisor), dtype)


def _common_squares(
    sum_: str,
    old: Stage,
    cut: ReductionSplit,
    squares: WelfordPair,
    partial: Mapping[str, Buffer],
    index: tuple[Expr, ...],
) -> Iterator[Instr]:
    """Squared distances from the mean of all: those from the chunks' means, and of the chunks' means."""
    total, mean, own = squares.squares[sum_], squares.means[sum_], f"{sum_}_own"
    name, dtype = f"{total.result}_chunk", total.dtype
    yield Load(f"{own}_sum", partial[sum_].name, index, dtype)
    yield from _mean(f"{own}_sum", own, dtype, cut, old)
    yield Load(f"{name}_within", partial[total.result].name, index, dtype)
    yield Compute(f"{name}_distance", "sub", (own, mean), dtype)
    yield Compute(f"{name}_square", "mul", (f"{name}_distance", f"{name}_distance"), dtype)
    yield Compute(f"{name}_between", "mul", (f"{name}_square", f"{own}_count"), dtype)
    yield Compute(f"{name}_sum", "add", (f"{name}_within", f"{name}_between"), dtype)
    chosen = f"{name}_sum"
    if uneven(cut):  # the distance of an empty chunk means nothing
        chosen = f"{name}_chosen"
        yield Const(f"{name}_nothing", 0.0, dtype)
        yield Compute(f"{name}_any", "ne", (f"{own}_count", f"{name}_nothing"), DType.BOOL)
        yield Compute(chosen, "where", (f"{name}_any", f"{name}_sum", f"{name}_nothing"), dtype)
    yield replace(total, value=chosen)
