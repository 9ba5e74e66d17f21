"""Saved tensors that hooks of the user's packed and give back.

Note [Unpacked tensors]
    A hook that offloads or compresses saved tensors may give them back with other strides than they had (of an array or
    a file, or as ``save_on_cpu`` does with pinned memory), which is nothing to eager mode's operators. Compiled code
    reads memory as it was compiled to. So where hooks are in effect the forward notes how the tensors lie, and what
    comes back is brought into that form. Other sizes or elements cannot be: eager mode might compute with them, a
    compiled backward would read other memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._torch_compat import saving_hooks
from .errors import MetadataMismatchError

__all__ = ["layouts_if_packed", "unpacked"]

_REAL = (Tensor, torch.nn.Parameter)
_Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]


def layouts_if_packed(saved: Sequence[Any]) -> list[_Layout | None] | None:
    """How these tensors lie, if hooks will pack them when they are saved; ``None`` for a wrapper, and if there are no
    hooks."""
    if saving_hooks(False) is None:
        return None
    return [(t.size(), t.stride(), t.dtype, t.device) if type(t) in _REAL else None for t in saved]


def unpacked(ctx: Any) -> Sequence[Any]:
    """The saved tensors of ``ctx``, as its forward noted them; see Note [Unpacked tensors].

    Raises :class:`MetadataMismatchError` for a tensor of other sizes, or with other elements.
    """
    saved: Sequence[Any] = ctx.saved_tensors
    if ctx.packed is None:
        return saved
    return [t if layout is None else _as_saved(t, layout) for t, layout in zip(saved, ctx.packed, strict=True)]


def _as_saved(tensor: Tensor, layout: _Layout) -> Tensor:
    sizes, strides, dtype, device = layout
    if type(tensor) not in _REAL or (tensor.size(), tensor.dtype, tensor.device) != (sizes, dtype, device):
        raise MetadataMismatchError(
            f"a hook on saved tensors gave back a {type(tensor).__name__} of {tensor.dtype} with sizes "
            f"{tuple(tensor.size())} on {tensor.device} for one of {dtype} with sizes {tuple(sizes)} on {device}, "
            "which a compiled backward cannot read; let it unpack what it packed, or run this part in eager "
            "(torch.compiler.disable)"
        )
    if tensor.stride() == strides and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device).copy_(tensor)
