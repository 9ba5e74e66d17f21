"""Entries as one file, for another machine; listing and pruning."""

import pytest

from aotkit_cache import ArtifactCache, CacheError, key_from_text, make_key
from aotkit_cache.stores import DiskStore, MemoryStore

SHARED = key_from_text("a secret that the team shares")


def cache(name: str, store=None) -> ArtifactCache:
    return ArtifactCache(store or MemoryStore(), f"the secret bytes of {name}".encode())


def filled(count: int = 3) -> tuple[ArtifactCache, list]:
    ours, keys = cache("ours"), [make_key(n=n, graph="g" * 3000) for n in range(count)]
    for number, key in enumerate(keys):
        assert ours.put(key, {"object": bytes([number]) * 1000}, {"n": number})
    return ours, keys


@pytest.mark.covers("F7.18")
def test_exported_entries_hit_in_another_cache_with_another_key(tmp_path):
    ours, keys = filled()
    seen = []
    done = ours.export_entries(tmp_path / "all", signing_key=SHARED, progress=lambda n, of: seen.append((n, of)))
    assert sorted(done.keys) == sorted(key.digest for key in keys) and done.refused == ()
    assert seen[-1] == (3, 3)
    theirs = cache("theirs", DiskStore(tmp_path / "theirs"))
    assert str(theirs.import_entries(tmp_path / "all", signing_key=SHARED)) == "3 entries"
    for number, key in enumerate(keys):
        entry = theirs.get(key)
        assert entry is not None and entry.sections["object"] == bytes([number]) * 1000 and entry.meta == {"n": number}


@pytest.mark.covers("F7.18")
def test_chosen_entries_only_are_exported_and_missing_ones_are_named(tmp_path):
    ours, keys = filled()
    done = ours.export_entries(tmp_path / "one", keys=[keys[1].digest, "f" * 64])
    assert str(done) == "1 entries; 1 left out: no such entry"
    again = cache("ours")
    assert again.import_entries(tmp_path / "one").keys == (keys[1].digest,)


@pytest.mark.covers("F7.29")
def test_an_import_believes_only_what_was_signed_with_the_key_it_was_told(tmp_path):
    ours, _ = filled()
    ours.export_entries(tmp_path / "all")  # signed with our own key
    theirs = cache("theirs")
    for signing_key in (None, SHARED):
        done = theirs.import_entries(tmp_path / "all", signing_key=signing_key)
        assert done.keys == () and done.refused == (("the entry was signed with another signing key", 3),)
    data = (tmp_path / "all").read_bytes()
    ours.export_entries(tmp_path / "all", signing_key=SHARED)
    data = bytearray((tmp_path / "all").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "all").write_bytes(data)
    done = theirs.import_entries(tmp_path / "all", signing_key=SHARED)
    assert len(done.keys) == 2 and [count for _, count in done.refused] == [1]


def test_a_cut_or_foreign_export_is_refused_before_anything_is_kept(tmp_path):
    ours, _ = filled()
    ours.export_entries(tmp_path / "all")
    data = (tmp_path / "all").read_bytes()
    for damaged in (data[:-1], data + b"x", data[:25]):
        (tmp_path / "bad").write_bytes(damaged)
        again = cache("ours")
        with pytest.raises(CacheError, match="cut short"):
            again.import_entries(tmp_path / "bad")
        assert again.entries() == []
    for other, message in ((b"PK\3\4 a zip", "no export"), (data[:8] + b"\x09" + data[9:], "has format 9")):
        (tmp_path / "bad").write_bytes(other)
        with pytest.raises(CacheError, match=message):
            cache("ours").import_entries(tmp_path / "bad")
    with pytest.raises(CacheError, match="can't read the export"):
        cache("ours").import_entries(tmp_path / "nothing there")
    with pytest.raises(CacheError, match="can't write the export"):
        ours.export_entries(tmp_path / "no" / "folder")


def test_damaged_entries_of_the_cache_are_not_exported(tmp_path):
    store = MemoryStore()
    ours = cache("ours", store)
    key = make_key(n=1)
    ours.put(key, {"object": b"x" * 100})
    data = bytearray(store.get(key.digest))
    data[-40] ^= 1
    store.put(key.digest, bytes(data))
    assert ours.export_entries(tmp_path / "all").refused == (
        ("the signature does not match: the entry was damaged or changed", 1),
    )


def test_entries_are_listed_described_and_pruned(tmp_path, monkeypatch):
    ours, keys = filled()
    entry, parts = ours.describe(keys[2].digest)
    assert entry.meta == {"n": 2} and parts["n"] == "2" and parts["graph"].startswith('"\\"ggg')
    with pytest.raises(CacheError, match="there is no entry"):
        ours.describe("0" * 64)
    ours.get(keys[0])  # now the most recently used
    size = ours.entries()[0].size
    assert ours.entries()[0].key == keys[0].digest
    gone = ours.prune(max_bytes=2 * size)
    assert [found.key for found in gone] == [keys[1].digest]
    assert ours.prune(unused_seconds=3600) == []
    assert len(ours.prune()) == 2 and ours.entries() == []
