"""Products of few rows: which kernels are such, and the tile of one program instance.

Note [Products of few rows]
    What a language model computes token by token is products of one row, or a few, with large matrices: each number of
    the matrix is used once per row, so the time is that of reading it, and of starting a kernel. Multiplying in tiles
    (``tl.dot``) would fill 16 rows. So such a product is a sum along rows of the matrix, or down its columns, like any
    other sum: with what comes before and after it in the same kernel.

    Where the matrix lies along the sum (the weight of a linear layer), a program instance has a few columns and all of
    the sum at once, so that every load of it is under way together; a thread loads 16 bytes at a time of each. Only
    sums that are too long for that go in steps. Where the columns lie side by side, a program instance has as many as
    a sector of memory holds, or half as many if that would keep most of a device idle, and more threads go down them. A
    sum is never cut in parts for several instances, since adding these up is one more launch, which takes longer than
    reading a few megabytes. All sums are of float32, in an order that depends on sizes only.

    Rows are an axis of the tile, so that the matrix is read once for all. In steps, sums are kept one a thread, row and
    column: what a thread has loaded at once of a column is added up before it is added to these.

Note [Which products of few rows are ours]
    Measured on an H200 in bfloat16 (``tools/bench/triton_rows.py``), as a share of ATen's time, without what is fused:
    matrices along the sum and one row 0.3 to 0.95, whatever their size; two rows 0.35 to 0.9 up to 4096 x 4096, and 1.0
    to 1.1 above; four rows 0.55 to 0.66 and eight 0.67 to 0.9 where there are at most 1024 columns, which ATen cuts in
    parts, and more than 1 elsewhere: each number of the matrix is multiplied with one of each row without the units for
    products then. Where results are no multiple of 16 bytes, 0.7 with up to eight rows. Matrices whose columns lie side
    by side, one row: 0.8 to 1.15, which the launches pay for that are saved; 1.3 and more with more rows. Sums of more
    than 16 KiB took 1.2. Tiles are those that were fastest of some that were tried with one row: two loads a thread of
    4 to 8 KiB in a program instance, more if it sums a norm as well, which others would sum again.
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

__all__ = ["RowsSite", "is_few_rows", "map_rows", "rows_site", "takes_few_rows"]

_LOAD = 16  # bytes that a thread loads at once
_AT_ONCE = 8  # such loads that a thread has under way, of all matrices, at most
_EACH = 2  # such loads that it has, at least
_INSTANCE = 4096  # bytes that a program instance loads, at least
_SECTOR = 32
_INSTANCES = 264  # two on each multiprocessor of a large device
_HELD = 256  # products that a thread makes at once
_WHOLE = 1 << 14  # bytes of a sum that is not taken in steps
_LEAST = 1 << 16  # elements of a matrix that are worth a kernel
_NARROW = 1024  # columns, which ATen cuts in parts
_MOST_BYTES = {2: 1 << 25, 4: 3 << 21, 8: 1 << 21}  # of a matrix, for at most so many rows


def is_few_rows(product: Contraction) -> bool:
    """Whether a product of matrices has few rows, and all of its sizes are known."""
    if product.accumulate is not DType.F32 or product.batch or len(product.reduced) != 1 or len(product.columns) != 1:
        return False
    sizes = [r.size.constant for r in (*product.rows, *product.columns, *product.reduced)]
    return None not in sizes and 1 <= prod(r.size.constant or 0 for r in product.rows) <= MOST_ROWS


def takes_few_rows(product: Contraction, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a product of few rows is ours unless something else is said, see Note [Which products of few rows are
    ours]."""
    loads = [i for i in product.right.body if isinstance(i, Load)]
    if not is_few_rows(product) or len(loads) != 1:
        return False
    count = prod(r.size.constant or 0 for r in product.rows)
    (columns, across), (inner, along) = ((r.size.constant or 0, r.symbol) for r in (*product.columns, *product.reduced))
    size = bits(loads[0].dtype) // 8
    if columns * inner < _LEAST or inner * size > _WHOLE:
        return False
    steps = {str(i): s.constant for i, s in zip(loads[0].indices, buffers[loads[0].buffer].strides, strict=True)}
    if steps.get(along) == 1:
        return _pays(count, columns, columns * inner * size, size)
    return steps.get(across) == 1 and count == 1


