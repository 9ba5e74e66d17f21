"""What a kernel's loads tell the first cache: keep this, or let it go.

Note [What is kept]
    A kernel that goes through rows reads two kinds of memory: what belongs to its rows, and what all rows share (the
    weights of a norm, a bias), which is read again by the next program instance of the same processor. Rows that are
    not held are read once in each loop: all but the last of these want them kept too. So shared memory, and rows that
    another loop reads again, are evicted last, the rest first, so that it does not drive them out. Where there is
    nothing to keep, nothing is said. A hint changes no result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....analysis.reduction_patterns import online_pair, welford_pair
from ....ir import Load, Store
from ....ir.walk import instructions
from ....kernel_ir.nodes import Kernel
from ....kernel_ir.walk import PerfectNest, memories
from ....symbolic import Symbol, SymbolKind
from ..map_loops import is_persistent, is_serial

__all__ = ["evictions"]


def evictions(kernel: Kernel, nests: Sequence[PerfectNest]) -> Mapping[str, str]:
    """The eviction policy of loads, by their results."""
    held = is_persistent(kernel)
    merged = set() if held else _merged(nests)
    looped = [nest for position, nest in enumerate(nests) if nest.loops and position not in merged]
    if not looped or is_serial(kernel):
        return {}
    outside = {param.name for param in memories(kernel)}
    outside -= {i.buffer for i in instructions(kernel.body) if isinstance(i, Store)}
    rows = {Symbol(loop.symbol) for loop in kernel.grid}
    loads = [
        [i for i in nest.body if isinstance(i, Load) and i.buffer in outside and _moves(i, nest)] for nest in looped
    ]
    again = [set[str]() for _ in loads] if held else _read_later(loads)
    kept = {
        i.result
        for later, own in zip(again, loads, strict=True)
        for i in own
        if i.buffer in later or (rows and not i.indices[0].symbols & rows)
    }
    if not kept:
        return {}
    return {i.result: "evict_last" if i.result in kept else "evict_first" for own in loads for i in own}


def _merged(nests: Sequence[PerfectNest]) -> set[int]:
    """Nests that another one's loop computes."""
    pairs = [pair(nests, k) for pair in (online_pair, welford_pair) for k, nest in enumerate(nests) if nest.loops]
    return {pair.position for pair in pairs if pair is not None}


def _moves(load: Load, nest: PerfectNest) -> bool:
    """Whether a load is of another element in each iteration, and of one that is known beforehand."""
    symbols = load.indices[0].symbols
    along = {Symbol(loop.symbol) for loop in nest.loops}
    return bool(symbols & along) and not any(symbol.kind is SymbolKind.VALUE for symbol in symbols)


def _read_later(loads: Sequence[Sequence[Load]]) -> list[set[str]]:
    """For each loop the memory that some loop behind it reads."""
    found: list[set[str]] = []
    later: set[str] = set()
    for own in reversed(loads):
        found.append(set(later))
        later |= {i.buffer for i in own}
    return found[::-1]
