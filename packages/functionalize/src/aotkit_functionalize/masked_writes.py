"""Writes of a trained value to what a mask chooses, as a choice between old and new numbers.

Note [Masked writes of trained values]
    The gradient of ``x[mask] = value`` by the value is ``gradient[mask]``, whose number of rows is known when the
    program runs; a graph cannot hold it. If every row gets the same value (no dimension of it is along the chosen rows,
    or one of size 1), the write is ``x.copy_(torch.where(mask, value, x))``, whose gradients have known sizes and are
    the same numbers: what the mask leaves out adds zeros to the value's. Other values stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["as_choice"]


def as_choice(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The tensor and what to copy into it for ``__setitem__`` or ``index_put_`` of this kind, ``None`` for others."""
    if name not in ("__setitem__", "index_put_") or len(args) < 3:
        return None
    target, index, value, *accumulates = args
    if any(accumulates) or kwargs.get("accumulate") or not torch.is_grad_enabled():
        return None
    mask = _only_mask(index)
    if mask is None or not isinstance(value, Tensor) or not value.requires_grad:
        return None
    if (value.dtype, value.device) != (target.dtype, target.device) or mask.device != target.device:
        return None
    chosen, rest = target.shape[: mask.dim()], target.shape[mask.dim() :]
    if value.dim() == len(rest) + 1 and value.shape[0] == 1:
        value = value.squeeze(0)
    if not 0 < mask.dim() <= target.dim() or mask.shape != chosen or value.dim() > len(rest):
        return None
    sizes = rest[len(rest) - value.dim() :]
    if not all(own == 1 or own == size for own, size in zip(value.shape, sizes, strict=True)):
        return None
    return target, torch.where(mask.reshape(*chosen, *[1] * len(rest)), value, target)


def _only_mask(index: Any) -> Tensor | None:
    """The mask of an index that has nothing else but whole dimensions behind it."""
    first, *others = index if isinstance(index, tuple | list) and index else (index,)
    whole = all(each is Ellipsis or (isinstance(each, slice) and each == slice(None)) for each in others)
    return first if whole and isinstance(first, Tensor) and first.dtype is torch.bool else None
