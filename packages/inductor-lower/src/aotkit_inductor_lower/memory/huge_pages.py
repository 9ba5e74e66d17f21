"""Large memory in huge pages, where the system has them.

Note [Fresh memory in huge pages]
    The results of a call are new tensors, and what is larger than 32 MiB comes from the system each time, as pages that
    do not exist yet: the first write to each is a page fault, which takes longer than the write. With pages of 2 MiB
    there are 512 times fewer.

    Most systems give such pages only to who asks for them (``madvise``, transparent huge pages). It is a wish: where
    they don't exist, nothing changes. Only whole huge pages inside of the memory are asked for, so no more is used.

Note [Memory that is read through once]
    Whoever reads through gigabytes, as a language model does for each token, goes from page to page all the time. How
    long that takes depends on where the system happened to put the small ones, from one tensor to the next. Linux moves
    memory that is there already into huge pages (``MADV_COLLAPSE``, from 6.1 on). Tensors lie next to each other in the
    memory of the C library, so it is their common ranges that are moved, and a page of which less than half is asked
    for stays as it is.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable, Sequence

import torch

__all__ = [
    "HUGE_PAGE",
    "LARGE",
    "MADV_HUGEPAGE",
    "allocator_of_large",
    "move_to_huge_pages",
    "system_madvise",
    "wish_huge_pages",
]

LARGE = 8 << 20  # bytes, from which on two system calls do not count
HUGE_PAGE = 1 << 21  # bytes
MADV_HUGEPAGE = 14  # Linux's number of the wish
MADV_COLLAPSE = 25  # and of the move

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


def move_to_huge_pages(ranges: Iterable[tuple[int, int]]) -> int:
    """Move memory, given as addresses and bytes, into huge pages where it lies: addresses and contents stay the same.
    Gives the bytes of the pages that the system moved, or had there; 0 where it has no such call.

    See Note [Memory that is read through once]. Safe while others read and write that memory.
    """
    madvise = system_madvise()
    if madvise is None:
        return 0
    return sum(HUGE_PAGE for page in _pages_worth_moving(ranges) if madvise(page, HUGE_PAGE, MADV_COLLAPSE) == 0)


def _pages_worth_moving(ranges: Iterable[tuple[int, int]]) -> list[int]:
    """The huge pages of which at least half lies in the ranges, which may overlap."""
    held: dict[int, int] = {}
    behind = 0
    for start, nbytes in sorted(ranges):
        end, at = start + nbytes, max(start, behind)
        behind = max(behind, end)
        while at < end:
            page = at // HUGE_PAGE * HUGE_PAGE
            next_at = min(end, page + HUGE_PAGE)
            held[page] = held.get(page, 0) + next_at - at
            at = next_at
    return [page for page, nbytes in held.items() if 2 * nbytes >= HUGE_PAGE]


def allocator_of_large(empty: Allocator) -> Allocator:
    """Allocates on the CPU as ``empty`` does, in huge pages if it is much."""

    def empty_large(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = empty(sizes, strides, dtype)
        wish_huge_pages(tensor.data_ptr(), tensor.untyped_storage().nbytes())
        return tensor

    return empty_large
