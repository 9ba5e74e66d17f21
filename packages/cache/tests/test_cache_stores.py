"""Stores: bytes in, the same bytes or nothing out; private, capped, safe among processes."""

import errno
import fnmatch
import multiprocessing
import os
import re
import stat
import subprocess
import sys
import threading
import time
import warnings
from datetime import timedelta
from pathlib import Path

import pytest
import torch

from aotkit_cache import ArtifactCache, CacheError, CacheWarning, make_key, private_files
from aotkit_cache.stores import DiskStore, DistributedStore, FsspecStore, MemoryStore, RedisStore, Store, TieredStore


class RedisClient:
    """The five commands RedisStore uses, in a dict, with a switch for an outage."""

    def __init__(self):
        self.data, self.down = {}, False

    def _check(self):
        if self.down:
            raise ConnectionError("connection refused")

    def get(self, name):
        self._check()
        return self.data.get(name.encode())

    def set(self, name, value, ex=None):
        self._check()
        self.data[name.encode()] = value

    def delete(self, name):
        self._check()
        return int(self.data.pop(name.encode(), None) is not None)

    def strlen(self, name):
        self._check()
        return len(self.data.get(name.encode(), b""))

    def scan_iter(self, match):
        pattern = re.sub(r"\\(.)", r"[\1]", match)  # of the server's kind to Python's
        for name in list(self.data):
            self._check()
            if fnmatch.fnmatchcase(name.decode(), pattern):
                yield from (name, name)  # a server may tell a name twice


def tcp_store():
    return torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=timedelta(seconds=5))


@pytest.fixture(params=["memory", "disk", "tiered", "fsspec", "redis", "hash store", "file store", "tcp store"])
def store(request, tmp_path) -> Store:
    return {
        "memory": lambda: MemoryStore(),
        "disk": lambda: DiskStore(tmp_path / "c"),
        "tiered": lambda: TieredStore([MemoryStore(), DiskStore(tmp_path / "c")]),
        "fsspec": lambda: FsspecStore(f"file://{tmp_path}/objects"),
        "redis": lambda: RedisStore(RedisClient()),
        "hash store": lambda: DistributedStore(torch.distributed.HashStore()),
        "file store": lambda: DistributedStore(torch.distributed.FileStore(str(tmp_path / "store"), 1)),
        "tcp store": lambda: DistributedStore(tcp_store()),
    }[request.param]()


@pytest.mark.covers("F7.14")
def test_a_store_on_a_read_only_medium_still_gives_what_it_holds(tmp_path, monkeypatch):
    cache = ArtifactCache(DiskStore(tmp_path / "c"), b"sixteen secret bytes")
    key, other = make_key(n=1), make_key(n=2)
    assert cache.put(key, {"object": b"code"})

    def read_only(*_, **__):
        raise OSError(errno.EROFS, "Read-only file system")  # which is no PermissionError

    opened = os.open
    for name in ("utime", "unlink", "replace", "chmod"):
        monkeypatch.setattr(os, name, read_only)
    made = os.mkdir
    monkeypatch.setattr(os, "mkdir", lambda path, *a: made(path, *a) if os.path.exists(path) else read_only())
    monkeypatch.setattr(os, "open", lambda path, flags, *a: read_only() if flags & os.O_CREAT else opened(path, flags))
    cache = ArtifactCache(DiskStore(tmp_path / "c"), b"sixteen secret bytes")
    assert cache.get(key).sections["object"] == b"code"
    with pytest.warns(CacheWarning) as said:
        assert cache.get_or_compute(other, lambda: ({"object": b"new"}, {})).sections["object"] == b"new"
    assert ["Read-only" in str(each.message) for each in said] == [True, True]  # of the lock, and of the entry


@pytest.mark.parametrize("broken", ["mkdir", "chmod", "open"])
def test_a_directory_that_cannot_be_made_ready_is_a_typed_error(tmp_path, monkeypatch, broken):
    (tmp_path / "c").mkdir(mode=0o755)

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    if broken == "mkdir":  # of a folder in it
        monkeypatch.setattr(os, "makedirs", full)
    else:
        monkeypatch.setattr(os, broken, full)
    with pytest.raises(CacheError, match=r"cache directory .* No space left"):
        DiskStore(tmp_path / "c")


