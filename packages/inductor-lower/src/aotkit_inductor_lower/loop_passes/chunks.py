"""How a long reduction of few results is cut, as a :class:`~.target.SplitPolicy` says."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ..analysis.nests import hint, iteration_count
from ..ir import Buffer, LoopNest, Range, Stage
from ..ir.walk import loads
from ..symbolic import Expr, Symbol, estimate, floordiv, product, smax, to_expr
from ..target import SplitPolicy
from .product_chunks import is_product, product_chunks
from .rfactor import ReductionSplit, arg_reduces

__all__ = ["choose_chunks", "goes_along", "result_count", "size_or", "unit_count"]

UNKNOWN_LENGTH = 1 << 14  # elements that a loop of unknown length counts as where a target assumes sizes


def choose_chunks(
    nest: LoopNest, stage: Stage, buffers: Mapping[str, Buffer], policy: SplitPolicy
) -> ReductionSplit | None:
    """How ``stage`` is cut, if that pays."""
    if policy.product is not None and is_product(nest, stage):
        return product_chunks(nest, stage, policy.product)
    if policy.chunk is None:
        return _as_many_as_units(nest, stage, buffers, policy)
    return _of_fixed_length(nest, stage, buffers, policy, policy.chunk)


def result_count(nest: LoopNest, policy: SplitPolicy) -> int | None:
    """How many results a nest has; ``None`` if that is not known and nothing is assumed."""
    results = 1
    for r in nest.outer:
        if r.size.constant is None and policy.assume is None:
            return None
        results *= size_or(r.size, policy.assume)
    return results


def size_or(size: Expr, assume: int | None) -> int:
    """A size as a number, where unknown ones count as ``assume``."""
    return size.constant if size.constant is not None else estimate(size, assume or 0)


def unit_count(results: int, stage: Stage, buffers: Mapping[str, Buffer], policy: SplitPolicy) -> int:
    """In how many units of work so many results are computed: one each where the reduced elements lie side by side."""
    return results if goes_along(stage, buffers, policy) else -(-results // policy.columns)


def goes_along(stage: Stage, buffers: Mapping[str, Buffer], policy: SplitPolicy) -> bool:
    """Whether a unit of work reduces elements side by side in memory, not several columns. Where some memory lies
    along the reduced loops and other across, as images of two layouts do, many units go down several columns."""
    found = set(_runs(stage, buffers, policy))
    return True in found and (len(found) == 1 or policy.chunk is not None)


def _runs(stage: Stage, buffers: Mapping[str, Buffer], policy: SplitPolicy) -> Iterator[bool]:
    """For each load that counts and has neighbours in memory: whether those are reduced. Where there must be many
    units, only what is large counts: a column of a norm's rows is multiplied by one number of each row, and those lie
    side by side."""
    inner = {Symbol(r.symbol) for r in stage.ranges}
    found = [(load, frozenset[Symbol]().union(*(i.symbols for i in load.indices))) for load in loads(stage.body)]
    most = max((len(symbols) for _, symbols in found), default=0)
    for load, symbols in found:
        if len(symbols) < most and policy.chunk is None:
            continue
        for index, stride in zip(load.indices, buffers[load.buffer].strides, strict=True):
            if stride == 1 and index.symbols:
                yield not inner.isdisjoint(index.symbols)


# -- so many chunks as keep all units busy ---------------------------------------------------------------------


def _as_many_as_units(
    nest: LoopNest, stage: Stage, buffers: Mapping[str, Buffer], policy: SplitPolicy
) -> ReductionSplit | None:
    """The longest loop is cut; for places in it the outermost, whose chunks are in the order of places."""
    results, reduced = result_count(nest, policy), 1
    for r in stage.ranges:
        reduced *= _length(r)
    if reduced < policy.least or not results:
        return None
    along = goes_along(stage, buffers, policy)
    units = policy.units if along else policy.column_units or policy.units
    share = units // unit_count(results, stage, buffers, policy)
    wanted = min(1 << max(0, share - 1).bit_length(), reduced // policy.shortest)
    loop, most = _most_chunks(stage, buffers, policy, wanted)
    wanted = min(wanted, most)
    if wanted <= 1:
        return None
    length = floordiv(loop.size + (wanted - 1), wanted)
    # Results that lie side by side are written side by side, too.
    return ReductionSplit(loop, to_expr(wanted), length, place=None if along else 0)


def _most_chunks(stage: Stage, buffers: Mapping[str, Buffer], policy: SplitPolicy, wanted: int) -> tuple[Range, int]:
    """The loop that is cut, and in how many chunks at most."""
    if arg_reduces(stage.body):
        return stage.ranges[0], _length(stage.ranges[0])
    if len(set(_runs(stage, buffers, policy))) < 2:
        loop = max(stage.ranges, key=_length)
        return loop, _length(loop)
    # Two layouts: a unit takes several results side by side, and of the other memory as many elements side by side.
    contiguous = _contiguous(stage, buffers)
    chunks = {r: _length(r) // (policy.columns if r.symbol in contiguous else 1) for r in stage.ranges}
    loop = max(stage.ranges, key=lambda r: min(wanted, chunks[r]))
    return loop, chunks[loop]


def _contiguous(stage: Stage, buffers: Mapping[str, Buffer]) -> set[str]:
    """Loops of the stage along which some load moves by one element."""
    found = set()
    for load in loads(stage.body):
        for index, stride in zip(load.indices, buffers[load.buffer].strides, strict=True):
            if stride == 1:
                factors = {r.symbol: index.coefficient(Symbol(r.symbol)) for r in stage.ranges}
                found |= {symbol for symbol, factor in factors.items() if factor is not None and factor == 1}
    return found


def _length(loop: Range) -> int:
    """How long a reduced loop is, or is taken to be."""
    return loop.size.constant if loop.size.constant is not None else UNKNOWN_LENGTH


# -- chunks of fixed length ------------------------------------------------------------------------------------


def _of_fixed_length(
    nest: LoopNest, stage: Stage, buffers: Mapping[str, Buffer], policy: SplitPolicy, elements: int
) -> ReductionSplit | None:
    """Chunks that depend on the nest alone: so results do not depend on the number of threads."""
    results = result_count(nest, policy)
    if not results:
        return None
    units = unit_count(results, stage, buffers, policy)
    known = all(r.size.constant is not None for r in stage.ranges)
    if units >= policy.units or (known and results * iteration_count(stage.ranges) < policy.least):
        return None
    loop = _outermost(stage, buffers, 4 * policy.units)
    others = product(r.size for r in stage.ranges if r is not loop) * max(1, min(results // units, policy.columns))
    length = _chunk_length(others, elements)
    if known and length.constant is not None and hint(loop.size) < 2 * length.constant:
        return None
    return ReductionSplit(loop, floordiv(loop.size, length), length, place=0)


def _outermost(stage: Stage, buffers: Mapping[str, Buffer], least: int) -> Range:
    """The loop with the widest steps in memory that has ``least`` iterations; for places in it the first, whose chunks
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
        return loop.size.constant is None or loop.size.constant >= least, step, hint(loop.size)

    return max(stage.ranges, key=worth)


def _chunk_length(others: Expr, elements: int) -> Expr:
    """Iterations of the loop that is cut, of which each has ``others`` elements: whole vectors, if there are many."""
    if others.constant is None:
        return smax(1, floordiv(elements, smax(1, others)))
    length = max(1, elements // max(1, others.constant))
    return to_expr(length // 64 * 64 if length > 64 else length)
