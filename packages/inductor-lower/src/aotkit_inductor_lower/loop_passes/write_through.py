"""Pass: a value that is only copied into an input of the graph is computed there.

An optimizer's update reads and writes each parameter; through a temporary its memory would be walked over twice.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import Alias, Buffer, BufferKind, BufferRef, ExternCall, Load, LoopNest, Program, Step, Store
from ..ir.independence import check_outer_independence
from ..ir.walk import buffers_of, map_nest, placed, step_reads, step_writes, with_buffers
from ..passes import Pass, PassContext, fuses

__all__ = ["PASS", "copied", "same_memory", "write_through"]


def write_through(program: Program, ctx: PassContext) -> Program:
    """The program without copies of temporaries into inputs, where each temporary can be the input itself.

    That is so if the two have the same layout, the temporary has one writer, nothing reads the input's old value
    after that writer, and the writer itself reads an element of it before it stores that element.
    """
    buffers = buffers_of(program)
    steps: list[Step | None] = list(program.steps)
    users = _users(program)
    for position in range(len(steps)):
        found = copied(steps[position])  # its source may have become an input by now
        if found is None:
            continue
        source, target = found
        writer = _writer(steps, users, source, position)
        if writer is None or not same_memory(buffers[source], buffers[target]):
            continue
        if any(writer < user != position for user in users[target]) or target in _returned(program, source):
            continue
        renamed = _renamed(steps[writer], source, target, buffers)
        if renamed is None or not ctx.fuel.take():
            continue
        steps[writer], steps[position] = renamed, None
        for user in users[source] - {writer, position}:
            steps[user] = _with_name(steps[user], source, target)
        del buffers[source]  # the target has no later copy, or it would have been used behind the writer
    return replace(program, steps=tuple(s for s in steps if s is not None), buffers=tuple(buffers.values()))


def _users(program: Program) -> dict[str, set[int]]:
    users: dict[str, set[int]] = {b.name: set() for b in program.buffers}
    for position, step in enumerate(program.steps):
        for name in (*step_reads(step), *step_writes(step)):
            users[name].add(position)
    return users


def copied(step: Step | None) -> tuple[str, str] | None:
    """(source, target) of a nest that does nothing but copy one buffer to another, element by element."""
    if not isinstance(step, LoopNest) or len(step.stages) != 1 or len(step.stages[0].body) != 2:
        return None
    load, store = step.stages[0].body
    if not isinstance(load, Load) or not isinstance(store, Store):
        return None
    plain = load.mask is None and store.plain and store.value == load.result
    return (load.buffer, store.buffer) if plain and load.indices == store.indices else None


def _writer(steps: list[Step | None], users: Mapping[str, set[int]], source: str, copy: int) -> int | None:
    """The one nest that makes ``source``, if only nests use it."""
    found = None
    for position in users[source]:
        step = steps[position]
        if not isinstance(step, LoopNest):
            return None
        if source in step.writes:
            if found is not None or position >= copy:
                return None
            found = position
    return found


def same_memory(source: Buffer, target: Buffer) -> bool:
    """Whether a temporary lies in memory as an input does, which it could be."""
    kinds = source.kind is BufferKind.TEMPORARY and target.kind is BufferKind.INPUT
    return kinds and replace(source, name=target.name, kind=target.kind) == target


def _returned(program: Program, source: str) -> set[str]:
    """Every name that cannot be merged with ``source``: all inputs if it is returned or has other names."""
    aliased = {name for step in program.steps if isinstance(step, Alias) for name in (step.base, step.result)}
    if source in aliased or any(isinstance(out, BufferRef) and out.name == source for out in program.outputs):
        return {b.name for b in program.buffers}
    return aliased


def _renamed(step: Step | None, source: str, target: str, buffers: Mapping[str, Buffer]) -> LoopNest | None:
    assert isinstance(step, LoopNest)
    accesses = _accesses(step, target)
    if accesses:
        stored = [(s, p, i) for s, p, i in _accesses(step, source) if isinstance(i, Store)]
        loaded_again = any(isinstance(i, Load) for _, _, i in _accesses(step, source))
        if len(stored) != 1 or loaded_again:
            return None
        stage, place, store = stored[0]
        if not all(isinstance(i, Load) and (s, p) < (stage, place) for s, p, i in accesses):
            return None
        if not store.plain:
            return None
    renamed = _with_name(step, source, target)
    assert isinstance(renamed, LoopNest)
    return renamed if check_outer_independence(renamed, buffers) is None else None


def _accesses(nest: LoopNest, name: str) -> list[tuple[int, int, Load | Store]]:
    return [(s, p, i) for s, p, i in placed(nest.stages) if isinstance(i, (Load, Store)) and i.buffer == name]


def _with_name(step: Step | None, old: str, new: str) -> Step | None:
    if not isinstance(step, LoopNest):
        assert not isinstance(step, ExternCall)
        return step
    return map_nest(step, lambda i: with_buffers(i, {old: new}))


PASS = Pass(
    "write-through",
    write_through,
    why="a value that is only copied into an input is computed there",
    after=("fuse-kernels", "fuse-mixed-order-reductions"),
    when=fuses,
)