def test_what_a_store_cannot_look_at_is_a_typed_error(tmp_path, monkeypatch):
    store = DiskStore(tmp_path / "c")
    store.put("abc", b"data")
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", _refuse)
        with pytest.raises(CacheError, match="look up"):
            store.stat("abc")
    monkeypatch.setattr(os, "scandir", _refuse)
    with pytest.raises(CacheError, match="list"):
        list(store.entries())


def _refuse(*_, **__):
    raise PermissionError(errno.EACCES, "Permission denied")


@pytest.mark.covers("F7.16")
def test_every_store_keeps_replaces_lists_and_forgets(store):
    assert store.get("abc") is None and store.stat("abc") is None and list(store.entries()) == []
    store.put("abc", b"one")
    store.put("abd", b"\0\xff" * 1000)
    store.put("abc", b"three")
    assert store.get("abc") == b"three" and store.get("abd") == b"\0\xff" * 1000
    assert store.stat("abc").size == 5
    assert sorted((entry.key, entry.size) for entry in store.entries()) == [("abc", 5), ("abd", 2000)]
    assert store.delete("abc") is True and store.delete("abc") is False
    assert store.get("abc") is None and [entry.key for entry in store.entries()] == ["abd"]


@pytest.mark.parametrize("key", ["", "ab", "../../etc/passwd", ".hidden", "a/b", "abc\n", "x" * 129, "ä" * 5])
def test_no_store_accepts_a_key_that_could_leave_its_directory(store, key):
    with pytest.raises(CacheError, match="can't be a store key"):
        store.put(key, b"")


def test_an_entry_of_many_pieces_is_read_whole_and_replaced_by_a_smaller_one(store):
    """A server of torch's ends the connection of whoever sends more than 8 MiB at once."""
    large = bytes(range(256)) * (9 << 12)
    store.put("abc", large)
    assert store.get("abc") == large and store.stat("abc").size == len(large)
    store.put("abc", b"small")
    assert store.get("abc") == b"small"
    store.put("abc", b"")
    assert (store.get("abc") == b"" and store.stat("abc") is not None) or isinstance(store, RedisStore)


def test_a_lock_of_ranks_is_given_on_and_one_held_too_long_is_a_typed_error():
    shared = torch.distributed.HashStore()
    first, second = DistributedStore(shared), DistributedStore(shared, lock_timeout=0.05)
    with first.lock("abc"):
        with second.lock("another"):
            pass
        with pytest.raises(CacheError, match=r"more than 0\.05 s"), second.lock("abc"):
            raise AssertionError("two hold one lock")
    with pytest.raises(KeyError), second.lock("abc"):  # what is raised inside lets it go
        raise KeyError
    with first.lock("abc"), pytest.raises(CacheError), second.lock("abc"):
        raise AssertionError("two hold one lock")


def test_a_store_of_torchs_that_is_gone_is_a_typed_error(tmp_path):
    server = tcp_store()
    store = DistributedStore(torch.distributed.TCPStore("127.0.0.1", server.port, None, timeout=timedelta(seconds=2)))
    store.put("abc", b"data")
    del server
    for attempt in (lambda: store.get("abc"), lambda: store.put("abc", b""), lambda: list(store.entries())):
        with pytest.raises(CacheError, match="store can't"):
            attempt()
    with pytest.raises(CacheError, match="store can't lock"), store.lock("abc"):
        raise AssertionError("there is nobody to ask")


def test_memory_store_evicts_the_least_recently_used_entry():
    store = MemoryStore(max_bytes=30)
    for key in ("aaa", "bbb", "ccc"):
        store.put(key, b"x" * 10)
    store.get("aaa")
    store.put("ddd", b"x" * 10)
    assert [entry.key for entry in store.entries()] == ["ccc", "aaa", "ddd"]
    with pytest.raises(CacheError, match="larger than the whole store"):
        store.put("eee", b"x" * 31)


