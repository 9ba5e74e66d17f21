"""Writes of a trained value to what a mask chooses, with gradients of known sizes.

Note [Masked writes of trained values]
    The gradient of ``x[mask] = value`` by the value is ``gradient[mask]``, whose number of rows is known when the
    program runs; a graph cannot hold it. If every row gets the same value (no dimension of it is along the chosen rows,
    or one of size 1), the write is ``x.copy_(torch.where(mask, value, x))``, whose gradients have known sizes and are
    the same numbers: what the mask leaves out adds zeros to the value's. If each row gets its own, there are as many
    rows as the value has, or the write itself fails: so ``masked_scatter_backward``, which takes the size of its
    result, finds the same gradient. Other values stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["without_unknown_sizes"]


def without_unknown_sizes(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Tensor, Tensor] | None:
    """The tensor and what to copy into it for ``__setitem__`` or ``index_put_`` of this kind, ``None`` for others."""
    if name not in ("__setitem__", "index_put_") or len(args) < 3:
        return None
    target, index, value, *accumulates = args
    if any(accumulates) or kwargs.get("accumulate") or not torch.is_grad_enabled():
        return None
    if not isinstance(value, Tensor) or not value.requires_grad:
        return None
    lead, mask = _only_mask(index, target.dim())
    if mask is None or (value.dtype, value.device, mask.device) != (target.dtype, target.device, target.device):
        return None
    behind = lead + mask.dim()
    if not 0 < mask.dim() <= target.dim() - lead or mask.shape != target.shape[lead:behind]:
        return None
    rest = target.dim() - behind
    rows = value.shape[-rest - 1] if value.dim() > rest else 1
    sizes = (*target.shape[:lead], rows, *target.shape[behind:])
    if not _can_be_expanded(value, sizes):
        return None
    if rows != 1:
        return target, _WrittenRows.apply(target, mask, lead, value, sizes)  # type: ignore[no-untyped-call]
    if value.dim() > rest:
        value = value.unflatten(-rest - 1, [1] * mask.dim())
    return target, torch.where(mask.reshape(*mask.shape, *[1] * rest), value, target)


def _can_be_expanded(value: Tensor, sizes: Sequence[Any]) -> bool:
    return value.dim() <= len(sizes) and all(
        own == 1 or own == size for own, size in zip(value.shape[::-1], sizes[::-1], strict=False)
    )


def _only_mask(index: Any, dims: int) -> tuple[int, Tensor | None]:
    """The mask of an index that has nothing else but whole dimensions, and how many of those are before it."""
    items = list(index) if isinstance(index, tuple | list) else [index]
    masks = [place for place, item in enumerate(items) if isinstance(item, Tensor)]
    others = [item for item in items if not isinstance(item, Tensor)]
    if len(masks) != 1 or not all(
        item is Ellipsis or (isinstance(item, slice) and item == slice(None)) for item in others
    ):
        return 0, None
    lead, mask = masks[0], items[masks[0]]
    if Ellipsis in others[:lead]:
        lead = dims - mask.dim() - len(others[lead:])
    return lead, mask if mask.dtype is torch.bool else None


class _WrittenRows(torch.autograd.Function):
    """``target`` with each chosen row as ``value`` has it; see Note [Masked writes of trained values]."""

    @staticmethod
    def forward(ctx: Any, target: Tensor, mask: Tensor, lead: int, value: Tensor, sizes: Sequence[Any]) -> Tensor:
        ctx.save_for_backward(mask.reshape(*mask.shape, *[1] * (target.dim() - lead - mask.dim())))
        ctx.sizes, ctx.shape = sizes, value.shape
        return torch.ops.aten.index_put.default(target, [*[None] * lead, mask], value)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (gradient,), (mask,) = gradients, ctx.saved_tensors
        by_target = gradient.masked_fill(mask, 0) if ctx.needs_input_grad[0] else None
        by_value = torch.ops.aten.masked_scatter_backward(gradient, mask.expand_as(gradient), ctx.sizes)
        return by_target, None, None, by_value.sum_to_size(ctx.shape), None
