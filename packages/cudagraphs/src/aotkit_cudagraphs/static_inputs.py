"""Buffers that stand in for inputs during capture, and copies into them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

import torch


def span(tensor: torch.Tensor) -> int:
    """Elements from the first to the last one that the tensor's strides reach (0 for an empty tensor)."""
    if tensor.numel() == 0:
        return 0
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def expanded_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """Dimensions along which all positions are the same element (stride 0, more than one position)."""
    return tuple(
        dim
        for dim, (size, stride) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if stride == 0 and size > 1
    )


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two positions may share an element. Says yes when in doubt.

    Sorted by stride, each dimension must step over everything that the smaller ones reach.
    """
    reach = 0
    for stride, size in sorted((st, sz) for sz, st in zip(tensor.shape, tensor.stride(), strict=True) if sz > 1):
        if stride <= reach:
            return True
        reach += (size - 1) * stride
    return False


def buffer_like(tensor: torch.Tensor) -> torch.Tensor:
    """An uninitialized tensor with the same sizes, strides and dtype in memory of its own, from its first byte on."""
    flat = torch.empty(span(tensor), dtype=tensor.dtype, device=tensor.device)
    return flat.as_strided(tensor.shape, tensor.stride())


def copy_into_buffer(buffer: torch.Tensor, source: torch.Tensor, dims: Sequence[int]) -> None:
    """Copy `source` into a buffer of the same layout; `dims` are its expanded dimensions, copied once each."""
    for dim in dims:
        buffer, source = buffer.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
    if overlaps_itself(buffer):
        # Layouts are equal, so copying the memory they span, gaps included, is right for any overlap.
        length = span(source)
        buffer, source = buffer.as_strided((length,), (1,)), source.as_strided((length,), (1,))
    buffer.copy_(source)


def is_aligned(tensor: torch.Tensor, alignment: int) -> bool:
    """Whether the first element's address is a multiple of `alignment` bytes."""
    return tensor.data_ptr() % alignment == 0


def sharing_memory(values: Sequence[Any], some: Sequence[int], others: Sequence[int]) -> list[int]:
    """Those of `some` indices whose storage has memory in common with one of `others`.

    Addresses tell, not the identity of storages: a tensor that came through DLPack has a storage of its own.
    """
    ends: list[int] = []
    starts: list[int] = []
    for start, end in sorted(_memory(values[index]) for index in others if isinstance(values[index], torch.Tensor)):
        if starts and start < ends[-1]:
            ends[-1] = max(ends[-1], end)
        elif start < end:
            starts.append(start)
            ends.append(end)
    found = []
    for index in some if starts else ():
        start, end = _memory(values[index])
        last = bisect_right(starts, end - 1) - 1  # of those that begin before its end
        if start < end and last >= 0 and ends[last] > start:
            found.append(index)
    return found


def _memory(tensor: torch.Tensor) -> tuple[int, int]:
    storage = tensor.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()
