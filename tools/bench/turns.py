"""ATen's call and ours in turns: what the benches of single operators share."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from .chains import keep_freed_memory, median_ratio, turn

__all__ = ["begin", "compared", "geometric_mean"]


def begin(threads: int) -> Callable[[], float]:
    """Prepare this process to measure on so many threads. Gives the clock: processor time of one, wall time of more."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    keep_freed_memory()
    return time.thread_time if threads == 1 else time.perf_counter


def compared(
    aten: Callable[[], object], own: Callable[[], object], rounds: int, clock: Callable[[], float]
) -> tuple[float, float, float]:
    """Milliseconds of both, medians of the rounds, and the median of the ratios within rounds."""

    def timed(call: Callable[[], object]) -> Callable[[], float]:
        def run() -> float:
            start = clock()
            call()
            return clock() - start

        return run

    runs = timed(aten), timed(own)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds):
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            times[side].append(turn(runs[side], 3))
    first, second = (1e3 * statistics.median(values) for values in times)
    return first, second, median_ratio(*times)


def geometric_mean(ratios: Sequence[float]) -> float:
    """Of ratios above 0."""
    return math.exp(statistics.fmean(map(math.log, ratios)))
