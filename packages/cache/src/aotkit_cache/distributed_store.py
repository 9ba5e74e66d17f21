"""A store over the key-value stores of torch.distributed, so that the ranks of a job share what one of them compiled.

Note [Values in a TCPStore]
    Its server closes the connection of whoever sends more than 8 MiB, so an entry is kept in pieces:
        data/<key> = "<version> <size>"    data/<key>/<version>/<number> = bytes    listed/<number> = key
    The pieces are written first, so a reader sees the old entry, the new one or none; a writer that dies in between
    leaves pieces that nobody reads. Versions are counted by the store, so two writers never share pieces. A key that
    is deleted stays listed, and is left out when entries are listed.

Note [Locks in a store]
    lock/<key> holds the token of its holder, or "free". There is no way to see that a holder has ended, so whoever
    waits longer than `lock_timeout` is told so by `CacheError`, and computes without the lock: nobody waits for the
    dead for longer than that, and all wait at the same time. Waiting asks again and again instead of blocking: other
    users of the same connection, as the process group itself, would be kept out meanwhile.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterator
from typing import Any

from .errors import CacheError
from .store import EntryStat, check_key

_PIECE_BYTES = 4 << 20
_FREE = "free"
_LONGEST_PAUSE = 0.05


class DistributedStore:
    """Entries in a `torch.distributed.Store` (`TCPStore`, `FileStore`, `HashStore`, `PrefixStore`), for one job.

    They live as long as that store, and take memory of the process that holds it.

    Args:
        store: what the ranks share; `torch.distributed.distributed_c10d._get_default_store()` is that of the job.
        prefix: put before every key.
        lock_timeout: seconds to wait for a rank that computes an entry before giving up with `CacheError`.
    """

    def __init__(self, store: Any, *, prefix: str = "aotkit-cache", lock_timeout: float = 600.0) -> None:
        self._store = store
        self._prefix = prefix
        self._lock_timeout = lock_timeout

    def get(self, key: str) -> bytes | None:
        """The bytes under `key`, or None."""
        check_key(key)
        with _failures("read", key):
            head = self._head(key)
            if head is None:
                return None
            version, size = head
            count = -(-size // _PIECE_BYTES)
            names = [self._name("data", key, version, number) for number in range(count)]
            data = b"".join(bytes(self._store.get(name)) for name in names)
            return data if len(data) == size else None  # replaced meanwhile

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`."""
        check_key(key)
        with _failures("write", key):
            old = self._head(key)
            version = self._store.add(self._name("versions"), 1)
            for number, start in enumerate(range(0, len(data), _PIECE_BYTES)):
                self._store.set(self._name("data", key, version, number), data[start : start + _PIECE_BYTES])
            self._store.set(self._name("data", key), f"{version} {len(data)}")
            if old is None:
                self._store.set(self._name("listed", self._store.add(self._name("count"), 1)), key)
            else:
                self._drop(key, *old)

    def delete(self, key: str) -> bool:
        """Forget `key`; True if it was there."""
        check_key(key)
        with _failures("delete", key):
            head = self._head(key)
            if head is None:
                return False
            self._store.set(self._name("data", key), "")  # not every store can delete a key
            self._drop(key, *head)
            return True

    def stat(self, key: str) -> EntryStat | None:
        """Size of `key`, or None. `last_used` is 0: such a store keeps no times."""
        check_key(key)
        with _failures("read", key):
            head = self._head(key)
        return None if head is None else EntryStat(key, head[1], 0.0)

    def entries(self) -> Iterator[EntryStat]:
        """All entries under the prefix."""
        with _failures("list", "all entries"):
            count = self._store.add(self._name("count"), 0)
            names = [self._name("listed", number) for number in range(1, count + 1)]
            keys = [bytes(self._store.get(name)).decode() for name in names if self._store.check([name])]
        for key in dict.fromkeys(keys):
            found = self.stat(key)
            if found is not None:
                yield found

    @contextlib.contextmanager
    def lock(self, key: str) -> Iterator[bool]:
        """Hold the right to compute `key` among all ranks; see Note [Locks in a store].

        Yields whether another rank had it when this one asked.
        """
        check_key(key)
        name, token = self._name("lock", key), secrets.token_hex(8)
        with _failures("lock", key):
            waited = self._acquire(name, token)
        try:
            yield waited
        finally:
            with _failures("unlock", key):
                self._store.compare_set(name, token, _FREE)

    def _acquire(self, name: str, token: str) -> bool:
        """Whether it took more than one attempt."""
        until, pause, waited = time.monotonic() + self._lock_timeout, 0.001, False
        while not any(bytes(self._store.compare_set(name, free, token)).decode() == token for free in ("", _FREE)):
            if time.monotonic() > until:
                raise CacheError(f"another rank has been computing an entry for more than {self._lock_timeout:g} s")
            waited = True
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return waited

    def _head(self, key: str) -> tuple[int, int] | None:
        """Version and size."""
        name = self._name("data", key)
        text = bytes(self._store.get(name)).decode() if self._store.check([name]) else ""
        if not text:
            return None
        version, size = text.split()
        return int(version), int(size)

    def _drop(self, key: str, version: int, size: int) -> None:
        for number in range(-(-size // _PIECE_BYTES)):
            self._store.set(self._name("data", key, version, number), "")

    def _name(self, *parts: object) -> str:
        return "/".join((self._prefix, *map(str, parts)))


@contextlib.contextmanager
def _failures(verb: str, key: str) -> Iterator[None]:
    """Whatever the store raises is a `CacheError`: the process that holds it may have ended."""
    try:
        yield
    except CacheError:
        raise
    except (RuntimeError, ValueError, UnicodeDecodeError) as error:
        raise CacheError(f"torch.distributed's store can't {verb} {key}: {type(error).__name__}: {error}") from error
