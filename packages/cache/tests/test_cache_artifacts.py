"""Signed entries: round trips, and every kind of bad entry is a miss with one warning."""

import ast
import contextlib
import multiprocessing
import os
import stat
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import pytest

import aotkit_cache
from aotkit_cache import ArtifactCache, CacheError, CacheWarning, default_cache_dir, fresh_cache, make_key, open_cache
from aotkit_cache.entry import RejectedEntry, decode_entry, encode_entry, stored_key_parts
from aotkit_cache.location import read_environment
from aotkit_cache.signing import Signer, key_from_text, user_key
from aotkit_cache.stores import DiskStore, MemoryStore, TieredStore

SECRET = b"0123456789abcdef"
KEY = make_key(graph="x + y", n=3)
SECTIONS = {"object": bytes(range(256)) * 20, "empty": b"", "source": "é".encode()}
META = {"symbol": "f", "sizes": [1, 2.5, None, True], "nested": {"a": []}, "odd": "\ud800"}


class Recorder:
    def __init__(self):
        self.events = []

    def event(self, name, fields):
        self.events.append((name, dict(fields)))


@pytest.fixture
def store():
    return MemoryStore()


@pytest.fixture
def cache(store):
    return ArtifactCache(store, SECRET)


def test_an_entry_comes_back_whole(cache):
    assert cache.get(KEY) is None
    assert cache.put(KEY, SECTIONS, META)
    entry = cache.get(KEY)
    assert dict(entry.sections) == SECTIONS and dict(entry.meta) == META and entry.digest == KEY.digest
    assert entry.size == sum(map(len, SECTIONS.values()))
    assert cache.get(make_key(graph="x + y", n=4)) is None
    assert cache.delete(KEY) and cache.get(KEY) is None


def test_equal_entries_are_equal_bytes_and_tell_their_key():
    signer = Signer(SECRET)
    data = encode_entry(KEY, SECTIONS, META, signer)
    assert data == encode_entry(KEY, SECTIONS, META, signer)
    assert stored_key_parts(data, signer) == {"graph": '"x + y"', "n": "3"}
    long = encode_entry(make_key(graph="g" * 100_000), {}, {}, signer)
    assert len(long) < 2000 and "100002 characters" in stored_key_parts(long, signer)["graph"]


@pytest.mark.covers("F7.29")
def test_no_single_flipped_bit_gets_through():
    signer = Signer(SECRET)
    data = encode_entry(KEY, {"s": b"payload"}, {"m": 1}, signer)
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << (position % 8)
        with pytest.raises(RejectedEntry):
            decode_entry(KEY.digest, bytes(damaged), signer)


@pytest.mark.covers("F7.14")
def test_no_truncation_or_addition_gets_through():
    signer = Signer(SECRET)
    data = encode_entry(KEY, {"s": b"payload"}, {"m": 1}, signer)
    for length in range(len(data)):
        with pytest.raises(RejectedEntry):
            decode_entry(KEY.digest, data[:length], signer)
    with pytest.raises(RejectedEntry, match="cut short or has bytes added"):
        decode_entry(KEY.digest, data + b"\0", signer)


def _entry(secret=SECRET, key=KEY):
    return encode_entry(key, {"s": b"payload" * 10}, {}, Signer(secret))


def _flipped():
    data = bytearray(_entry())
    data[-60] ^= 1
    return bytes(data)


BAD = {
    "DAMAGED": _flipped(),
    "TRUNCATED": _entry()[:-1],
    "NOT_AN_ENTRY": b"",
    "VERSION": _entry()[:8] + b"\x63\0\0\0" + _entry()[12:],
    "FOREIGN_KEY": _entry(secret=b"another secret key"),
    "WRONG_ADDRESS": _entry(key=make_key(other=1)),
}


@pytest.mark.covers("F7.14", "F7.29")
@pytest.mark.parametrize("reason", BAD)
def test_a_bad_entry_is_a_miss_with_one_warning_and_can_be_replaced(store, cache, reason):
    store.put(KEY.digest, BAD[reason])
    with pytest.warns(CacheWarning, match="treated as missing") as caught:
        assert [cache.get(KEY) for _ in range(3)] == [None] * 3
    assert len(caught) == 1
    assert cache.stats().misses == ((reason, 3),)
    cache.put(KEY, SECTIONS, META)
    assert cache.get(KEY) is not None


