"""Products of few rows: which kernels are such, and the tile of one program instance.

Note [Products of few rows]
    What a language model computes token by token is products of one row, or a few, with large matrices: each number of
    the matrix is used once per row, so the time is that of reading it, and of starting a kernel. Multiplying in tiles
    (``tl.dot``) would fill 16 rows. So such a product is a sum along rows of the matrix, or down its columns, like any
    other sum: with what comes before and after it in the same kernel.

    Where the matrix lies along the sum (the weight of a linear layer), a program instance has a few columns and all of
    the sum at once, so that every load of it is under way together; a thread loads 16 bytes at a time of each. Only
    sums that are too long for that go in steps. Where the columns lie side by side, a program instance has as many as
    a sector of memory holds, and more threads go down them. There are as many program instances as keep a device busy,
    if there are as many columns: a sum is never cut in parts for several instances, since adding these up is one more
    launch, which takes longer than reading a few megabytes. All sums are of float32, in an order that depends on sizes
    only.

    Rows are an axis of the tile, so that the matrix is read once for all. In steps, sums are kept one a thread, row and
    column: what a thread has loaded at once of a column is added up before it is added to these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from ...analysis.few_rows import MOST_ROWS, few_rows
from ...ir import Buffer, Contraction, DType, Load, Range
from ...kernel_ir.nodes import Kernel, Loop
from ...kernel_ir.walk import PerfectNest, perfect_nests
from ...ops.dtypes import bits
from ...symbolic import Symbol
from .map_loops import Config, map_to, next_power_of_two, size_hint

__all__ = ["RowsSite", "map_rows", "rows_site", "takes_few_rows"]

_LOAD = 16  # bytes that a thread loads at once
_AT_ONCE = 8  # such loads that a thread has under way, of all matrices
_SECTOR = 32
_INSTANCES = 264  # two on each multiprocessor of a large device
_HELD = 256  # products that a thread makes at once
_WHOLE = 1 << 14  # bytes of a sum that is not taken in steps
_LEAST = 1 << 16  # elements of a matrix that are worth a kernel


def takes_few_rows(product: Contraction, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a product is one of few rows with a large matrix, all sizes being known, that is read as it lies: by the
    rule of Note [Products of few rows]."""
    if product.accumulate is not DType.F32 or product.batch or len(product.reduced) != 1 or len(product.columns) != 1:
        return False
    sizes = [r.size.constant for r in (*product.rows, *product.columns, *product.reduced)]
    if None in sizes:
        return False
    *rows, columns, inner = (size or 0 for size in sizes)
    loads = [i for i in product.right.body if isinstance(i, Load)]
    if not 1 <= prod(rows) <= MOST_ROWS or columns * inner < _LEAST or len(loads) != 1:
        return False
    return 1 in {s.constant for s in buffers[loads[0].buffer].strides}


@dataclass(frozen=True, slots=True)
class RowsSite:
    """Where a kernel is a product of few rows, or several with one set of columns: the nest at ``position`` sums it.
    ``along``: the matrices lie along the sum, else their columns side by side. ``matrices``: loads of them, and
    ``size`` the bytes of an element."""

    position: int
    nest: PerfectNest
    rows: tuple[Loop, ...]
    columns: Loop
    matrices: tuple[Load, ...]
    along: bool
    size: int

    @property
    def count(self) -> int:
        """How many rows there are."""
        return prod(loop.extent.constant or 1 for loop in self.rows)


def rows_site(kernel: Kernel) -> RowsSite | None:
    """The products of few rows that a kernel computes, if it does."""
    if kernel.ordered or kernel.scratch:
        return None
    nests = perfect_nests(kernel)
    grid = {loop.symbol: loop for loop in kernel.grid}
    found = few_rows([Range(loop.symbol, loop.extent) for loop in kernel.grid], nests)
    if found is None:
        return None
    nest, columns = nests[found.position], grid[found.columns[-1]]
    matrices = _matrices(nest, columns)
    runs = {_runs(load, nest, columns) for load in matrices}
    if len(runs) != 1 or None in runs:
        return None
    rows, size = tuple(grid[s] for s in found.rows), max(max(8, bits(load.dtype)) for load in matrices) // 8
    return RowsSite(found.position, nest, rows, columns, matrices, runs == {"sum"}, size)


def _matrices(nest: PerfectNest, columns: Loop) -> tuple[Load, ...]:
    """Loads that vary along the columns and the sum."""
    inner = {Symbol(loop.symbol) for loop in nest.loops}
    found = [i for i in nest.body if isinstance(i, Load)]
    return tuple(i for i in found if Symbol(columns.symbol) in i.indices[0].symbols and inner & i.indices[0].symbols)


def _runs(load: Load, nest: PerfectNest, columns: Loop) -> str | None:
    """What a load's neighbours in memory are: of the ``"sum"``, or of the ``"columns"``."""
    for name, symbol in (("sum", nest.loops[-1].symbol), ("columns", columns.symbol)):
        factor = load.indices[0].coefficient(Symbol(symbol))
        if factor is not None and factor == 1:
            return name
    return None


# -- the tile ----------------------------------------------------------------------------------------------------


def map_rows(kernel: Kernel, site: RowsSite) -> Kernel:
    """The kernel with the tile of one program instance on its loops' maps."""
    config, whole = _along_sums(site) if site.along else _down_columns(site)
    names = {site.columns.symbol: "XBLOCK"} | ({site.rows[-1].symbol: "YBLOCK"} if site.rows else {})
    return map_to(kernel, names, config, whole)


def _along_sums(site: RowsSite) -> tuple[Config, bool]:
    """The tile, and whether it is as long as the sum."""
    rows, row = _block(site.rows), next_power_of_two(size_hint(site.nest.extent))
    warps = 4
    whole = row * site.size <= _WHOLE and rows * row <= _HELD * 256
    if whole and rows * row > _HELD * 32 * warps:
        warps = 8
    length = row if whole else min(row, 32 * warps * _LOAD // site.size)
    loads = max(1, length * site.size // (32 * warps * _LOAD)) * len(site.matrices)
    most = min(_AT_ONCE // min(loads, _AT_ONCE), _HELD * 32 * warps // (rows * length) or 1)
    return _config(site, _columns(site, 1, most), rows, 0 if whole else length, warps), whole


def _down_columns(site: RowsSite) -> tuple[Config, bool]:
    rows, row = _block(site.rows), next_power_of_two(size_hint(site.nest.extent))
    width = _columns(site, _SECTOR // site.size, 128 // site.size)
    each = width * site.size * len(site.matrices)  # bytes of one step
    warps = max(4, min(16, row * each // (32 * _LOAD * _AT_ONCE)))
    most = 2 * _AT_ONCE * 32 * warps * _LOAD // each
    whole = row <= most and rows * row * width <= _HELD * 32 * warps
    length = row if whole else min(row, most // (4 if rows > 4 else 2))
    return _config(site, width, rows, 0 if whole else length, warps), whole


def _block(rows: tuple[Loop, ...]) -> int:
    return next_power_of_two(rows[-1].extent.constant or 1) if rows else 1


def _columns(site: RowsSite, least: int, most: int) -> int:
    """As many as leave enough program instances."""
    count = size_hint(site.columns.extent)
    share = 1 << max(1, count // _INSTANCES).bit_length() - 1
    return max(least, min(most, share))


def _config(site: RowsSite, width: int, rows: int, length: int, warps: int) -> Config:
    blocks = [("XBLOCK", width)] + [("YBLOCK", rows)] * bool(site.rows) + [("RBLOCK", length)] * bool(length)
    return Config(tuple(blocks), num_warps=warps)
