"""How matrix products are cut into tiles on a device, and which way is taken where none is measured.

Note [Tiles of a product]
    A program instance computes a tile of the result, step by step along the sum. What a tile costs is the multiplying,
    or fetching its factors from the second cache, whichever takes longer: large tiles fetch less. Then the result is
    stored, and the first factors of the next tile take their time to come; a second instance on the same
    multiprocessor hides part of that. And as many instances run at once as fit: the last ones may leave most of the
    device idle. :func:`ranked` adds these up for each way and takes the least. Where ways are measured, it says which
    ones are worth compiling. Its numbers are fitted to an H200 (``python -m tools.bench.triton_products``), where they
    name the best tile or one that takes up to a tenth longer.

Note [Walks]
    Instances that walk are as many as the device runs at once, each takes every n-th tile. Triton makes one loop of
    those over tiles and along the sum, so that factors of the next tile are asked for while the present one ends.
    Factors are taken by descriptors, which are in memory (:class:`~.records.KernelArgument`, kind ``descriptors``): a
    multiprocessor's own unit copies a whole piece of a matrix, and what is behind its end is zero. That takes registers
    off the threads, of which stores of rows that begin anywhere need many: 1016 us for 8192x768x50257, where plain
    tiles took 1719. Where loads and products are given to warps of their own (Triton's ``warp_specialize``), results
    were wrong on an H200, with Triton 3.6.0.

Note [Odd rows of a result]
    ATen takes 6.7 ms for 8192x768x50257 in bfloat16 on an H200, since rows of the result begin at no multiple of 16
    bytes. Padded to 50264 columns, it takes 892 us, and 37 for the padded weight, but 405 to copy the result, if
    somebody wants it without the padding. A walk takes 1016 us. So such a product, if it is large and factors lie along
    the sum, is a kernel of ours, and is not padded (``pad-products``) where it would be copied. Of others none was
    faster than ATen's, which take 0.68 to 0.97 of the time, so they are ATen's unless they are measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...symbolic import Expr
from .map_loops import next_power_of_two, size_hint
from .records import Config, Gpu

__all__ = ["HOPPER", "STEP", "ProductTile", "Sizes", "ranked"]

HOPPER = 90
_REGISTERS = 65536  # of a multiprocessor
_HELD_TWICE = 64  # results a thread, where the sums of a step are held beside those of all (Note [Factors of 8 bits])


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a product: how many, rows, columns, summed; ``factor_bytes`` of an element of a factor, ``result_bytes`` of
    the largest that is stored."""

    count: int
    rows: int
    columns: int
    inner: int
    factor_bytes: int = 2
    result_bytes: int = 2


@dataclass(frozen=True, slots=True)
class ProductTile:
    """``rows`` by ``columns`` of the result, in steps of ``inner``; ``walks``: see Note [Walks]. ``group``: rows of
    tiles whose instances run one after the other, column by column, so that they find factors in the second cache."""

    rows: int
    columns: int
    inner: int
    num_warps: int
    num_stages: int
    walks: bool = False
    group: int = 8

    def fitting(self, sizes: Sequence[Expr]) -> ProductTile:
        """No larger than the sizes (rows, columns, inner), and at least the 16 that ``tl.dot`` asks for."""
        rows, columns, inner = (
            max(16, min(block, next_power_of_two(size_hint(size))))
            for block, size in zip((self.rows, self.columns, self.inner), sizes, strict=True)
        )
        return replace(self, rows=rows, columns=columns, inner=inner)

    @property
    def config(self) -> Config:
        """Its blocks, and what Triton is told."""
        blocks = (("XBLOCK", self.columns), ("YBLOCK", self.rows), ("RBLOCK", self.inner))
        return Config(blocks, self.num_warps, self.num_stages)

    def shared(self, sizes: Sizes) -> int:
        """Bytes of the factors of all stages, and beside them, in a walk, those through which threads exchange what
        they store: all of a wide result, half of another one."""
        factors = self.num_stages * (self.rows + self.columns) * self.inner * sizes.factor_bytes
        exchanged = self.rows * self.columns * (sizes.result_bytes if sizes.result_bytes > 2 else 1)
        return factors + self.walks * (exchanged + 1024)

    def at_once(self, gpu: Gpu, sizes: Sizes) -> int:
        """How many instances a multiprocessor runs."""
        threads = 32 * self.num_warps
        registers = min(255, 64 + self.rows * self.columns // threads)
        return max(1, min(gpu.shared // max(1, self.shared(sizes)), _REGISTERS // (threads * registers)))


STEP = 64  # along the sum, of all tiles that walk
_HALVES = (
    ProductTile(128, 256, STEP, 8, 3, walks=True),
    ProductTile(128, 128, STEP, 4, 3, walks=True),
    ProductTile(128, 256, 64, 8, 3),
    ProductTile(128, 256, 64, 8, 4),
    ProductTile(128, 128, 64, 8, 4),
    ProductTile(128, 128, 64, 4, 3),
    ProductTile(256, 128, 64, 8, 3),
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
    halves = sizes.factor_bytes <= 2
    walks = described and gpu.arch == HOPPER and sizes.factor_bytes == 2
    cut: tuple[ProductTile, ...] = _HALVES if halves else _FLOATS
    if sizes.factor_bytes == 1:
        cut = tuple(replace(t, inner=2 * t.inner) for t in cut if t.rows * t.columns <= _HELD_TWICE * 32 * t.num_warps)
    usable = [t for t in cut if t.shared(sizes) <= gpu.shared and (walks or not t.walks)]
    least = min(64, next_power_of_two(max(16, sizes.rows))) if halves else 0  # tensor cores multiply 64 rows at once
    return tuple(sorted((t for t in usable if t.rows >= least), key=lambda tile: expected_clocks(tile, sizes, gpu)))


# -- expected times ------------------------------------------------------------------------------------------------

_PRODUCTS = 2048.0  # multiplications of halves that a multiprocessor does in a clock
_FETCHED = 44.0  # bytes of factors that it gets in a clock
_STORED = 14.0  # and bytes of the result that it stores
_BEGIN = 1800.0  # clocks until the first factors are there
_ODD = 4.0  # times as long as others odd rows take to be stored by plain tiles


def expected_clocks(tile: ProductTile, sizes: Sizes, gpu: Gpu) -> float:
    """What the product takes, see Note [Tiles of a product]."""
    rows, columns = min(tile.rows, max(16, sizes.rows)), min(tile.columns, max(16, sizes.columns))
    down, across = -(-sizes.rows // rows), -(-sizes.columns // columns)
    tiles = max(1, sizes.count * down * across)  # there are none of a product without rows
    together = min(tile.at_once(gpu, sizes), -(-tiles // gpu.processors))
    steps = -(-sizes.inner // tile.inner) * tile.inner
    few = max(1.0, 64 / rows) * max(1.0, 64 / columns)
    product = rows * columns * few * steps / (_PRODUCTS * (2 if sizes.factor_bytes == 1 else 1))
    fetch = (rows + columns) * steps * sizes.factor_bytes / _FETCHED
    store = rows * columns * sizes.result_bytes / _STORED
    if not tile.walks and sizes.columns * sizes.result_bytes % 16:
        store *= _ODD
    body, rest = max(product, fetch) * together, _BEGIN + store * together
    hidden = 0.4 if tile.walks or together > 1 else 0.3
    rounds = -(-tiles // (gpu.processors * together))
    return rounds * (body + (1 - hidden) * rest) + hidden * rest
