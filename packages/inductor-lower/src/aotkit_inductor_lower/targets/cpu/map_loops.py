"""Choosing the vector variable of a kernel, and how many vectors are worked on at once.

Every candidate is costed over the strides of all accesses: a unit stride moves whole vectors, stride 0 one
scalar, anything else one scalar per lane. Inner candidates vectorise each perfect nest over one of its own loops
(row kernels); outer candidates put neighbouring iterations of the grid into the lanes (pointwise, column reductions).

Note [Maps of a CPU kernel]
    One loop of the grid is in ``lanes``, or one of each perfect nest of the body, then its innermost; or none. The
    other loops of the grid are ``units`` of work, but for the ``tile`` of Note [Tiles] and the ``strip`` of Note
    [Strips]. The tail of lanes is
    ``masked`` as far as Note [Masked tails] goes, and ``scalar`` else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import replace
from types import MappingProxyType

from ...ir import CheckedIndex, Compute, DType, Index, Instr, Load, Range, Reduce, Store
from ...ir.independence import checked_sizes, tells_apart
from ...ir.walk import value_types
from ...kernel_ir.bounds import hint
from ...kernel_ir.nodes import Kernel, Loop, LoopMap, Tail
from ...kernel_ir.walk import PerfectNest, loops_of_values, map_expressions, perfect_nests, with_nests
from ...ops.dtypes import bits
from ...ops.scalar import LONG, TRAPPING
from ...symbolic import Expr, Symbol, SymbolKind, estimate, to_expr
from .beside import loop_beside, with_sums_beside
from .machine import Machine
from .strips import ROWS, loop_within

__all__ = ["bears_mask", "map_loops", "map_rows", "version_loops", "work_of"]

LEAST_TAIL = 4  # elements for which a masked vector pays
LEAST_WEIGHT = 12  # of a body for which a masked vector of outer iterations pays with AVX2
FEW_APART = 4
FEW = 8  # what a size is that turns out to be small


def map_loops(kernel: Kernel, target: Machine) -> Kernel:
    """The kernel with the cheapest way to put it into vectors."""
    nests = perfect_nests(kernel)
    lanes = target.lanes(element_bits(nests))
    best: tuple[float, str | None, tuple[str | None, ...]] | None = None
    inner, cost = _inner_choice(kernel, nests, lanes, target)
    if any(inner) or any(nest.scans for nest in nests):
        best = (cost, None, inner)
    for position, loop in enumerate(kernel.grid):
        if kernel.ordered and loop.extent.constant is not None and loop.extent.constant < lanes:
            continue  # it would only become the innermost
        if not all(_keeps_order(nest, (*kernel.grid, *nest.loops), position) for nest in nests):
            continue
        cost = _outer_cost(kernel, nests, loop, lanes, target)
        if best is None or cost < best[0]:
            best = (cost, loop.symbol, tuple(None for _ in nests))
    if best is None:
        return _along_rows(kernel, nests, tuple(None for _ in nests), lanes, target)
    _, outer, per_nest = best
    tiled = _tile_choice(kernel, nests, lanes) if _weight(nests) <= 24 else None
    if tiled is not None and tiled[0] < best[0]:
        _, outer, tile = tiled
        return _across_grid(kernel, {outer: _lanes(_loop(kernel, outer), lanes, lanes), tile: _tile_map(lanes)})
    if outer is None:
        return _along_rows(kernel, nests, per_nest, lanes, target)
    loop = _loop(kernel, outer)
    wanted = _outer_interleave(nests)
    whole, rest = divmod(loop.extent.constant or 0, lanes)
    joint = wanted == 4 and not rest and 4 < whole <= (16 if target.vector_bits == 512 else 8)  # one walk over rows
    interleave = whole if joint else _fit_interleave(wanted, loop.extent, lanes)
    masked = outer_tail(kernel, nests, loop, lanes, target)
    if target.vector_bits == 512:
        beside = loop_beside(kernel, nests, loop)
        if beside is not None:
            maps = {outer: _lanes(loop, lanes, 1, masked=masked), beside[0].symbol: LoopMap("unroll", beside[1])}
            return _across_grid(kernel, maps)
        kernel = with_sums_beside(kernel)
    maps = {outer: _lanes(loop, lanes, interleave, masked=masked)}
    within = loop_within(kernel, nests, loop)
    if within is not None:
        maps[within.symbol] = LoopMap("strip", ROWS)
    return _across_grid(kernel, maps)


def map_rows(kernel: Kernel, target: Machine) -> Kernel:
    """The kernel with a loop of each nest in the lanes, and the grid's loops as units of work."""
    nests = perfect_nests(kernel)
    lanes = target.lanes(element_bits(nests))
    names, _ = _inner_choice(kernel, nests, lanes, target)
    return _along_rows(kernel, nests, names, lanes, target)


