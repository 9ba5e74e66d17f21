"""In-place random operations whose numbers depend on how the tensor lies in memory.

Note [Random numbers and memory]
    Functionalization draws into a new tensor, which need not lie in memory as the one that eager mode draws into.
    ``normal_`` has another method for 16 and more elements without gaps than for others, and the new tensor never has
    gaps: that is refused. ``bernoulli_`` hands out its numbers in the order of memory, and whoever records it has to
    mind the strides of what it is called on. So these are to be those of what eager mode fills: where ``bernoulli`` of
    a number returns a new tensor, that is contiguous.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _torch_compat as compat
from .errors import Unsupported

__all__ = ["as_eager_draws", "check_normal"]

_FILLED_AT_ONCE = 16  # elements from which normal_ fills memory without gaps at once


def as_eager_draws(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Arguments of ``bernoulli``, which returns a new tensor, that lie as what eager mode fills."""
    p = kwargs.get("p", args[1] if len(args) > 1 else None)
    if p is None or isinstance(p, torch.Tensor) or args[0].device.type != "cpu":
        return args
    if compat.is_known(args[0].numel() == 0):  # contiguous whatever its strides are, and those would be the result's
        return (args[0].clone(memory_format=torch.contiguous_format), *args[1:])
    return (args[0].contiguous(), *args[1:])


def check_normal(target: torch.Tensor) -> None:
    """Refuse a ``normal_`` whose functional form would draw other numbers."""
    strides = target.stride()
    in_order = sorted(range(target.dim()), key=lambda dim: -strides[dim]) == list(range(target.dim()))
    # A copy of it would be contiguous, unless its dimensions lie in another order.
    gaps = in_order and not target.is_contiguous()
    numbers = target.numel() * (2 if target.is_complex() else 1)
    if target.device.type == "cpu" and gaps and numbers >= _FILLED_AT_ONCE:
        raise Unsupported(
            f"normal_ draws into a view of sizes {tuple(target.shape)} with gaps between its elements",
            "the functional form would draw other numbers than eager mode does",
            "Copy the result of torch.randn into the view",
        )
