"""Choosing the vector variable of a nest, and how many vectors are worked on at once.

Every candidate is costed over the strides of all accesses: a unit stride moves whole vectors, stride 0 one
scalar, anything else one scalar per lane. Inner candidates vectorise each stage over one of its own loops
(row kernels); outer candidates put neighbouring outer iterations into the lanes (pointwise, column reductions).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ...ir import CheckedIndex, Compute, Index, Instr, Load, Range, Reduce, Stage, Store
from ...ir.independence import tells_apart
from ...kernel_ir.nests import FlatNest, element_bits, hint, map_expressions
from ...ops.scalar import LONG, TRAPPING
from ...symbolic import Expr, Symbol, SymbolKind, estimate, product, to_expr
from .machine import Machine

__all__ = ["VectorPlan", "choose_vectors", "masked_tail", "outer_tail", "version_loops"]

LEAST_TAIL = 4  # elements for which a masked vector pays
FEW = 8  # what a size is that turns out to be small


@dataclass(frozen=True, slots=True)
class VectorPlan:
    """``outer``: the outer loop in the lanes, or ``None`` for inner vectorisation with ``inner`` naming one loop per
    stage (``None``: scalar). ``interleave``: vectors per step, per stage for inner vectorisation. ``tile``: the outer
    loop whose steps are interleaved, see Note [Tiles]. ``work``: estimated scalar operations of one element."""

    lanes: int
    outer: str | None
    inner: tuple[str | None, ...]
    interleave: tuple[int, ...]
    work: int
    tile: str | None = None


def choose_vectors(nest: FlatNest, target: Machine) -> VectorPlan:
    """The cheapest way to put the nest into vectors."""
    lanes = target.lanes(element_bits(nest))
    best: tuple[float, str | None, tuple[str | None, ...]] | None = None
    inner, cost = _inner_choice(nest, lanes, target)
    scans = any(stage.scans for stage in nest.stages)
    if any(inner) or scans:
        best = (cost, None, inner)
    for position, loop in enumerate(nest.outer):
        if not all(_keeps_order(stage, (*nest.outer, *stage.ranges), position) for stage in nest.stages):
            continue
        cost = _outer_cost(nest, loop, lanes, target)
        if best is None or cost < best[0]:
            best = (cost, loop.symbol, tuple(None for _ in nest.stages))
    work = max(1, sum(_body_weight(stage) for stage in nest.stages))
    if best is None:
        return VectorPlan(lanes, None, tuple(None for _ in nest.stages), tuple(1 for _ in nest.stages), work)
    _, outer, per_stage = best
    tiled = _tile_choice(nest, lanes) if work <= 24 else None
    if tiled is not None and tiled[0] < best[0]:
        _, outer, tile = tiled
        return VectorPlan(lanes, outer, tuple(None for _ in nest.stages), (lanes,) * len(nest.stages), work, tile)
    if outer is not None:
        size = next(loop.size for loop in nest.outer if loop.symbol == outer)
        wanted = _outer_interleave(nest)
        whole, rest = divmod(size.constant or 0, lanes)
        joint = wanted == 4 and not rest and 4 < whole <= (16 if target.vector_bits == 512 else 8)  # one walk over rows
        interleave = whole if joint else _fit_interleave(wanted, size, lanes)
        return VectorPlan(lanes, outer, per_stage, (interleave,) * len(nest.stages), work)
    counts = tuple(_stage_copies(stage, name, lanes) for stage, name in zip(nest.stages, per_stage, strict=True))
    return VectorPlan(lanes, None, per_stage, counts, work)


def version_loops(nest: FlatNest, plan: VectorPlan, target: Machine) -> VectorPlan | None:
    """Another loop in the lanes for when the one of ``plan`` turns out to be short, if that would cost less than half.

    A window over images of unknown sizes runs along them, with all lanes busy; over images of 4 by 4, across channels.
    """
    chosen = next((loop for loop in nest.outer if loop.symbol == plan.outer), None)
    if chosen is None or chosen.size.constant is not None or plan.tile is not None or nest.ordered:
        return None
    env = {s: to_expr(FEW) for s in chosen.size.symbols}
    try:
        outer = tuple(Range(loop.symbol, loop.size.substitute(env)) for loop in nest.outer)
        small = replace(map_expressions(nest, lambda e: e.substitute(env)), outer=outer)
    except ZeroDivisionError:  # s // (t // 16), which are never so small
        return None
    costs = {loop.symbol: _outer_cost(small, loop, plan.lanes, target) for loop in outer}
    best = min(nest.outer, key=lambda loop: costs[loop.symbol])
    if estimate(best.size, 1) < plan.lanes or 2 * costs[best.symbol] > costs[chosen.symbol]:
        return None
    interleave = _fit_interleave(_outer_interleave(nest), best.size, plan.lanes)
    return replace(plan, outer=best.symbol, interleave=(interleave,) * len(nest.stages))


# -- costs -----------------------------------------------------------------------------------------------


def _inner_choice(nest: FlatNest, lanes: int, target: Machine) -> tuple[tuple[str | None, ...], float]:
    trips = 1.0
    for loop in nest.outer:
        trips *= max(1, hint(loop.size))
    names: list[str | None] = []
    total = 0.0
    for stage in nest.stages:
        if not stage.ranges or stage.scans:
            names.append(None)
            total += trips * max(1, hint(_iterations(stage))) * _stage_cost(stage, None, 1)
            continue
        nested, first = (*nest.outer, *stage.ranges), len(nest.outer)
        loops = [loop for at, loop in enumerate(stage.ranges, first) if _keeps_order(stage, nested, at)]
        cost, name = min((_stage_loop_cost(stage, loop, lanes, target), loop.symbol) for loop in loops)
        names.append(name)
        reduces = sum(isinstance(i, Reduce) for i in stage.body)
        total += trips * (cost + 3.0 + 5.0 * reduces)
    return tuple(names), total


def _keeps_order(stage: Stage, loops: Sequence[Range], position: int) -> bool:
    """Whether what is added to one place stays in order when iterations of one of these nested loops go into the lanes.

    Loops inside of it then see all lanes of a step before their own next iteration. So the lanes have to add to
    different places, or the iterations of the inner loops have to.
    """
    outside, loop, inside = loops[:position], loops[position], loops[position + 1 :]
    return all(
        tells_apart(instr.indices, inside, (*outside, loop)) or tells_apart(instr.indices, (loop,), (*outside, *inside))
        for instr in stage.body
        if isinstance(instr, Store) and instr.accumulates
    )


def _iterations(stage: Stage) -> Expr:
    return product(loop.size for loop in stage.ranges)


def _stage_loop_cost(stage: Stage, loop: Range, lanes: int, target: Machine) -> float:
    others = 1.0
    for other in stage.ranges:
        if other.symbol != loop.symbol:
            others *= max(1, hint(other.size))
    vectors, tail = _steps(loop.size, lanes)
    symbol = Symbol(loop.symbol)
    if masked_tail(stage, loop, lanes, target):
        return others * ((vectors + 1.5) * _stage_cost(stage, symbol, lanes) + 1.0)
    return others * (vectors * _stage_cost(stage, symbol, lanes) + tail * _stage_cost(stage, None, 1) + 1.0)


def _steps(size: Expr, lanes: int) -> tuple[float, float]:
    """Whole vectors and elements after them. Of a size that is not known half a vector's elements are left on average,
    so that of two loops that vectorise alike the longer one is taken."""
    count = max(1, hint(size))
    tail = count % lanes if size.constant is not None else min(count, lanes / 2)
    return (count - tail) / lanes, tail


def _outer_cost(nest: FlatNest, loop: Range, lanes: int, target: Machine) -> float:
    trips = 1.0
    for other in nest.outer:
        if other.symbol != loop.symbol:
            trips *= max(1, hint(other.size))
    vectors, tail = _steps(loop.size, lanes)
    if tail and outer_tail(nest, loop, lanes, target):
        vectors, tail = vectors + 1.5, 0
    symbol = Symbol(loop.symbol)
    rows = frozenset(row.name for row in nest.scratch)
    total = 0.0
    for stage in nest.stages:
        inner = 1.0
        for other in stage.ranges:
            inner *= max(1, hint(other.size))
        # rows far apart, walked in step, fall out of the cache
        far = 2.0 if stage.scans and _stage_cost(stage, symbol, lanes) > 2.0 * lanes else 1.0
        total += far * inner * (vectors * _stage_cost(stage, symbol, lanes, rows) + tail * _stage_cost(stage, None, 1))
    return trips * (total + 1.0)


def _tile_choice(nest: FlatNest, lanes: int) -> tuple[float, str, str] | None:
    """The cheapest pair of vector and tile variable of a pointwise nest, with its cost."""
    if nest.ordered or nest.scratch or any(stage.ranges for stage in nest.stages) or lanes > 16:
        return None
    best: tuple[float, str, str] | None = None
    for vector in nest.outer:
        for tile in nest.outer:
            if tile is vector or min(hint(tile.size), hint(vector.size)) < lanes:
                continue
            cost = _tile_cost(nest, Symbol(vector.symbol), Symbol(tile.symbol), lanes)
            if cost is None:
                continue
            trips = 1.0
            for loop in nest.outer:
                trips *= max(1, hint(loop.size))
            if best is None or cost * trips / lanes < best[0]:
                best = (cost * trips / lanes, vector.symbol, tile.symbol)
    return best


def _tile_cost(nest: FlatNest, vector: Symbol, tile: Symbol, lanes: int) -> float | None:
    """Cost of one vector with this pair, ``None`` if nothing is transposed."""
    total, any_transposed = 0.0, False
    for stage in nest.stages:
        for instr in stage.body:
            if isinstance(instr, Load | Store):
                plain = _access_cost(instr, vector, lanes)
                along = instr.indices[0].coefficient(tile)
                transposed = along is not None and along.constant == 1 and instr.mask is None
                any_transposed = any_transposed or (plain > 5.0 and transposed)
                total += 5.0 if plain > 5.0 and transposed else plain
            elif isinstance(instr, Compute):
                total += 10.0 if instr.op in LONG else 0.7
    return total if any_transposed else None


def _stage_cost(stage: Stage, vector: Symbol | None, lanes: int, rows: frozenset[str] = frozenset()) -> float:
    """Cost of one step of the body with ``vector`` in the lanes; ``rows`` are scratch with an element per lane."""
    total = 0.0
    for instr in stage.body:
        if isinstance(instr, Load | Store) and instr.buffer in rows:
            indirect = any(s.kind is SymbolKind.VALUE for s in instr.indices[0].symbols)
            total += 1.2 * lanes if indirect else 1.0
        elif isinstance(instr, Load | Store):
            total += _access_cost(instr, vector, lanes)
        elif isinstance(instr, Compute):
            total += 10.0 if instr.op in LONG else 0.7
        elif isinstance(instr, Reduce):
            total += 1.0
    return total


def _access_cost(instr: Load | Store, vector: Symbol | None, lanes: int) -> float:
    if vector is None:
        return 1.0
    offset = instr.indices[0]
    indirect = any(s.kind is SymbolKind.VALUE for s in offset.symbols)
    slope = offset.coefficient(vector)
    step = slope.constant if slope is not None else None
    if step == 0:
        return 1.0 * lanes if indirect or isinstance(instr, Store) else 0.3
    if step in (1, -1) and not (isinstance(instr, Store) and instr.accumulates and indirect):
        return 1.0
    wide = 1.5 if step is None or abs(step) >= 16 else 1.0
    return wide * (1.2 if isinstance(instr, Load) else 1.6) * lanes


def masked_tail(stage: Stage, loop: Range, lanes: int, target: Machine) -> int:
    """How many elements of ``loop`` one masked vector takes at its end; 0 where they are taken one by one.

    Note [Masked tails]
        With AVX-512 the elements that fill no vector are loaded, stored and reduced under a mask: a layer norm over
        rows of 31 floats takes about as long as one over 32. A lane that does not exist is not read, holds 0, and
        counts as the identity in reductions. That needs accesses with step 1 or 0, no instruction that may report an
        error, and more than a few elements. Of outer iterations a mask also takes those that are not known to fill a
        vector, with accesses of any step: rather one slow vector than up to fifteen slow elements. AVX2 lacks masks
        for narrow types; it keeps single elements, as plain x86-64 does.
    """
    size = loop.size.constant
    if target.vector_bits != 512 or size is None or size < lanes or size % lanes < LEAST_TAIL or stage.scans:
        return 0
    symbol = Symbol(loop.symbol)
    for instr in stage.body:
        if isinstance(instr, Load | Store):
            slope = instr.indices[0].coefficient(symbol)
            if slope is None or not (slope == 1 or (slope == 0 and isinstance(instr, Load))):
                return 0
        if not _bears_mask(instr) or isinstance(instr, Index):
            return 0
    return size % lanes


def outer_tail(nest: FlatNest, loop: Range, lanes: int, target: Machine) -> bool:
    """Whether one masked vector takes what is left of an outer loop."""
    size = loop.size.constant
    if target.vector_bits != 512 or nest.ordered or (size is not None and size % lanes < LEAST_TAIL):
        return False
    return all(_bears_mask(instr) for stage in nest.stages for instr in stage.body)


def _bears_mask(instr: Instr) -> bool:
    """Whether an instruction may be computed for lanes that do not exist."""
    if isinstance(instr, Load | Store):
        indirect = any(s.kind is SymbolKind.VALUE for s in instr.indices[0].symbols)
        return not indirect and not (isinstance(instr, Store) and instr.accumulates)
    return not (isinstance(instr, CheckedIndex) or (isinstance(instr, Compute) and instr.op in TRAPPING))


# -- vectors per step ------------------------------------------------------------------------------------


def _body_weight(stage: Stage) -> int:
    weight = 0
    for instr in stage.body:
        if isinstance(instr, Compute):
            weight += 10 if instr.op in LONG else 1
        elif isinstance(instr, Load | Store | Reduce):
            weight += 1
    return weight


def _outer_interleave(nest: FlatNest) -> int:
    weight = sum(_body_weight(stage) for stage in nest.stages)
    if any(isinstance(i, Compute) and i.op in LONG for s in nest.stages for i in s.body):
        return 1
    if any(isinstance(i, Reduce) for s in nest.stages for i in s.body):
        return 4 if weight <= 12 else 2 if weight <= 30 else 1
    return 2 if weight <= 12 else 1


def _stage_copies(stage: Stage, name: str | None, lanes: int) -> int:
    if name is None:
        return 1
    size = next(loop.size for loop in stage.ranges if loop.symbol == name)
    weight = _body_weight(stage)
    reduces = sum(isinstance(i, Reduce) for i in stage.body)
    short = size.constant is not None and size.constant < 32 * lanes
    wanted = (4 if weight <= 8 and not short else 2) if reduces else (2 if weight <= 12 else 1)
    if any(isinstance(i, Compute) and i.op in LONG for i in stage.body):
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
