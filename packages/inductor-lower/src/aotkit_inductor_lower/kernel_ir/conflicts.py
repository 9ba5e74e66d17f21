"""Grid iterations that depend on each other: one loads what another stores.

Offsets of small grids are looked at one by one. Larger ones, sizes that are not known, masks and computed offsets are
taken on trust: the loop IR's rules made sure of them, and this check is there for passes over kernels.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .._torch_compat import modes_and_autocast_off
from ..ir import Load, Store
from ..ir.grid import evaluate_on_grid, index_grid
from ..symbolic import Symbol
from .nodes import Kernel, Loop
from .walk import accesses_within

__all__ = ["find_conflict"]

_LIMIT = 1 << 14  # points of a grid, with the loops around an access


def find_conflict(kernel: Kernel) -> str | None:
    """Two accesses of different iterations of the grid to one element, as a sentence, or ``None``."""
    with modes_and_autocast_off():  # a caller's fake tensors have no values
        return _find_conflict(kernel)


def _find_conflict(kernel: Kernel) -> str | None:
    own = {scratch.name for scratch in kernel.scratch}
    accesses = [(loops, i) for loops, i in accesses_within(kernel.body) if i.buffer not in own and i.mask is None]
    for name in {i.buffer for _, i in accesses if isinstance(i, Store)}:
        loads = [(loops, i) for loops, i in accesses if isinstance(i, Load) and i.buffer == name]
        for around, store in accesses if loads else ():
            if not isinstance(store, Store) or store.buffer != name:
                continue
            stored = _iterations(kernel, around, store)
            for loops, load in loads:
                if stored is not None and _meet(stored, _iterations(kernel, loops, load)):
                    return f"an iteration loads {name}[{load.indices[0]}], which another stores as [{store.indices[0]}]"
    return None


def _iterations(kernel: Kernel, around: tuple[Loop, ...], access: Load | Store) -> tuple[Tensor, Tensor] | None:
    """The offset of each access, and the number of its grid iteration; ``None`` if that is not known."""
    loops = (*kernel.grid, *around)
    sizes = [loop.extent.constant for loop in loops]
    known = [size for size in sizes if size is not None]
    symbols = [Symbol(loop.symbol) for loop in loops]
    if len(known) != len(sizes) or not 0 < math.prod(known) <= _LIMIT:
        return None
    if not access.indices[0].symbols <= set(symbols):
        return None
    offsets = evaluate_on_grid(access.indices[0], index_grid(symbols, known)).expand(known).reshape(-1)
    iterations = math.prod(known[: len(kernel.grid)])
    return offsets, torch.arange(iterations).repeat_interleave(offsets.numel() // iterations)


def _meet(stored: tuple[Tensor, Tensor], loaded: tuple[Tensor, Tensor] | None) -> bool:
    """Whether an element is stored by one iteration and loaded by another."""
    if loaded is None:
        return False
    low = int(min(stored[0].min(), loaded[0].min()))
    first = torch.full((int(max(stored[0].max(), loaded[0].max())) - low + 1,), -1)
    last = first.clone()
    first[stored[0] - low] = stored[1]
    last.scatter_reduce_(0, stored[0] - low, stored[1], "amax")
    owner, other = first[loaded[0] - low], last[loaded[0] - low]
    return bool(((owner >= 0) & ((owner != loaded[1]) | (other != loaded[1]))).any())
