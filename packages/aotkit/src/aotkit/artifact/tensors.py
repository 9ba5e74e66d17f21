"""The bytes of a tensor, and a tensor of bytes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

__all__ = ["bytes_of", "tensor_of"]


def bytes_of(value: torch.Tensor) -> bytes:
    """The elements in memory order, first to last, gaps between them included."""
    if value.numel() == 0:
        return b""
    last = sum((size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True))
    if value.device.type != "cpu":
        value = value.as_strided((last + 1,), (1,)).cpu()
    return ctypes.string_at(value.data_ptr(), (last + 1) * value.element_size())


def tensor_of(data: bytes, dtype: str, shape: Sequence[int], stride: Sequence[int], device: str) -> torch.Tensor:
    """The inverse of :func:`bytes_of`; ``dtype`` and ``device`` as torch prints them."""
    kind: torch.dtype = getattr(torch, dtype.removeprefix("torch."))
    if not data:
        return torch.empty_strided(shape, stride, dtype=kind, device=device)
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind)
    return flat.to(device).as_strided(shape, stride)
