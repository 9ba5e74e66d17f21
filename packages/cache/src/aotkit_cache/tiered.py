"""Several stores as one: fast and near first, slow and shared last."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from ._notices import warn_user
from .errors import CacheError, CacheWarning
from .store import EntryStat, LockingStore, Store, check_key, peek


class TieredStore:
    """Reads from the first store that has an entry and copies it into those before; writes to all.

    A tier that fails is left out of that operation, with one warning per tier; the operation fails
    only if no tier worked.

    Args:
        stores: at least one, nearest first.
        background_writes: write all but the first tier on one worker thread; `flush` waits for it.
    """

    def __init__(self, stores: Sequence[Store], *, background_writes: bool = False) -> None:
        if not stores:
            raise ValueError("a tiered store needs at least one store")
        self._stores = tuple(stores)
        self._background = background_writes
        self._worker: ThreadPoolExecutor | None = None
        self._worker_process = os.getpid()
        self._pending: set[Future[None]] = set()
        self._guard = threading.Lock()
        self._warned: set[int] = set()

    def get(self, key: str) -> bytes | None:
        """The bytes from the nearest tier that has them, or None."""
        index, data = self._nearest(key, lambda store: store.get(key))
        if data is not None:
            for nearer in range(index):
                self._write(nearer, key, data)
        return data

    def peek(self, key: str) -> bytes | None:
        """The bytes from the nearest tier that has them, or None; copies nothing, and does not count as a use."""
        return self._nearest(key, lambda store: peek(store, key))[1]

    def _nearest(self, key: str, look: Callable[[Store], bytes | None]) -> tuple[int, bytes | None]:
        """Which tier has it, and what."""
        check_key(key)
        failures = 0
        for index, store in enumerate(self._stores):
            try:
                data = look(store)
            except CacheError as error:
                failures += 1
                self._warn(index, error)
                continue
            if data is not None:
                return index, data
        if failures == len(self._stores):
            raise CacheError("none of the tiers could be read; see the warnings before this")
        return 0, None

    def put(self, key: str, data: bytes) -> None:
        """Write to every tier; `CacheError` if none took it."""
        check_key(key)
        foreground = 1 if self._background else len(self._stores)
        written = sum(self._write(index, key, data) for index in range(foreground))
        for index in range(foreground, len(self._stores)):
            self._later(index, key, data)
        if written == 0 and foreground == len(self._stores):
            raise CacheError("none of the tiers could be written; see the warnings before this")

    def delete(self, key: str) -> bool:
        """Forget `key` in every tier; True if one had it. Unlike reads, fails if any tier fails."""
        return sum(store.delete(key) for store in self._stores) > 0

    def stat(self, key: str) -> EntryStat | None:
        """Size and last use in the nearest tier that has it, or None."""
        return next((found for store in self._stores if (found := store.stat(key)) is not None), None)

    def entries(self) -> Iterator[EntryStat]:
        """All entries of all tiers, each key once (as the nearest tier sees it)."""
        seen: set[str] = set()
        for store in self._stores:
            for entry in store.entries():
                if entry.key not in seen:
                    seen.add(entry.key)
                    yield entry

    def lock(self, key: str) -> contextlib.AbstractContextManager[object]:
        """The lock of the farthest tier that has one, which most processes share; no lock if none has."""
        for store in reversed(self._stores):
            if isinstance(store, LockingStore):
                return store.lock(key)
        return contextlib.nullcontext()

    def flush(self) -> None:
        """Wait until background writes are done."""
        with self._guard:
            pending = list(self._pending)
        for future in pending:
            future.result()

    def _write(self, index: int, key: str, data: bytes) -> bool:
        try:
            self._stores[index].put(key, data)
        except CacheError as error:
            self._warn(index, error)
            return False
        return True

    def _later(self, index: int, key: str, data: bytes) -> None:
        def write() -> None:
            self._write(index, key, data)

        with self._guard:
            if self._worker is None or self._worker_process != os.getpid():
                # A forked child inherits the object but not its thread.
                self._worker = ThreadPoolExecutor(1, thread_name_prefix="aotkit-cache")
                self._worker_process = os.getpid()
                self._pending.clear()
            future = self._worker.submit(write)
            self._pending.add(future)
        future.add_done_callback(self._forget)

    def _forget(self, future: Future[None]) -> None:
        with self._guard:
            self._pending.discard(future)

    def _warn(self, index: int, error: CacheError) -> None:
        with self._guard:
            if index in self._warned:
                return
            self._warned.add(index)
        name = type(self._stores[index]).__name__
        warn_user(f"cache tier {index} ({name}) failed and is left out: {error}", CacheWarning)
