"""Which loops of a kernel become axes of its tile, and how large the tile is.

Note [Tiles]
    A program instance computes a tile of up to three loops of the grid (two, where the body has loops), each a
    ``block``, and each perfect nest of the body as one more axis: whole (a ``tile``; the kernel is *persistent*) if all
    are short, else in a loop over a ``block``. A loop of the grid is an axis if some large access has unit stride along
    it, so that reads and writes of a transpose both coalesce, and gets its share of the tile first; further ones from
    the innermost outwards until the tile is full. The others are ``units``: each program instance has one value of
    them. Where rows lie side by side, a tile is many of them wide and goes along them in a loop, see Note [Sectors] in
    :mod:`.sectors`. In a kernel whose stores combine in a way that is no atomic operation, one program instance runs
    all iterations in order: its grid stays ``serial``.

Note [Odd rows]
    Rows of 50257 halves begin anywhere, so a thread loads two bytes at once, and threads beside each other should load
    neighbours. Triton gives each thread eight neighbours if something else in the kernel begins at multiples of 16
    bytes, though, as what is stored does: each load of a warp then touches 16 sectors, and the gradient of GPT-2's
    logits took 1.8 ms on an H200, whatever the tile, where the bytes take 0.4. So lanes are said to be no neighbours,
    or as many as a thread can load at once: rows of 1500 halves begin at multiples of eight bytes. An address is that
    of the tile's first element, which all threads share, and the lane's number, a constant of the instruction. Where
    much is done once a row (its label is checked, before which nothing else can be asked for), one program instance
    goes along all of it in steps. Rows that are only stored need none of this: Triton exchanges those through shared
    memory, and copies of such rows have the bandwidth of memory (measured there as well).

Note [Warps of a row]
    A row of up to 1024 elements belongs to one warp, which takes as many rows as make 1024 elements (a quarter of the
    limit of a tile, of which tuning tries others): its sums need no memory that warps share, and 32 numbers of a thread
    are in flight. Where there are too few rows to fill a device, warps share a row. A program instance that walks over
    rows takes two at once, since each next one waits for the sums; what goes down columns in steps has a warp for 256
    elements, since few instances do it. Measured on an H200 (``tools/bench/triton_tiles.py``): rows of 96 to 384 take
    two thirds to half of what eight rows to eight warps took. Of rows shorter than those a walk takes as many as fill a
    warp's threads with eight elements each, which was not measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from ...ir import DType, Index, Instr, Load, Store
from ...ir.walk import index_exprs, instructions, operands, value_types
from ...kernel_ir.bounds import hint
from ...kernel_ir.nodes import LOOP_KINDS, Kernel, Loop, LoopMap, Stmt, Tail
from ...kernel_ir.walk import PerfectNest, memories, nested, perfect_nests
from ...ops.dtypes import ATOMIC
from ...symbolic import Expr, Symbol
from .flat_rows import flat_rows, walked_together
from .records import Config, Gpu
from .sectors import loads_odd_rows, moved_bytes, narrowest
from .walked_rows import walked_loop

__all__ = ["Config", "TileLimits", "config_of", "is_persistent", "is_serial", "map_loops"]
__all__ += ["map_to", "next_power_of_two", "size_hint"]

SIZE_HINT = 4096  # what an unknown size counts as
BLOCK_NAMES = ("XBLOCK", "YBLOCK", "ZBLOCK")
_HOPPER = Gpu()
_RUN = 128  # bytes that a tile takes of each row of columns
_FEWEST = 256  # elements that a walk takes at once
_FEW_ROWS = 512  # do not fill a device with a warp each
_LONG = 16384  # elements of an odd row
_WORTH = 0.95  # rows are read in pieces where that moves less than this share


@dataclass(frozen=True, slots=True)
class TileLimits:
    """``row``: the longest row that is held as a whole. ``pointwise``, ``reduction``: elements of a tile. ``together``:
    small kernels share launches, unless they are tuned. ``gpu``: what the tiles of products are chosen for."""

    row: int = 8192
    pointwise: int = 1024
    reduction: int = 4096
    together: bool = False
    gpu: Gpu = _HOPPER


def next_power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n`` and 1."""
    return 1 << max(0, n - 1).bit_length()


def size_hint(expr: Expr) -> int:
    """A plausible value for choosing block sizes."""
    return hint(expr, SIZE_HINT)


