"""Pass: contractions that the target computes become nests, with what is computed of their results.

Note [What joins a product]
    A target that writes a product in tiles can do so only as long as its nest is a product and nothing else is summed
    in it. So the contraction stays whole while everything else is fused, as a call does; then it takes in one kernel
    that reads its result, if the nest of both is still one that the target has a form for. What the target has no form
    for after all is ATen's call again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..analysis.dependencies import Dependencies
from ..ir import Buffer, Contraction, Load, LoopNest, Program, Step, Store
from ..ir.walk import accesses, buffers_of, contractions, without_single_iterations
from ..passes import Decision, Pass, PassContext
from ..symbolic import Expr, to_expr
from .merge_nests import Kernel, merge_kernels

__all__ = ["PASS", "generate_contractions"]


def generate_contractions(program: Program, ctx: PassContext) -> Program:
    """The program without contractions: each is a nest, alone or with the kernel behind it, or ATen's call."""
    if not contractions(program):
        return program
    buffers, dependencies = buffers_of(program), Dependencies.of(program)
    steps: list[Step | None] = list(program.steps)
    for position, step in enumerate(program.steps):
        if not isinstance(step, Contraction):
            continue
        nest = without_single_iterations(step.as_nest())
        if step.library is not None and not ctx.target.renders_product(nest, buffers):
            steps[position] = step.library
            why = "the target has no form for its operands"
            ctx.decisions.append(Decision("contraction", step.name, step.library.target, False, why))
            continue
        steps[position] = nest
        if ctx.options.fuse:
            _take_in(position, nest, steps, buffers, dependencies, ctx)
    return replace(program, steps=tuple(step for step in steps if step is not None))


def _take_in(
    position: int,
    nest: LoopNest,
    steps: list[Step | None],
    buffers: Mapping[str, Buffer],
    dependencies: Dependencies,
    ctx: PassContext,
) -> None:
    """Put the product into the first kernel that reads its result, where nothing before that needs it."""
    if len(nest.writes) != 1:
        return
    (result,) = nest.writes
    reader = min(dependencies.readers.get(result, ()), default=position)
    follower = steps[reader]
    if reader <= position or not isinstance(follower, LoopNest) or _is_changed(nest, dependencies):
        return
    first, second = Kernel.of(nest, buffers), Kernel.of(follower, buffers, parts=dependencies.parts)
    store = first.stores[result]
    for load in (access for access in second.loads if access.buffer == result and access.plain):
        if ctx.fuel.left <= 0:
            return
        merged: object = merge_kernels(first, second, (store, load), buffers)
        if isinstance(merged, LoopNest) and _parts_neighbors(follower, result, buffers):
            merged = "neighbors in the result of the product would be stored apart"
        if isinstance(merged, LoopNest) and ctx.target.renders_product(merged, buffers):
            ctx.fuel.take()
            ctx.decisions.append(Decision("vertical", nest.name, follower.name, True, f"through {result}"))
            steps[position], steps[reader] = None, merged
            return
        why = merged if isinstance(merged, str) else "the kernel of both would be no product of matrices"
        ctx.decisions.append(Decision("vertical", nest.name, follower.name, False, why))


def _parts_neighbors(follower: LoopNest, result: str, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a kernel stores elements apart that are neighbors in the result that it reads: a copy into another
    layout. It is faster by itself, since vectors of a product's tiles would be taken apart."""
    accessed = [access for stage in follower.stages for access in accesses(stage.body)]
    places = [_place(access, buffers) for access in accessed if isinstance(access, Load) and access.buffer == result]
    stored = [_place(access, buffers) for access in accessed if isinstance(access, Store)]
    along = {s for place in places for s in place.symbols if place.coefficient(s) == 1}
    steps = (place.coefficient(s) for place in stored for s in along & set(place.symbols))
    return any(step is not None and step != 1 for step in steps)


def _place(access: Load | Store, buffers: Mapping[str, Buffer]) -> Expr:
    """Where in memory."""
    strides = buffers[access.buffer].strides
    return sum((index * step for index, step in zip(access.indices, strides, strict=True)), to_expr(0))


def _is_changed(nest: LoopNest, dependencies: Dependencies) -> bool:
    """Whether something that the product reads or writes is overwritten while the program runs."""
    return any(dependencies.root[name] in dependencies.unstable for name in (*nest.reads, *nest.writes))


PASS = Pass(
    "generate-contractions",
    generate_contractions,
    why="bias, activation and the rest of what becomes of a product are computed of its tiles",
    after=("choose-contractions", "fuse-kernels", "fuse-mixed-order-reductions"),
    required=True,
)
