"""When each buffer is used first and last, and where its memory is given back.

Note [Program points]
    Every step of a plan but ``Free`` is one program point, a segment as many as it has kernels: they run one after the
    other. Memory of the arena lives from the first point at which it is used to the last. Tensors that Python holds
    are freed between steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from ..ir import BufferRef, LoopNest, Program
from ..ir.walk import buffer_args
from ..launch_plan.records import Allocate, CallExtern, CallSegment, Free, PlanStep, Return, ReuseBuffer, View
from .storage import Storage, Workspace

__all__ = ["Lifetimes", "find_lifetimes", "with_frees"]


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """``nests``: what runs, by program point, where it is a kernel. ``points``: the first and the last program point of
    each buffer, its allocation left out. ``last_steps``: the position of the last step that uses it."""

    nests: Mapping[int, LoopNest]
    points: Mapping[str, tuple[int, int]]
    last_steps: Mapping[str, int]


def find_lifetimes(
    program: Program, steps: Sequence[PlanStep], storage: Storage, workspaces: Sequence[Workspace] = ()
) -> Lifetimes:
    """The lifetimes of all buffers of a plan's ``steps``, which have no frees yet. Using a view is using its memory."""
    by_name = {step.name: step for step in program.steps if isinstance(step, LoopNest)}
    beside: dict[str, list[str]] = {}
    for workspace in workspaces:
        beside.setdefault(workspace.step, []).append(workspace.buffer.name)
    nests: dict[int, LoopNest] = {}
    points: dict[str, tuple[int, int]] = {}
    last_steps: dict[str, int] = {}
    point = 0
    for position, step in enumerate(steps):
        for launch in step.launches if isinstance(step, CallSegment) else (None,):
            used: Iterator[str] | tuple[str, ...]
            if launch is None:
                used = _used(step)
            else:
                nest = nests[point] = by_name[launch]
                used = (*nest.reads, *nest.writes, *beside.get(launch, ()))
            for name in used:
                for memory in (name, storage.root(name)) if name in storage.placements else (name,):
                    last_steps[memory] = position
                    if not isinstance(step, Allocate):
                        points[memory] = (points[memory][0] if memory in points else point, point)
            point += 1
    return Lifetimes(nests, points, last_steps)


def with_frees(
    inputs: Sequence[str], steps: Sequence[PlanStep], storage: Storage, last_steps: Mapping[str, int]
) -> Iterator[PlanStep]:
    """The steps with a Free after each last use of a tensor that Python holds, and first of inputs without any."""
    unused = tuple(name for name in inputs if storage.classes.get(name) == "input" and name not in last_steps)
    if unused:
        yield Free(unused)
    dying: dict[int, list[str]] = {}
    for name, kind in storage.classes.items():
        last = last_steps.get(name)
        if kind in ("input", "allocated", "call result", "view") and last is not None and last < len(steps) - 1:
            dying.setdefault(last, []).append(name)
    held = {name for step in steps for name in _made(step)} | {name for name in inputs if not name.startswith("$")}
    for position, step in enumerate(steps):
        yield step
        names = tuple(name for name in dying.get(position, ()) if name in held)
        if names:
            yield Free(names)


def _made(step: PlanStep) -> Iterator[str]:
    """Tensors that a step creates in Python."""
    if isinstance(step, Allocate):
        yield step.buffer
    elif isinstance(step, CallExtern) and step.out is None:
        yield from (r for r in step.results if r is not None)
    elif isinstance(step, View | ReuseBuffer):
        yield step.result


def _used(step: PlanStep) -> Iterator[str]:
    """Buffers that a step uses by itself; a segment's kernels are asked instead."""
    if isinstance(step, Allocate):
        yield step.buffer
    elif isinstance(step, CallExtern):
        yield from buffer_args((*step.args, *(value for _, value in step.kwargs)))
        yield from (r for r in step.results if r is not None)
    elif isinstance(step, View | ReuseBuffer):
        yield step.result
        yield step.base
    elif isinstance(step, Return):
        yield from (o.name for o in step.outputs if isinstance(o, BufferRef))
