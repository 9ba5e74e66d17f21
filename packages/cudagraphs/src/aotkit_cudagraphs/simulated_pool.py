"""A byte-accurate memory pool in host memory.

Note [Simulated memory]
A pool is one arena with a first-fit allocator. Each allocation is a torch storage that points into the arena
without owning it, so that a block which is freed and handed out again really is the same bytes: what reads it through
an old address sees the new contents, as on a GPU. A block is freed when its storage dies, which is polled (torch tells
nobody); freed and fresh blocks are filled with 0xFF, NaN in every floating type. Storages hold the arena, so no
address outlives its memory whatever the caller does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

POISON = 0xFF


class SimulatedMemoryError(RuntimeError):
    """The simulated device caught a memory mistake, or ran out of memory."""


@dataclass(frozen=True, slots=True)
class Block:
    """Bytes of the arena in use.

    Attributes:
        offset: from the start of the arena.
        size: as rounded up by the allocator.
        requested: as asked for.
    """

    offset: int
    size: int
    requested: int


@dataclass(frozen=True, slots=True)
class PoolState:
    """Which blocks of a pool were in use."""

    blocks: tuple[Block, ...]


class SimulatedPool:
    """First-fit allocation in one arena.

    Args:
        capacity: bytes.
        granularity: block sizes and addresses are multiples of it (512 on CUDA).
    """

    def __init__(self, capacity: int, granularity: int = 512) -> None:
        self._granularity = granularity
        self._capacity = capacity
        # Untouched pages cost nothing, so the capacity may be generous.
        self._arena = torch.empty(capacity + granularity, dtype=torch.uint8)
        self._skip = -self._arena.data_ptr() % granularity
        self._base = self._arena.data_ptr() + self._skip
        self._blocks: dict[int, tuple[Block, StorageWeakRef]] = {}
        self.peak_bytes = 0

    @property
    def live_bytes(self) -> int:
        """Bytes in use, after freeing what died."""
        self.collect()
        return sum(block.size for block, _ in self._blocks.values())

    def allocate(self, nbytes: int) -> torch.UntypedStorage:
        """A storage of `nbytes` poisoned bytes.

        Raises:
            SimulatedMemoryError: no gap is large enough.
        """
        self.collect()
        size = max(1, -(-nbytes // self._granularity)) * self._granularity
        offset = self._first_gap(size)
        block = Block(offset, size, nbytes)
        self._poison(block)
        storage = self.storage_at(self._base + offset, nbytes)
        self._blocks[offset] = (block, StorageWeakRef(storage))
        self.peak_bytes = max(self.peak_bytes, sum(used.size for used, _ in self._blocks.values()))
        return storage

    def storage_at(self, address: int, nbytes: int) -> torch.UntypedStorage:
        """A storage on the bytes at `address`, which does not count as a use of the block there."""
        if not (self.owns(address) and address + nbytes <= self._base + self._capacity):
            raise SimulatedMemoryError(f"address {address:#x} with {nbytes} bytes is not inside this pool")
        storage: Any = torch._C._construct_storage_from_data_pointer(address, torch.device("cpu"), nbytes)
        storage._arena = self._arena
        return storage

    def owns(self, address: int) -> bool:
        """Whether `address` is inside the arena."""
        return self._base <= address < self._base + self._capacity

    def is_live(self, address: int) -> bool:
        """Whether the block that starts at `address` is in use."""
        self.collect()
        return address - self._base in self._blocks

    def free(self, address: int) -> None:
        """Free the block that starts at `address`, whoever refers to it."""
        found = self._blocks.pop(address - self._base, None)
        if found is None:
            raise SimulatedMemoryError(
                f"no block in use starts at {address:#x}; it was freed before, or never allocated"
            )
        self._poison(found[0])

    def collect(self) -> None:
        """Free the blocks whose storages have died."""
        for offset in [offset for offset, (_, weak) in self._blocks.items() if weak.expired()]:
            self._poison(self._blocks.pop(offset)[0])

    def poison_unused(self, address: int, nbytes: int) -> None:
        """Poison the part of these bytes that no block in use covers (after a replay wrote its temporaries)."""
        start, end = address - self._base, address - self._base + nbytes
        for block, _ in sorted(self._blocks.values(), key=lambda item: item[0].offset):
            if block.offset + block.size <= start or block.offset >= end:
                continue
            self._fill(start, min(block.offset, end))
            start = max(start, block.offset + block.size)
        self._fill(start, end)

    def poison_contents(self, address: int) -> None:
        """Poison a block in use (a capture leaves its memory undefined)."""
        self._poison(self._blocks[address - self._base][0])

    def checkpoint(self) -> PoolState:
        """The blocks in use now."""
        self.collect()
        return PoolState(tuple(block for _, (block, _) in sorted(self._blocks.items())))

    def restore(self, state: PoolState, live: dict[int, torch.UntypedStorage]) -> None:
        """Make exactly the blocks of `state` whose storages (by address) are in `live` the ones in use.

        Raises:
            SimulatedMemoryError: a live storage is no block of the state: it would be used and free at once.
        """
        offsets = {block.offset for block in state.blocks}
        strays = [address for address in live if address - self._base not in offsets]
        if strays:
            raise SimulatedMemoryError(f"the state has no block for live storages at {', '.join(map(hex, strays))}")
        self._blocks = {
            block.offset: (block, StorageWeakRef(live[self._base + block.offset]))
            for block in state.blocks
            if self._base + block.offset in live
        }

    def _first_gap(self, size: int) -> int:
        offset = 0
        for start, (block, _) in sorted(self._blocks.items()):
            if start - offset >= size:
                return offset
            offset = start + block.size
        if offset + size > self._capacity:
            raise SimulatedMemoryError(f"out of simulated memory: no gap of {size} bytes in a pool of {self._capacity}")
        return offset

    def _poison(self, block: Block) -> None:
        self._fill(block.offset, block.offset + block.size)

    def _fill(self, start: int, end: int) -> None:
        if end > start:
            self._arena[self._skip + start : self._skip + end] = POISON
