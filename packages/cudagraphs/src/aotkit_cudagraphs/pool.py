"""One memory pool and what is known about it: allocation states, results in use, bytes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from .driver import DeviceDriver
from .liveness import Layout, LiveSlots, Slot, tensors_on


class PoolBusy(RuntimeError):
    """Blocks of the pool are in use that no recording accounts for."""


class Pool:
    """A device pool shared by recordings.

    Note [One pool, many recordings]
    Recordings never run at the same time, so they may use the same memory; only results must not be overwritten while
    in use. Before a recording is made, the pool's allocator is put into the state at the end of the recording before
    it in the path, where exactly the results still in use occupy memory. Between recordings no block is in use for the
    allocator: replays write to the addresses they know, and results are storages that own nothing.

    Args:
        driver: of the device.
        number: names the pool in reports.
    """

    def __init__(self, driver: DeviceDriver, number: int) -> None:
        self._driver = driver
        self.number = number
        self.handle = driver.new_pool()
        self._release = weakref.finalize(self, driver.release_pool, self.handle)
        self._release.atexit = False
        self.empty_state = driver.checkpoint(self.handle)
        self.stream = driver.new_stream()
        self.live = LiveSlots()
        self.last_use = 0
        self.attributed_bytes = 0

    @property
    def reserved_bytes(self) -> int:
        """Bytes the pool holds on the device."""
        return self._driver.reserved_bytes(self.handle)

    @property
    def live_bytes(self) -> int:
        """Bytes of results in use."""
        return sum(slot.nbytes for slot in self.live.find())

    def resume(self, state: Any, slots: Iterable[Slot]) -> dict[Slot, torch.UntypedStorage]:
        """Put the allocator into `state` with only these slots' blocks in use; a storage that owns each.

        Raises:
            PoolBusy: something is in use now that should not be.
        """
        if self._driver.live_blocks(self.handle):
            gc.collect()
            if self._driver.live_blocks(self.handle):
                raise PoolBusy("memory made in an earlier recording is still held")
        wanted = list(dict.fromkeys(slots))
        owners = self._driver.restore(self.handle, state, {slot.address: slot.nbytes for slot in wanted})
        return dict(zip(wanted, owners, strict=True))

    def leaked(self, known: set[int]) -> dict[int, int]:
        """Blocks in use at other addresses than `known`."""
        blocks = self._driver.live_blocks(self.handle)
        if blocks.keys() - known:
            gc.collect()  # a cycle of Python objects may hold what is no longer needed
            blocks = self._driver.live_blocks(self.handle)
        return {address: nbytes for address, nbytes in blocks.items() if address not in known}

    def make_slot(self, owner: Any, address: int, leaves: dict[int, torch.Tensor]) -> Slot:
        """The slot for results on one storage, which must be the storage of all of `leaves`; to be settled."""
        nbytes = next(iter(leaves.values())).untyped_storage().nbytes()
        storage = self._driver.storage_at(self.handle, address, nbytes)
        bases = tensors_on(storage, {leaf: Layout.of(tensor) for leaf, tensor in leaves.items()})
        return Slot(owner, address, nbytes, tuple(leaves), storage, bases)

    def attribute_growth(self) -> int:
        """Bytes that the pool grew by since the last call."""
        before, self.attributed_bytes = self.attributed_bytes, self.reserved_bytes
        return self.attributed_bytes - before

    def release(self) -> None:
        """Give the memory back once no result in it is in use; happens by itself when the pool object dies."""
        self._release()
