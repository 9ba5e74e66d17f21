"""How fast the ranks of a group talk to each other, measured once by all of them."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch

from .errors import RanksDisagree

__all__ = ["measure_link"]

_SMALL, _LARGE = 1 << 8, 1 << 22  # bytes that each rank gives
_ROUNDS = 7


def measure_link(group: Any = None, *, device: torch.device | str | None = None) -> dict[str, float]:
    """Latency and bandwidth of gathers among the ranks of ``group`` (default: all), as options for ``torch.compile``::

        torch.compile(model, backend="aotkit", options={**measure_link()})

    All ranks of the group call it, as they do a collective: it runs some, which takes about as long as 30 MB need. Each
    rank gets the same numbers, those of the slowest, so that all overlap and join alike. ``device``: where the tensors
    are; by default the one that the group's backend is for.

    Returns ``link_latency`` in seconds, and ``link_bandwidth`` in bytes per second, counted as what a rank has after a
    gather. Raises :class:`.RanksDisagree` if there is no process group, and what its backend raises.
    """
    distributed = torch.distributed
    if not distributed.is_available() or not distributed.is_initialized():
        raise RanksDisagree("there are no ranks to measure: call torch.distributed.init_process_group first")
    if device is None:
        device = "cuda" if distributed.get_backend(group) == "nccl" else "cpu"
    device = torch.device(device)
    small, large = (_seconds(nbytes, group, device) for nbytes in (_SMALL, _LARGE))
    moved = (_LARGE - _SMALL) * distributed.get_world_size(group)
    slowest = torch.tensor([small, max(large - small, 1e-9) / moved], dtype=torch.float64, device=device)
    distributed.all_reduce(slowest, distributed.ReduceOp.MAX, group=group)
    latency, seconds_per_byte = slowest.tolist()
    return {"link_latency": latency, "link_bandwidth": 1 / seconds_per_byte}


def _seconds(nbytes: int, group: Any, device: torch.device) -> float:
    """The median of some gathers, the first of which (connections are made) does not count."""
    given = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    whole = torch.empty(nbytes * torch.distributed.get_world_size(group), dtype=torch.uint8, device=device)
    taken = []
    for _ in range(_ROUNDS + 1):
        torch.distributed.barrier(group)
        _wait(device)
        began = time.perf_counter()
        torch.distributed.all_gather_into_tensor(whole, given, group=group)
        _wait(device)
        taken.append(time.perf_counter() - began)
    return statistics.median(taken[1:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
