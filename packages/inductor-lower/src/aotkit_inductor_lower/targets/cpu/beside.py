"""Iterations of one loop beside each other, for what neighbours read in common.

Note [Iterations beside each other]
    With channels in the lanes, the nine places that a window of 3 by 3 reads for one pixel are, but for three, those
    that it reads for the pixel before. Where a kernel is of that kind, some iterations of one loop of its grid are
    written out one after the other, and whatever reads the same place reads it once: 27 places and 9 weights for seven
    pixels, in the place of 63 and 63. Within a block most conditions are known to hold: only its first pixel may have
    the image's edge on its left, only the last one on its right. Conditions of rows are computed once for a row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from ...ir import CheckedIndex, Load, Reduce
from ...ir.walk import contains
from ...kernel_ir.nodes import Kernel, Loop, LoopMap
from ...kernel_ir.walk import PerfectNest, perfect_nests, with_nests
from ...symbolic import Symbol, SymbolKind, to_expr

__all__ = ["blocks_of", "loop_beside", "with_sums_beside"]

WIDTHS = (8, 7, 6, 5, 4)  # iterations beside each other
LONGEST = 128  # sums of more iterations are added up in two levels
FEWEST_LOADS = 4
MOST_LOADS = 40  # of a body: what is read once waits in registers
SAVED = 0.75  # of loads are left at most


def loop_beside(kernel: Kernel, nests: Sequence[PerfectNest], lanes: Loop) -> tuple[Loop, int] | None:
    """The loop of the grid whose iterations have most to read in common, and how many of them go beside each other;
    see Note [Iterations beside each other]. ``lanes``: the loop that is in the lanes."""
    if len(nests) != 1 or nests[0].loops or kernel.ordered or kernel.scratch:
        return None
    return _best((loop for loop in kernel.grid if loop is not lanes), nests[0])


def with_sums_beside(kernel: Kernel) -> Kernel:
    """A kernel with a loop of the grid in the lanes, and the same of the innermost loops of its sums."""
    nests: list[PerfectNest] = []
    for nest in perfect_nests(kernel):
        found = _best(nest.loops[-1:], nest) if not nest.scans and contains(nest.body, Reduce) else None
        if found is not None and (found[0].extent.constant or 0) <= LONGEST:
            inner = replace(found[0], map=LoopMap("unroll", found[1]))
            nest = PerfectNest((*nest.loops[:-1], inner), nest.body)
        nests.append(nest)
    return with_nests(kernel, nests)


def _best(loops: Iterable[Loop], nest: PerfectNest) -> tuple[Loop, int] | None:
    """The loop with most to gain, of equals the innermost, and how many of its iterations go beside each other."""
    loads = [i for i in nest.body if isinstance(i, Load)]
    if not FEWEST_LOADS <= len(loads) <= MOST_LOADS or contains(nest.body, CheckedIndex):
        return None
    best: tuple[float, Loop, int] | None = None
    for loop in loops:
        size = loop.extent.constant
        if size is None or size < min(WIDTHS):
            continue
        count = min(WIDTHS, key=lambda width: size % width)
        left = _left(loads, Symbol(loop.symbol), count)
        if left <= SAVED and (best is None or left <= best[0]):
            best = left, loop, count
    return None if best is None else best[1:]


def _left(loads: Sequence[Load], symbol: Symbol, count: int) -> float:
    """The share of loads that is left if iterations of a loop read common places once, of the loads that move with
    it."""
    moving = [load for load in loads if symbol in load.indices[0].symbols]
    if any(s.kind is SymbolKind.VALUE for load in moving for s in load.indices[0].symbols):
        return 1.0
    places = {
        (load.buffer, load.indices[0].substitute({symbol: to_expr(symbol) + k}))
        for load in moving
        for k in range(count)
    }
    return len(places) / (len(moving) * count) if moving else 1.0


def blocks_of(size: int, width: int) -> Iterator[tuple[int, int, int]]:
    """``size`` iterations in blocks: where a loop over blocks begins and ends, and how wide its blocks are. The last
    block takes what is left."""
    whole = size // width * width
    yield 0, whole, width
    if whole < size:
        yield whole, size, size - whole
