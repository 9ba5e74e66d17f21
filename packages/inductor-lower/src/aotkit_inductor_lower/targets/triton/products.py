"""How matrix products are cut into tiles on a device, and which way is taken where none is measured.

Note [Tiles of a product]
    A program instance computes a tile of the result, step by step along the sum. What a tile costs is the multiplying,
    or fetching its factors from the second cache, whichever takes longer: large tiles fetch less. Then the result is
    stored, and the first factors of the next tile take their time to come; a second instance on the same
    multiprocessor, or an instance that goes on to its next tile while its last result is stored (a *walk*), hides that.
    And as many instances run at once as fit: the last ones may leave most of the device idle. :func:`ranked` adds
    these up for each way and takes the least. Where ways are measured, it says which ones are worth compiling.

Note [Walks]
    Instances that walk are as many as the device runs at once, each takes every n-th tile. Triton writes the loop over
    tiles and that of the sum as one loop (``flat``), so that factors of the next tile are asked for while the present
    one ends; or gives loads to a warp of their own and products to two groups of others (``warps``). Both take
    factors by descriptors, which are in memory (:class:`~.records.KernelArgument`, kind ``descriptors``): a
    multiprocessor's own unit copies a whole piece of a matrix, and what is behind its end is zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from ...symbolic import Expr
from .map_loops import next_power_of_two, size_hint
from .records import Config, Gpu

__all__ = ["STEP", "ProductTile", "Sizes", "Walk", "ranked"]

Walk = Literal["", "flat", "warps"]

_HOPPER = 90
_WARPS, _REGISTERS = 64, 65536  # of a multiprocessor


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a product: how many, rows, columns, summed; ``bytes`` of an element of a factor and of the result."""

    count: int
    rows: int
    columns: int
    inner: int
    factor_bytes: int = 2
    result_bytes: int = 2


@dataclass(frozen=True, slots=True)
class ProductTile:
    """``rows`` by ``columns`` of the result, in steps of ``inner``; ``walk``: see Note [Walks]. ``group``: rows of
    tiles whose instances run one after the other, column by column, so that they find factors in the second cache."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    walk: Walk = ""
    group: int = 8

    def fitting(self, sizes: Sequence[Expr]) -> ProductTile:
        """No larger than the sizes (rows, columns, inner), and at least the 16 that ``tl.dot`` asks for."""
        rows, columns, inner = (
            max(16, min(block, next_power_of_two(size_hint(size))))
            for block, size in zip((self.rows, self.columns, self.inner), sizes, strict=True)
        )
        return ProductTile(rows, columns, inner, self.num_warps, self.num_stages, self.walk, self.group)

    @property
    def config(self) -> Config:
        """Its blocks, and what Triton is told."""
        blocks = (("XBLOCK", self.columns), ("YBLOCK", self.rows), ("RBLOCK", self.inner))
        return Config(blocks, self.num_warps, self.num_stages)

    def shared(self, factor_bytes: int) -> int:
        """Bytes of the factors of all stages."""
        return self.num_stages * (self.rows + self.columns) * self.inner * factor_bytes

    def at_once(self, gpu: Gpu, factor_bytes: int) -> int:
        """How many instances a multiprocessor runs."""
        if self.walk == "warps":
            return 1
        threads = 32 * self.num_warps
        registers = min(255, 40 + self.rows * self.columns // threads + 24)
        return max(1, min(gpu.shared // max(1, self.shared(factor_bytes)), _REGISTERS // (threads * registers)))


STEP = 64  # along the sum, of all tiles that walk
_HALVES = (
    ProductTile(128, 256, 64, 4, 4, "warps"),
    ProductTile(128, 256, 64, 4, 3, "warps"),
    ProductTile(256, 128, 64, 4, 3, "warps"),
    ProductTile(128, 128, 64, 4, 4, "warps"),
    ProductTile(128, 256, 64, 8, 3, "flat"),
    ProductTile(128, 128, 64, 4, 3, "flat"),
    ProductTile(128, 256, 64, 8, 3),
    ProductTile(128, 256, 64, 8, 4),
    ProductTile(256, 128, 64, 8, 3),
    ProductTile(128, 128, 64, 8, 4),
    ProductTile(128, 128, 64, 4, 3),
    ProductTile(128, 128, 32, 4, 4),
    ProductTile(128, 64, 64, 4, 4),
    ProductTile(64, 128, 64, 4, 4),
    ProductTile(64, 64, 64, 4, 4),
    ProductTile(32, 64, 64, 4, 4),
    ProductTile(16, 64, 128, 4, 4),
    ProductTile(32, 32, 64, 2, 4),
)
_FLOATS = (
    ProductTile(128, 128, 32, 8, 3),
    ProductTile(128, 64, 32, 4, 3),
    ProductTile(64, 64, 32, 4, 4),
    ProductTile(64, 32, 64, 4, 3),
    ProductTile(32, 32, 32, 2, 2),
)


def ranked(sizes: Sizes, gpu: Gpu, described: bool) -> tuple[ProductTile, ...]:
    """The tiles that a product can have, that with the least expected time first. ``described``: descriptors can say
    where both factors are."""
    table = _HALVES if sizes.factor_bytes == 2 else _FLOATS
    walks = described and gpu.arch == _HOPPER and sizes.factor_bytes == 2
    least = min(64, next_power_of_two(max(16, sizes.rows)))  # fewer rows are no gain for what multiplies 64 at once
    usable = [t for t in table if t.shared(sizes.factor_bytes) <= gpu.shared and (walks or not t.walk)]
    usable = [t for t in usable if t.rows >= least or sizes.factor_bytes > 2]
    return tuple(sorted(usable, key=lambda tile: expected_clocks(tile, sizes, gpu)))


# -- expected times ------------------------------------------------------------------------------------------------

_PRODUCTS = 2048.0  # multiplications of halves that a multiprocessor does in a clock
_FETCHED = 44.0  # bytes of factors that it gets in a clock
_STORED = 14.0  # and bytes of the result that it stores
_BEGIN = 1800.0  # clocks until the first factors are there


def expected_clocks(tile: ProductTile, sizes: Sizes, gpu: Gpu) -> float:
    """What the product takes, see Note [Tiles of a product]."""
    rows, columns = min(tile.rows, max(16, sizes.rows)), min(tile.columns, max(16, sizes.columns))
    down, across = -(-sizes.rows // rows), -(-sizes.columns // columns)
    tiles = sizes.count * down * across
    together = min(tile.at_once(gpu, sizes.factor_bytes), -(-tiles // gpu.processors))
    steps = -(-sizes.inner // tile.inner) * tile.inner
    few = max(1.0, 64 / rows)  # what multiplies takes 64 rows at least
    product = rows * few * columns * steps / _PRODUCTS / (1.0 if columns >= 64 else columns / 64)
    fetch = (rows + columns) * steps * sizes.factor_bytes / _FETCHED
    store = rows * columns * sizes.result_bytes / _STORED
    body = max(product, fetch) * together
    rest = _BEGIN + store * together
    hidden = {"warps": 0.15, "flat": 0.4}.get(tile.walk, 0.6 if together > 1 else 1.0)
    rounds = -(-tiles // (gpu.processors * together))
    return rounds * (body + hidden * rest) + (1 - hidden) * rest