def map_loops(kernel: Kernel, limits: TileLimits = TileLimits()) -> Kernel:
    """The kernel with the tile of one program instance on its loops' maps, and the first choice of a config."""
    if is_serial(kernel):
        config = Config((("RBLOCK", 1),), num_warps=1)
        return replace(kernel, body=_rows(kernel, config.block("RBLOCK")), config=_told(config))
    kernel = flat_rows(kernel)
    walked = walked_loop(kernel, limits.row)
    if walked is not None:
        return _map_walked(kernel, walked, limits)
    looped = [nest for nest in perfect_nests(kernel) if nest.loops]
    sizes = [nest.extent.constant for nest in looped]
    persistent = all(size is not None and size <= limits.row for size in sizes)
    unit = _unit_strides(kernel)
    chosen = _tile_loops(kernel, unit, 2 if looped else 3, limits.pointwise)
    names = dict(zip(reversed(chosen), BLOCK_NAMES, strict=False))
    tile = [(names[loop.symbol], loop) for loop in kernel.grid if loop.symbol in names]
    if looped:
        config, persistent = _reduction_tile(tile, kernel, looped, persistent, limits)
    else:
        along_rows = _along_odd_rows(kernel, chosen)
        if along_rows is not None:
            return map_to(along_rows, {}, Config((("RBLOCK", limits.reduction // 2),), num_warps=4))
        config = _pointwise_config(tile, unit, limits)
    return map_to(kernel, names, config, persistent)


def map_to(kernel: Kernel, names: Mapping[str, str], config: Config, persistent: bool = False) -> Kernel:
    """The kernel with the named loops of its grid cut into blocks, the others units, and the loops of its body whole if
    that is ``persistent``, else in blocks."""
    grid = tuple([_in_blocks(loop, names.get(loop.symbol), config) for loop in kernel.grid])
    body = kernel.body
    if any(isinstance(stmt, Loop) for stmt in body):
        body = _rows(kernel, None if persistent else config.block("RBLOCK"))
    return replace(kernel, grid=grid, body=body, config=_told(config))


def _map_walked(kernel: Kernel, walked: Loop, limits: TileLimits) -> Kernel:
    """The kernel with whole rows, of which a program instance takes some at once, see :mod:`.walked_rows`."""
    kernel, walked = walked_together(kernel, walked)
    looped = [nest for nest in perfect_nests(kernel) if nest.loops]
    config = _walked_config(walked, looped, max(1, limits.reduction // 2048))
    width = config.block("XBLOCK")
    at_once = LoopMap("serial", width, block="XBLOCK", tail=_tail(walked.extent, width))
    grid = tuple(replace(loop, map=at_once if loop is walked else LoopMap("units")) for loop in kernel.grid)
    return replace(kernel, grid=grid, body=_rows(kernel, None), config=_told(config))


def _in_blocks(loop: Loop, name: str | None, config: Config) -> Loop:
    if name is None:
        return replace(loop, map=LoopMap("units"))
    width = config.block(name)
    return replace(loop, map=LoopMap("block", width, block=name, tail=_tail(loop.extent, width)))


def _rows(kernel: Kernel, block: int | None) -> tuple[Stmt, ...]:
    """The body with the loops of each nest as one axis: in blocks, or whole. The map is the outermost one's, the others
    follow it."""
    body: list[Stmt] = []
    for nest in perfect_nests(kernel):
        if not nest.loops:
            body += nest.body
            continue
        size = nest.extent
        kind, name = ("tile", "") if block is None else ("block", "RBLOCK")
        width = next_power_of_two(size.constant or 0) if block is None else block
        tail = _tail(size, width) if size.constant else "masked"  # a row without elements is a tile of one
        first, *others = nest.loops
        follow = LoopMap(LOOP_KINDS[kind], block=name)
        loops = [replace(first, map=LoopMap(LOOP_KINDS[kind], width, block=name, tail=tail))]
        body += nested([*loops, *(replace(loop, map=follow) for loop in others)], nest.body)
    return tuple(body)


def _tail(size: Expr, width: int) -> Tail:
    return "masked" if size.constant is None or size.constant % width else "exact"


def _told(config: Config) -> tuple[tuple[str, int], ...]:
    return ("num_warps", config.num_warps), ("num_stages", config.num_stages)


def config_of(kernel: Kernel) -> Config:
    """The sizes of all blocks, innermost loops of the grid first, and what the compiler is told."""
    loops = [*reversed(kernel.grid), *(stmt for stmt in kernel.body if isinstance(stmt, Loop))]
    blocks = {loop.map.block: loop.map.width for loop in loops if loop.map.block}
    return Config(tuple(blocks.items()), **dict(kernel.config))


def is_serial(kernel: Kernel) -> bool:
    """Whether one program instance runs all iterations in order, for stores that no atomic operation does, or whose
    results something reads."""
    if not kernel.ordered:
        return False
    body = instructions(kernel.body)
    types = value_types(body)
    loaded = {i.buffer for i in body if isinstance(i, Load)}
    adding = [i for i in body if isinstance(i, Store) and i.accumulates]
    return any(i.buffer in loaded or (types.get(i.value, DType.I64), i.mode) not in ATOMIC for i in adding)


def is_persistent(kernel: Kernel) -> bool:
    """Whether the body's loops are computed whole, with nothing in the grid that waits for something else."""
    return not is_serial(kernel) and all(stmt.map.kind == "tile" for stmt in kernel.body if isinstance(stmt, Loop))


# -- the tile ----------------------------------------------------------------------------------------------------


def _tile_loops(kernel: Kernel, unit: set[str], limit: int, elements: int) -> list[str]:
    """Symbols of the loops that become axes, outermost first."""
    if not kernel.grid:
        return []
    loops = {loop.symbol: loop for loop in kernel.grid}
    innermost = kernel.grid[-1].symbol
    chosen = dict.fromkeys([innermost, *(s for s in reversed(loops) if s in unit)])
    picked = list(chosen)[:limit]
    for symbol in reversed(loops):
        full = prod(size_hint(loops[s].extent) for s in picked) >= elements // 2
        if len(picked) < limit and symbol not in picked and not full:
            picked.append(symbol)
    return [symbol for symbol in loops if symbol in picked]


def _unit_strides(kernel: Kernel) -> set[str]:
    """Loops of the grid along which some access moves by one element. Accesses that move along fewer of the loops than
    others do are little to read: one number of each row is no reason to go down the columns."""
    places = [i.indices[0] for i in instructions(kernel.body) if isinstance(i, Load | Store)]
    symbols = {Symbol(loop.symbol) for loop in kernel.grid}
    moving = [len(symbols & place.symbols) for place in places]
    found = set()
    for place, loops in zip(places, moving, strict=True):
        for loop in kernel.grid if loops == max(moving) else ():
            factor = place.coefficient(Symbol(loop.symbol))
            if factor is not None and factor == 1:
                found.add(loop.symbol)
    return found


def _pointwise_config(tile: Sequence[tuple[str, Loop]], unit: set[str], limits: TileLimits) -> Config:
    blocks: dict[str, int] = {}
    left = limits.pointwise
    several = [loop for _, loop in tile if loop.symbol in unit and size_hint(loop.extent) >= 16]
    inner_first = [*reversed(tile)]
    for name, loop in sorted(inner_first, key=lambda named: named[1].symbol not in unit):
        share = 32 if len(several) > 1 and loop in several else left
        blocks[name] = min(next_power_of_two(size_hint(loop.extent)), share, left)
        left = max(1, left // blocks[name])
    total = prod(blocks.values()) if blocks else 1
    return Config(tuple(blocks.items()), num_warps=max(1, min(4, total // 128)))


def _along_odd_rows(kernel: Kernel, tile: Sequence[str]) -> Kernel | None:
    """The kernel with its innermost loop in the body, if it goes along long rows that begin anywhere, and much is done
    once for a row; see Note [Odd rows]."""
    if kernel.ordered or not kernel.grid or list(tile) != [kernel.grid[-1].symbol]:
        return None
    *above, loop = kernel.grid
    rows, body = prod(size_hint(each.extent) for each in above), instructions(kernel.body)
    if size_hint(loop.extent) < _LONG or rows < _FEW_ROWS or not loads_odd_rows(body, Symbol(loop.symbol)):
        return None
    once, each = _once_a_row(body, Symbol(loop.symbol))
    written = {i.buffer for i in body if isinstance(i, Store)}
    if any(isinstance(i, Store) or (isinstance(i, Load) and i.buffer in written) for i in once):
        return None
    if 2 * len(once) < len(each):
        return None
    return replace(kernel, grid=tuple(above), body=(*once, replace(loop, body=each)))


def _once_a_row(body: Sequence[Instr], symbol: Symbol) -> tuple[tuple[Instr, ...], tuple[Instr, ...]]:
    """The instructions that do not vary along a loop, and the others."""
    varying, once, each = {symbol.name}, list[Instr](), list[Instr]()
    for instr in body:
        used = {*operands(instr), *(s.name for expr in index_exprs(instr) for s in expr.symbols)}
        if used.isdisjoint(varying):
            once.append(instr)
            continue
        each.append(instr)
        if not isinstance(instr, Store):
            varying.add(instr.result)
    return tuple(once), tuple(each)


def _reduction_tile(
    tile: Sequence[tuple[str, Loop]],
    kernel: Kernel,
    looped: Sequence[PerfectNest],
    persistent: bool,
    limits: TileLimits,
) -> tuple[Config, bool]:
    """The tile, and whether its rows are whole. Rows that lie side by side are read in pieces of many at once, if that
    moves fewer bytes, see Note [Sectors]."""
    inner = _reads_along_rows(kernel, looped)
    first = _reduction_config(tile, looped, inner, persistent, limits)
    if inner and persistent:
        first = _row_config(kernel, tile, looped, limits.reduction // 4) or first
    if not tile:
        return first, persistent
    wide = _RUN // narrowest(kernel, looped, {loop.symbol: 1 for _, loop in tile})
    beside = _reduction_config(tile, looped, False, False, replace(limits, reduction=min(limits.reduction, 64 * wide)))
    moved = [_moved(kernel, tile, looped, config, whole) for config, whole in ((first, persistent), (beside, False))]
    return (beside, False) if moved[1] < _WORTH * moved[0] else (first, persistent)


def _moved(
    kernel: Kernel, tile: Sequence[tuple[str, Loop]], looped: Sequence[PerfectNest], config: Config, whole: bool
) -> float:
    blocks = {loop.symbol: config.block(name) for name, loop in tile}
    row = max(size_hint(nest.extent) for nest in looped) if whole else config.block("RBLOCK")
    return moved_bytes(kernel, looped, blocks, row, whole)


def _reduction_config(
    tile: Sequence[tuple[str, Loop]],
    looped: Sequence[PerfectNest],
    inner: bool,
    persistent: bool,
    limits: TileLimits,
) -> Config:
    longest = max(size_hint(nest.extent) for nest in looped)
    fits = next_power_of_two(longest)
    rblock = fits if persistent else min(fits, limits.reduction // 2 if inner else 64)
    left = max(1, limits.reduction // rblock)
    if inner:
        left = min(left, 64 if longest <= 64 else 8 if longest <= 512 else 1)
    blocks: dict[str, int] = {}
    for name, loop in reversed(tile):
        blocks[name] = min(next_power_of_two(size_hint(loop.extent)), left)
        left = max(1, left // blocks[name])
    total = rblock * prod(blocks.values())
    if not persistent:
        blocks["RBLOCK"] = rblock
    warps = min(16, total // 512) if inner else min(8, total // 256)
    return Config(tuple(blocks.items()), num_warps=max(1, warps))


def _row_config(
    kernel: Kernel, tile: Sequence[tuple[str, Loop]], looped: Sequence[PerfectNest], elements: int
) -> Config | None:
    """For whole rows that lie side by side, see Note [Warps of a row]; ``None`` for rows of more than ``elements``, as
    many as one warp computes."""
    row = next_power_of_two(max(size_hint(nest.extent) for nest in looped))
    if row > elements:
        return None
    rows = prod(size_hint(loop.extent) for loop in kernel.grid)
    left, blocks = elements // row, dict[str, int]()
    if rows // left < _FEW_ROWS:
        left = 1
    for name, loop in reversed(tile):
        blocks[name] = min(next_power_of_two(size_hint(loop.extent)), left)
        left = max(1, left // blocks[name])
    return Config(tuple(blocks.items()), num_warps=1 if rows >= _FEW_ROWS else max(1, min(8, row // 256)))


def _walked_config(walked: Loop, looped: Sequence[PerfectNest], rows: int) -> Config:
    """So many rows at once, see Note [Warps of a row]."""
    row = next_power_of_two(max(size_hint(nest.extent) for nest in looped))
    width = min(max(rows, _FEWEST // row), next_power_of_two(size_hint(walked.extent)))
    return Config((("XBLOCK", width),), num_warps=max(1, min(16, width * row // 512)))


def _reads_along_rows(kernel: Kernel, looped: Iterable[PerfectNest]) -> bool:
    """Whether the inner loops are what accesses move along by one element."""
    names = {param.name for param in memories(kernel)}
    for nest in looped:
        for instr in nest.body:
            if isinstance(instr, Load | Store) and instr.buffer in names:
                factor = instr.indices[0].coefficient(Symbol(nest.loops[-1].symbol))
                if factor is not None and factor == 1:
                    return True
    return not any(isinstance(i, Load | Index) for nest in looped for i in nest.body)
