"""Which loops of a nest become axes of a kernel's tile, and how large the tile is.

Note [Tiles]
    A program instance computes a tile of up to three outer loops (two, where a stage has loops of its own), and the
    inner loops of each stage as one more axis: whole (*persistent*) if it is short, else in a loop. A loop is an axis
    if some access has unit stride along it, so that reads and writes of a transpose both coalesce; further ones from
    the innermost outwards until the tile is full. The other loops give each program instance one value.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from ...ir import Index, Load, Range, Stage, Store
from ...kernel_ir.nests import FlatNest
from ...symbolic import Expr, Symbol, estimate, to_expr
from .records import Config

__all__ = ["Axis", "Config", "TileLimits", "TilePlan", "next_power_of_two", "plan_tiles", "size_hint", "stage_size"]

SIZE_HINT = 4096  # what an unknown size counts as
BLOCK_NAMES = ("XBLOCK", "YBLOCK", "ZBLOCK")


@dataclass(frozen=True, slots=True)
class TileLimits:
    """``row``: the longest row that is held as a whole. ``pointwise``, ``reduction``: elements of a tile."""

    row: int = 8192
    pointwise: int = 1024
    reduction: int = 4096


@dataclass(frozen=True, slots=True)
class Axis:
    """An outer loop. ``block``: its constexpr name, or ``None`` if a program instance computes one value of it."""

    loop: Range
    block: str | None


@dataclass(frozen=True, slots=True)
class TilePlan:
    """``axes``: all outer loops, outermost first. ``persistent``: stages with loops are computed whole.
    ``serial``: one program instance runs all iterations in order. ``config``: the first choice."""

    axes: tuple[Axis, ...]
    persistent: bool
    serial: bool
    config: Config

    @property
    def tile(self) -> tuple[Axis, ...]:
        """The axes with a block."""
        return tuple(axis for axis in self.axes if axis.block is not None)


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` and 1."""
    return 1 << max(0, n - 1).bit_length()


def size_hint(expr: Expr) -> int:
    """A plausible value for choosing block sizes."""
    constant = expr.constant
    return constant if constant is not None else estimate(expr, SIZE_HINT)


def stage_size(stage: Stage) -> Expr:
    """How many iterations a stage has within one outer iteration."""
    total = to_expr(1)
    for loop in stage.ranges:
        total = total * loop.size
    return total


def plan_tiles(nest: FlatNest, serial: bool = False, limits: TileLimits = TileLimits()) -> TilePlan:
    """The tile of a nest. ``serial`` asks for one program instance, for stores that no atomic operation does."""
    sizes = [stage_size(stage) for stage in nest.stages if stage.ranges]
    persistent = not serial and all(s.constant is not None and s.constant <= limits.row for s in sizes)
    if serial:
        blocks = (("RBLOCK", 1),) if sizes else ()
        return TilePlan(tuple(Axis(loop, None) for loop in nest.outer), False, True, Config(blocks, num_warps=1))
    chosen = _tile_loops(nest, 2 if sizes else 3, limits.pointwise)
    names = dict(zip(reversed(chosen), BLOCK_NAMES, strict=False))
    axes = tuple(Axis(loop, names.get(loop.symbol)) for loop in nest.outer)
    if not sizes:
        return TilePlan(axes, persistent, False, _pointwise_config(axes, _unit_strides(nest), limits))
    return TilePlan(axes, persistent, False, _reduction_config(axes, nest, persistent, limits))


def _tile_loops(nest: FlatNest, limit: int, elements: int) -> list[str]:
    """Symbols of the loops that become axes, outermost first."""
    if not nest.outer:
        return []
    unit = _unit_strides(nest)
    loops = {loop.symbol: loop for loop in nest.outer}
    innermost = nest.outer[-1].symbol
    chosen = dict.fromkeys([innermost, *(s for s in reversed(loops) if s in unit)])
    picked = list(chosen)[:limit]
    for symbol in reversed(loops):
        full = prod(size_hint(loops[s].size) for s in picked) >= elements // 2
        if len(picked) < limit and symbol not in picked and not full:
            picked.append(symbol)
    return [symbol for symbol in loops if symbol in picked]


def _unit_strides(nest: FlatNest) -> set[str]:
    """Outer loops along which some access moves by one element."""
    found = set()
    for stage in nest.stages:
        for instr in stage.body:
            if isinstance(instr, Load | Store):
                for loop in nest.outer:
                    factor = instr.indices[0].coefficient(Symbol(loop.symbol))
                    if factor is not None and factor == 1:
                        found.add(loop.symbol)
    return found


def _pointwise_config(axes: tuple[Axis, ...], unit: set[str], limits: TileLimits) -> Config:
    tile = [axis for axis in axes if axis.block is not None]
    blocks: dict[str, int] = {}
    left = limits.pointwise
    several = [axis for axis in tile if axis.loop.symbol in unit and size_hint(axis.loop.size) >= 16]
    for axis in reversed(tile):
        assert axis.block is not None
        share = 32 if len(several) > 1 and axis in several else left
        blocks[axis.block] = min(next_power_of_two(size_hint(axis.loop.size)), share, left)
        left = max(1, left // blocks[axis.block])
    total = prod(blocks.values()) if blocks else 1
    return Config(tuple(blocks.items()), num_warps=max(1, min(4, total // 128)))


def _reduction_config(axes: tuple[Axis, ...], nest: FlatNest, persistent: bool, limits: TileLimits) -> Config:
    inner = _reads_along_rows(nest)
    longest = max(size_hint(stage_size(s)) for s in nest.stages if s.ranges)
    fits = next_power_of_two(longest)
    rblock = fits if persistent else min(fits, limits.reduction // 2 if inner else 64)
    left = max(1, limits.reduction // rblock)
    if inner:
        left = min(left, 64 if longest <= 64 else 8 if longest <= 512 else 1)
    blocks: dict[str, int] = {}
    for axis in reversed([axis for axis in axes if axis.block is not None]):
        assert axis.block is not None
        blocks[axis.block] = min(next_power_of_two(size_hint(axis.loop.size)), left)
        left = max(1, left // blocks[axis.block])
    total = rblock * prod(blocks.values())
    if not persistent:
        blocks["RBLOCK"] = rblock
    return Config(tuple(blocks.items()), num_warps=max(1, min(16, total // 512)))


def _reads_along_rows(nest: FlatNest) -> bool:
    """Whether the inner loops are what accesses move along by one element."""
    for stage in nest.stages:
        for instr in stage.body:
            if isinstance(instr, Load | Store) and instr.buffer in nest.memories and stage.ranges:
                factor = instr.indices[0].coefficient(Symbol(stage.ranges[-1].symbol))
                if factor is not None and factor == 1:
                    return True
    return not any(isinstance(i, Load | Index) for s in nest.stages for i in s.body if s.ranges)
