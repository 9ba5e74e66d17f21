"""Blocks that travel by themselves, and single entries between caches."""

from __future__ import annotations

from pathlib import Path

import pytest

from aotkit_cache import CacheError, make_key, open_cache
from aotkit_cache.sealed import RejectedEntry, seal, unseal


@pytest.mark.parametrize("key", [None, "a secret of sixteen or more"])
def test_a_block_is_whole_or_refused(key: str | None) -> None:
    data = seal({"code": b"\x00\x01"}, {"name": "f"}, key)
    entry = unseal(data, key)
    assert (dict(entry.sections), dict(entry.meta)) == ({"code": b"\x00\x01"}, {"name": "f"})
    for at in range(0, len(data), 7):
        with pytest.raises(RejectedEntry):
            unseal(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], key)
    with pytest.raises(RejectedEntry, match="another signing key"):
        unseal(data, "another secret of sixteen")
    with pytest.raises(CacheError, match="signing key"):
        seal({}, {}, "short")


def test_one_entry_goes_to_a_cache_with_the_same_key_and_to_no_other(tmp_path: Path) -> None:
    secret, key = "a secret of sixteen or more", make_key(what="entry")
    one, two = (open_cache(tmp_path / name, signing_key=secret) for name in ("one", "two"))
    assert one.envelope(key) is None
    one.put(key, {"object": b"code"}, {})
    data = one.envelope(key)
    assert data is not None and two.accept(data) == key.digest
    found = two.get(key)
    assert found is not None and found.sections["object"] == b"code"
    with pytest.raises(RejectedEntry, match="another signing key"):
        open_cache(tmp_path / "three", signing_key="another secret of sixteen").accept(data)
    with pytest.raises(RejectedEntry, match="damaged"):
        two.accept(data[:-1] + bytes([data[-1] ^ 1]))
