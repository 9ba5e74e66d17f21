"""Which loop nests one native call runs.

Note [Where native code is cut]
    Between two ATen calls all kernels could be one segment. But tensors are allocated before a segment and given back
    behind it, so a long one holds everything that its kernels read and write. So it ends where its kernels have let go
    of a tensor, and before another one is begun. A call of native code takes a microsecond or two, kernels over so much
    memory many times that. Tensors of less than :data:`SMALL` bytes do not count: many kernels over these are one
    parallel region.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..analysis.nests import buffer_bytes
from ..ir import BufferKind, BufferRef, ExternCall, LoopNest, Program
from ..ir.walk import step_reads, step_writes
from .storage import Storage

__all__ = ["SMALL", "Segment", "segments"]

SMALL = 1 << 19


@dataclass(frozen=True, slots=True)
class Segment:
    """Nests whose kernels the native function ``function`` runs one after the other."""

    function: str
    nests: tuple[LoopNest, ...]


def segments(program: Program, storage: Storage, separate: bool = False) -> tuple[tuple[Segment, ...], ...]:
    """The segments of a program, in order: a group for each run of kernels between ATen calls; with ``separate`` each
    kernel is one. What kernels do through an alias they do in its memory, so an alias is no step of native code."""
    held = _Held.of(program, storage)
    runs: list[list[tuple[int, LoopNest]]] = [[]]
    for position, step in enumerate(program.steps):
        if isinstance(step, LoopNest):
            runs[-1].append((position, step))
        elif isinstance(step, ExternCall):
            runs.append([])
    groups, number = [], 0
    for run in filter(None, runs):
        parts = [(nest,) for _, nest in run] if separate else list(held.cut(run))
        names = (f"segment_{number + part}" for part in range(len(parts)))
        groups.append(tuple(map(Segment, names, parts)))
        number += len(parts)
    return tuple(groups)


@dataclass(frozen=True, slots=True)
class _Held:
    """The steps of a program that let go of tensors that Python holds, and those that begin some. ``together``: as of
    :class:`~.storage.Storage`; between such nests is no cut."""

    ends: frozenset[int]
    begins: frozenset[int]
    together: Mapping[str, int]

    @staticmethod
    def of(program: Program, storage: Storage) -> _Held:
        nbytes = {
            buffer.name: buffer_bytes(buffer)
            for buffer in program.buffers
            if buffer.kind not in (BufferKind.SCRATCH, BufferKind.CONSTANT) and storage.classes[buffer.name] != "view"
        }
        kept = {storage.root(out.name) for out in program.outputs if isinstance(out, BufferRef)}
        first: dict[str, int] = {}
        last: dict[str, int] = {}
        for position, step in enumerate(program.steps):
            for name in map(storage.root, (*step_reads(step), *step_writes(step))):
                first.setdefault(name, position)
                last[name] = position
        ends: set[int] = set()
        begins: set[int] = set()
        for name, position in last.items():
            kind = storage.classes.get(name)
            if nbytes.get(name, 0) < SMALL:
                continue
            if kind in ("input", "allocated", "call result") and name not in kept:
                ends.add(position)
            if kind == "allocated":
                begins.add(first[name])
        return _Held(frozenset(ends), frozenset(begins), storage.together)

    def cut(self, run: list[tuple[int, LoopNest]]) -> Iterator[tuple[LoopNest, ...]]:
        """The parts of a run of nests, each with its position in the program."""
        part: list[LoopNest] = []
        released = False
        for position, nest in run:
            shared = self.together.get(nest.name) if part else None
            apart = shared is None or shared != self.together.get(part[-1].name)
            if released and position in self.begins and apart:
                yield tuple(part)
                part, released = [], False
            part.append(nest)
            released = released or position in self.ends
        yield tuple(part)
