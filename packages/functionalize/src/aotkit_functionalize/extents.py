"""Which memory a tensor looks at, compared with that of another tensor of the same storage."""

from __future__ import annotations

from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["covers", "looks_beyond"]

_COUNTED = 1 << 16  # elements up to which addresses are compared one by one


def covers(base: torch.Tensor, member: torch.Tensor) -> bool:
    """Whether every element of ``member`` lies within the dense tensor ``base``. Symbolic sizes must prove it."""
    known = compat.is_known
    if known(member.numel() == 0):
        return True
    same_range = base.dtype == member.dtype and known(base.numel() == member.numel())
    if same_range and base.storage_offset() == member.storage_offset() and compat.is_dense(member):
        return True
    first, last = _byte(member, member.storage_offset()), _byte(member, _last(member) + 1)
    return known(first >= _byte(base, base.storage_offset())) and known(last <= _byte(base, _end(base)))


def looks_beyond(view: torch.Tensor, base: torch.Tensor) -> bool:
    """Whether ``view`` may have elements that are none of ``base``: in its gaps, or before or behind it."""
    if compat.is_dense(base):
        return not covers(base, view)
    numbers = (*base.shape, *base.stride(), base.storage_offset(), *view.shape, *view.stride(), view.storage_offset())
    if view.dtype != base.dtype or not all(isinstance(number, int) for number in numbers):
        return True
    return max(view.numel(), base.numel()) > _COUNTED or not _addresses(view) <= _addresses(base)


def _addresses(plain: torch.Tensor) -> set[int]:
    found = {int(plain.storage_offset())} if plain.numel() else set()
    for size, stride in zip(plain.shape, plain.stride(), strict=True):
        found = {address + step * int(stride) for address in found for step in range(int(size))}
    return found


def _last(plain: torch.Tensor) -> Any:
    reach: Any = plain.storage_offset()
    for size, stride in zip(plain.shape, plain.stride(), strict=True):
        reach = reach + (size - 1) * stride
    return reach


def _end(dense: torch.Tensor) -> Any:
    return dense.storage_offset() + dense.numel()


def _byte(plain: torch.Tensor, element: Any) -> Any:
    return element * plain.element_size()
