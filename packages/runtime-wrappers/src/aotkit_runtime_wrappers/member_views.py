"""Parts of a synthetic base while the function is captured: views that can be written to.

Note [Views of a base in another dtype]
    torch's functionalization writes through a chain of views only if ``as_strided`` is the first of them. So the part
    is cut out of the base in the base's own dtype, then seen in the other one, and then cut to size by slices.

    Larger elements consist of whole base elements: one more dimension, which the change of dtype turns into one
    element. Smaller elements lie within base elements: the base elements that hold them are cut out along the last
    dimension, split, and what lies before and between the wanted ones is sliced away. That needs the strides of all
    other dimensions to be whole numbers of base elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ._torch_compat import dtype_from_name
from .contract import ViewSpec, with_lazy_bits, without_lazy_bits
from .dims import evaluate, evaluate_all
from .errors import UnsupportedOverlapError

__all__ = ["take_member"]


def take_member(base: Tensor, view: ViewSpec, symbols: Mapping[str, Any]) -> Tensor:
    """``view`` of ``base``, whose sizes are evaluated with ``symbols`` (integers or symbolic ones)."""
    sizes, strides = evaluate_all(view.sizes, symbols), evaluate_all(view.strides, symbols)
    memory = without_lazy_bits(base)
    member = _take(memory, view, sizes, strides, evaluate(view.offset_delta, symbols))
    member = with_lazy_bits(member, view.conj, view.neg)
    return member if view.requires_grad or not base.requires_grad else member.detach()


def _take(base: Tensor, view: ViewSpec, sizes: Sequence[Any], strides: Sequence[Any], delta: Any) -> Tensor:
    dtype = dtype_from_name(view.dtype)
    begin = base.storage_offset()
    if dtype == base.dtype:
        return base.as_strided(sizes, strides, begin + delta)
    if dtype.itemsize == base.element_size():
        return base.as_strided(sizes, strides, begin + delta).view(dtype)
    if dtype.itemsize > base.element_size():
        return _larger(base, dtype, sizes, strides, delta)
    return _smaller(base, dtype, sizes, strides, delta)


def _larger(base: Tensor, dtype: torch.dtype, sizes: Sequence[Any], strides: Sequence[Any], delta: Any) -> Tensor:
    ratio = dtype.itemsize // base.element_size()
    wider = [ratio * stride for stride in strides]
    parts = base.as_strided((*sizes, ratio), (*wider, 1), base.storage_offset() + ratio * delta)
    if dtype.is_complex and dtype.to_real() == base.dtype:
        return torch.view_as_complex(parts)
    return parts.view(dtype).squeeze(-1)


def _smaller(base: Tensor, dtype: torch.dtype, sizes: Sequence[Any], strides: Sequence[Any], delta: Any) -> Tensor:
    ratio = base.element_size() // dtype.itemsize
    size, step = (sizes[-1], strides[-1]) if sizes else (1, 1)
    outer = list(zip(sizes[:-1], strides[:-1], strict=True))
    if any(stride % ratio for length, stride in outer if length != 1) or step < 1:
        raise UnsupportedOverlapError(
            f"arguments share memory, one of them is mutated, and one of dtype {dtype} has strides {tuple(strides)}, "
            f"which are not whole numbers of elements of the {base.dtype} tensor that they are views of; pass a clone"
        )
    first, before = delta // ratio, delta % ratio
    reach = before + (size - 1) * step + 1
    count = (reach + ratio - 1) // ratio
    whole = [stride // ratio for _, stride in outer]
    held = base.as_strided((*(n for n, _ in outer), count), (*whole, 1), base.storage_offset() + first)
    if base.is_complex() and base.dtype.to_real() == dtype:
        split = torch.view_as_real(held).flatten(-2)
    else:
        split = held.view(dtype)
    wanted = split[..., before : before + (size - 1) * step + 1 : step]
    return wanted if sizes else wanted.squeeze(-1)