@pytest.mark.covers("F7.28")
def test_disk_store_evicts_least_recently_used_entries_under_its_cap(tmp_path):
    store = DiskStore(tmp_path / "c", max_bytes=1000)
    for index in range(9):
        store.put(f"key{index}", b"x" * 100)
        os.utime(store._path(f"key{index}"), (index, index))
    assert store.get("key0") is not None  # a hit makes the oldest the newest
    store.put("new1", b"x" * 150)
    kept = {entry.key for entry in store.entries()}
    assert "key0" in kept and "new1" in kept
    assert "key1" not in kept and "key2" not in kept, "the oldest unused entries go first"
    assert sum(entry.size for entry in store.entries()) <= 1000


@pytest.mark.covers("F7.28")
def test_entries_from_before_a_clock_went_back_give_way_to_new_ones(tmp_path):
    store = DiskStore(tmp_path / "c", max_bytes=1000)
    coming = time.time() + 1e6
    for name in ("aaa", "bbb", "ccc"):
        store.put(name, b"x" * 300)
        os.utime(tmp_path / f"c/entries/{name[:2]}/{name}", (coming, coming))
    leftover = tmp_path / "c/entries/aa/.tmp-killed"
    leftover.write_bytes(b"half")
    os.utime(leftover, (coming, coming))
    for name in ("new1", "new2"):
        store.put(name, b"x" * 300)
    kept = {entry.key for entry in store.entries()}
    assert {"new1", "new2"} <= kept and len(kept) == 3 and not leftover.exists()


def test_the_cap_holds_whatever_is_written(tmp_path):
    store = DiskStore(tmp_path / "c", max_bytes=10_000)
    for index in range(300):
        store.put(f"key{index % 70}", bytes(index * 37 % 3000))
        assert sum(entry.size for entry in store.entries()) <= 10_000
    with pytest.raises(CacheError, match="larger than the whole store's cap"):
        store.put("big", bytes(10_001))
    store.put("big", bytes(10_000))
    assert [entry.key for entry in store.entries()] == ["big"]


@pytest.mark.parametrize("text", ["", "12", "nonsense\n", None])
def test_a_damaged_usage_count_is_counted_anew(tmp_path, text):
    store = DiskStore(tmp_path / "c", max_bytes=1000)
    for index in range(8):
        store.put(f"key{index}", bytes(100))
    usage = tmp_path / "c" / "usage"
    usage.unlink() if text is None else usage.write_text(text)
    store.put("new1", bytes(100))
    assert usage.read_text() == "900\n"


def test_a_process_without_cap_does_not_hide_bytes_from_one_with_a_cap(tmp_path):
    capped, free = DiskStore(tmp_path / "c", max_bytes=1000), DiskStore(tmp_path / "c", max_bytes=None)
    capped.put("aaa", bytes(100))
    free.put("bbb", bytes(800))
    capped.put("ccc", bytes(400))
    assert sum(entry.size for entry in capped.entries()) <= 1000


def test_leftovers_of_killed_writers_are_removed_by_an_eviction(tmp_path):
    store = DiskStore(tmp_path / "c", max_bytes=1000)
    store.put("abc", bytes(500))
    old = tmp_path / "c" / "entries" / "ab" / ".tmp-dead"
    young = tmp_path / "c" / "entries" / "ab" / ".tmp-live"
    for path in (old, young):
        path.write_bytes(bytes(700))
    os.utime(old, (0, 0))
    store.put("abd", bytes(600))
    assert not old.exists() and young.exists()
    assert [entry.key for entry in store.entries()] == ["abd"]


@pytest.mark.covers("F7.29")
@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_modes_are_private_under_any_umask(tmp_path, umask):
    code = (
        f"import os; os.umask({umask})\n"
        "from aotkit_cache import make_key, open_cache\n"
        f"c = open_cache({str(tmp_path / 'c')!r}); k = make_key(a=1)\n"
        "assert c.put(k, {'s': b'x'}) and c.get(k).sections == {'s': b'x'}\n"
        "with c.store.lock(k.digest): pass\n"
    )
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
    for folder, _, files in os.walk(tmp_path / "c"):
        assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
        for name in files:
            assert stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode) & 0o077 == 0, name


@pytest.mark.covers("F7.29")
def test_a_directory_of_another_user_is_refused(tmp_path, monkeypatch):
    DiskStore(tmp_path / "c")
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(CacheError, match=r"belongs to user .* never loaded"):
        DiskStore(tmp_path / "c")


