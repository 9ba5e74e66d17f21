"""Peak memory of a step, in two ways.

Tensor memory is exact: torch's CPU allocator tells the profiler of every allocation and release, so the running sum
over one step has a true maximum, to the byte and without noise, also for compiled code (whose buffers are torch's).
Resident memory is what the operating system saw at most over the life of the process: compilation included, and
whatever libraries allocate past torch.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

MEGABYTE = 2**20


def peak_tensor_mb(step: Callable[[], object]) -> float:
    """The most tensor memory in use at once during a step, above what was in use before it, in MiB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        step()
    results = recorded.profiler.kineto_results if recorded.profiler is not None else None
    if results is None:
        raise RuntimeError("the profiler returned no results")
    changes = sorted((e.start_ns(), e.nbytes()) for e in results.events() if e.name() == "[memory]")
    current = peak = 0
    for _, size in changes:
        current += size
        peak = max(peak, current)
    return peak / MEGABYTE


def peak_resident_mb() -> float:
    """The largest resident set of this process so far, in MiB."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) / 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / MEGABYTE if sys.platform == "darwin" else peak / 1024
