"""Signed entries on top of a store, and what became of each lookup."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ._notices import warn_user
from ._observer import SILENT, Observer
from .entry import (
    Entry,
    JsonValue,
    MissReason,
    RejectedEntry,
    decode_entry,
    encode_entry,
    entry_digest,
    stored_key_parts,
)
from .errors import CacheError, CacheWarning
from .key import CacheKey
from .signing import Signer
from .store import EntryStat, LockingStore, Store, peek

if TYPE_CHECKING:
    from .transfer import Transfer

Payload = tuple[Mapping[str, bytes], Mapping[str, JsonValue]]


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Counts since the cache object was made.

    Attributes:
        hits: lookups that gave an entry.
        misses: lookups that gave none, by `MissReason` name, reasons with a count only.
        puts: entries written.
        failed_puts: entries that could not be written.
        bytes_read: envelope bytes of hits.
        bytes_written: envelope bytes of puts.
    """

    hits: int
    misses: tuple[tuple[str, int], ...]
    puts: int
    failed_puts: int
    bytes_read: int
    bytes_written: int

    @property
    def missed(self) -> int:
        """Lookups that gave nothing, for whatever reason."""
        return sum(count for _, count in self.misses)

    def __str__(self) -> str:
        reasons = "".join(f", {count} {name.lower()}" for name, count in self.misses)
        return (
            f"{self.hits} hits ({self.bytes_read} bytes), {self.missed} misses{reasons}, "
            f"{self.puts} puts ({self.bytes_written} bytes), {self.failed_puts} failed puts"
        )


