"""Memory for the temporaries of calls, kept between calls and shared by the graphs of one compile.

Note [Arenas]
    Fresh memory is dear: on the machines this was measured on, touching a new page for the first time costs more than
    writing it ten times. So the blocks that calls take their temporaries from stay with an :class:`ArenaPool`. A
    forward and its backward do not run at once, so they take turns with one block, which grows to what the larger one
    needs. A call that overlaps another one (threads, re-entry) gets a block of its own. What is kept free is bounded:
    a block over the pool's limit goes back to torch when its call ends.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable
from typing import Any

from .._torch_compat import own_memory
from ..memory.huge_pages import wish_huge_pages
from ..memory.placement import ALIGNMENT

__all__ = ["ArenaBlock", "ArenaPool"]

KEPT_BYTES = 1 << 30
KEPT_FRAMES = 32


class ArenaBlock:
    """One piece of memory, aligned at ``start``, with the frames that were laid out in it."""

    __slots__ = ("frames", "memory", "nbytes", "start")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.memory = own_memory(nbytes + ALIGNMENT)
        wish_huge_pages(self.memory.data_ptr(), nbytes)
        self.start = -self.memory.data_ptr() % ALIGNMENT
        self.frames: dict[Hashable, Any] = {}

    def keep(self, key: Hashable, frame: Any) -> None:
        """Remember a frame of this block; the oldest goes when there are many."""
        while len(self.frames) >= KEPT_FRAMES:
            self.frames.pop(next(iter(self.frames)), None)
        self.frames[key] = frame


class ArenaPool:
    """Blocks of memory between calls. ``limit``: bytes kept while no call runs. Any thread may use it."""

    def __init__(self, limit: int = KEPT_BYTES) -> None:
        self.limit = limit
        self._free: list[ArenaBlock] = []
        self._lock = threading.Lock()

    @property
    def kept_bytes(self) -> int:
        """What the pool holds that no running call uses."""
        return sum(block.nbytes for block in list(self._free))

    def take(self, nbytes: int) -> ArenaBlock:
        """A block of at least ``nbytes`` that nobody else uses: the last one given back, or a larger one instead."""
        try:
            block = self._free.pop()
        except IndexError:
            return ArenaBlock(nbytes)
        if block.nbytes >= nbytes:
            return block
        del block  # before the larger one is allocated, so that both are never held at once
        return ArenaBlock(nbytes)

    def give_back(self, block: ArenaBlock) -> None:
        """The call is over. Dropped where the pool would keep more than its limit."""
        with self._lock:
            if self.kept_bytes + block.nbytes <= self.limit:
                self._free.append(block)
