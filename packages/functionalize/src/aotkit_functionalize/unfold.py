"""Windows over a dimension (``unfold``) that leave some elements out.

Note [Windows with gaps]
    torch's functionalization writes back through ``unfold`` by adding the windows into zeros, so the elements between
    windows would become zero. Where windows do not overlap, the same view is a chain of views with a correct way back:
    the dimension in blocks of ``step``, of which the first ``size`` elements count. If the last block is not complete,
    ``as_strided`` is that view, which functionalization follows back only as the first view of a tensor: it is taken of
    the tensor that autograd knows as the base. Not of one that repeats its memory: autograd would give each of its
    elements the mean of the gradients of all that share its memory, and nobody may write to it.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _torch_compat as compat
from .overlap import repeats_memory

__all__ = ["without_gaps"]


def without_gaps(func: Any, args: Any, kwargs: Any) -> Any:
    """``unfold``, by other views if its windows leave out elements; see Note [Windows with gaps]."""
    target, numbers = args[0], args[1:]
    if target.dim() == 0 and (*numbers, *kwargs.values())[1] == 1:
        return target.view(1)  # the inverse that functionalization has for unfold knows no scalars
    if len(numbers) != 3 or target.dim() == 0:
        return func(*args, **kwargs)
    dim, size, step = (int(n) if isinstance(n, bool) else n for n in numbers)
    dim = dim % target.dim()
    length = target.shape[dim]
    if not all(isinstance(n, int) for n in (length, size, step)) or not (0 < size <= length and step > 0):
        return func(*args, **kwargs)
    count = (length - size) // step + 1
    if count == 1 and size >= step:  # which overlaps nothing
        return target.narrow(dim, 0, size).unsqueeze(dim).movedim(dim + 1, -1)
    if size > step:
        return func(*args, **kwargs)
    if length == count * step and size == step:
        return func(*args, **kwargs)
    if count * step <= length:
        blocks = target.narrow(dim, 0, count * step).unflatten(dim, (count, step))
        return blocks.narrow(dim + 1, 0, size).movedim(dim + 1, -1)
    base = target if target._base is None else target._base
    if not compat.is_base(compat.inner_wrapper(base)) or base.requires_grad != target.requires_grad:
        return func(*args, **kwargs)
    if not compat.is_dense(base) and (base is not target or repeats_memory(base)):
        return func(*args, **kwargs)
    sizes, strides = list(target.shape), list(target.stride())
    sizes[dim], strides[dim] = count, strides[dim] * step
    with torch._C.DisableTorchFunction():
        return base.as_strided([*sizes, size], [*strides, target.stride(dim)], target.storage_offset())
