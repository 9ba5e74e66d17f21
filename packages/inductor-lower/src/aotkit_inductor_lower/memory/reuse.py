"""Which results take the memory of an argument that dies there, see Note [In place]."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ..ir import Buffer, LoopNest
from ..ir.in_place import may_write_over
from .storage import Storage

__all__ = ["find_reuses"]


def find_reuses(
    nests: Mapping[int, LoopNest],
    lives: Mapping[str, tuple[int, int]],
    buffers: Mapping[str, Buffer],
    storage: Storage,
    only: Collection[str] | None = None,
) -> dict[str, str]:
    """For results of one storage class, the buffer whose memory they take over. ``nests`` by the program point at which
    they run, ``lives``: first and last point of each buffer of the class. ``only``: the buffers that may be written
    over."""
    reuses: dict[str, str] = {}
    for point, nest in nests.items():
        shared = {storage.root(name) for name in (*nest.reads, *nest.writes) if name in storage.placements}
        own = lives.keys() - shared
        born = [name for name in nest.writes if name in own and lives[name][0] == point]
        dying = [name for name in nest.reads if name in own and lives[name][1] == point and name not in nest.writes]
        dying = [name for name in dying if only is None or name in only]
        for result in born:
            for argument in dying:
                if may_write_over(nest, argument, result, buffers):
                    reuses[result] = argument
                    dying.remove(argument)
                    break
    return reuses
