"""Which small kernels of a program one launch can compute.

Note [Launches that are shared]
    A launch takes a device about two microseconds whatever it computes, so small kernels are worth as many launches as
    there are of them. Kernels that follow each other, and of which none reads or writes what another one writes, can be
    one launch: each has program instances of its own in it. They may write parts of the same tensor that lie beside
    each other. Large kernels gain nothing by that. Products of few rows with their long sums are such kernels too:
    those of queries, keys and values read the same row.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Alias, Buffer, BufferKind, CheckedIndex, LoopNest, Program
from ..ir.walk import buffers_of, contains, instructions
from .dependencies import Dependencies
from .few_rows import few_rows
from .nests import buffer_bytes, iteration_count

__all__ = ["launch_groups", "moved_bytes", "shares_launch"]

MOST_BYTES = 1 << 24  # that a kernel moves which is small
MOST_MEMBERS = 64
_MOST_BYTES_OF_ROWS = 1 << 26  # that a product of few rows moves: its instances are as many as it has columns
_LONGEST_SUM = 256  # iterations of a stage


def launch_groups(program: Program) -> tuple[tuple[str, ...], ...]:
    """The names of the nests of each launch that several share, in order; see Note [Launches that are shared]."""
    buffers, dependencies = buffers_of(program), Dependencies.of(program)
    root, parts = dependencies.root, {dependencies.root[name] for name in dependencies.parts}
    found: list[tuple[str, ...]] = []
    names: list[str] = []
    read: set[str] = set()
    written: set[str] = set()

    def end() -> None:
        if len(names) > 1:
            found.append(tuple(names))
        for each in (names, read, written):
            each.clear()

    for step in program.steps:
        if isinstance(step, Alias):
            continue
        if not (isinstance(step, LoopNest) and shares_launch(step, buffers)):
            end()
            continue
        reads, writes = ({root[name] for name in each} for each in (step.reads, step.writes))
        if len(names) == MOST_MEMBERS or writes & (read | (written - parts)) or reads & written:
            end()
        names.append(step.name)
        read |= reads
        written |= writes
    end()
    return tuple(found)


def shares_launch(nest: LoopNest, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a nest is small, and as simple as what shares a launch has to be."""
    if nest.combines or any(buffers[n].kind is BufferKind.SCRATCH for n in (*nest.reads, *nest.writes)):
        return False
    sizes = [r.size.constant for stage in nest.stages for r in stage.ranges]
    if None in sizes or any(r.size.constant is None for r in nest.outer):
        return False
    if contains(instructions(nest.stages), CheckedIndex):
        return False
    if few_rows(nest.outer, nest.stages) is not None:
        return moved_bytes(nest, buffers) <= _MOST_BYTES_OF_ROWS
    short = all(iteration_count(stage.ranges) <= _LONGEST_SUM for stage in nest.stages)
    return short and moved_bytes(nest, buffers) <= MOST_BYTES


def moved_bytes(nest: LoopNest, buffers: Mapping[str, Buffer]) -> int:
    """Bytes of all that a nest reads and writes."""
    return sum(buffer_bytes(buffers[name]) for name in {*nest.reads, *nest.writes})