def _pays(rows: int, columns: int, matrix: int, size: int) -> bool:
    if rows == 1 or columns * size % _LOAD:
        return True
    most = next(limit for count, limit in _MOST_BYTES.items() if rows <= count)
    return matrix <= most and (rows == 2 or columns <= _NARROW)


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
    config, whole = _along_sums(kernel, site) if site.along else _down_columns(site)
    names = {site.columns.symbol: "XBLOCK"} | ({site.rows[-1].symbol: "YBLOCK"} if site.rows else {})
    return map_to(kernel, names, config, whole)


def _along_sums(kernel: Kernel, site: RowsSite) -> tuple[Config, bool]:
    """The tile, and whether it is as long as the sum."""
    rows, extent = _block(site.rows), size_hint(site.nest.extent)
    row, column = next_power_of_two(extent), extent * site.size * len(site.matrices)
    whole = row * site.size <= _WHOLE
    least = _INSTANCE if not _sums_before(kernel, site) else _AT_ONCE * _INSTANCE // _EACH
    width = _floor(least // column)
    warps = max(2, min(8, _floor(width * column // (32 * _LOAD * _EACH))))
    if least > _INSTANCE:
        warps = 4
    elif rows > 1:
        warps = max(4, warps)
    while rows * row > _HELD * 32 * warps and warps < 16:
        warps *= 2
    length = row if whole else min(row, 32 * warps * _LOAD // site.size)
    if not whole:
        width = _AT_ONCE // min(_AT_ONCE, len(site.matrices))
    most = max(1, min(width, _HELD * 32 * warps // (rows * length)))
    return _config(site, _columns(site, 1, most), rows, 0 if whole else length, warps), whole


def _down_columns(site: RowsSite) -> tuple[Config, bool]:
    rows, row = _block(site.rows), next_power_of_two(size_hint(site.nest.extent))
    width = _SECTOR // site.size
    few = size_hint(site.columns.extent) * 2 < width * _INSTANCES
    width = width // 2 if few else _columns(site, width, 128 // site.size)
    each = width * site.size * len(site.matrices)  # bytes of one step
    warps = max(8 if few else 4, min(16, row * each // (32 * _LOAD * 2 * _AT_ONCE)))
    most = 2 * _AT_ONCE * 32 * warps * _LOAD // each
    whole = row <= most and rows * row * width <= _HELD * 32 * warps
    length = row if whole else min(row, most // (4 if rows > 4 else 2))
    return _config(site, width, rows, 0 if whole else length, warps), whole


def _sums_before(kernel: Kernel, site: RowsSite) -> bool:
    """Whether a program instance sums something else, too, once for all of its columns."""
    return any(nest.loops for nest in perfect_nests(kernel)[: site.position])


def _floor(n: int) -> int:
    """The largest power of two that is at most ``n``, or 1."""
    return 1 << max(1, n).bit_length() - 1


def _block(rows: tuple[Loop, ...]) -> int:
    return next_power_of_two(rows[-1].extent.constant or 1) if rows else 1


def _columns(site: RowsSite, least: int, most: int) -> int:
    """As many as leave enough program instances."""
    count = size_hint(site.columns.extent)
    share = _floor(count // _INSTANCES)
    return max(least, min(most, share))


def _config(site: RowsSite, width: int, rows: int, length: int, warps: int) -> Config:
    blocks = [("XBLOCK", width)] + [("YBLOCK", rows)] * bool(site.rows) + [("RBLOCK", length)] * bool(length)
    return Config(tuple(blocks), num_warps=warps)