@pytest.mark.covers("F7.29")
def test_the_manifest_is_not_parsed_before_the_signature_holds(monkeypatch):
    data = bytearray(_entry())
    data[-60] ^= 1
    monkeypatch.setattr("json.loads", lambda *_: pytest.fail("parsed an unsigned manifest"))
    with pytest.raises(RejectedEntry, match="signature does not match"):
        decode_entry(KEY.digest, bytes(data), Signer(SECRET))


@pytest.mark.covers("F7.29")
def test_nothing_in_the_package_unpickles_or_evaluates():
    forbidden = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    for path in Path(aotkit_cache.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = {alias.name.split(".")[0] for alias in node.names} | {
                    (getattr(node, "module", "") or "").split(".")[0]
                }
                assert not names & forbidden, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in {"eval", "exec", "compile", "__import__"}, path


@pytest.mark.filterwarnings("error")
def test_a_failing_store_is_a_miss_and_an_unwritten_entry(tmp_path):
    class Down(MemoryStore):
        def get(self, key):
            raise CacheError("the store is down")

        def put(self, key, data):
            raise CacheError("the store is down")

    cache = ArtifactCache(Down(), SECRET)
    with pytest.warns(CacheWarning, match="the store is down.*treated as missing"):
        assert cache.get(KEY) is None
    with pytest.warns(CacheWarning, match="the store is down.*not kept"):
        assert cache.put(KEY, {}) is False
    # Each cause has been told: from here on the `error` filter would turn a second warning into a failure.
    assert cache.get(KEY) is None and cache.put(KEY, {}) is False
    assert cache.get_or_compute(KEY, lambda: ({"s": b"x"}, {})).sections == {"s": b"x"}
    assert cache.stats().failed_puts == 3


@pytest.mark.covers("F7.29")
def test_an_entry_of_another_user_is_a_miss(tmp_path, monkeypatch):
    cache = open_cache(tmp_path / "c")
    cache.put(KEY, SECTIONS, META)
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.warns(CacheWarning, match="never loaded"):
        assert cache.get(KEY) is None
    with pytest.raises(CacheError, match="belongs to user"):
        open_cache(tmp_path / "c")


@pytest.mark.parametrize(
    "sections, meta", [({"s": "text"}, {}), ({3: b""}, {}), ({}, {"x": object()}), ({}, {"x": float("nan")})]
)
def test_what_is_not_data_is_refused_at_put(cache, sections, meta):
    with pytest.raises(TypeError):
        cache.put(KEY, sections, meta)


def test_get_or_compute_computes_once(cache):
    calls = []

    def compute():
        calls.append(1)
        return {"s": b"result"}, {"n": 1}

    entries = [cache.get_or_compute(KEY, compute) for _ in range(3)]
    assert len(calls) == 1 and all(entry == entries[0] for entry in entries)
    stats = cache.stats()
    assert (stats.hits, stats.missed, stats.puts) == (2, 1, 1)
    assert str(stats).startswith("2 hits")


def test_a_failing_computation_keeps_nothing_and_frees_the_lock(tmp_path):
    cache = open_cache(tmp_path / "c")

    def fail():
        raise RuntimeError("compiler error")

    with pytest.raises(RuntimeError, match="compiler error"):
        cache.get_or_compute(KEY, fail)
    assert cache.get_or_compute(KEY, lambda: ({"s": b"x"}, {})).sections == {"s": b"x"}


def _compute_shared(directory, results, begin):
    def compute():
        results.put("computed")
        return {"s": b"shared"}, {}

    cache = open_cache(directory)
    begin.wait()
    results.put(cache.get_or_compute(KEY, compute).sections["s"])


@pytest.mark.covers("F7.26")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_of_two_processes_that_miss_one_computes(tmp_path):
    context = multiprocessing.get_context("fork")
    results, begin = context.Queue(), context.Barrier(2)
    workers = [context.Process(target=_compute_shared, args=(tmp_path / "c", results, begin)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(str(results.get(timeout=5)) for _ in range(3)) == ["b'shared'", "b'shared'", "computed"]


@pytest.mark.covers("F7.27")
def test_of_many_threads_that_miss_one_computes(tmp_path):
    cache = open_cache(tmp_path / "c")
    calls, entries = [], []

    def compute():
        calls.append(1)
        return {"s": b"shared"}, {}

    threads = [threading.Thread(target=lambda: entries.append(cache.get_or_compute(KEY, compute))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1 and len(entries) == 8 and {entry.sections["s"] for entry in entries} == {b"shared"}


def test_a_held_lock_delays_but_never_prevents_a_computation(tmp_path):
    store = DiskStore(tmp_path / "c", lock_timeout=0.05)
    cache = ArtifactCache(store, SECRET)
    held, release = threading.Event(), threading.Event()

    def hold():
        with store.lock(KEY.digest):
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    with pytest.warns(CacheWarning, match="computing without waiting"):
        assert cache.get_or_compute(KEY, lambda: ({"s": b"x"}, {})).sections == {"s": b"x"}
    release.set()
    thread.join()


def test_an_observer_sees_each_lookup():
    observer = Recorder()
    cache = ArtifactCache(MemoryStore(), SECRET, observer=observer)
    cache.get(KEY)
    cache.put(KEY, SECTIONS)
    cache.get(KEY)
    assert [name for name, _ in observer.events] == ["cache.miss", "cache.put", "cache.hit"]
    assert observer.events[0][1]["reason"] == "no such entry" and observer.events[2][1]["bytes"] > 5000


@pytest.mark.covers("F7.29")
def test_the_user_key_is_private_stable_and_shared_by_processes(tmp_path):
    cache = open_cache(tmp_path / "c")
    cache.put(KEY, SECTIONS)
    path = tmp_path / "c" / "signing.key"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    code = (
        "from aotkit_cache import make_key, open_cache\n"
        f"assert open_cache({str(tmp_path / 'c')!r}).get(make_key(graph='x + y', n=3)) is not None"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)


@pytest.mark.covers("F7.29")
def test_a_readable_or_damaged_user_key_is_refused(tmp_path):
    store = DiskStore(tmp_path / "c")
    first = user_key(store.directory)
    path = store.directory / "signing.key"
    path.chmod(0o644)
    with pytest.raises(CacheError, match="others may read"):
        user_key(store.directory)
    path.chmod(0o600)
    path.write_text("zz")
    with pytest.raises(CacheError, match="damaged"):
        user_key(store.directory)
    path.unlink()
    assert user_key(store.directory) != first


def test_short_secrets_are_refused():
    with pytest.raises(CacheError, match="at least 16 bytes"):
        ArtifactCache(MemoryStore(), b"short")
    with pytest.raises(CacheError, match="AOTKIT_CACHE_KEY"):
        key_from_text("short")


def test_the_environment_is_read_as_documented(tmp_path, monkeypatch):
    home = Path("~/.cache/aotkit").expanduser()
    assert read_environment({}).directory == home
    assert read_environment({"XDG_CACHE_HOME": "/x", "AOTKIT_CACHE_DIR": ""}).directory == Path("/x/aotkit")
    assert read_environment({"XDG_CACHE_HOME": "relative"}).directory == home
    assert read_environment({"XDG_CACHE_HOME": "/x", "AOTKIT_CACHE_DIR": "/y"}).directory == Path("/y")
    assert read_environment({}).signing_key is None
    secret = read_environment({"AOTKIT_CACHE_KEY": "team secret 12345"})
    assert secret.signing_key is not None and "secret" not in repr(secret).replace("AOTKIT", "")
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path / "d"))
    assert default_cache_dir() == tmp_path / "d"
    assert open_cache().store.directory == tmp_path / "d"


@pytest.mark.parametrize("tiered", [False, True])
def test_whoever_lists_describes_or_exports_entries_does_not_use_them(tmp_path, tiered):
    disk = DiskStore(tmp_path / "c")
    store = TieredStore([disk, MemoryStore()]) if tiered else disk
    cache = ArtifactCache(store, SECRET)
    for number in range(3):
        key = make_key(n=number)
        cache.put(key, {"object": b"x"})
        os.utime(tmp_path / "c/entries" / key.digest[:2] / key.digest, (number + 1, number + 1))
    before = cache.entries()
    for entry in before:
        cache.describe(entry.key)
    cache.export_entries(tmp_path / "export")
    cache.envelope(make_key(n=0))
    assert cache.entries() == before and [entry.last_used for entry in before] == [3, 2, 1]
    cache.get(make_key(n=0))
    assert cache.entries()[0].key == make_key(n=0).digest


def test_a_store_that_ends_while_an_entry_is_computed_costs_a_warning():
    class Ending(MemoryStore):
        @contextlib.contextmanager
        def lock(self, key):
            yield False
            raise CacheError("the store has ended")

    cache = ArtifactCache(Ending(), SECRET)
    with pytest.warns(CacheWarning, match="has ended"):
        assert cache.get_or_compute(make_key(n=1), lambda: ({"object": b"x"}, {})).sections == {"object": b"x"}
    with cache.computing(make_key(n=2)) as waited:
        assert waited is False
    with pytest.raises(KeyError), cache.computing(make_key(n=3)):
        raise KeyError("of whoever computes")


def test_a_user_without_a_home_directory_is_told_what_to_set(tmp_path, monkeypatch):
    def unknown(_):
        raise KeyError("getpwuid(): uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr("pwd.getpwuid", unknown)
    for variables in ({}, {"AOTKIT_CACHE_DIR": "~/cache"}):
        with pytest.raises(CacheError, match="set AOTKIT_CACHE_DIR"):
            read_environment(variables)
    assert read_environment({"AOTKIT_CACHE_DIR": str(tmp_path)}).directory == tmp_path


def test_a_team_key_lets_two_directories_share_a_store(tmp_path, monkeypatch):
    shared = MemoryStore()
    with pytest.raises(ValueError, match="signing key that its other users have too"):
        open_cache(tmp_path / "a", shared=shared)
    monkeypatch.setenv("AOTKIT_CACHE_KEY", "team secret 12345")
    first = open_cache(tmp_path / "a", shared=shared)
    first.put(KEY, SECTIONS)
    assert isinstance(first.store, TieredStore)
    first.store.flush()
    assert open_cache(tmp_path / "b", shared=shared).get(KEY) is not None


def test_importing_the_package_imports_neither_torch_nor_its_extras():
    code = (
        "import sys, aotkit_cache; bad = {'torch', 'fsspec', 'redis', 'pickle'} & set(sys.modules); assert not bad, bad"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hits_raise_no_warning(cache):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.put(KEY, SECTIONS)
        assert cache.get(KEY) is not None


@pytest.mark.covers("F7.17")
@pytest.mark.parametrize("delete", [True, False])
def test_a_fresh_cache_is_empty_lies_in_the_usual_directory_and_leaves_it_alone(tmp_path, monkeypatch, delete):
    monkeypatch.setenv("AOTKIT_CACHE_DIR", str(tmp_path / "usual"))
    key = make_key(graph="x")
    assert open_cache().put(key, {"object": b"old"})
    with pytest.raises(KeyError, match="inside"), fresh_cache(delete=delete) as folder:
        assert folder.parent == tmp_path / "usual" and folder.stat().st_mode & 0o077 == 0
        cache = open_cache()
        assert cache.get(key) is None and cache.put(key, {"object": b"new"})
        command = "from aotkit_cache import default_cache_dir; print(default_cache_dir())"
        done = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, timeout=60, check=True)
        assert done.stdout.strip() == str(folder)
        raise KeyError("inside")
    assert open_cache().store.directory == tmp_path / "usual"
    assert open_cache().get(key).sections["object"] == b"old"
    assert [entry.key for entry in open_cache().entries()] == [key.digest]
    assert folder.exists() is not delete
    if not delete:
        assert open_cache(folder, signing_key=None).get(key).sections["object"] == b"new"
