"""What a store is, and the one that lives in memory."""

from __future__ import annotations

import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from .errors import CacheError

_SAFE_KEY = re.compile(r"[0-9A-Za-z_][0-9A-Za-z_.-]{2,127}")


@dataclass(frozen=True, slots=True)
class EntryStat:
    """What a store knows of an entry without opening it.

    Attributes:
        key: the entry's key (a digest, for entries of an `ArtifactCache`).
        size: bytes.
        last_used: seconds since the epoch of the last write or hit, as far as the store keeps track.
    """

    key: str
    size: int
    last_used: float


class Store(Protocol):
    """Bytes by key. Keys are 3 to 128 characters of `[0-9A-Za-z_.-]`, not starting with a dot or dash.

    A store promises that `get` returns None or the whole of one `put`, as far as its medium can; entries are
    signed above it, so a store that breaks the promise costs a miss and nothing else. Failures are `CacheError`.
    Stores may be used from many threads.
    """

    def get(self, key: str) -> bytes | None:
        """The bytes under `key`, or None."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`, replacing what was there."""
        ...

    def delete(self, key: str) -> bool:
        """Forget `key`; True if it was there."""
        ...

    def stat(self, key: str) -> EntryStat | None:
        """Size and last use of `key`, or None; does not count as a use."""
        ...

    def entries(self) -> Iterator[EntryStat]:
        """All entries, in no order."""
        ...


@runtime_checkable
class LockingStore(Protocol):
    """A store through which processes can agree who computes a missing entry."""

    def lock(self, key: str) -> AbstractContextManager[object]:
        """Hold the right to compute `key`; waits for another holder, raises `CacheError` when that takes too long."""
        ...


@runtime_checkable
class PeekingStore(Protocol):
    """A store that keeps track of uses, and can be looked into without one."""

    def peek(self, key: str) -> bytes | None:
        """What `get` gives; does not count as a use."""
        ...


def peek(store: Store, key: str) -> bytes | None:
    """The bytes under `key`, or None; a use only in a store that can't tell: who lists entries does not use them."""
    return store.peek(key) if isinstance(store, PeekingStore) else store.get(key)


def is_key(name: str) -> bool:
    """Whether a store could have kept something under `name`: others may write to the same place."""
    return _SAFE_KEY.fullmatch(name) is not None


def check_key(key: str) -> None:
    """Refuse keys that could leave a store's directory or hide in it (`CacheError`)."""
    if not is_key(key):
        raise CacheError(
            f"{key!r} can't be a store key: use 3 to 128 characters of [0-9A-Za-z_.-], the first of [0-9A-Za-z_]"
        )


def check_fits(size: int, max_bytes: int | None) -> None:
    """Refuse an entry larger than the whole store (`CacheError`)."""
    if max_bytes is not None and size > max_bytes:
        raise CacheError(
            f"an entry of {size} bytes is larger than the whole store's cap of {max_bytes}; raise max_bytes"
        )


class MemoryStore:
    """A least-recently-used store in this process.

    Args:
        max_bytes: cap on the sum of entry sizes; None for no cap.
    """

    def __init__(self, max_bytes: int | None = None) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._data: OrderedDict[str, tuple[bytes, float]] = OrderedDict()
        self._size = 0

    def get(self, key: str) -> bytes | None:
        """The bytes under `key`, or None."""
        with self._lock:
            found = self._data.get(key)
            if found is None:
                return None
            self._data[key] = (found[0], time.time())
            self._data.move_to_end(key)
            return found[0]

    def peek(self, key: str) -> bytes | None:
        """The bytes under `key`, or None; does not count as a use."""
        with self._lock:
            found = self._data.get(key)
            return None if found is None else found[0]

    def put(self, key: str, data: bytes) -> None:
        """Keep `data`, evicting the least recently used entries to stay under the cap."""
        check_key(key)
        check_fits(len(data), self._max_bytes)
        with self._lock:
            self._drop(key)
            self._data[key] = (data, time.time())
            self._size += len(data)
            while self._max_bytes is not None and self._size > self._max_bytes:
                self._drop(next(iter(self._data)))

    def delete(self, key: str) -> bool:
        """Forget `key`; True if it was there."""
        with self._lock:
            return self._drop(key)

    def stat(self, key: str) -> EntryStat | None:
        """Size and last use of `key`, or None."""
        with self._lock:
            found = self._data.get(key)
            return None if found is None else EntryStat(key, len(found[0]), found[1])

    def entries(self) -> Iterator[EntryStat]:
        """All entries, least recently used first."""
        with self._lock:
            stats = [EntryStat(key, len(data), used) for key, (data, used) in self._data.items()]
        return iter(stats)

    def _drop(self, key: str) -> bool:
        old = self._data.pop(key, None)
        if old is not None:
            self._size -= len(old[0])
        return old is not None
