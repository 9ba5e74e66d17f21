"""Which memories a kernel writes past the caches, see Note [Non-temporal stores] in the CPU's target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import Buffer
from ..ir.walk import instructions, loads
from ..kernel_ir.nests import FlatNest
from ..ops.dtypes import item_bytes
from ..symbolic import product

__all__ = ["NONTEMPORAL_BYTES", "mark_nontemporal"]

NONTEMPORAL_BYTES = 24 << 20  # results of that size are written past the caches


def mark_nontemporal(nest: FlatNest, buffers: Mapping[str, Buffer], storage: Mapping[str, str]) -> FlatNest:
    """The nest with those of its new results marked that are too large to be still in a cache when they are read, and
    that it does not read itself. ``storage``: the storage class of each buffer."""
    loaded = {load.buffer for load in loads(instructions(nest.stages))}
    new = (buffers[name] for name in nest.memories if storage.get(name) == "allocated" and name not in loaded)
    return replace(nest, nontemporal=frozenset(buffer.name for buffer in new if _bytes(buffer) >= NONTEMPORAL_BYTES))


def _bytes(buffer: Buffer) -> int:
    """0 if that is known at run time only."""
    return (product(buffer.sizes).constant or 0) * item_bytes(buffer.dtype)
