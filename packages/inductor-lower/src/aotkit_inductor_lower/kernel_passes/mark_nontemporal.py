"""Which memories a kernel writes past the caches, see Note [Non-temporal stores] in the CPU's target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import Buffer, Load
from ..ir.walk import instructions
from ..kernel_ir.nodes import Kernel, Param
from ..ops.dtypes import item_bytes
from ..symbolic import product

__all__ = ["NONTEMPORAL_BYTES", "mark_nontemporal"]

NONTEMPORAL_BYTES = 24 << 20  # results of that size are written past the caches


def mark_nontemporal(kernel: Kernel, buffers: Mapping[str, Buffer], storage: Mapping[str, str]) -> Kernel:
    """The kernel with those of its new results marked that are too large to be still in a cache when they are read, and
    that it does not read itself. ``storage``: the storage class of each buffer."""
    loads = {instr.buffer for instr in instructions(kernel.body) if isinstance(instr, Load)}

    def is_large(param: Param) -> bool:
        if param.kind != "memory" or storage.get(param.name) != "allocated" or param.name in loads:
            return False
        return _bytes(buffers[param.name]) >= NONTEMPORAL_BYTES

    if not any(map(is_large, kernel.params)):
        return kernel
    params = (replace(param, nontemporal=True) if is_large(param) else param for param in kernel.params)
    return replace(kernel, params=tuple(params))


def _bytes(buffer: Buffer) -> int:
    """0 if that is known at run time only."""
    return (product(buffer.sizes).constant or 0) * item_bytes(buffer.dtype)
