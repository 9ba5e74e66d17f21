"""A store on any fsspec file system: s3, gcs, a network share (extra `fsspec`)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .errors import CacheError
from .store import EntryStat, check_key, is_key


class FsspecStore:
    """Entries as objects below a URL such as `s3://bucket/prefix`.

    Object stores replace objects atomically; on file systems that don't, a half-written entry fails its signature
    and is a miss. There is no size cap: use the bucket's own expiry rules.

    Args:
        url: where; its scheme picks the file system.
        storage_options: passed to `fsspec.core.url_to_fs` (credentials, endpoint).
    """

    def __init__(self, url: str, **storage_options: Any) -> None:
        # The extra: importing the package must not need it.
        import fsspec  # type: ignore[import-untyped,unused-ignore]

        self._fs, root = fsspec.core.url_to_fs(url, **storage_options)
        self._root = root.rstrip("/")

    def get(self, key: str) -> bytes | None:
        """The bytes under `key`, or None."""
        check_key(key)
        try:
            return bytes(self._fs.cat_file(self._path(key)))
        except FileNotFoundError:
            return None
        except Exception as error:  # file systems raise their own libraries' types
            raise self._failure("read", key, error) from error

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`."""
        check_key(key)
        try:
            self._fs.makedirs(f"{self._root}/{key[:2]}", exist_ok=True)
            self._fs.pipe_file(self._path(key), data)
        except Exception as error:
            raise self._failure("write", key, error) from error

    def delete(self, key: str) -> bool:
        """Forget `key`; True if it was there."""
        check_key(key)
        try:
            self._fs.rm_file(self._path(key))
        except FileNotFoundError:
            return False
        except Exception as error:
            raise self._failure("delete", key, error) from error
        return True

    def stat(self, key: str) -> EntryStat | None:
        """Size of `key`, or None. `last_used` is 0: remote file systems don't keep it."""
        check_key(key)
        try:
            return EntryStat(key, int(self._fs.info(self._path(key))["size"]), 0.0)
        except FileNotFoundError:
            return None
        except Exception as error:
            raise self._failure("look up", key, error) from error

    def entries(self) -> Iterator[EntryStat]:
        """All entries below the URL."""
        try:
            found = self._fs.find(self._root, detail=True)
        except FileNotFoundError:
            return
        except Exception as error:
            raise CacheError(f"can't list the cache entries in {self._root}: {error}") from error
        for path, info in found.items():
            name = path.rpartition("/")[2]
            # One of another store may lie in a folder of this one.
            if is_key(name) and path.strip("/") == self._path(name).strip("/"):
                yield EntryStat(name, int(info["size"]), 0.0)

    def _path(self, key: str) -> str:
        return f"{self._root}/{key[:2]}/{key}"

    def _failure(self, verb: str, key: str, error: Exception) -> CacheError:
        return CacheError(f"can't {verb} the cache entry {key} in {self._root}: {type(error).__name__}: {error}")
