"""Which memory the elements of a tensor are."""

from __future__ import annotations

import torch

__all__ = ["last_element", "overlaps"]


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether several elements are the same memory."""
    if tensor.numel() < 2:
        return False
    places = torch.arange(last_element(tensor) + 1).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return places.unique().numel() < tensor.numel()


def last_element(tensor: torch.Tensor) -> int:
    """Offset of the last element."""
    reach = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return int(tensor.storage_offset()) + reach
