"""Long trials of the disk store, of which the tests run a slice.

python packages/cache/tests/cache_campaign.py kill --points 200
python packages/cache/tests/cache_campaign.py cap --inserts 10000 --processes 4
"""

from __future__ import annotations

import argparse
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from aotkit_cache import ArtifactCache, make_key
from aotkit_cache.stores import DiskStore

SECRET = b"the campaign's secret"
_SIZE = 200_000

# Kills itself at a chosen system call of a chosen put: no clock decides where. The audit hook sees every open,
# rename and unlink; between them the data is written in pieces, and `write` is patched to stop inside one.
_WRITER = """
import os, signal, sys
from aotkit_cache import ArtifactCache, make_key
from aotkit_cache.stores import DiskStore
import aotkit_cache.private_files as files

directory, point = sys.argv[1], int(sys.argv[2])
steps = 0

def step():
    global steps
    steps += 1
    if steps == point:
        os.kill(os.getpid(), signal.SIGKILL)

def hook(event, args):
    if event in ("open", "os.rename", "os.remove", "os.utime", "os.chmod", "os.mkdir"):
        step()

real = os.fdopen

class InPieces:
    def __init__(self, file):
        self.file = file
    def __enter__(self):
        return self
    def __exit__(self, *what):
        self.file.close()
    def write(self, view):
        step()
        return self.file.write(view[: max(1, len(view) // 2)])

def fdopen(descriptor, mode="r", *args, **kwargs):
    file = real(descriptor, mode, *args, **kwargs)
    return InPieces(file) if mode == "wb" else file

cache = ArtifactCache(DiskStore(directory, max_bytes=2_000_000), b"the campaign's secret")
files.os.fdopen = fdopen
sys.addaudithook(hook)
for number in range(12):
    key = make_key(number=number % 7)
    cache.put(key, {"data": bytes([number % 7]) * SIZE}, {"number": number % 7})
print(steps)
""".replace("SIZE", str(_SIZE))


def written_steps(directory: Path) -> int:
    """How many places there are to be killed at in one run of the writer."""
    done = subprocess.run(
        [sys.executable, "-c", _WRITER, str(directory), "0"], capture_output=True, text=True, timeout=60, check=True
    )
    return int(done.stdout)


def kill_at(directory: Path, point: int) -> None:
    """Run the writer until it kills itself at ``point``; then every entry has to be whole or missing, and writable."""
    done = subprocess.run([sys.executable, "-c", _WRITER, str(directory), str(point)], capture_output=True, timeout=60)
    assert done.returncode == -9, f"the writer was not killed at {point}: {done.stderr.decode()}"
    cache = ArtifactCache(DiskStore(directory, max_bytes=2_000_000, lock_timeout=20), SECRET)
    for number in range(7):
        entry = cache.get(make_key(number=number))
        if entry is not None:
            assert entry.meta == {"number": number}
            assert entry.sections["data"] == bytes([number]) * _SIZE
    misses = dict(cache.stats().misses)
    assert set(misses) <= {"ABSENT"}, f"a killed writer left a damaged entry: {misses}"
    assert cache.put(make_key(number="after"), {"data": b"x" * _SIZE})
    assert sum(entry.size for entry in cache.store.entries()) <= 2_000_000


_INSERT = """
import random, sys
from aotkit_cache.stores import DiskStore
directory, worker, count, cap, size = sys.argv[1], *map(int, sys.argv[2:])
store, chosen = DiskStore(directory, max_bytes=cap), random.Random(worker)
largest = 0
for number in range(count):
    store.put(f"w{worker}n{number}", bytes(chosen.randrange(size // 2, 2 * size)))
    if number % 50 == 49:
        with store._exclusive():  # a listing among writers counts what came after what went
            largest = max(largest, sum(entry.size for entry in store.entries()))
    if number % 7 == 0:
        store.get(f"w{worker}n{max(0, number - 3)}")
print(largest)
"""


def insert_from_processes(directory: Path, inserts: int, processes: int, cap: int) -> int:
    """Insert eight times the cap from several processes at once; the largest sum of sizes that any of them saw."""
    numbers = [str(inserts // processes), str(cap), str(8 * cap // inserts)]
    commands = [[sys.executable, "-c", _INSERT, str(directory), str(w), *numbers] for w in range(processes)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    largest = 0
    for process in running:
        out, _ = process.communicate(timeout=1800)
        assert process.returncode == 0
        largest = max(largest, int(out))
    store = DiskStore(directory, max_bytes=cap)
    return max(largest, sum(entry.size for entry in store.entries()))


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    kill = commands.add_parser("kill")
    kill.add_argument("--points", type=int, default=200)
    kill.add_argument("--seed", type=int, default=0)
    cap = commands.add_parser("cap")
    cap.add_argument("--inserts", type=int, default=10_000)
    cap.add_argument("--processes", type=int, default=4)
    cap.add_argument("--megabytes", type=int, default=100)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.command == "kill":
            steps = written_steps(Path(folder) / "count")
            chosen = random.Random(given.seed)
            for number in range(given.points):
                kill_at(Path(folder) / f"c{number % 5}", chosen.randrange(1, steps // 2))
                if number % 20 == 19:
                    print(f"{number + 1} of {given.points} killed writers left whole entries only", flush=True)
        else:
            limit = given.megabytes * 1_000_000
            largest = insert_from_processes(Path(folder) / "c", given.inserts, given.processes, limit)
            count = sum(1 for _ in os.scandir(Path(folder) / "c" / "entries"))
            print(f"{given.inserts} inserts, at most {largest / 1e6:.1f} of {limit / 1e6:.0f} MB, {count} folders")
            assert largest <= limit


if __name__ == "__main__":
    main()
