"""A store in a directory.

Note [Disk layout and locking]
    CACHEDIR.TAG  signing.key  store.lock  usage  entries/<2 digits>/<key>  locks/<key>.lock
An entry is written to a hidden temporary file beside its place and renamed over it, so a reader sees the old
entry, the new one or none; the read path takes no lock. No fsync: after a power cut an entry may be empty, which
the envelope's signature turns into a miss.
Writers hold `store.lock` for the rename and the book-keeping only. `usage` is an upper bound on the bytes in
`entries`: it is raised before the rename, so a writer killed in between leaves it too high, never too low. When
the bound would pass the cap, the true sizes are read and the least recently used entries go, down to nine tenths
of the cap, which keeps such scans rare. Last use is the file's modification time, set on every hit. A time that is yet
to come was set before a clock went back, and tells nothing: such entries go first, or they would stay until then.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from .errors import CacheError
from .private_files import absolute, check_owner, private_directory, write_temporary
from .store import EntryStat, check_fits, check_key, is_key

_LEFTOVER_SECONDS = 3600.0
_CLOCK_SECONDS = 3600.0  # by which clocks of machines that share a directory may differ
_OPEN_FLAGS = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_NOFOLLOW", 0)


class DiskStore:
    """Entries as files of a private directory, capped in size, shared by any number of processes of one user.

    Args:
        directory: made with mode 0700 if missing; must belong to the current user.
        max_bytes: cap on the sum of entry sizes; None for no cap.
        lock_timeout: seconds to wait for another process before giving up with `CacheError`.

    Raises:
        CacheError: the directory can't be used; the message says why and what to do.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, max_bytes: int | None = 4 << 30, lock_timeout: float = 600.0
    ) -> None:
        if max_bytes is not None and max_bytes <= 0:
            raise ValueError(f"max_bytes must be positive or None, not {max_bytes}")
        self.directory = private_directory(absolute(directory))
        self._max_bytes = max_bytes
        self._lock_timeout = lock_timeout
        self._entries = f"{self.directory}/entries"
        self._locks = f"{self.directory}/locks"
        self._usage = f"{self.directory}/usage"
        try:
            self._make_directory(self._entries)
            self._make_directory(self._locks)
        except OSError as error:
            raise CacheError(f"can't use the cache directory {self.directory}: {error}") from error

    def get(self, key: str) -> bytes | None:
        """The bytes under `key`, or None; marks the entry as used now. Takes no lock."""
        return self._read(key, touches=True)

    def peek(self, key: str) -> bytes | None:
        """The bytes under `key`, or None; does not count as a use. Takes no lock."""
        return self._read(key, touches=False)

    def _read(self, key: str, touches: bool) -> bytes | None:
        check_key(key)
        path = self._path(key)
        try:
            descriptor = os.open(path, _OPEN_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"can't open the cache entry {path}: {error}") from error
        try:
            status = os.fstat(descriptor)
            check_owner(status, path)
            data = _read_all(descriptor, status.st_size)
            # The rename in `put` never changes an open file, so what was read is one whole entry.
            if touches:
                with contextlib.suppress(OSError):  # a read-only medium or a full one: the hit counts, not its time
                    _touch(descriptor if os.utime in os.supports_fd else path)
        except OSError as error:
            raise CacheError(f"can't read the cache entry {path}: {error}") from error
        finally:
            os.close(descriptor)
        return data

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`, evicting the least recently used entries to stay under the cap.

        Raises:
            CacheError: the disk is full or read-only, the entry exceeds the cap, or the lock can't be had.
        """
        check_key(key)
        check_fits(len(data), self._max_bytes)
        path = self._path(key)
        try:
            self._make_directory(os.path.dirname(path))
            temporary = write_temporary(os.path.dirname(path), data)
            try:
                with self._exclusive():
                    self._reserve(path, len(data))
                    _touch(temporary)  # waiting for the lock must not make a new entry look old
                    os.replace(temporary, path)
            finally:
                Path(temporary).unlink(missing_ok=True)  # gone already where the rename took place
        except OSError as error:
            raise CacheError(f"can't write the cache entry {path}: {error}") from error

    def delete(self, key: str) -> bool:
        """Forget `key`; True if it was there."""
        check_key(key)
        path = self._path(key)
        try:
            with self._exclusive():
                size = _size_of(path)
                if size is None:
                    return False
                os.unlink(path)
                usage = self._read_usage()
                if usage is not None:
                    self._write_usage(max(0, usage - size))
        except OSError as error:
            raise CacheError(f"can't delete the cache entry {path}: {error}") from error
        return True

    def stat(self, key: str) -> EntryStat | None:
        """Size and last use of `key`, or None."""
        check_key(key)
        path = self._path(key)
        try:
            status = os.stat(path, follow_symlinks=False)
        except FileNotFoundError:
            return None
        except OSError as error:
            raise CacheError(f"can't look up the cache entry {path}: {error}") from error
        return EntryStat(key, status.st_size, status.st_mtime)

    def entries(self) -> Iterator[EntryStat]:
        """All entries; those that vanish while listing are left out."""
        try:
            for file, status in self._files(self._entries):
                if is_key(file.name):
                    yield EntryStat(file.name, status.st_size, status.st_mtime)
        except OSError as error:
            raise CacheError(f"can't list the cache entries in {self._entries}: {error}") from error

    def lock(self, key: str) -> contextlib.AbstractContextManager[object]:
        """Hold the right to compute `key` among all processes that share the directory."""
        check_key(key)
        return self._acquired(f"{self._locks}/{key}.lock")

    def _path(self, key: str) -> str:
        return f"{self._entries}/{key[:2]}/{key}"

    def _make_directory(self, path: str) -> None:
        if not os.path.isdir(path):
            os.makedirs(path, mode=0o700, exist_ok=True)
            os.chmod(path, 0o700)

    def _exclusive(self) -> contextlib.AbstractContextManager[object]:
        return self._acquired(f"{self.directory}/store.lock")

    @contextlib.contextmanager
    def _acquired(self, path: str) -> Iterator[None]:
        lock = FileLock(path, timeout=self._lock_timeout, mode=0o600)
        try:
            lock.acquire()
        except Timeout as error:
            raise CacheError(f"another process held {path} for more than {self._lock_timeout:g} s") from error
        except OSError as error:
            raise CacheError(f"can't lock {path}: {error}") from error
        try:
            yield
        finally:
            lock.release()

    def _reserve(self, path: str, size: int) -> None:
        """Make room for `size` bytes at `path` and count them. Called under the lock."""
        if self._max_bytes is None:
            # Uncounted bytes would make the bound too low for a process with a cap: let that one count anew.
            Path(self._usage).unlink(missing_ok=True)
            return
        usage = self._read_usage()
        if usage is None:
            usage = sum(entry.size for entry in self.entries())
        wanted = usage + size - (_size_of(path) or 0)
        if wanted > self._max_bytes:
            wanted = self._evict(int(self._max_bytes * 0.9) - size, keep=path) + size
        self._write_usage(wanted)

    def _evict(self, target: int, keep: str) -> int:
        """Delete least recently used entries until at most `target` bytes are left; return what is left.

        The entry at `keep` is about to be replaced: it is neither counted nor deleted.
        """
        self._remove_leftovers()
        latest = time.time() + _CLOCK_SECONDS
        found = [
            (s.st_mtime_ns if s.st_mtime < latest else 0, s.st_size, f.path)
            for f, s in self._files(self._entries)
            if not f.name.startswith(".")
        ]
        found = sorted(item for item in found if item[2] != keep)
        total = sum(size for _, size, _ in found)
        for _, size, path in found:
            if total <= target:
                break
            Path(path).unlink(missing_ok=True)  # someone may empty the directory by hand
            total -= size
        return total

    def _remove_leftovers(self) -> None:
        """Delete temporary files of killed writers and lock files nobody has used for long."""
        oldest, latest = time.time() - _LEFTOVER_SECONDS, time.time() + _CLOCK_SECONDS
        for file, status in [*self._files(self._entries), *self._files(self._locks, depth=0)]:
            left = not oldest <= status.st_mtime < latest
            if left and (file.name.startswith(".tmp-") or file.name.endswith(".lock")):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.path)

    def _files(self, directory: str, depth: int = 1) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(directory) as found:
            for file in found:
                if depth and file.is_dir(follow_symlinks=False):
                    yield from self._files(file.path, depth - 1)
                elif not depth:
                    with contextlib.suppress(FileNotFoundError):
                        yield file, file.stat(follow_symlinks=False)

    def _read_usage(self) -> int | None:
        """The counted bytes, or None where they must be counted anew (first use, damaged file)."""
        try:
            with open(self._usage, encoding="ascii") as file:
                text = file.read()
            return int(text) if text.endswith("\n") else None
        except (FileNotFoundError, ValueError):
            return None

    def _write_usage(self, usage: int) -> None:
        # In place, under the lock: a torn write reads as damaged, and then the files are counted.
        descriptor = os.open(self._usage, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o600)
        with os.fdopen(descriptor, "w", encoding="ascii") as file:
            file.write(f"{usage}\n")


def _read_all(descriptor: int, size: int) -> bytes:
    data = os.read(descriptor, size)
    if len(data) == size:  # the usual case: one call, no copy
        return data
    chunks = [data]
    while chunk := os.read(descriptor, 1 << 20):
        chunks.append(chunk)
    return b"".join(chunks)


def _touch(file: int | str) -> None:
    """Set the time of last use. Given in full, since the kernel's own notion of now is only a few milliseconds fine."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def _size_of(path: str) -> int | None:
    try:
        return os.stat(path, follow_symlinks=False).st_size
    except FileNotFoundError:
        return None
