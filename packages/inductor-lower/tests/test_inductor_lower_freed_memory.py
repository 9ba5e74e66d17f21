"""What a process frees stays with the C library once it was asked to keep it."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import os, torch
from aotkit_inductor_lower.memory.freed import keep_freed_memory

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

def kept():
    before = resident()
    blocks = [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(24)]
    assert resident() - before > 20 << 20
    del blocks
    return resident() - before

first = kept()
before = resident()
keep_freed_memory()
assert resident() - before < 1 << 20
print(first >> 20, kept() >> 20)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="only this C library has such bounds")
def test_memory_that_is_freed_stays_with_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    without, kept = map(int, done.stdout.split())
    assert without < 8 and kept > 20
