"""A store on a Redis server (extra `redis`)."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

from .errors import CacheError
from .store import EntryStat, check_key, is_key

_GLOB, _ESCAPED = re.compile(r"([\\*?\[\]^])"), r"\\\1"  # what a pattern of the server's gives a meaning of its own


class RedisStore:
    """Entries as string values `<prefix><key>`; the server's own eviction policy caps the size.

    Args:
        client: a `redis.Redis` with `decode_responses=False`, or anything with its `get`, `set`, `delete`,
            `strlen` and `scan_iter`.
        prefix: put before every key.
        expire_seconds: time to live, renewed by each write; None to keep entries.
    """

    def __init__(self, client: Any, *, prefix: str = "aotkit:", expire_seconds: int | None = None) -> None:
        self._client = client
        self._prefix = prefix
        self._expire_seconds = expire_seconds

    @staticmethod
    def from_url(url: str, *, prefix: str = "aotkit:", timeout: float = 2.0) -> RedisStore:
        """Connect to `redis://host:port/db`; a server that does not answer within `timeout` seconds is an error."""
        # The extra: only users of a server need it installed.
        import redis  # type: ignore[import-not-found,unused-ignore]

        return RedisStore(
            redis.Redis.from_url(url, socket_timeout=timeout, socket_connect_timeout=timeout), prefix=prefix
        )

    def get(self, key: str) -> bytes | None:
        """The bytes under `key`, or None."""
        check_key(key)
        data = self._call("get", self._prefix + key)
        return None if data is None else bytes(data)

    def put(self, key: str, data: bytes) -> None:
        """Keep `data` under `key`."""
        check_key(key)
        self._call("set", self._prefix + key, data, ex=self._expire_seconds)

    def delete(self, key: str) -> bool:
        """Forget `key`; True if it was there."""
        check_key(key)
        return bool(self._call("delete", self._prefix + key))

    def stat(self, key: str) -> EntryStat | None:
        """Size of `key`, or None. `last_used` is 0: the server keeps it to itself."""
        check_key(key)
        size = int(self._call("strlen", self._prefix + key))
        return EntryStat(key, size, 0.0) if size else None

    def entries(self) -> Iterator[EntryStat]:
        """All entries under the prefix."""
        # The client asks the server as it goes along, and the server may tell a name twice.
        names = self._call("scan_iter", read=list, match=f"{_GLOB.sub(_ESCAPED, self._prefix)}*")
        for name in dict.fromkeys(bytes(name).decode(errors="replace") for name in names):
            key = name.removeprefix(self._prefix)
            found = self.stat(key) if is_key(key) else None
            if found is not None:
                yield found

    def _call(
        self, command: str, *args: object, read: Callable[[Any], Any] = lambda answer: answer, **options: object
    ) -> Any:
        """What the client's ``command`` gives, as ``read`` takes it from the answer."""
        try:
            return read(getattr(self._client, command)(*args, **options))
        except Exception as error:  # redis.RedisError, OSError: whatever the client raises is a store failure
            raise CacheError(f"Redis {command} failed: {type(error).__name__}: {error}") from error
