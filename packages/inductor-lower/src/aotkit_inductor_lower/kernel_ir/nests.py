"""Normal form of a loop nest before code generation: flat offsets, split and merged loops.

Note [Normal form]
    1. Each load and store gets one flat offset (elements from the memory's first element) instead of one index
       per dimension; aliases are resolved to the memory they view.
    2. A loop over ``n`` whose variable occurs as ``i // d`` and ``i % d`` becomes two loops (``n/d`` by ``d``),
       so that reshaped views become plain strides.
    3. Loops are ordered by stride, and neighbours that are contiguous in every access are merged. A pointwise
       op on ``[B, S, H]`` ends as one loop.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..ir import Buffer, BufferKind, CheckedIndex, DType, Index, Instr, Load, LoopNest, Range, Reduce, Stage, Store
from ..ir.independence import tells_apart
from ..ops.dtypes import bits
from ..symbolic import Call, Expr, Symbol, SymbolKind, estimate, product, sym, to_expr

__all__ = ["LENGTH", "FlatNest", "Placement", "flatten_nest", "hint", "lower_bound", "map_expressions", "steps_grain"]

LENGTH = Symbol("length", SymbolKind.SIZE)  # the length of a loop that each launch's table gives
SIZE_HINT = 64  # what an unknown size counts as in cost estimates
FEW = 64  # loops shorter than this may be repeated to fill vectors


@dataclass(frozen=True, slots=True)
class Placement:
    """Where a buffer lives: the buffer that owns the memory, and this one's offset there in its own elements."""

    root: str
    offset: Expr


@dataclass(frozen=True, slots=True)
class FlatNest:
    """A nest in normal form. Loads and stores name the root memory and have exactly one index, the flat offset.

    ``positions``: for each argmin/argmax, the flattened position in the stage's original ranges.
    ``scratch``: buffers of one outer iteration. ``ordered``: outer iterations must run in order.
    ``nontemporal``: memories whose stores go past the caches, see Note [Non-temporal stores]. ``length``: what the size
    ``LENGTH`` is in this launch, for a nest that has it, see Note [Combo kernels].
    """

    name: str
    outer: tuple[Range, ...]
    stages: tuple[Stage, ...]
    positions: Mapping[str, Expr]
    memories: tuple[str, ...]
    sizes: tuple[Symbol, ...]
    scratch: tuple[Buffer, ...]
    ordered: bool
    nontemporal: frozenset[str] = frozenset()
    length: int | None = None

    def expressions(self) -> Iterator[Expr]:
        """Every index expression of the nest."""
        for stage in self.stages:
            for instr in stage.body:
                if isinstance(instr, Load | Store):
                    yield instr.indices[0]
                elif isinstance(instr, Index):
                    yield instr.expr
        yield from self.positions.values()


def flatten_nest(nest: LoopNest, buffers: Mapping[str, Buffer], memory: Mapping[str, Placement]) -> FlatNest:
    """The normal form of ``nest``. ``memory`` gives the owner of each buffer that is an alias."""
    flat = _flat_offsets(nest, buffers, memory)
    flat = _split_loops(flat)
    flat = _order_loops(flat)
    flat = _merge_loops(flat)
    return replace(flat, sizes=_sizes(flat))


def hint(expr: Expr) -> int:
    """A plausible value for cost estimates."""
    constant = expr.constant
    if constant is not None:
        return constant
    return estimate(expr, SIZE_HINT)


def steps_grain(nest: FlatNest) -> Expr | None:
    """For iterations that must run in order, but whose first loop's steps accumulate in different places: how many
    iterations one such step has; then steps may run at once. ``None`` for every other nest."""
    if not nest.ordered or len(nest.outer) < 2:
        return None
    first, *others = nest.outer
    apart = (
        tells_apart(instr.indices, (first,), (*others, *stage.ranges))
        for stage in nest.stages
        for instr in stage.body
        if isinstance(instr, Store) and instr.accumulates
    )
    return product(loop.size for loop in others) if all(apart) else None


def lower_bound(expr: Expr) -> float:
    """A lower bound: indices and sizes are not negative, computed values may be anything."""
    return _bounds(expr, {})[0]


# -- step 1 ---------------------------------------------------------------------------------------------


