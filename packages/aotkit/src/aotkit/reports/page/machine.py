"""What this processor can do at best, measured in a moment, as a scale for kernels."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

__all__ = ["Machine", "measure_machine"]

_ELEMENTS = 1 << 24  # 64 MiB of floats, past the caches of most processors
_WIDTH = 1024


@dataclass(frozen=True, slots=True)
class Machine:
    """``gb_per_s``: a copy of 64 MiB. ``gflop_per_s``: ATen's product of two matrices of floats."""

    gb_per_s: float
    gflop_per_s: float
    threads: int


def measure_machine() -> Machine:
    """With the threads that torch has now; takes a fraction of a second."""
    source, target = torch.ones(_ELEMENTS), torch.empty(_ELEMENTS)
    left, right, product = torch.ones(_WIDTH, _WIDTH), torch.ones(_WIDTH, _WIDTH), torch.empty(_WIDTH, _WIDTH)
    with torch.no_grad():
        copy = _best(lambda: target.copy_(source))
        multiply = _best(lambda: torch.mm(left, right, out=product))
    return Machine(2 * 4 * _ELEMENTS / copy / 1e9, 2 * _WIDTH**3 / multiply / 1e9, torch.get_num_threads())


def _best(run: Callable[[], object], times: int = 4) -> float:
    seconds = []
    for _ in range(times):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
