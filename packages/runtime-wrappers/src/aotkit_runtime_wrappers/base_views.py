"""Synthetic bases and the views of them that arguments are; see Note [Synthetic bases] in :mod:`.synthetic_base`.

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
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ._torch_compat import dtype_from_name
from .contract import ViewSpec, dims, with_lazy_bits, without_lazy_bits
from .dims import evaluate, evaluate_all
from .errors import AliasingChangedError, UnsupportedOverlapError
from .overlap import byte_range

__all__ = ["base_of", "common_base", "dtype_name", "root", "take_member", "view_of"]


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


def dtype_name(tensor: Tensor) -> str:
    """As records have it."""
    return str(tensor.dtype).removeprefix("torch.")


def view_of(member: Tensor, base: Tensor, name: str) -> ViewSpec:
    """Which view of ``base`` the argument called ``name`` is."""
    offset: Any = base.storage_offset()
    if member.dtype != base.dtype:
        offset = offset * base.element_size()
        if offset % member.element_size():
            raise UnsupportedOverlapError(
                f"{name} has dtype {member.dtype} and shares memory with a mutated argument of dtype {base.dtype}, "
                "which does not begin at a whole number of its elements; pass a clone of one of them"
            )
        offset = offset // member.element_size()
    (delta,) = dims([member.storage_offset() - offset])
    sizes, strides = dims(member.size()), dims(member.stride())
    bits = {"conj": member.is_conj(), "neg": member.is_neg()}
    return ViewSpec(dtype_name(member), sizes, strides, delta, member.requires_grad, **bits)


def common_base(members: Sequence[Tensor]) -> Tensor | None:
    """The tensor that autograd knows as the base of all members, or of those that require grad if it covers all."""
    roots = [m if m._base is None else m._base for m in members]
    if any(m.requires_grad and not r.requires_grad for m, r in zip(members, roots, strict=True)):
        return None  # a leaf over a part of the base: no gradient reaches it through the base
    if all(r is roots[0] for r in roots):
        same_dtype = all(m.dtype == roots[0].dtype for m in members)
        return roots[0] if same_dtype or _is_dense(roots[0]) else None
    with_grad = [r for r, m in zip(roots, members, strict=True) if m.requires_grad]
    if not with_grad or any(r is not with_grad[0] for r in with_grad):
        return None
    # The others were detached from it: the same memory, and no history.
    return with_grad[0] if _covers(with_grad[0], members) else None


def _covers(base: Tensor, members: Sequence[Tensor]) -> bool:
    """Whether the dense tensor ``base`` holds every element of ``members``; not where that depends on a symbol."""
    numbers = [n for t in (base, *members) for n in (*t.size(), *t.stride(), t.storage_offset())]
    if not all(isinstance(n, int) for n in numbers) or not _is_dense(base):
        return False
    low, high = byte_range(base)
    ranges = [byte_range(m) for m in members if m.numel()]
    return all(low <= first and end <= high for first, end in ranges)


def root(members: Sequence[Tensor], names: Sequence[str], flat: bool | None = None) -> Tensor:
    """The tensor that all members are views of: as autograd has it, else a flat one over the storage.

    ``flat``: which of both it has to be.
    """
    common = None if flat else common_base(members)
    if common is not None:
        return common
    if flat is False:
        raise AliasingChangedError(
            f"arguments {', '.join(names)} were views of one tensor when the graph was captured and are not now; "
            "capture the function again with these arguments"
        )
    if any(m.requires_grad for m in members):
        raise UnsupportedOverlapError(
            f"{', '.join(names)} share memory, one of them is mutated and one requires grad, but they are no views of "
            "one tensor as far as autograd knows; make them views of one tensor by torch operations, or pass clones"
        )
    # Of the smallest elements, so that the others are made of whole numbers of them.
    first = min(members, key=lambda m: m.element_size())
    storage = first.untyped_storage()
    count = storage.nbytes() // first.element_size()
    # Of a fake tensor this is a fake one again.
    return first.new_empty(0).set_(storage, 0, (count,), (1,))


def _is_dense(tensor: Tensor) -> bool:
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))


def base_of(
    members: Sequence[Tensor], views: Sequence[ViewSpec], names: str, flat: bool, symbols: Mapping[str, int]
) -> Tensor:
    """The synthetic base of ``members``, if each is still the part of it that the graph was captured for."""
    argument_names = names.split()
    first = members[0].untyped_storage()._cdata
    if any(m.untyped_storage()._cdata != first for m in members):
        raise AliasingChangedError(
            f"arguments {', '.join(argument_names)} shared memory when the graph was captured and do not now; capture "
            "the function again with these arguments"
        )
    base = root(members, argument_names, flat)
    for member, view, name in zip(members, views, argument_names, strict=True):
        if view_of(member, base, name) != (_with_values(view, symbols) if symbols else view):
            raise AliasingChangedError(
                f"argument {name} is another part of the memory it shares with {', '.join(argument_names)} than when "
                "the graph was captured; capture the function again with these arguments"
            )
    return base


def _with_values(view: ViewSpec, symbols: Mapping[str, int]) -> ViewSpec:
    return replace(
        view,
        sizes=evaluate_all(view.sizes, symbols),
        strides=evaluate_all(view.strides, symbols),
        offset_delta=evaluate(view.offset_delta, symbols),
    )
