"""What a launch plan tells about a call: memory while it runs, and its calls of ATen.

Note [What the picture of memory counts]
    What a call makes: new tensors, results of ATen's calls, and what is alive in the arena. The caller's inputs are
    there before and after, and count nothing, but what a backward gets from its forward is the step's own: it counts
    from where it is made to where the backward frees it. Views count as what they look at.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

import torch

from ..ir.arguments import BufferRef
from .records import (
    Allocate,
    CallExtern,
    CallSegment,
    CompiledProgram,
    Free,
    LaunchPlan,
    PlannedBuffer,
    Return,
    ReuseBuffer,
    View,
)

__all__ = ["KINDS", "MemoryOverTime", "Moment", "UnknownSize", "extern_calls", "memory_of"]

_GIVES_BACK = "_c10d_functional.wait_tensor."  # what it waited for
KINDS = ("saved", "result", "allocated", "call result", "arena")


@dataclass(frozen=True, slots=True)
class Moment:
    """While one step of a plan runs: bytes by kind, and the largest tensors that are there."""

    step: str
    bytes: dict[str, int]
    largest: tuple[tuple[str, int], ...]

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.bytes.values())


@dataclass(frozen=True, slots=True)
class MemoryOverTime:
    """The moments of a step; the backward begins at number ``backward`` (there is none: their count)."""

    moments: tuple[Moment, ...]
    backward: int

    @property
    def peak(self) -> Moment:
        """The first moment with the most bytes."""
        return max(self.moments, key=lambda moment: moment.total)


@dataclass
class _Held:
    """What is alive: bytes and kind by the buffer that owns the memory. ``kinds``: of buffers that outlive the call."""

    plan: LaunchPlan
    kinds: dict[str, str]
    alive: dict[str, tuple[int, str]] = field(default_factory=dict)
    moments: list[Moment] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.buffers = {buffer.name: buffer for buffer in self.plan.buffers}
        self.bases = _bases(self.plan)
        self.names: dict[str, set[str]] = {name: {name} for name in self.buffers}
        for name in self.bases:
            self.names[_base(self.bases, name)].add(name)
        self.in_arena = {each.buffer for each in self.plan.arena}
        self.arena = [(each, _bytes(self.buffers[each.buffer])) for each in self.plan.arena]

    def add(self, name: str, kind: str) -> None:
        """A buffer comes into being, unless it is in the arena, though ATen writes it, or is another one's memory."""
        if name in self.in_arena or name in self.bases:
            return
        self.alive[name] = _bytes(self.buffers[name]), self.kinds.get(name, kind)

    def drop(self, names: Iterable[str]) -> None:
        """Names are not used any more; memory goes with the last name of what is not returned."""
        self.gone.update(names)
        for name in {_base(self.bases, name) for name in names} - self.kinds.keys():
            if self.names[name] <= self.gone:
                self.alive.pop(name, None)

    def moment(self, step: str, point: int) -> None:
        """While ``step`` runs."""
        arena = {each.buffer: size for each, size in self.arena if each.first <= point <= each.last}
        for each, _ in self.arena:
            if each.reuses and each.first == point:
                arena.pop(each.reuses, None)  # they are one memory
        amounts = dict.fromkeys(KINDS, 0)
        for size, kind in self.alive.values():
            amounts[kind] += size
        amounts["arena"] += sum(arena.values())
        held = {name: size for name, (size, _) in self.alive.items()} | arena
        self.moments.append(Moment(step, amounts, tuple(sorted(held.items(), key=lambda item: -item[1])[:5])))


class UnknownSize(Exception):
    """A size is not known before the call."""


def memory_of(
    forward: CompiledProgram, backward: CompiledProgram | None = None, saved: Sequence[str | None] = ()
) -> MemoryOverTime:
    """Memory over one step. ``saved``: what the forward returns behind its results, by the names that the backward has
    for it; ``None`` for an input, which the caller holds.

    Raises :class:`UnknownSize`.
    """
    base, outputs = _bases(forward.plan), _outputs(forward.plan)
    kinds = {_base(base, name): "result" for name in outputs}
    if backward is not None and saved:
        kinds |= {_base(base, name): "saved" for name in outputs[-len(saved) :]}
    first = _Held(forward.plan, kinds)
    _run(first)
    if backward is None:
        return MemoryOverTime(tuple(first.moments), len(first.moments))
    second = _Held(backward.plan, {_base(_bases(backward.plan), name): "result" for name in _outputs(backward.plan)})
    for name, (size, kind) in first.alive.items():
        if kind == "result":
            second.alive[f"{name}, of the forward"] = size, kind
    own = {name for name in saved if name is not None}
    for name in backward.plan.inputs:
        if name in own and name in second.buffers:
            second.add(name, "saved")
    _run(second)
    return MemoryOverTime((*first.moments, *second.moments), len(first.moments))


def extern_calls(program: CompiledProgram) -> list[tuple[str, str]]:
    """The operators that ATen computes, in order, each with the name of its first result."""
    calls = [step for step in program.plan.steps if isinstance(step, CallExtern)]
    return [(step.target, next((name for name in step.results if name), "")) for step in calls]


def _run(held: _Held) -> None:
    """Walk over the plan; a program point is what :class:`ArenaBuffer` means by it."""
    point = 0
    for step in held.plan.steps:
        match step:
            case Free(buffers):
                held.drop(buffers)
                continue
            case Allocate(buffer):
                held.add(buffer, "allocated")
            case CallExtern():
                for name in step.results:
                    if name is not None:
                        held.add(name, "call result")
        names = step.launches if isinstance(step, CallSegment) else [_name(step)]
        for name in names:
            if isinstance(step, CallSegment | CallExtern):
                held.moment(name, point)
            point += 1


def _bases(plan: LaunchPlan) -> dict[str, str]:
    """Whose memory a buffer's is, if it has none of its own."""
    found = {}
    for step in plan.steps:
        match step:
            case View() | ReuseBuffer():
                found[step.result] = step.base
            case CallExtern(target, (BufferRef(base), *_), results=(str(result),)) if target.startswith(_GIVES_BACK):
                found[result] = base
    return found


def _base(bases: dict[str, str], name: str) -> str:
    while name in bases:
        name = bases[name]
    return name


def _outputs(plan: LaunchPlan) -> list[str]:
    """The results' buffers, in order; empty names for what is no tensor."""
    found = [step.outputs for step in plan.steps if isinstance(step, Return)]
    return [each.name if isinstance(each, BufferRef) else "" for each in found[-1]] if found else []


def _name(step: object) -> str:
    return step.target.removesuffix(".default") if isinstance(step, CallExtern) else type(step).__name__


def _bytes(buffer: PlannedBuffer) -> int:
    sizes = [size.constant for size in buffer.sizes]
    known = [size for size in sizes if size is not None]
    if len(known) != len(sizes):
        raise UnknownSize(f"the size of {buffer.name} is not known before the call")
    return prod(known) * getattr(torch, buffer.dtype).itemsize
