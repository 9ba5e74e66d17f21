"""Kernels as renderers read them: outer loops around stages, a view of :class:`~.nodes.Kernel`."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..ir import Buffer, BufferKind, DType, Index, Instr, Load, Range, Reduce, Stage, Store
from ..ir.independence import tells_apart
from ..ops.dtypes import bits, torch_name
from ..symbolic import Expr, Symbol, SymbolKind, estimate, product, to_expr
from .nodes import Kernel, Loop
from .walk import perfect_nest

__all__ = ["LENGTH", "FlatNest", "Placement", "flat_nest", "hint", "map_expressions", "steps_grain"]

LENGTH = Symbol("length", SymbolKind.SIZE)  # the length of a loop that each launch's table gives
SIZE_HINT = 64  # what an unknown size counts as in cost estimates


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


def flat_nest(kernel: Kernel) -> FlatNest:
    """The kernel as outer loops around stages, its perfect nests; what is beside these is a stage without ranges."""
    stages: list[Stage] = []
    beside: list[Instr] = []
    positions: dict[str, Expr] = {}
    for stmt in kernel.body:
        if not isinstance(stmt, Loop):
            beside.append(stmt)
            continue
        if beside:
            stages.append(Stage((), tuple(beside)))
            beside = []
        stages.append(_stage(stmt, positions))
    if beside:
        stages.append(Stage((), tuple(beside)))
    return FlatNest(
        kernel.name,
        tuple(Range(loop.symbol, loop.extent) for loop in kernel.grid),
        tuple(stages),
        positions,
        tuple(param.name for param in kernel.params if param.kind == "memory"),
        tuple(Symbol(param.name, SymbolKind.SIZE) for param in kernel.params if param.kind == "size"),
        tuple(
            Buffer(s.name, torch_name(s.dtype), (s.extent,), (to_expr(1),), BufferKind.SCRATCH) for s in kernel.scratch
        ),
        kernel.ordered,
    )


def _stage(loop: Loop, positions: dict[str, Expr]) -> Stage:
    """A perfect nest. The positions of argmin and argmax are taken out of the instructions."""
    loops, inner = perfect_nest(loop)
    body: list[Instr] = []
    for instr in inner:
        assert not isinstance(instr, Loop), "renderers know no trees of loops"
        if isinstance(instr, Reduce) and instr.position is not None:
            positions[instr.result] = instr.position
            instr = replace(instr, position=None)
        body.append(instr)
    return Stage(tuple(Range(loop.symbol, loop.extent) for loop in loops), tuple(body))


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


# -- helpers ---------------------------------------------------------------------------------------------


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
