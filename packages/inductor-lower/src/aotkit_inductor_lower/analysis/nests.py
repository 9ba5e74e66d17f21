"""Small facts about nests that several passes ask for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

from ..ir import Buffer, CheckedIndex, Instr, LoopNest, Range, Reduce, Store
from ..ir.walk import computes, contains, index_exprs, instructions, operands, stores
from ..ops.dtypes import item_bytes
from ..ops.scalar import DEAR, TRAPPING
from ..symbolic import Expr, Ranges, Symbol, SymbolKind, estimate, product

__all__ = [
    "body_size",
    "buffer_bytes",
    "full_instructions",
    "has_division",
    "heavy_count",
    "hint",
    "identity_store",
    "is_heavy",
    "iteration_count",
    "numel",
    "ranges_of",
    "traps",
]

SIZE_HINT = 64


def hint(size: Expr) -> int:
    """A size as a number; unknown sizes count as 64."""
    if size.constant is not None:
        return size.constant
    return max(estimate(size, SIZE_HINT), 1)


def buffer_bytes(buffer: Buffer) -> int:
    """Of all elements of a buffer; unknown sizes count as 64."""
    count = item_bytes(buffer.dtype)
    for size in buffer.sizes:
        count *= hint(size) if size.constant != 0 else 0
    return count


def iteration_count(ranges: Iterable[Range]) -> int:
    """How many iterations loops make together."""
    total = 1
    for loop in ranges:
        total *= hint(loop.size)
    return total


def body_size(nest: LoopNest) -> int:
    """The number of instructions."""
    return sum(len(stage.body) for stage in nest.stages)


def heavy_count(nest: LoopNest) -> int:
    """How many instructions are dear (transcendental, roots, remainders)."""
    return sum(i.op in DEAR for i in computes(instructions(nest.stages)))


def is_heavy(body: Iterable[Instr]) -> bool:
    """Whether a body computes something dear."""
    return any(i.op in DEAR for i in computes(body))


def has_division(nest: LoopNest) -> bool:
    """Whether an instruction may report an error: integer division, a checked index."""
    return contains(instructions(nest.stages), CheckedIndex) or traps(nest)


def traps(nest: LoopNest) -> bool:
    """Whether an operation may report an error, as integer division does."""
    return any(i.op in TRAPPING for i in computes(instructions(nest.stages)))


def full_instructions(nest: LoopNest) -> list[Instr]:
    """Instructions of about as many different values as the nest has iterations: not those that are computed once for
    a row or a column."""
    sizes = {loop.symbol: hint(loop.size) for loop in (*nest.outer, *(r for s in nest.stages for r in s.ranges))}
    elements = iteration_count(nest.outer)
    varies: dict[str, frozenset[str]] = {}
    found = []
    for instr in instructions(nest.stages):
        places = {symbol.name for expr in index_exprs(instr) for symbol in expr.symbols}
        loops = frozenset(places & sizes.keys()).union(*(varies.get(name, ()) for name in {*operands(instr), *places}))
        if not isinstance(instr, Store):
            varies[instr.result] = loops
        if prod(sizes[name] for name in loops) * 4 > elements:
            found.append(instr)
    return found


def ranges_of(nest: LoopNest) -> Ranges:
    """The loops of a nest as assumptions for simplification."""
    sizes = {Symbol(r.symbol): r.size for r in nest.outer}
    for stage in nest.stages:
        for r in stage.ranges:
            sizes[Symbol(r.symbol)] = r.size
    return Ranges(sizes)


def identity_store(nest: LoopNest, buffers: Mapping[str, Buffer]) -> tuple[Symbol | None, ...] | None:
    """For a nest of one stage without ranges and one plain store that covers its buffer: the loop symbol of each
    dimension of the buffer (``None`` for dimensions of size 1). ``None`` for every other nest."""
    if len(nest.stages) != 1 or nest.stages[0].ranges:
        return None
    stored = stores(nest.stages[0].body)
    if len(stored) != 1 or not stored[0].plain or contains(nest.stages[0].body, Reduce):
        return None
    sizes = {loop.symbol: loop.size for loop in nest.outer}
    symbols: list[Symbol | None] = []
    for index, size in zip(stored[0].indices, buffers[stored[0].buffer].sizes, strict=True):
        symbol = index.symbol
        if symbol is not None and symbol.kind is SymbolKind.INDEX and sizes.pop(symbol.name, None) == size:
            symbols.append(symbol)
        elif index.constant == 0 and size == 1:
            symbols.append(None)
        else:
            return None
    return None if sizes else tuple(symbols)


def numel(buffer: Buffer) -> Expr:
    """The number of elements of a buffer."""
    return product(buffer.sizes)
