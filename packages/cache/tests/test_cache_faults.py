"""What goes wrong with stores and entries: killed writers, outages of a server, forged and foreign entries, the cap."""

import importlib.util
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

from aotkit_cache import ArtifactCache, CacheWarning, make_key
from aotkit_cache.entry import encode_entry
from aotkit_cache.signing import Signer
from aotkit_cache.stores import DiskStore, MemoryStore, RedisStore, TieredStore

_spec = importlib.util.spec_from_file_location("cache_campaign", Path(__file__).with_name("cache_campaign.py"))
cache_campaign = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(cache_campaign)

SECRET = b"sixteen secret bytes and more"


@pytest.mark.covers("F7.14")
def test_a_writer_killed_at_chosen_system_calls_leaves_whole_entries_only(tmp_path):
    steps = cache_campaign.written_steps(tmp_path / "count")
    assert steps > 60
    for point in (2, 5, steps // 3, steps // 2):
        cache_campaign.kill_at(tmp_path / "c", point)


@pytest.mark.covers("F7.28")
def test_the_cap_holds_under_inserts_from_four_processes(tmp_path):
    cap = 2_000_000
    largest = cache_campaign.insert_from_processes(tmp_path / "c", 400, 4, cap)
    assert cap // 2 < largest <= cap


@pytest.fixture
def server():
    """A Redis server on a port of its own, in this process."""
    fakeredis = pytest.importorskip("fakeredis", reason="the server of these tests is fakeredis, which is missing")
    server = fakeredis.TcpFakeServer(("127.0.0.1", 0), server_type="redis")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


def _address(server):
    return f"redis://127.0.0.1:{server.server_address[1]}/0"


@pytest.mark.covers("F7.16")
def test_signed_entries_travel_through_a_redis_server(server):
    key, data = make_key(graph="x + 1"), bytes(range(256)) * 4000
    writer = ArtifactCache(RedisStore.from_url(_address(server)), SECRET)
    assert writer.get(key) is None
    assert writer.put(key, {"kernel": data}, {"n": 1})
    reader = ArtifactCache(RedisStore.from_url(_address(server)), SECRET)
    entry = reader.get(key)
    assert entry is not None and entry.sections["kernel"] == data and entry.meta == {"n": 1}
    assert [found.key for found in reader.entries()] == [key.digest]
    assert reader.delete(key) and reader.get(key) is None


@pytest.mark.covers("F7.16")
def test_a_redis_server_that_goes_down_in_the_middle_costs_one_warning(server, tmp_path):
    far = RedisStore.from_url(_address(server), timeout=0.5)
    cache = ArtifactCache(TieredStore([DiskStore(tmp_path / "c"), far]), SECRET)
    first, second = make_key(n=1), make_key(n=2)
    assert cache.put(first, {"kernel": b"1"})
    server.shutdown()
    server.server_close()
    far._client.connection_pool.disconnect()
    with pytest.warns(CacheWarning) as said:
        assert cache.put(second, {"kernel": b"2"})  # kept on disk
        assert cache.get(make_key(n=3)) is None
        for key, content in ((first, b"1"), (second, b"2")):
            entry = cache.get(key)
            assert entry is not None and entry.sections["kernel"] == content
    assert len(said) == 1 and "cache tier 1 (RedisStore) failed" in str(said[0].message)


@pytest.mark.covers("F7.29")
def test_a_forged_entry_is_never_read(monkeypatch):
    """Right in every byte but made with another secret, under both key ids."""
    key, store = make_key(graph="x"), MemoryStore()
    cache = ArtifactCache(store, SECRET)
    stranger = Signer(b"the stranger's secret bytes")
    forged = encode_entry(key, {"object": b"evil"}, {}, stranger)
    genuine = encode_entry(key, {"object": b"good"}, {}, Signer(SECRET))
    named_as_ours = forged[:12] + genuine[12:20] + forged[20:]
    spliced = genuine[:-32].replace(b"good", b"evil") + genuine[-32:]
    monkeypatch.setattr("json.loads", lambda text: pytest.fail("a forged manifest was parsed"))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for data in (forged, named_as_ours, spliced):
            store.put(key.digest, data)
            assert cache.get(key) is None
    assert [w.category for w in said] == [CacheWarning, CacheWarning]  # one per cause: foreign, damaged
    assert dict(cache.stats().misses) == {"FOREIGN_KEY": 1, "DAMAGED": 2}


_ONE_KEY = """
import sys
from aotkit_cache import ArtifactCache, make_key
from aotkit_cache.stores import DiskStore
cache = ArtifactCache(DiskStore(sys.argv[1]), b"sixteen secret bytes and more")
made = []
for round_number in range(5):
    entry = cache.get_or_compute(
        make_key(round=round_number), lambda: (made.append(1), ({"object": b"o" * 50_000}, {}))[1]
    )
    assert entry.sections["object"] == b"o" * 50_000
print(len(made))
"""


@pytest.mark.covers("F7.26")
def test_of_eight_processes_on_the_same_keys_each_gets_the_entry_and_one_computes_it(tmp_path):
    command = [sys.executable, "-c", _ONE_KEY, str(tmp_path / "c")]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    made = [int(process.communicate(timeout=120)[0]) for process in running]
    assert all(process.returncode == 0 for process in running)
    assert sum(made) == 5