def _flat_offsets(nest: LoopNest, buffers: Mapping[str, Buffer], memory: Mapping[str, Placement]) -> FlatNest:
    positions: dict[str, Expr] = {}
    memories: dict[str, None] = {}
    rows: dict[str, Buffer] = {}

    def flat(name: str, indices: tuple[Expr, ...]) -> tuple[str, Expr]:
        buffer = buffers[name]
        offset = to_expr(0)
        for index, stride in zip(indices, buffer.strides, strict=True):
            offset = offset + index * stride
        if buffer.kind is BufferKind.SCRATCH:
            rows[name] = buffer
            return name, offset
        place = memory.get(name)
        root = place.root if place else name
        memories[root] = None
        return root, offset + place.offset if place else offset

    stages = []
    ordered = False
    for stage in nest.stages:
        body: list[Instr] = []
        for instr in stage.body:
            if isinstance(instr, Load | Store):
                root, offset = flat(instr.buffer, instr.indices)
                ordered = ordered or (isinstance(instr, Store) and instr.accumulates)
                body.append(replace(instr, buffer=root, indices=(offset,)))
                continue
            if isinstance(instr, Reduce) and instr.kind in ("argmin", "argmax"):
                positions[instr.result] = _position(stage.ranges)
            body.append(instr)
        stages.append(Stage(stage.ranges, tuple(body)))
    return FlatNest(nest.name, nest.outer, tuple(stages), positions, tuple(memories), (), tuple(rows.values()), ordered)


def _position(ranges: tuple[Range, ...]) -> Expr:
    position = to_expr(0)
    for loop in ranges:
        position = position * loop.size + sym(loop.symbol)
    return position


# -- step 2 ---------------------------------------------------------------------------------------------


def _split_loops(nest: FlatNest) -> FlatNest:
    """Split loops at the constants their variables are divided by, as long as that removes divisions."""
    nest = _simplify(nest)
    for _ in range(16):
        candidate = next((c for c in _split_candidates(nest)), None)
        if candidate is None:
            return nest
        nest = candidate
    return nest


def _split_candidates(nest: FlatNest) -> Iterator[FlatNest]:
    calls = _calls(nest)
    if not calls:
        return
    loops = {loop.symbol: loop for loop in _all_ranges(nest)}
    for call in calls:
        divisor = call.args[1].constant if call.fn in ("floordiv", "mod") else None
        if not divisor:
            continue
        for symbol in call.args[0].symbols:
            loop = loops.get(symbol.name)
            size = loop.size.constant if loop and symbol.kind is SymbolKind.INDEX else None
            factor = call.args[0].coefficient(symbol)
            step = factor.constant if factor is not None else None
            if not size or not step:
                continue
            inner = abs(divisor) // math.gcd(step, divisor)
            if 1 < inner < size and size % inner == 0:
                split = _simplify(_split(nest, symbol, size, inner))
                if len(_calls(split)) < len(calls):
                    yield split