class ArtifactCache:
    """Compiled artifacts by key: named binary sections and JSON metadata, signed, never executed or unpickled.

    Nothing that is wrong with the store or an entry reaches the caller: a cut, changed, foreign or outdated
    entry and an unreachable store are misses, with one `CacheWarning` per cause and cache object.
    May be used from many threads.

    Args:
        store: where the bytes are kept.
        signing_key: at least 16 secret bytes; readers and writers need the same. See `user_key` for a
            per-user one; `open_cache` does that.
        observer: told of the events `cache.hit`, `cache.miss`, `cache.put` and `cache.skip`: `key` (a digest),
            `seconds`, and `bytes` or `reason`.
    """

    def __init__(self, store: Store, signing_key: bytes | str, *, observer: Observer = SILENT) -> None:
        self.store = store
        self._signer = Signer(signing_key)
        self._observer = observer
        self._guard = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._misses: Counter[MissReason] = Counter()
        self._warned: set[str] = set()

    def get(self, key: CacheKey) -> Entry | None:
        """The entry under `key`, or None."""
        began = time.perf_counter()
        try:
            data = self.store.get(key.digest)
            if data is None:
                self._missed(key, MissReason.ABSENT, began)
                return None
            entry = decode_entry(key.digest, data, self._signer)
        except RejectedEntry as error:
            self._missed(key, error.reason, began)
            self._warn(error.reason.name, f"{error.reason.value} (key {key.digest[:12]}); it is treated as missing")
            return None
        except CacheError as error:
            self._missed(key, MissReason.STORE, began)
            self._warn("read", f"{error}; the entry is treated as missing")
            return None
        with self._guard:
            self._counts["hits"] += 1
            self._counts["bytes_read"] += len(data)
        self._tell("cache.hit", key, began, bytes=len(data))
        return entry

    def put(self, key: CacheKey, sections: Mapping[str, bytes], meta: Mapping[str, JsonValue] | None = None) -> bool:
        """Keep sections and metadata under `key`; False, with a warning, if the store would not take them.

        Raises:
            TypeError: a section is not bytes or the metadata is not JSON; that is the caller's mistake.
        """
        began = time.perf_counter()
        data = encode_entry(key, sections, meta or {}, self._signer)
        try:
            self.store.put(key.digest, data)
        except CacheError as error:
            with self._guard:
                self._counts["failed_puts"] += 1
            self._warn("write", f"{error}; the entry is not kept")
            self._tell("cache.skip", key, began, reason=str(error))
            return False
        with self._guard:
            self._counts["puts"] += 1
            self._counts["bytes_written"] += len(data)
        self._tell("cache.put", key, began, bytes=len(data))
        return True

    def get_or_compute(self, key: CacheKey, compute: Callable[[], Payload]) -> Entry:
        """The entry under `key`, or what `compute()` returns, which is then kept.

        `compute` returns `(sections, meta)`. Where the store can lock (`DiskStore`), only one of the processes that
        miss at the same time computes and the others take its result. What `compute` raises is passed on and
        nothing is kept.
        """
        entry = self.get(key)
        if entry is not None:
            return entry
        with self._locked(key) as (locked, _):
            if locked and (entry := self._get_written_meanwhile(key)) is not None:
                return entry
            sections, meta = compute()
            self.put(key, sections, meta)
        return Entry(key.digest, dict(sections), dict(meta))

    def delete(self, key: CacheKey) -> bool:
        """Forget `key`; True if it was there. Raises `CacheError` if the store fails."""
        return self.store.delete(key.digest)

    def stats(self) -> CacheStats:
        """Counts so far."""
        with self._guard:
            misses = tuple((reason.name, self._misses[reason]) for reason in MissReason if self._misses[reason])
            counts = self._counts
            return CacheStats(
                hits=counts["hits"],
                misses=misses,
                puts=counts["puts"],
                failed_puts=counts["failed_puts"],
                bytes_read=counts["bytes_read"],
                bytes_written=counts["bytes_written"],
            )

    def entries(self) -> list[EntryStat]:
        """What the store holds, most recently used first, other people's entries included. Raises `CacheError`."""
        return sorted(self.store.entries(), key=lambda entry: -entry.last_used)

    def describe(self, digest: str) -> tuple[Entry, dict[str, str]]:
        """An entry of ours and the parts of its key, long ones abbreviated, without counting a lookup or a use.

        Raises:
            CacheError: there is none, or it is not one that a lookup would give; the message says why.
        """
        data = peek(self.store, digest)
        if data is None:
            raise CacheError(f"there is no entry {digest}")
        return decode_entry(digest, data, self._signer), stored_key_parts(data, self._signer)

    def prune(self, *, max_bytes: int = 0, unused_seconds: float | None = None) -> list[EntryStat]:
        """Delete least recently used entries until `max_bytes` are left, or all not used for `unused_seconds`.

        Returns what was deleted. Raises `CacheError` if the store fails.
        """
        left, gone = 0, []
        for entry in self.entries():
            old = unused_seconds is not None and time.time() - entry.last_used > unused_seconds
            if old or (unused_seconds is None and left + entry.size > max_bytes):
                if self.store.delete(entry.key):
                    gone.append(entry)
            else:
                left += entry.size
        return gone

    def export_entries(
        self,
        path: str | os.PathLike[str],
        *,
        keys: Iterable[str] | None = None,
        signing_key: bytes | str | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Transfer:
        """Write entries (all, or those with the digests `keys`) to one file, signed with `signing_key`.

        Without a key the cache's own is used, which another machine has only if it is a shared one.
        `progress(done, total)` is called along the way. Raises `CacheError`. See Note [Export file].
        """
        from .transfer import export_entries

        found = [entry.key for entry in self.store.entries()] if keys is None else keys
        return export_entries(self.store, self._signer, self._other(signing_key), path, found, progress)

    def import_entries(
        self,
        path: str | os.PathLike[str],
        *,
        signing_key: bytes | str | None = None,
        progress: Callable[[int, int], None] = lambda done, total: None,
    ) -> Transfer:
        """Keep what `export_entries` wrote with the same `signing_key`; anything else in the file is left out.

        Raises `CacheError` if it is no such file, or cut short.
        """
        from .transfer import import_entries

        return import_entries(self.store, self._signer, self._other(signing_key), path, progress)

    def _other(self, signing_key: bytes | str | None) -> Signer:
        return self._signer if signing_key is None else Signer(signing_key)

    def envelope(self, key: CacheKey) -> bytes | None:
        """The entry under ``key`` as it is stored and signed, for :meth:`accept` of a cache with the same signing key.

        Raises `CacheError` if the store fails.
        """
        return peek(self.store, key.digest)

    def accept(self, data: bytes) -> str:
        """Keep an entry that :meth:`envelope` gave, here or elsewhere; returns the digest of its key.

        Raises `RejectedEntry`, a `CacheError`, if it is not whole or not signed with this cache's key.
        """
        digest = entry_digest(data, self._signer)
        self.store.put(digest, data)
        return digest

    @contextlib.contextmanager
    def computing(self, key: CacheKey) -> Iterator[bool]:
        """Hold the right to compute the entry under `key` among those that share the store, if it can lock.

        Yields whether another one had it when this one asked: then the entry may be there, or there will be none.
        Whoever has it for too long is not waited for, after one `CacheWarning`.
        """
        with self._locked(key) as (locked, waited):
            yield waited or not locked

    @contextlib.contextmanager
    def _locked(self, key: CacheKey) -> Iterator[tuple[bool, bool]]:
        """Hold the store's lock for `key` if it has one; yields whether it is held, and whether the store says that
        another had it before."""
        lock = self.store.lock(key.digest) if isinstance(self.store, LockingStore) else None
        locked = waited = False
        if lock is not None:
            try:
                waited = lock.__enter__() is True
                locked = True
            except CacheError as error:
                self._warn("lock", f"{error}; computing without waiting")
        try:
            yield locked, waited
        finally:
            if lock is not None and locked:
                try:
                    lock.__exit__(None, None, None)
                except CacheError as error:  # a store that ended meanwhile; what was computed is there
                    self._warn("unlock", str(error))

    def _get_written_meanwhile(self, key: CacheKey) -> Entry | None:
        """A second look under the lock; counts as a lookup only if it finds something."""
        try:
            there = self.store.stat(key.digest) is not None
        except CacheError:
            return None  # the first look has warned about this store
        if not there:
            return None
        return self.get(key)

    def _missed(self, key: CacheKey, reason: MissReason, began: float) -> None:
        with self._guard:
            self._misses[reason] += 1
        self._tell("cache.miss", key, began, reason=reason.value)

    def _tell(self, name: str, key: CacheKey, began: float, **fields: object) -> None:
        self._observer.event(name, {"key": key.digest, "seconds": time.perf_counter() - began, **fields})

    def _warn(self, cause: str, message: str) -> None:
        with self._guard:
            if cause in self._warned:
                return
            self._warned.add(cause)
        warn_user(f"compile cache: {message}. This is said once per cause.", CacheWarning)
