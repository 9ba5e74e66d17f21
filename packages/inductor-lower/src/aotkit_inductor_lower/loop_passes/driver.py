"""Scheduling: dead steps go, producers are inlined, kernels fused, temporaries made local, steps put in order."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from ..analysis.alignment import digit_env, expand_ranges, split_loops
from ..analysis.dependencies import Dependencies, step_reads, step_writes
from ..analysis.nests import has_calls, index_exprs
from ..ir import Alias, Buffer, BufferKind, BufferRef, ExternCall, LoopNest, Program, Range, Step
from ..ir.verify import verify_program
from ..ops.aten import is_random
from ..options import LowerOptions
from ..passes import Decision
from ..symbolic import Expr, Symbol, sym
from .fuse_concats import fuse_concats
from .fuse_kernels import fuse_kernels
from .fuse_mixed_order_reductions import fuse_mixed_order_reductions
from .inline_producers import inline_producers
from .localize_temporaries import drop_dead_code, localize_temporaries
from .order_steps import order_by_memory
from .write_through import write_through
from .writer import NestWriter

__all__ = ["schedule_program"]


def schedule_program(program: Program, options: LowerOptions | None = None) -> tuple[Program, tuple[Decision, ...]]:
    """The program with as few kernels as its data allows, and a record of every decision."""
    options = options or LowerOptions()
    records: list[Decision] = []
    passes: list[Callable[[Program], Program]] = [drop_dead_steps]
    if options.fuse:
        passes += [
            lambda p: _inline(p, options, records),
            lambda p: drop_dead_steps(fuse_concats(p, options, records)),
            _split,
            lambda p: _fuse(p, options, records),
            lambda p: _mix(p, options, records),
            write_through,
            _localize,
        ]
        if options.fuel is None:
            passes.append(order_by_memory)
    for run in passes:
        program = run(program)
        if options.verify:
            verify_program(program)
    return program, tuple(records)


def drop_dead_steps(program: Program) -> Program:
    """Without steps whose results no one uses. Steps that write memory of the caller, and random ones, stay."""
    kinds = {b.name: b.kind for b in program.buffers}
    live = {out.name for out in program.outputs if isinstance(out, BufferRef)}
    aliases = {step.result for step in program.steps if isinstance(step, Alias)}
    kept: list[Step] = []
    for step in reversed(program.steps):
        writes = step_writes(step)
        keeps = isinstance(step, ExternCall) and (step.mutates or not step.results or is_random(step.target))
        outside = isinstance(step, LoopNest) and not aliases.isdisjoint(writes)
        if keeps or outside or any(name in live or kinds[name] is BufferKind.INPUT for name in writes):
            kept.append(step)
            live.update(step_reads(step))
    used = live | {name for step in kept for name in step_writes(step)} | set(program.inputs)
    buffers = tuple(b for b in program.buffers if b.name in used or b.kind is BufferKind.INPUT)
    return replace(program, steps=tuple(reversed(kept)), buffers=buffers)


def _inline(program: Program, options: LowerOptions, records: list[Decision]) -> Program:
    steps = inline_producers(program, Dependencies.of(program), options, records)
    return drop_dead_steps(replace(program, steps=tuple(s for s in steps if s is not None)))


def _mix(program: Program, options: LowerOptions, records: list[Decision]) -> Program:
    """Not on a GPU: sums that are added up in memory, a row after the other, would leave nothing to do at once."""
    if not all(b.device.startswith("cpu") for b in program.buffers):
        return program
    return fuse_mixed_order_reductions(program, records, options.max_fusion_instructions)


def _split(program: Program) -> Program:
    """Loops that are read through reshapes are split, so that positions are plain sums."""
    buffers = {b.name: b for b in program.buffers}
    steps: list[Step] = []
    for step in program.steps:
        if isinstance(step, LoopNest) and any(has_calls(e) for e in index_exprs(step)):
            step = _split_nest(step, buffers)
        steps.append(step)
    return replace(program, steps=tuple(steps))


def _split_nest(nest: LoopNest, buffers: Mapping[str, Buffer]) -> LoopNest:
    taken = {r.symbol for r in nest.outer} | {r.symbol for s in nest.stages for r in s.ranges}
    fresh = [name for name in (f"k{n}" for n in range(64)) if name not in taken]
    loops = split_loops(nest, fresh)
    if not loops:
        return nest
    env = digit_env(loops)
    writer = NestWriter(expand_ranges(nest.outer, loops), buffers)
    names: dict[str, str] = {}
    for stage in nest.stages:
        writer.stage(expand_ranges(stage.ranges, loops))
        writer.copy(stage.body, env, names)
    return writer.finish(nest.name, nest.origin)


def _fuse(program: Program, options: LowerOptions, records: list[Decision]) -> Program:
    buffers = {b.name: b for b in program.buffers}
    groups = fuse_kernels(program.steps, buffers, Dependencies.of(program), options, records)
    order = _topological(groups.needs)
    return replace(program, steps=tuple(groups.steps[g] for g in order))


def _topological(needs: Mapping[int, set[int]]) -> list[int]:
    """Program order as far as dependencies allow."""
    waiting = {group: len(before) for group, before in needs.items()}
    after: dict[int, list[int]] = {group: [] for group in needs}
    for group, before in needs.items():
        for need in before:
            after[need].append(group)
    ready = [group for group, count in waiting.items() if count == 0]
    heapq.heapify(ready)
    order: list[int] = []
    while ready:
        group = heapq.heappop(ready)
        order.append(group)
        for later in after[group]:
            waiting[later] -= 1
            if waiting[later] == 0:
                heapq.heappush(ready, later)
    if len(order) != len(needs):
        raise AssertionError("fusion made kernels wait for each other; this is a bug in the legality check")
    return order


def _localize(program: Program) -> Program:
    """Temporaries of one kernel become values or scratch of one row; loops get plain names."""
    buffers = {b.name: b for b in program.buffers}
    users: dict[str, set[int]] = {}
    for position, step in enumerate(program.steps):
        for name in (*step_reads(step), *step_writes(step)):
            users.setdefault(name, set()).add(position)
    escaping = {out.name for out in program.outputs if isinstance(out, BufferRef)}
    steps: list[Step] = []
    for position, step in enumerate(program.steps):
        if not isinstance(step, LoopNest):
            steps.append(step)
            continue
        private = [
            name
            for name in step.writes
            if buffers[name].kind is BufferKind.TEMPORARY and users[name] == {position} and name not in escaping
        ]
        nest, rows = localize_temporaries(step, private, buffers)
        buffers.update((row.name, row) for row in rows)
        cleaned = drop_dead_code(nest)
        if cleaned is not None:
            steps.append(_plain_names(cleaned, buffers))
    return drop_dead_steps(replace(program, steps=tuple(steps), buffers=tuple(buffers.values())))


def _plain_names(nest: LoopNest, buffers: Mapping[str, Buffer]) -> LoopNest:
    """Outer loops ``i0 ..``, each stage's loops ``r0 ..`` numbered through, values ``v0 ..``."""
    env: dict[Symbol, Expr] = {}
    outer = _renamed("i", 0, nest.outer, env)
    writer = NestWriter(outer, buffers)
    names: dict[str, str] = {}
    count = 0
    for stage in nest.stages:
        ranges = _renamed("r", count, stage.ranges, env)
        count += len(ranges)
        writer.stage(ranges)
        writer.copy(stage.body, env, names)
    return writer.finish(nest.name, nest.origin)


def _renamed(letter: str, first: int, ranges: Sequence[Range], env: dict[Symbol, Expr]) -> tuple[Range, ...]:
    result = tuple(Range(f"{letter}{first + k}", loop.size) for k, loop in enumerate(ranges))
    env.update((Symbol(old.symbol), sym(new.symbol)) for old, new in zip(ranges, result, strict=True))
    return result