def _split(nest: FlatNest, symbol: Symbol, size: int, inner: int) -> FlatNest:
    high = f"{symbol.name}h{inner}"
    ranges = (Range(high, to_expr(size // inner)), Range(symbol.name, to_expr(inner)))

    def widen(loops: tuple[Range, ...]) -> tuple[Range, ...]:
        return tuple(new for loop in loops for new in (ranges if loop.symbol == symbol.name else (loop,)))

    nest = replace(
        nest,
        outer=widen(nest.outer),
        stages=tuple(Stage(widen(stage.ranges), stage.body) for stage in nest.stages),
    )
    return map_expressions(nest, lambda e: e.substitute({symbol: sym(high) * inner + sym(symbol.name)}))


def _calls(nest: FlatNest) -> list[Call]:
    found: dict[Call, None] = {}

    def visit(expr: Expr) -> None:
        for monomial, _ in expr.terms:
            for atom in monomial:
                if isinstance(atom, Call):
                    found[atom] = None
                    for arg in atom.args:
                        visit(arg)

    for expr in nest.expressions():
        visit(expr)
    return list(found)


def _simplify(nest: FlatNest) -> FlatNest:
    upper = {Symbol(loop.symbol): loop.size.constant - 1 for loop in _all_ranges(nest) if loop.size.constant}
    zero = {Symbol(loop.symbol): to_expr(0) for loop in _all_ranges(nest) if loop.size.constant == 1}
    return map_expressions(nest, lambda e: _drop_divisions(e.substitute(zero), upper))


def _drop_divisions(expr: Expr, upper: Mapping[Symbol, int]) -> Expr:
    """``x // d -> 0`` and ``x % d -> x`` where ``0 <= x < d`` follows from the ranges."""
    if not any(isinstance(atom, Call) for monomial, _ in expr.terms for atom in monomial):
        return expr
    total = to_expr(0)
    for monomial, factor in expr.terms:
        product = to_expr(factor)
        for atom in monomial:
            product = product * (_drop_division(atom, upper) if isinstance(atom, Call) else to_expr(atom))
        total = total + product
    return total


def _drop_division(call: Call, upper: Mapping[Symbol, int]) -> Expr:
    args = tuple(_drop_divisions(arg, upper) for arg in call.args)
    divisor = args[1].constant if call.fn in ("floordiv", "mod") else None
    if divisor and divisor > 0:
        low, high = _bounds(args[0], upper)
        if low >= 0 and high < divisor:
            return to_expr(0) if call.fn == "floordiv" else args[0]
    if call.fn == "floordiv":
        return args[0] // args[1]
    if call.fn == "mod":
        return args[0] % args[1]
    return Expr((((Call(call.fn, args),), 1),))


def _bounds(expr: Expr, upper: Mapping[Symbol, int]) -> tuple[float, float]:
    low = high = 0.0
    for monomial, factor in expr.terms:
        a, b = float(factor), float(factor)
        for atom in monomial:
            x, y = _atom_bounds(atom, upper)
            products = [_times(p, q) for p in (a, b) for q in (x, y)]
            a, b = min(products), max(products)
        low, high = low + a, high + b
    return low, high


def _times(a: float, b: float) -> float:
    return 0.0 if a == 0 or b == 0 else a * b


def _atom_bounds(atom: Symbol | Call, upper: Mapping[Symbol, int]) -> tuple[float, float]:
    if isinstance(atom, Symbol):
        if atom.kind is SymbolKind.VALUE:
            return -math.inf, math.inf
        return 0.0, float(upper.get(atom, math.inf))
    args = [_bounds(arg, upper) for arg in atom.args]
    if atom.fn == "min":
        return min(a for a, _ in args), min(b for _, b in args)
    if atom.fn == "max":
        return max(a for a, _ in args), max(b for _, b in args)
    (low, high), (divisor_low, divisor_high) = args
    if atom.fn == "mod":
        return (0.0, divisor_high) if divisor_low >= 0 else (-math.inf, math.inf)
    if divisor_low > 0:
        return (0.0 if low >= 0 else low), (high if high >= 0 else 0.0)
    return -math.inf, math.inf


# -- step 3 ---------------------------------------------------------------------------------------------


def _order_loops(nest: FlatNest) -> FlatNest:
    """Widest stride outside. Outer loops go by the stores, inner loops by the loads."""
    stores = [i.indices[0] for s in nest.stages for i in s.body if isinstance(i, Store)]
    outer = nest.outer if nest.ordered else _by_stride(nest.outer, stores)
    stages = []
    for stage in nest.stages:
        accesses = [i.indices[0] for i in stage.body if isinstance(i, Load | Store)]
        ordered = stage.scans or any(isinstance(i, Store) and i.accumulates for i in stage.body)
        stages.append(stage if ordered else Stage(_by_stride(stage.ranges, accesses), stage.body))
    return replace(nest, outer=outer, stages=tuple(stages))


def _by_stride(loops: tuple[Range, ...], offsets: list[Expr]) -> tuple[Range, ...]:
    if len(loops) < 2 or not offsets:
        return loops

    def stride(loop: Range) -> int:
        widest = 0
        for offset in offsets:
            factor = offset.coefficient(Symbol(loop.symbol))
            widest = max(widest, abs(hint(factor)) if factor is not None else 1)
        return widest

    return tuple(sorted(loops, key=stride, reverse=True))


def _merge_loops(nest: FlatNest) -> FlatNest:
    nest = _drop_unit_loops(nest)
    nest = _merge_in(nest, nest.outer, lambda n, loops: replace(n, outer=loops))
    for position, stage in enumerate(nest.stages):

        def put(n: FlatNest, loops: tuple[Range, ...], at: int = position) -> FlatNest:
            stages = tuple(Stage(loops, s.body) if k == at else s for k, s in enumerate(n.stages))
            return replace(n, stages=stages)

        nest = _merge_in(nest, stage.ranges, put)
    return nest


def _drop_unit_loops(nest: FlatNest) -> FlatNest:
    """Outer loops of one iteration vanish. A stage keeps one loop, since stages without loops are row scope."""

    def keep(loops: tuple[Range, ...]) -> tuple[Range, ...]:
        return tuple(loop for loop in loops if loop.size.constant != 1)

    stages = tuple(Stage(keep(s.ranges) or s.ranges[:1], s.body) for s in nest.stages)
    return replace(nest, outer=keep(nest.outer), stages=stages)


def _merge_in(
    nest: FlatNest, loops: tuple[Range, ...], put: Callable[[FlatNest, tuple[Range, ...]], FlatNest]
) -> FlatNest:
    position = len(loops) - 2
    while position >= 0:
        a, b = loops[position], loops[position + 1]
        transposed = _transposed(nest, a, b)
        if b.size.constant != 0 and _jointly_contiguous(nest, a, b, transposed):
            merged = Range(b.symbol, a.size * b.size)
            loops = (*loops[:position], merged, *loops[position + 2 :])
            zero, again = {Symbol(a.symbol): to_expr(0)}, {Symbol(b.symbol): sym(b.symbol) % b.size}
            envs = dict.fromkeys(transposed, again)
            nest = put(map_expressions(nest, lambda e, z=zero, t=envs: e.substitute(t.get(e, z))), loops)  # type: ignore[misc]
        position -= 1
    return nest


def _transposed(nest: FlatNest, a: Range, b: Range) -> frozenset[Expr]:
    """What the outer loops ``a`` and ``b`` read for each ``a`` alike, before a long inner loop: it may be loaded from
    ``b % size``, where ``b`` alone is too short for vectors."""
    if a not in nest.outer or nest.ordered or (b.size.constant or FEW) >= FEW:
        return frozenset()
    ranges = [r for stage in nest.stages for r in stage.ranges]
    if hint(product(r.size for r in ranges)) < FEW:
        return frozenset()
    still = {Symbol(r.symbol) for r in (a, *ranges)}
    loads = [i.indices[0] for stage in nest.stages for i in stage.body if isinstance(i, Load)]
    return frozenset(e for e in loads if Symbol(b.symbol) in e.symbols and still.isdisjoint(e.symbols))


def _jointly_contiguous(nest: FlatNest, a: Range, b: Range, transposed: frozenset[Expr]) -> bool:
    """Whether stepping ``a`` once is stepping ``b`` through its whole range, in every expression but ``transposed``."""
    outer, inner = Symbol(a.symbol), Symbol(b.symbol)
    for expr in nest.expressions():
        if expr in transposed:
            continue
        if outer not in expr.symbols and inner not in expr.symbols:
            continue
        x, y = expr.coefficient(outer), expr.coefficient(inner)
        if x is None or y is None or x != y * b.size:
            return False
    return True


# -- helpers ---------------------------------------------------------------------------------------------


def _all_ranges(nest: FlatNest) -> Iterable[Range]:
    yield from nest.outer
    for stage in nest.stages:
        yield from stage.ranges


def map_expressions(nest: FlatNest, change: Callable[[Expr], Expr]) -> FlatNest:
    """The nest with every index expression changed."""
    stages = []
    for stage in nest.stages:
        body = []
        for instr in stage.body:
            if isinstance(instr, Load | Store):
                instr = replace(instr, indices=(change(instr.indices[0]),))
            elif isinstance(instr, Index):
                instr = replace(instr, expr=change(instr.expr))
            body.append(instr)
        stages.append(Stage(stage.ranges, tuple(body)))
    positions = {name: change(expr) for name, expr in nest.positions.items()}
    return replace(nest, stages=tuple(stages), positions=positions)


def _sizes(nest: FlatNest) -> tuple[Symbol, ...]:
    found: dict[Symbol, None] = {}

    def visit(expr: Expr) -> None:
        for symbol in sorted(expr.symbols, key=str):
            if symbol.kind is SymbolKind.SIZE:
                found[symbol] = None

    for expr in nest.expressions():
        visit(expr)
    for loop in _all_ranges(nest):
        visit(loop.size)
    for stage in nest.stages:
        for instr in stage.body:
            if isinstance(instr, CheckedIndex):
                visit(instr.size)
    for row in nest.scratch:
        for expr in (*row.sizes, *row.strides):
            visit(expr)
    return tuple(found)


def element_bits(nest: FlatNest) -> int:
    """The element width that vector lengths go by: the widest of what most of the nest moves and computes."""
    counts: dict[int, int] = {}
    for stage in nest.stages:
        for instr in stage.body:
            dtype = getattr(instr, "dtype", None)
            if isinstance(dtype, DType) and dtype is not DType.BOOL:
                counts[bits(dtype)] = counts.get(bits(dtype), 0) + 1
    if not counts:
        return 8
    if 8 * counts.get(32, 0) > counts.get(64, 0):
        return 32
    return 64 if 64 in counts else min(counts)
