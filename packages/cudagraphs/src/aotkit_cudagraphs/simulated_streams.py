"""Stream order as vector clocks: a race is an access that no wait orders after the last write."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.multiprocessing.reductions import StorageWeakRef


class StreamOrderError(RuntimeError):
    """Work on one stream uses memory that another stream wrote or reads, and nothing orders the two."""


@dataclass(frozen=True, slots=True)
class SimulatedStream:
    """A stream of the simulated device. Number 0 is the default stream."""

    number: int


@dataclass(frozen=True, slots=True)
class SimulatedEvent:
    """How far each stream's work was known to be done, as (stream number, time) pairs."""

    clock: tuple[tuple[int, int], ...]


@dataclass(slots=True)
class _Access:
    storage: StorageWeakRef | None
    writer: tuple[int, int] | None
    readers: dict[int, int]


class StreamClocks:
    """Who knows of what. Each stream has a clock: for each stream, up to which time its work is ordered before.

    Args:
        is_pooled: whether an address belongs to a pool. Such memory stays the same memory whatever storage is on it,
            until the pool hands it out anew (`forget`); other memory does until its storage dies.
    """

    def __init__(self, is_pooled: Callable[[int], bool]) -> None:
        self._is_pooled = is_pooled
        self._clocks: dict[int, dict[int, int]] = {0: {0: 0}}
        self._accesses: dict[int, _Access] = {}
        self.current = SimulatedStream(0)

    def new_stream(self) -> SimulatedStream:
        """A stream that knows of no other's work."""
        number = len(self._clocks)
        self._clocks[number] = {number: 0}
        return SimulatedStream(number)

    def record(self, stream: SimulatedStream) -> SimulatedEvent:
        """What `stream` has done and knows of."""
        return SimulatedEvent(tuple(sorted(self._clocks[stream.number].items())))

    def wait(self, stream: SimulatedStream, event: SimulatedEvent) -> None:
        """Later work of `stream` comes after `event`."""
        clock = self._clocks[stream.number]
        for number, time in event.clock:
            clock[number] = max(clock.get(number, 0), time)

    def synchronize(self) -> None:
        """Everything that was issued is done, and all later work comes after it."""
        events = [self.record(SimulatedStream(number)) for number in self._clocks]
        for number in self._clocks:
            for event in events:
                self.wait(SimulatedStream(number), event)

    def access(self, reads: list[torch.UntypedStorage], writes: list[torch.UntypedStorage], what: str) -> None:
        """One piece of work on the current stream.

        Raises:
            StreamOrderError: it touches memory whose last write, or it writes memory whose reads, are not
                ordered before it.
        """
        number = self.current.number
        clock = self._clocks[number]
        clock[number] += 1
        for storage in reads:
            entry = self._entry(storage)
            self._check(entry.writer, clock, what, "was written on")
            entry.readers[number] = clock[number]
        for storage in writes:
            entry = self._entry(storage)
            self._check(entry.writer, clock, what, "was written on")
            for reader in entry.readers.items():
                self._check(reader, clock, what, "is read on")
            entry.writer, entry.readers = (number, clock[number]), {}

    def forget(self, address: int) -> None:
        """The memory at `address` is handed out anew; the allocator has ordered it."""
        self._accesses.pop(address, None)

    def _entry(self, storage: torch.UntypedStorage) -> _Access:
        # By address: two storages on the same bytes are the same memory.
        address = storage.data_ptr()
        entry = self._accesses.get(address)
        if entry is None or (entry.storage is not None and entry.storage.expired()):
            weak = None if self._is_pooled(address) else StorageWeakRef(storage)
            entry = self._accesses[address] = _Access(weak, None, {})
        return entry

    def _check(self, access: tuple[int, int] | None, clock: dict[int, int], what: str, did: str) -> None:
        if access is not None and clock.get(access[0], 0) < access[1]:
            raise StreamOrderError(
                f"{what} on stream {self.current.number} uses memory that {did} stream {access[0]}, and nothing "
                "orders the two; wait for an event of that stream first"
            )
