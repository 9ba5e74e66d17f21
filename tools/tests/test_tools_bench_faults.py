"""Page faults are counted where memory appears, and only there."""

from __future__ import annotations

import mmap
import resource

from tools.bench.faults import faults_of

PAGES = 256


def _touch_new_memory() -> None:
    with mmap.mmap(-1, PAGES * resource.getpagesize()) as memory:
        for page in range(PAGES):
            memory[page * resource.getpagesize()] = 1


def test_memory_that_appears_is_counted_once_per_page() -> None:
    kept = bytearray(PAGES * resource.getpagesize())
    assert faults_of(_touch_new_memory, warmup=1, steps=5).pages >= PAGES / 16  # a fault may bring several pages
    assert faults_of(lambda: kept.reverse(), warmup=1, steps=5).pages < 8
