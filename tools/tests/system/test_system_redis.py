"""The cache on a real Redis server."""

from __future__ import annotations

import pytest

from aotkit_cache import ArtifactCache, make_key
from aotkit_cache.stores import RedisStore

pytestmark = pytest.mark.system


def test_bytes_come_back_from_a_real_server_as_they_were(redis_port: int) -> None:
    store = RedisStore.from_url(f"redis://127.0.0.1:{redis_port}/0")
    key, data = "a" * 64, bytes(range(256)) * 1000
    assert store.get(key) is None
    store.put(key, data)
    assert store.get(key) == data
    assert [(entry.key, entry.size) for entry in store.entries()] == [(key, len(data))]
    assert store.delete(key)
    assert store.get(key) is None


def test_a_signed_entry_written_by_one_client_is_read_by_another(redis_port: int) -> None:
    address, signing_key = f"redis://127.0.0.1:{redis_port}/0", b"k" * 32
    key = make_key(graph="x + 1", threads=1)
    assert ArtifactCache(RedisStore.from_url(address), signing_key).put(key, {"kernel": b"\x00\xff"})
    entry = ArtifactCache(RedisStore.from_url(address), signing_key).get(key)
    assert entry is not None
    assert entry.sections["kernel"] == b"\x00\xff"