def version_loops(kernel: Kernel, target: Machine) -> Kernel:
    """A kernel that :func:`map_loops` made, with another version that has another loop in the lanes, for when the
    chosen one turns out to be short, if that would cost less than half.

    A window over images of unknown sizes runs along them, with all lanes busy; over images of 4 by 4, across channels.
    """
    chosen = next((loop for loop in kernel.grid if loop.map.kind == "lanes"), None)
    if chosen is None or chosen.extent.constant is not None or kernel.ordered:
        return kernel
    if any(loop.map.kind == "tile" for loop in kernel.grid):
        return kernel
    lanes, env = chosen.map.width, {s: to_expr(FEW) for s in chosen.extent.symbols}
    try:
        grid = tuple(replace(loop, extent=loop.extent.substitute(env)) for loop in kernel.grid)
        small = replace(map_expressions(kernel, lambda e: e.substitute(env)), grid=grid)
    except ZeroDivisionError:  # s // (t // 16), which are never so small
        return kernel
    nests = perfect_nests(small)
    costs = {loop.symbol: _outer_cost(small, nests, loop, lanes, target) for loop in grid}
    best = min(kernel.grid, key=lambda loop: costs[loop.symbol])
    if estimate(best.extent, 1) < lanes or 2 * costs[best.symbol] > costs[chosen.symbol]:
        return kernel
    interleave = _fit_interleave(_outer_interleave(nests), best.extent, lanes)
    masked = outer_tail(kernel, perfect_nests(kernel), best, lanes, target)
    short = _across_grid(kernel, {best.symbol: _lanes(best, lanes, interleave, masked=masked)})
    return replace(kernel, versions=((lanes // 2 - chosen.extent, short),))


def work_of(kernel: Kernel) -> Expr:
    """Estimated scalar operations of a whole launch."""
    nests = perfect_nests(kernel)
    work = to_expr(max(1, _weight(nests)))
    for loop in kernel.grid:
        work = work * loop.extent
    return work * max((nest.extent for nest in nests), key=hint, default=to_expr(1))


# -- maps ------------------------------------------------------------------------------------------------

_UNITS = LoopMap("units")


def _tile_map(lanes: int) -> LoopMap:
    return LoopMap("tile", lanes, tail="scalar")


def _loop(kernel: Kernel, symbol: str) -> Loop:
    return next(loop for loop in kernel.grid if loop.symbol == symbol)


def _lanes(loop: Loop, width: int, interleave: int, *, masked: object = False) -> LoopMap:
    exact = loop.extent.constant is not None and loop.extent.constant % (width * interleave) == 0
    tail: Tail = "masked" if masked else "exact" if exact else "scalar"
    return LoopMap("lanes", width, interleave, tail=tail)


def _across_grid(kernel: Kernel, maps: dict[str, LoopMap]) -> Kernel:
    grid = [Loop(loop.symbol, loop.extent, (), maps.get(loop.symbol, _UNITS)) for loop in kernel.grid]
    return replace(kernel, grid=tuple(grid))


def _along_rows(
    kernel: Kernel, nests: Sequence[PerfectNest], names: Sequence[str | None], lanes: int, target: Machine
) -> Kernel:
    """The named loop of each nest in the lanes, as its innermost."""
    if not any(names):
        return _across_grid(kernel, {})
    made: list[PerfectNest] = []
    for nest, name in zip(nests, names, strict=True):
        chosen = next((loop for loop in nest.loops if loop.symbol == name), None)
        if chosen is not None:
            masked = masked_tail(nest, chosen, lanes, target)
            map_ = _lanes(chosen, lanes, _nest_interleave(nest, chosen, lanes), masked=masked)
            others = (loop for loop in nest.loops if loop is not chosen)
            nest = PerfectNest((*others, replace(chosen, map=map_)), nest.body)
        made.append(nest)
    return _across_grid(with_nests(kernel, made), {})


def element_bits(nests: Iterable[PerfectNest]) -> int:
    """The element width that vector lengths go by: the widest of what most of the kernel moves and computes."""
    counts: dict[int, int] = {}
    for nest in nests:
        for instr in nest.body:
            dtype = getattr(instr, "dtype", None)
            if isinstance(dtype, DType) and dtype is not DType.BOOL:
                counts[bits(dtype)] = counts.get(bits(dtype), 0) + 1
    if not counts:
        return 8
    if 8 * counts.get(32, 0) > counts.get(64, 0):
        return 32
    return 64 if 64 in counts else min(counts)


# -- costs -----------------------------------------------------------------------------------------------


def _trips(loops: Iterable[Loop], without: Loop | None = None) -> float:
    trips = 1.0
    for loop in loops:
        if without is None or loop.symbol != without.symbol:
            trips *= max(1, hint(loop.extent))
    return trips


def _inner_choice(
    kernel: Kernel, nests: Sequence[PerfectNest], lanes: int, target: Machine
) -> tuple[tuple[str | None, ...], float]:
    trips = _trips(kernel.grid)
    names: list[str | None] = []
    total = 0.0
    for nest in nests:
        if not nest.loops or nest.scans:
            names.append(None)
            total += trips * max(1, hint(nest.extent)) * _body_cost(nest, None, 1)
            continue
        nested, first = (*kernel.grid, *nest.loops), len(kernel.grid)
        loops = [loop for at, loop in enumerate(nest.loops, first) if _keeps_order(nest, nested, at)]
        cost, name = min((_loop_cost(nest, loop, lanes, target), loop.symbol) for loop in loops)
        names.append(name)
        reduces = sum(isinstance(i, Reduce) for i in nest.body)
        total += trips * (cost + 3.0 + 5.0 * reduces)
    return tuple(names), total


def _keeps_order(nest: PerfectNest, loops: Sequence[Loop], position: int) -> bool:
    """Whether what is added to one place stays in order when iterations of one of these nested loops go into the lanes.

    Loops inside of it then see all lanes of a step before their own next iteration. So the lanes have to add to
    different places, or the iterations of the inner loops have to.
    """
    adding = [i for i in nest.body if isinstance(i, Store) and i.accumulates]
    if not adding:
        return True
    ranges = [Range(loop.symbol, loop.extent) for loop in loops]
    outside, loop, inside = ranges[:position], ranges[position], ranges[position + 1 :]
    checked = checked_sizes(nest.body)
    return all(
        tells_apart(instr.indices, inside, (*outside, loop), checked=checked)
        or tells_apart(instr.indices, (loop,), (*outside, *inside), checked=checked)
        for instr in adding
    )


def _loop_cost(nest: PerfectNest, loop: Loop, lanes: int, target: Machine) -> float:
    others = _trips(nest.loops, loop)
    vectors, tail = _steps(loop.extent, lanes)
    symbol = Symbol(loop.symbol)
    if masked_tail(nest, loop, lanes, target):
        return others * ((vectors + 1.5) * _body_cost(nest, symbol, lanes) + 1.0)
    return others * (vectors * _body_cost(nest, symbol, lanes) + tail * _body_cost(nest, None, 1) + 1.0)


def _steps(size: Expr, lanes: int) -> tuple[float, float]:
    """Whole vectors and elements after them. Of a size that is not known half a vector's elements are left on average,
    so that of two loops that vectorise alike the longer one is taken."""
    count = max(1, hint(size))
    tail = count % lanes if size.constant is not None else min(count, lanes / 2)
    return (count - tail) / lanes, tail


def _outer_cost(kernel: Kernel, nests: Sequence[PerfectNest], loop: Loop, lanes: int, target: Machine) -> float:
    vectors, tail = _steps(loop.extent, lanes)
    if tail and outer_tail(kernel, nests, loop, lanes, target):
        vectors, tail = vectors + 1.5, 0
    symbol = Symbol(loop.symbol)
    rows = frozenset(row.name for row in kernel.scratch)
    total = 0.0
    for nest in nests:
        inner = _trips(nest.loops)
        # rows far apart, walked in step, fall out of the cache
        far = 2.0 if nest.scans and _body_cost(nest, symbol, lanes) > 2.0 * lanes else 1.0
        total += far * inner * (vectors * _body_cost(nest, symbol, lanes, rows) + tail * _body_cost(nest, None, 1))
    return _trips(kernel.grid, loop) * (total + 1.0)


def _tile_choice(kernel: Kernel, nests: Sequence[PerfectNest], lanes: int) -> tuple[float, str, str] | None:
    """The cheapest pair of vector and tile variable of a pointwise kernel, with its cost."""
    if kernel.ordered or kernel.scratch or any(nest.loops for nest in nests) or lanes > 16:
        return None
    best: tuple[float, str, str] | None = None
    for vector in kernel.grid:
        for tile in kernel.grid:
            if tile is vector or min(hint(tile.extent), hint(vector.extent)) < lanes:
                continue
            cost = _tile_cost(nests, Symbol(vector.symbol), Symbol(tile.symbol), lanes)
            if cost is None:
                continue
            trips = _trips(kernel.grid)
            if best is None or cost * trips / lanes < best[0]:
                best = (cost * trips / lanes, vector.symbol, tile.symbol)
    return best


def _tile_cost(nests: Sequence[PerfectNest], vector: Symbol, tile: Symbol, lanes: int) -> float | None:
    """Cost of one vector with this pair, ``None`` if nothing is transposed."""
    total, any_transposed = 0.0, False
    for nest in nests:
        for instr in nest.body:
            if isinstance(instr, Load | Store):
                plain = _access_cost(instr, vector, lanes)
                along = instr.indices[0].coefficient(tile)
                transposed = along is not None and along.constant == 1 and instr.mask is None
                any_transposed = any_transposed or (plain > 5.0 and transposed)
                total += 5.0 if plain > 5.0 and transposed else plain
            elif isinstance(instr, Compute):
                total += 10.0 if instr.op in LONG else 0.7
    return total if any_transposed else None


def _body_cost(nest: PerfectNest, vector: Symbol | None, lanes: int, rows: frozenset[str] = frozenset()) -> float:
    """Cost of one step of the body with ``vector`` in the lanes; ``rows`` are scratch with an element per lane."""
    total = 0.0
    computed = vector is not None and any(isinstance(instr, CheckedIndex) for instr in nest.body)
    loops = loops_of_values(nest) if computed else {}
    for instr in nest.body:
        if isinstance(instr, Load | Store) and instr.buffer in rows:
            indirect = any(s.kind is SymbolKind.VALUE for s in instr.indices[0].symbols)
            total += 1.2 * lanes if indirect else 1.0
        elif isinstance(instr, Load | Store):
            total += _access_cost(instr, vector, lanes, loops)
        elif isinstance(instr, Compute):
            total += 10.0 if instr.op in LONG else 0.7
        elif isinstance(instr, Reduce):
            total += 1.0
    return total


def _access_cost(
    instr: Load | Store, vector: Symbol | None, lanes: int, loops: Mapping[str, AbstractSet[str]] = MappingProxyType({})
) -> float:
    """``loops``: what the values of the nest vary along."""
    if vector is None:
        return 1.0
    offset = instr.indices[0]
    computed = [s.name for s in offset.symbols if s.kind is SymbolKind.VALUE]
    indirect = any(vector.name in loops.get(name, {vector.name}) for name in computed)
    slope = offset.coefficient(vector)
    step = slope.constant if slope is not None else None
    if step == 0:
        return 1.0 * lanes if indirect or isinstance(instr, Store) else 0.3
    if step in (1, -1) and not indirect:
        return 1.0
    wide = 1.5 if step is None or abs(step) >= 16 else 1.0
    return wide * (1.2 if isinstance(instr, Load) else 1.6) * lanes


def masked_tail(nest: PerfectNest, loop: Loop, lanes: int, target: Machine) -> int:
    """How many elements of ``loop`` one masked vector takes at its end; 0 where they are taken one by one.

    Note [Masked tails]
        With AVX-512 the elements that fill no vector are loaded, stored and reduced under a mask: a layer norm over
        rows of 31 floats takes about as long as one over 32. A lane that does not exist is not read, holds 0, and
        counts as the identity in reductions. That needs accesses with step 1 or 0, no instruction that may report an
        error, and more than a few elements. Of outer iterations a mask also takes those that are not known to fill a
        vector, with accesses of any step: rather one slow vector than up to fifteen slow elements.

        AVX2 has masks for elements of 32 bits, and stores under them take as long as a few single ones. So there a
        mask takes what is left of known sizes where all elements are of that kind and near each other, of outer
        iterations for bodies that are long enough (:data:`LEAST_WEIGHT`). Plain x86-64 takes single elements.
    """
    size = loop.extent.constant
    if size is None or size < lanes or size % lanes < LEAST_TAIL or nest.scans or not _has_masks([nest], target):
        return 0
    symbol = Symbol(loop.symbol)
    for instr in nest.body:
        if isinstance(instr, Load | Store):
            slope = instr.indices[0].coefficient(symbol)
            if slope is None or not (slope == 1 or (slope == 0 and isinstance(instr, Load))):
                return 0
        if not bears_mask(instr) or isinstance(instr, Index):
            return 0
    return size % lanes


def outer_tail(kernel: Kernel, nests: Sequence[PerfectNest], loop: Loop, lanes: int, target: Machine) -> bool:
    """Whether one masked vector takes what is left of a loop of the grid."""
    size = loop.extent.constant
    if kernel.ordered or (size is not None and size % lanes < LEAST_TAIL) or not _has_masks(nests, target):
        return False
    body = [instr for nest in nests for instr in nest.body]
    if target.vector_bits == 256:
        weight = sum(_body_weight(nest) * hint(nest.extent) for nest in nests)
        if size is None or weight < LEAST_WEIGHT or not _near(body, Symbol(loop.symbol)):
            return False
    return all(map(bears_mask, body))


def _has_masks(nests: Sequence[PerfectNest], target: Machine) -> bool:
    """Whether the processor loads and stores elements of these kinds under a mask."""
    if target.vector_bits != 256:
        return target.vector_bits == 512
    body = [instr for nest in nests for instr in nest.body]
    types: dict[str, DType | None] = {**value_types(body)}
    accessed = {i.dtype for i in body if isinstance(i, Load)} | {
        types.get(i.value) for i in body if isinstance(i, Store)
    }
    return accessed <= {DType.F32, DType.I32}


def _near(body: Iterable[Instr], symbol: Symbol) -> bool:
    """Whether what neighbours in a loop access lies side by side, or a few elements apart, or is the same."""
    slopes = [instr.indices[0].coefficient(symbol) for instr in body if isinstance(instr, Load | Store)]
    return all(
        slope is not None and slope.constant is not None and 0 <= slope.constant <= FEW_APART for slope in slopes
    )


def bears_mask(instr: Instr) -> bool:
    """Whether an instruction may be computed for lanes that do not exist."""
    if isinstance(instr, Load | Store):
        indirect = any(s.kind is SymbolKind.VALUE for s in instr.indices[0].symbols)
        return not indirect and not (isinstance(instr, Store) and instr.accumulates)
    return not (isinstance(instr, CheckedIndex) or (isinstance(instr, Compute) and instr.op in TRAPPING))


# -- vectors per step ------------------------------------------------------------------------------------


def _weight(nests: Iterable[PerfectNest]) -> int:
    return sum(_body_weight(nest) for nest in nests)


def _body_weight(nest: PerfectNest) -> int:
    weight = 0
    for instr in nest.body:
        if isinstance(instr, Compute):
            weight += 10 if instr.op in LONG else 1
        elif isinstance(instr, Load | Store | Reduce):
            weight += 1
    return weight


def _outer_interleave(nests: Sequence[PerfectNest]) -> int:
    weight = _weight(nests)
    if any(isinstance(i, Compute) and i.op in LONG for nest in nests for i in nest.body):
        return 1
    if any(isinstance(i, Reduce) for nest in nests for i in nest.body):
        return 4 if weight <= 12 else 2 if weight <= 30 else 1
    return 2 if weight <= 12 else 1


def _nest_interleave(nest: PerfectNest, loop: Loop, lanes: int) -> int:
    size = loop.extent
    weight = _body_weight(nest)
    reduces = sum(isinstance(i, Reduce) for i in nest.body)
    short = size.constant is not None and size.constant < 32 * lanes
    wanted = (4 if weight <= 8 and not short else 2) if reduces else (2 if weight <= 12 else 1)
    if any(isinstance(i, Compute) and i.op in LONG for i in nest.body):
        wanted = 1  # long enough to keep the processor busy by itself
    return _fit_interleave(wanted, size, lanes)


def _fit_interleave(wanted: int, size: Expr, lanes: int) -> int:
    """Fewer vectors per step where the loop is short or would leave a remainder of whole vectors."""
    n = size.constant
    if n is None:
        return min(wanted, 2)
    while wanted > 1 and (n // lanes) % wanted:
        wanted //= 2
    return wanted
