"""A byte-accurate memory pool in host memory.

Note [Simulated memory]
A pool is one arena with a first-fit allocator. Each allocation is a torch storage that points into the arena
without owning it, so that a block which is freed and handed out again really is the same bytes: what reads it through
an old address sees the new contents, as on a GPU. A block is freed when its storage dies, which is polled (torch tells
nobody); freed and fresh blocks are filled with 0xFF, NaN in every floating type. Storages hold the arena, so no
address outlives its memory whatever the caller does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
        quiet: is not poisoned when its owner dies, since others may read it then: it came back with
            `SimulatedPool.restore`, or was allocated in a capture, where an input may have been before.
    """

    offset: int
    size: int
    requested: int
    quiet: bool = False


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
        self.extent = 0
        self.is_recorded_to = False

    def begin_recording(self) -> None:
        """A recording begins to allocate here. Raises `SimulatedMemoryError` if another one never ended."""
        if self.is_recorded_to:
            raise SimulatedMemoryError("another recording allocates in this pool, and was neither ended nor abandoned")
        self.is_recorded_to = True

    def end_recording(self) -> None:
        """The recording ended."""
        self.is_recorded_to = False

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
        self.extent = max(self.extent, offset + size)
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
            block, _ = self._blocks.pop(offset)
            if not block.quiet:
                self._poison(block)

    def blocks(self) -> list[tuple[int, Block]]:
        """Address and block of what is in use."""
        self.collect()
        return [(self._base + offset, block) for offset, (block, _) in sorted(self._blocks.items())]

    def poison_unused(self, address: int, nbytes: int, spare: Sequence[tuple[int, int]] = ()) -> None:
        """Poison the part of these bytes that no block in use covers (after a replay wrote its temporaries).

        Args:
            address: of the first byte.
            nbytes: how many.
            spare: further (address, bytes) to leave alone, in order of addresses.
        """
        start, end = address - self._base, address - self._base + nbytes
        used = [(block.offset, block.size) for block, _ in self._blocks.values()]
        used += [(spared - self._base, size) for spared, size in spare]
        for offset, size in sorted(used):
            if offset + size <= start or offset >= end:
                continue
            self._fill(start, min(offset, end))
            start = max(start, offset + size)
        self._fill(start, end)

    def keep_quiet(self, address: int) -> None:
        """Don't poison this block when its owner dies."""
        block, owner = self._blocks[address - self._base]
        self._blocks[block.offset] = (replace(block, quiet=True), owner)

    def read(self, address: int, nbytes: int) -> torch.Tensor:
        """A copy of these bytes."""
        start = self._skip + address - self._base
        return self._arena[start : start + nbytes].clone()

    def write(self, address: int, contents: torch.Tensor) -> None:
        """Put bytes back that `read` returned."""
        start = self._skip + address - self._base
        self._arena[start : start + contents.numel()] = contents

    def poison_contents(self, address: int) -> None:
        """Poison a block in use (a capture leaves its memory undefined)."""
        self._poison(self._blocks[address - self._base][0])

    def checkpoint(self) -> PoolState:
        """The blocks in use now."""
        self.collect()
        return PoolState(tuple(block for _, (block, _) in sorted(self._blocks.items())))

    def restore(self, state: PoolState, live: Mapping[int, int]) -> list[torch.UntypedStorage]:
        """Make the blocks of `state` at the addresses of `live` the ones in use, each owned by a returned storage.

        Raises:
            SimulatedMemoryError: a block is in use now, and would be used and free at once; or the state has no
                block at an address.
        """
        self.collect()
        if self._blocks:
            used = ", ".join(hex(self._base + offset) for offset in self._blocks)
            raise SimulatedMemoryError(f"the pool can't be restored while blocks are in use: {used}")
        known = {self._base + block.offset: block for block in state.blocks}
        strays = [address for address in live if address not in known]
        if strays:
            raise SimulatedMemoryError(f"the state has no block for live storages at {', '.join(map(hex, strays))}")
        storages = []
        for address, nbytes in live.items():
            storages.append(self.storage_at(address, nbytes))
            block = replace(known[address], quiet=True)
            self._blocks[block.offset] = (block, StorageWeakRef(storages[-1]))
        return storages

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
