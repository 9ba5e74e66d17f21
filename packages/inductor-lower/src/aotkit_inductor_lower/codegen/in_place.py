"""Which results of kernels may be written over an argument that dies there.

Note [In place]
    A kernel's result takes the memory of a temporary that the kernel is the last to read, if both have the same layout
    and each element is read before, and nowhere else than where, its place is written: in the same iteration with
    the same indices, or in an earlier stage of the same outer iteration. Kernels promise LLVM nothing about pointers
    being different, and emit the loads of a block of lanes before its stores.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import Buffer, Load, LoopNest, Store
from ..ir.verify_order import check_outer_independence

__all__ = ["find_in_place"]

_MOST_INSTRUCTIONS = 300  # the check looks at all pairs of accesses


def find_in_place(
    nests: Mapping[int, LoopNest],
    lives: Mapping[str, tuple[int, int]],
    buffers: Mapping[str, Buffer],
    aliases: Mapping[str, str],
) -> dict[str, str]:
    """For results in the arena, the buffer whose memory they take over. ``nests`` by the moment at which they run,
    ``lives``: first and last moment of each buffer of the arena; ``aliases``: whose memory an alias views."""
    over: dict[str, str] = {}
    for moment, nest in nests.items():
        if sum(len(stage.body) for stage in nest.stages) > _MOST_INSTRUCTIONS:
            continue
        shared = {aliases[name] for name in (*nest.reads, *nest.writes) if name in aliases}
        own = lives.keys() - shared
        born = [name for name in nest.writes if name in own and lives[name][0] == moment]
        dying = [name for name in nest.reads if name in own and lives[name][1] == moment and name not in nest.writes]
        for result in born:
            for argument in dying:
                if _same_layout(buffers[result], buffers[argument]) and _reads_first(nest, argument, result, buffers):
                    over[result] = argument
                    dying.remove(argument)
                    break
    return over


def _same_layout(a: Buffer, b: Buffer) -> bool:
    return a.sizes == b.sizes and a.strides == b.strides and a.dtype == b.dtype


def _reads_first(nest: LoopNest, argument: str, result: str, buffers: Mapping[str, Buffer]) -> bool:
    stored = [
        (number, at, instr)
        for number, stage in enumerate(nest.stages)
        for at, instr in enumerate(stage.body)
        if isinstance(instr, Store) and instr.buffer == result
    ]
    if len(stored) != 1 or stored[0][2].mode != "set" or stored[0][2].mask is not None:
        return False
    place = stored[0][:2]
    renamed = []
    for number, stage in enumerate(nest.stages):
        body = []
        for at, instr in enumerate(stage.body):
            if isinstance(instr, Load) and instr.buffer in (argument, result):
                if instr.buffer == result or (number, at) > place or instr.mask is not None:
                    return False
                instr = replace(instr, buffer=result)
            body.append(instr)
        if stage.scans and number == place[0]:
            return False
        renamed.append(replace(stage, body=tuple(body)))
    return check_outer_independence(replace(nest, stages=tuple(renamed)), buffers) is None