@pytest.mark.covers("F7.29")
def test_an_entry_of_another_user_is_refused(tmp_path, monkeypatch):
    store = DiskStore(tmp_path / "c")
    store.put("abc", b"data")
    monkeypatch.setattr(os, "geteuid", lambda: os.stat(tmp_path).st_uid + 1)
    with pytest.raises(CacheError, match="belongs to user"):
        store.get("abc")


@pytest.mark.covers("F7.29")
def test_a_symbolic_link_is_not_followed_to_an_entry(tmp_path):
    store = DiskStore(tmp_path / "c")
    store.put("abc", b"data")
    (tmp_path / "elsewhere").write_bytes(b"planted")
    (tmp_path / "c/entries/ab/abc").unlink()
    (tmp_path / "c/entries/ab/abc").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheError, match="can't open"):
        store.get("abc")


def test_an_open_directory_is_tightened_only_if_nothing_else_lives_there(tmp_path):
    (tmp_path / "empty").mkdir(mode=0o755)
    DiskStore(tmp_path / "empty")
    assert stat.S_IMODE(os.stat(tmp_path / "empty").st_mode) == 0o700
    (tmp_path / "home").mkdir(mode=0o755)
    (tmp_path / "home" / "thesis.txt").write_text("...")
    with pytest.raises(CacheError, match="holds files that are not aotkit's"):
        DiskStore(tmp_path / "home")
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="not a directory"):
        DiskStore(tmp_path / "file")


def _hammer(directory, worker, done):
    store = DiskStore(directory, max_bytes=200_000)
    for round_number in range(60):
        store.put("same", bytes([worker]) * (5000 + 100 * worker))
        store.put(f"own{worker}_{round_number}", bytes(4000))
        seen = store.get("same")
        assert seen is not None and len(set(seen)) == 1 and len(seen) == 5000 + 100 * seen[0]
    done.put(worker)


