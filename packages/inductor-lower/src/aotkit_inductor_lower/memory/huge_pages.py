"""Large memory in huge pages, where the system has them.

Note [Fresh memory in huge pages]
    The results of a call are new tensors, and what is larger than 32 MiB comes from the system each time, as pages that
    do not exist yet: the first write to each is a page fault, which takes longer than the write. With pages of 2 MiB
    there are 512 times fewer.

    Most systems give such pages only to who asks for them (``madvise``, transparent huge pages). It is a wish: where
    they don't exist, nothing changes. Only whole huge pages inside of the memory are asked for, so no more is used.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Sequence

import torch

__all__ = ["HUGE_PAGE", "LARGE", "MADV_HUGEPAGE", "allocator_of_large", "system_madvise", "wish_huge_pages"]

LARGE = 8 << 20  # bytes, from which on two system calls do not count
HUGE_PAGE = 1 << 21  # bytes
MADV_HUGEPAGE = 14  # Linux's number of the wish

Allocator = Callable[[Sequence[int], Sequence[int], torch.dtype], torch.Tensor]


@functools.cache
def system_madvise() -> Callable[[int, int, int], int] | None:
    """Linux's call about the use of memory, of an address, bytes and the number of an advice; it gives 0 if taken."""
    if not sys.platform.startswith("linux"):
        return None
    found = getattr(ctypes.CDLL(None), "madvise", None)
    if found is not None:
        found.argtypes, found.restype = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int), ctypes.c_int
    return found


def wish_huge_pages(address: int, nbytes: int) -> bool:
    """Ask for huge pages for memory that is written soon. Gives whether the system took the wish: never of less than
    :data:`LARGE` bytes."""
    madvise = system_madvise() if nbytes >= LARGE else None
    if madvise is None:
        return False
    first = -(-address // HUGE_PAGE) * HUGE_PAGE
    return madvise(first, (address + nbytes - first) // HUGE_PAGE * HUGE_PAGE, MADV_HUGEPAGE) == 0


def allocator_of_large(empty: Allocator) -> Allocator:
    """Allocates on the CPU as ``empty`` does, in huge pages if it is much."""

    def empty_large(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = empty(sizes, strides, dtype)
        wish_huge_pages(tensor.data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    return empty_large
