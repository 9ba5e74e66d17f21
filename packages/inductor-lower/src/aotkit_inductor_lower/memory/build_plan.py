"""The launch plan of a program, once its kernels are generated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..ir import Alias, BufferKind, BufferRef, Contraction, ExternCall, LoopNest, Program
from ..ir.walk import buffer_args, buffers_of, expressions, instructions, nests, ranges_within
from ..launch_plan.records import (
    Allocate,
    ArenaBuffer,
    CallExtern,
    CallSegment,
    LaunchPlan,
    PlannedBuffer,
    PlanStep,
    Return,
    ReuseBuffer,
    StorageClass,
    View,
)
from ..ops.aten import out_overload
from ..symbolic import Expr, Symbol, SymbolKind, to_expr, wide_parts
from .lifetimes import Lifetimes, find_lifetimes, with_frees
from .reuse import find_reuses
from .segments import Segment, segments
from .storage import Storage, Workspace

__all__ = ["build_plan"]


def build_plan(
    program: Program,
    storage: Storage,
    slots: Sequence[str],
    workspaces: Sequence[Workspace] = (),
    separate: bool = False,
) -> LaunchPlan:
    """What a call of ``program`` does, with the kernels of :func:`.segments` as native functions.

    ``slots``: the frame entries that these use, in order, see Note [The frame]; ``workspaces``: the memory that they
    need beside the program's buffers. ``separate``: as of :func:`.segments`.
    """
    beside: dict[str, StorageClass] = {w.buffer.name: "allocated" for w in workspaces}
    storage = replace(storage, classes={**storage.classes, **beside})
    steps = (*_steps(program, storage, workspaces, separate), Return(program.outputs))
    lifetimes = find_lifetimes(program, steps, storage, workspaces)
    lives = _lives(lifetimes, storage, "arena")
    buffers = buffers_of(program)
    reuses = find_reuses(lifetimes.nests, lives, buffers, storage)
    over = find_reuses(lifetimes.nests, _lives(lifetimes, storage, "allocated"), buffers, storage, storage.large)
    steps = tuple(_written_over(step, over) for step in steps)
    return LaunchPlan(
        program.name,
        program.inputs,
        tuple(
            PlannedBuffer(b.name, b.dtype, b.sizes, b.strides, storage.classes[b.name], b.device)
            for b in (*program.buffers, *(w.buffer for w in workspaces))
            if b.kind is not BufferKind.SCRATCH
        ),
        tuple(slots),
        tuple(ArenaBuffer(name, *lives[name], reuses.get(name, "")) for name in storage.classes if name in lives),
        tuple(with_frees(program.inputs, steps, storage, lifetimes.last_steps)),
        program.symbol_sources,
        program.computed_sizes,
        _wide_sizes(program),
    )


def _wide_sizes(program: Program) -> tuple[Expr, ...]:
    """See Note [Sizes beyond 64 bits]."""
    if not program.size_symbols:
        return ()
    found = [expr for buffer in program.buffers for expr in (*buffer.sizes, *buffer.strides)]
    for nest in nests(program):
        found += [loop.size for loop in ranges_within(nest)]
        found += expressions(instructions(nest.stages))
    return wide_parts(found, _integers(program))


def _integers(program: Program) -> set[Symbol]:
    """What a call is given, or computes, and no size of an input."""
    given = {size for buffer in program.buffers if buffer.kind is BufferKind.INPUT for size in buffer.sizes}
    sized = {name for name, _, kind, _ in program.symbol_sources if kind in ("size", "stride")}
    symbols = (Symbol(name, SymbolKind.SIZE) for name in program.size_symbols if name not in sized)
    return {symbol for symbol in symbols if to_expr(symbol) not in given}


def _lives(lifetimes: Lifetimes, storage: Storage, kind: StorageClass) -> dict[str, tuple[int, int]]:
    return {name: life for name, life in lifetimes.points.items() if storage.classes.get(name) == kind}


def _written_over(step: PlanStep, reuses: Mapping[str, str]) -> PlanStep:
    """What takes the memory of another buffer is not allocated."""
    if isinstance(step, Allocate) and step.buffer in reuses:
        return ReuseBuffer(step.buffer, reuses[step.buffer])
    return step


def _steps(program: Program, storage: Storage, workspaces: Sequence[Workspace], separate: bool) -> Iterator[PlanStep]:
    """The program's steps as steps of a plan, nests grouped into segments, without frees."""
    needed = _tensors_needed(program)
    left = iter(segments(program, storage, separate))
    allocated: set[str] = set()
    open_segment = False
    views: list[View | ReuseBuffer] = []
    for step in (*program.steps, None):
        if isinstance(step, LoopNest):
            open_segment = True
            continue
        if isinstance(step, Alias):
            if step.result in needed:
                views.append(_view(step))
            continue
        if open_segment:
            for segment in next(left):
                yield from _segment(segment, storage, workspaces, allocated)
            open_segment = False
        yield from views
        views.clear()
        if step is not None:
            assert not isinstance(step, Contraction)  # no kernel was made of it, see linearize
            call = _extern(step, storage)
            yield from (Allocate(name) for name in call.results if name in storage.large and name not in allocated)
            allocated.update(name for name in call.results if name in storage.large)
            yield call


def _view(alias: Alias) -> View | ReuseBuffer:
    if alias.reuses:
        return ReuseBuffer(alias.result, alias.base)
    return View(alias.result, alias.base, alias.offset)


def _segment(
    segment: Segment, storage: Storage, workspaces: Sequence[Workspace], allocated: set[str]
) -> Iterator[PlanStep]:
    """The segment's call, after the allocation of what it is the first to write and of its workspaces."""
    for root in dict.fromkeys(storage.root(name) for nest in segment.nests for name in nest.writes):
        if storage.classes.get(root) == "allocated" and root not in allocated:
            yield Allocate(root)
            allocated.add(root)
    names = {nest.name for nest in segment.nests}
    yield from (Allocate(workspace.buffer.name) for workspace in workspaces if workspace.step in names)
    yield CallSegment(segment.function, tuple(nest.name for nest in segment.nests))


def _extern(call: ExternCall, storage: Storage) -> CallExtern:
    out = None
    result = call.results[0] if len(call.results) == 1 else None
    if result is not None and (storage.classes.get(result) == "arena" or result in storage.large):
        out = out_overload(call.target)
    return CallExtern(call.target, call.args, call.kwargs, call.results, out, call.reason)


def _tensors_needed(program: Program) -> set[str]:
    """Aliases that must exist as tensors: used by an ATen call, returned, or the base of such a view."""
    needed = {o.name for o in program.outputs if isinstance(o, BufferRef)}
    for step in program.steps:
        if isinstance(step, ExternCall):
            needed.update(buffer_args((*step.args, *(value for _, value in step.kwargs))))
    for step in reversed(program.steps):
        if isinstance(step, Alias) and step.result in needed:
            needed.add(step.base)
    return needed