@pytest.mark.covers("F7.26")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_writing_one_key_never_see_a_mixed_entry_and_keep_the_cap(tmp_path):
    context = multiprocessing.get_context("fork")
    done = context.Queue()
    workers = [context.Process(target=_hammer, args=(tmp_path / "c", index, done)) for index in (1, 2, 3)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert sorted(done.get(timeout=5) for _ in workers) == [1, 2, 3]
    assert sum(entry.size for entry in DiskStore(tmp_path / "c").entries()) <= 200_000


@pytest.mark.covers("F7.14")
def test_a_writer_killed_at_any_moment_leaves_whole_entries_only(tmp_path):
    code = (
        "import sys; from aotkit_cache.stores import DiskStore\n"
        f"s = DiskStore({str(tmp_path / 'c')!r}, max_bytes=3_000_000); i = 0\n"
        "print('up', flush=True)\n"
        "while True: i += 1; s.put(f'key{i % 9}', bytes([i % 256]) * 400_000)\n"
    )
    for delay in (0.0, 0.01, 0.02, 0.05):
        writer = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        writer.stdout.readline()
        time.sleep(delay)
        writer.kill()
        writer.wait()
        writer.stdout.close()
        store = DiskStore(tmp_path / "c", max_bytes=3_000_000, lock_timeout=5)
        for entry in store.entries():
            data = store.get(entry.key)
            assert data is not None and len(data) == 400_000 and len(set(data)) == 1
        store.put("alive", b"x" * 400_000)  # the dead writer's lock is free
        assert sum(entry.size for entry in store.entries()) <= 3_000_000


def test_a_lock_held_too_long_is_a_typed_error(tmp_path):
    store = DiskStore(tmp_path / "c", lock_timeout=0.05)
    with store.lock("abc"):
        caught = []

        def attempt():
            try:
                with store.lock("abc"):
                    caught.append("entered")
            except CacheError as error:
                caught.append(str(error))

        thread = threading.Thread(target=attempt)
        thread.start()
        thread.join()
    assert "for more than 0.05 s" in caught[0]


def test_a_full_disk_is_a_typed_error_and_leaves_nothing_behind(tmp_path, monkeypatch):
    store = DiskStore(tmp_path / "c")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(CacheError, match="No space left"):
        store.put("abc", b"data")
    assert store.get("abc") is None and os.listdir(tmp_path / "c/entries/ab") == []


@pytest.mark.covers("F7.16")
def test_a_far_hit_is_copied_to_the_near_tier():
    near, far = MemoryStore(), MemoryStore()
    far.put("abc", b"data")
    tiers = TieredStore([near, far])
    assert tiers.get("abc") == b"data" and near.get("abc") == b"data"
    tiers.put("abd", b"both")
    assert near.get("abd") == far.get("abd") == b"both"


@pytest.mark.covers("F7.16")
@pytest.mark.filterwarnings("error")
def test_a_tier_that_is_down_costs_one_warning_and_nothing_else():
    near, client = MemoryStore(), RedisClient()
    tiers = TieredStore([near, RedisStore(client)])
    client.down = True
    with pytest.warns(CacheWarning, match="RedisStore.*connection refused"):
        tiers.put("abc", b"data")
    # The tier has been told of: from here on the `error` filter would turn a second warning into a failure.
    assert tiers.get("abc") == b"data" and tiers.get("missing") is None
    near.delete("abc")
    client.down = False
    tiers.put("abc", b"back")
    assert client.data == {b"aotkit:abc": b"back"}


def test_a_tier_that_is_down_is_left_out_of_a_look_that_is_no_use():
    client = RedisClient()
    client.down = True
    far = MemoryStore()
    far.put("abc", b"data")
    tiers = TieredStore([RedisStore(client), far])
    with pytest.warns(CacheWarning):
        assert tiers.peek("abc") == b"data"
    assert tiers.peek("missing") is None


def test_all_tiers_down_is_an_error():
    client = RedisClient()
    client.down = True
    tiers = TieredStore([RedisStore(client)])
    with pytest.warns(CacheWarning), pytest.raises(CacheError, match="none of the tiers could be read"):
        tiers.get("abc")
    with pytest.raises(CacheError, match="none of the tiers could be written"):
        tiers.put("abc", b"")
    with pytest.raises(ValueError, match="at least one store"):
        TieredStore([])


@pytest.mark.covers("F7.16")
def test_background_writes_do_not_hold_up_the_caller():
    gate = threading.Event()

    class SlowStore(MemoryStore):
        def put(self, key, data):
            assert gate.wait(10)
            super().put(key, data)

    near, far = MemoryStore(), SlowStore()
    tiers = TieredStore([near, far], background_writes=True)
    tiers.put("abc", b"data")
    assert near.get("abc") == b"data" and far.get("abc") is None
    gate.set()
    tiers.flush()
    assert far.get("abc") == b"data"


def test_an_empty_store_on_a_missing_fsspec_path_lists_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(FsspecStore("memory://aotkit-nothing-here").entries()) == []


@pytest.mark.parametrize("lacking", ["fchmod", "O_CLOEXEC", "geteuid"])
def test_files_are_written_and_read_where_the_system_lacks_a_function(
    lacking: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(os, lacking)  # as on Windows
    path = private_files.private_directory(tmp_path / "cache") / "entry"
    private_files.write_atomically(path, b"one\ntwo\r\n")
    assert path.read_bytes() == b"one\ntwo\r\n"


def test_listing_leaves_out_what_is_no_entry(tmp_path):
    """Others write to the same server, bucket or folder; entries could not be listed or pruned then."""
    client = RedisClient()
    stores = [RedisStore(client, prefix="a[b]*:"), FsspecStore(f"file://{tmp_path}/f"), DiskStore(tmp_path / "d")]
    for store in stores:
        store.put("abc", b"1")
    client.data |= {b"a[b]*:locks:x": b"", b"ab*:abc": b"", b"a[b]x:abc": b""}
    for folder in ("f/ab", "d/entries/ab"):
        (tmp_path / folder / "not an entry~").touch()
    (tmp_path / "f" / "README").touch()
    FsspecStore(f"file://{tmp_path}/f/of another").put("xyz", b"1")
    for store in stores:
        assert [entry.key for entry in store.entries()] == ["abc"]
        assert store.delete("abc") and list(store.entries()) == []


def test_a_server_that_ends_while_it_lists_is_a_failure_of_the_store():
    client = RedisClient()
    store = RedisStore(client)
    store.put("abc", b"1")
    client.down = True
    with pytest.raises(CacheError, match="connection refused"):
        list(store.entries())
