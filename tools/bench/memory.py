"""Peak memory of a step, in two ways.

Tensor memory is exact: torch's CPU allocator tells the profiler of every allocation and release, so a running sum has
a true maximum, to the byte and without noise, also for compiled code (whose buffers are torch's). The sum begins
before the first call: what a backend keeps between calls (an arena, folded constants) counts in every step.
Resident memory is what the operating system saw at most over the life of the process: compilation included, and
whatever libraries allocate past torch.
"""

from __future__ import annotations

import gc
import resource
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile, record_function

MEGABYTE = 2**20
MARKER = "bench: the measured step"


def profiled_step(step: Callable[[], object], warmup: int) -> tuple[Any, int]:
    """The profiler's results of some steps that compile and fill what is kept and of one behind them, and when that
    one begins, in nanoseconds of the profiler's clock."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as recorded:
        for _ in range(warmup):
            step()
        gc.collect()  # of what the first calls left in circles: when that goes is chance
        with record_function(MARKER):
            step()
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    if results is None:
        raise RuntimeError("the profiler returned no results")
    begins = [event.start_ns() for event in results.events() if event.name() == MARKER]
    if len(begins) != 1:
        raise RuntimeError(f"the profiler saw the measured step {len(begins)} times")
    return results, begins[0]


def peak_tensor_mb(step: Callable[[], object], warmup: int = 2) -> float:
    """The most tensor memory in use at once during a step, in MiB, what was there before the first call left out.

    ``step`` must not have run yet: its first ``warmup`` runs compile and fill what is kept, the next one is measured.
    """
    results, begin = profiled_step(step, warmup)
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    current = sum(size for when, size in changes if when < begin)
    peak = current
    for when, size in changes:
        if when >= begin:
            current += size
            peak = max(peak, current)
    return peak / MEGABYTE


def peak_resident_mb() -> float:
    """The largest resident set of this process so far, in MiB."""
    told = _of_status("VmHWM:")
    if told is not None:
        return told
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MEGABYTE if sys.platform == "darwin" else peak / 1024


def resident_mb() -> float:
    """The resident set of this process now, in MiB; its largest one where the system tells nothing else."""
    told = _of_status("VmRSS:")
    return peak_resident_mb() if told is None else told


def _of_status(name: str) -> float | None:
    status = Path("/proc/self/status")
    for line in status.read_text().splitlines() if status.exists() else ():
        if line.startswith(name):
            return int(line.split()[1]) / 1024
    return None
