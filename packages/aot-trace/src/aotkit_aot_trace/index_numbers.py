"""Indices that are read when the graph runs: integers in tensors without dimensions (``x[i]``, ``x[:, i] = y``).

Eager's C++ code reads the number and selects, which gives a view. It asks what the number is, which a symbol does not
tell it; ``select`` itself takes one. Within ``torch.vmap`` an index has a number for each of what is mapped, so it is
none to be read; eager mode does not select there either.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["select_numbers"]

# Not sequences: as many dimensions as they are for, torch finds out itself.
_PARTS = (type(None), type(Ellipsis), slice, int, torch.SymInt, torch.Tensor)


def select_numbers(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, Any]:
    """``x`` where such numbers are selected, and the index that is left of ``index``."""
    given = index if isinstance(index, tuple) else (index,)
    if not any(map(_is_number, given)) or not all(isinstance(each, _PARTS) for each in given):
        return x, index
    compat.allow_numbers()
    dim, left = 0, []
    for place, each in enumerate(given):
        if _is_number(each):
            x = x.select(dim, each.item())
            continue
        if each is None:  # made now: its stride depends on what is still behind it
            x, each = x.unsqueeze(dim), slice(None)
        left.append(each)
        if each is Ellipsis:
            dim = x.dim() - sum(map(_dimensions, given[place + 1 :]))
        else:
            dim += _dimensions(each)
    return x, tuple(left) or Ellipsis


def _is_number(index: Any) -> bool:
    if not isinstance(index, torch.Tensor) or index.dim() != 0 or _is_mapped(index):
        return False
    dtype = index.dtype
    return not (dtype.is_floating_point or dtype.is_complex or dtype in (torch.bool, torch.uint8))  # these are masks


def _is_mapped(index: torch.Tensor) -> bool:
    """Whether ``torch.vmap`` maps over it, at any level of transforms."""
    levels: Any = torch._C._functorch
    while levels.is_functorch_wrapped_tensor(index):
        if levels.is_batchedtensor(index):
            return True
        index = levels.get_unwrapped(index)
    return False


def _dimensions(index: Any) -> int:
    """How many dimensions a part of an index is for."""
    if index is None or isinstance(index, bool):
        return 0
    if isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8):
        return index.dim()
    return 1
