"""How many bytes a tile moves, counted in what memory hands out at once.

Note [Sectors]
    Memory is read and written in sectors of 32 bytes. What a tile takes of an access is runs of neighbours: as long as
    the tile is along the loop that the access moves along by one element. A run that is shorter than a sector, or ends
    in one, still moves all of it: a tile of one column of a matrix of halves moves sixteen times what it needs. Each
    run is asked for on its own besides, which counts as half a sector: runs of 128 bytes are worth having. What does
    not vary along the whole tile is shared, and found in a cache: it does not count.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from math import prod

from ...ir import DType, Instr, Load, Store
from ...ir.walk import instructions, value_types
from ...kernel_ir.bounds import hint
from ...kernel_ir.nodes import Kernel, Loop
from ...kernel_ir.walk import PerfectNest
from ...ops.dtypes import bits
from ...symbolic import Symbol

__all__ = ["WIDEST", "bytes_of", "loads_odd_rows", "moved_bytes", "narrowest", "neighbours_at_once", "row_start"]

SECTOR = 32
WIDEST = 16  # bytes that a thread loads at once
_REQUEST = 0.5  # sectors that asking for a run is worth
_UNKNOWN = 4096  # what an unknown size counts as


def moved_bytes(kernel: Kernel, nests: Sequence[PerfectNest], tile: Mapping[str, int], row: int, whole: bool) -> float:
    """Bytes that the loops of ``nests`` move for each of their iterations, if a program instance computes a tile of
    ``tile`` iterations of these loops of the grid, and ``row`` of a nest's at once. ``whole``: nests that read the same
    share one load."""
    extents = {loop.symbol: max(1, hint(loop.extent, _UNKNOWN)) for loop in kernel.grid}
    grid = {name: min(width, extents[name]) for name, width in tile.items()}
    total, longest, seen = 0.0, 1, set()
    for nest in nests:
        extent = hint(nest.extent, _UNKNOWN)
        length, longest = max(1, min(row, extent)), max(longest, extent)
        for access, size in _counted(kernel, nest, tile):
            key = access.buffer, str(access.indices[0]), isinstance(access, Load)
            if not (whole and key in seen):
                total += extent / length * _of_access(access, grid, nest.loops, length, size)
            seen.add(key)
    return total / (prod(grid.values()) * longest)


def loads_odd_rows(body: Sequence[Instr], loop: Symbol) -> bool:
    """Whether a body loads runs of neighbours along a loop that begin at places that are no multiples of what a thread
    loads at once, see Note [Odd rows] in :mod:`.map_loops`."""
    return any(_start(i, loop) < WIDEST for i in body)


def neighbours_at_once(body: Sequence[Instr], loop: Symbol) -> int:
    """How many neighbours along a loop a thread can load at once, of each memory that is loaded along it."""
    return min((max(1, _start(i, loop) // bytes_of(i)) for i in body if isinstance(i, Load)), default=1)


def _start(instr: Instr, loop: Symbol) -> int:
    """At multiples of how many bytes rows along a loop begin that are loaded, as :func:`row_start`; what is not loaded
    begins where it should."""
    return row_start(instr, loop) if isinstance(instr, Load) else WIDEST


def row_start(access: Load, loop: Symbol, also: Symbol | None = None) -> int:
    """At multiples of how many bytes rows along a loop begin: no more than a thread loads at once, which it is of all
    that does not move along the loop by one element. ``also``: a loop that goes along the rows, too."""
    if access.indices[0].coefficient(loop) != 1:
        return WIDEST
    own, terms = {(loop,), (also,)}, access.indices[0].terms
    return math.gcd(WIDEST, *(factor * bytes_of(access) for monomial, factor in terms if monomial not in own))


def bytes_of(load: Load) -> int:
    """Of an element."""
    return max(8, bits(load.dtype)) // 8


def narrowest(kernel: Kernel, nests: Sequence[PerfectNest], tile: Mapping[str, int]) -> int:
    """Bytes of the smallest elements that count."""
    return min((size for nest in nests for _, size in _counted(kernel, nest, tile)), default=4)


def _counted(kernel: Kernel, nest: PerfectNest, tile: Mapping[str, int]) -> Iterator[tuple[Load | Store, int]]:
    """Accesses that vary along the whole tile, and the bytes of their elements."""
    types = value_types(instructions(kernel.body))
    needed = {Symbol(name) for name in tile}
    for i in nest.body:
        if isinstance(i, Load | Store) and needed <= i.indices[0].symbols:
            dtype = i.dtype if isinstance(i, Load) else types.get(i.value, DType.I64)
            yield i, max(8, bits(dtype)) // 8


def _of_access(access: Load | Store, grid: Mapping[str, int], loops: Sequence[Loop], length: int, size: int) -> float:
    """Bytes that one access of a tile moves."""
    index = access.indices[0]
    widths = dict(grid)
    if any(Symbol(loop.symbol) in index.symbols for loop in loops):
        inner = max(1, min(length, hint(loops[-1].extent, _UNKNOWN)))
        widths[loops[-1].symbol] = inner
        elements = prod(widths.values()) * length / inner
    else:
        elements = float(prod(widths.values()))
    run = 1
    for name, width in widths.items():
        factor = index.coefficient(Symbol(name))
        if factor is not None and factor == 1:
            run = max(run, width)
    return elements / run * SECTOR * (-(-run * size // SECTOR) + _REQUEST)
