"""In-place random operations whose numbers depend on how the tensor lies in memory.

Note [Random numbers and memory]
    Functionalization draws into a new tensor, which need not lie in memory as the one that eager mode draws into.
    ``bernoulli_`` on the CPU hands out its numbers in the order of memory: it is given the view in which that is the
    order of the indices. ``normal_`` has another method for 16 and more elements without gaps than for others, and the
    new tensor never has gaps: that is refused.
"""

from __future__ import annotations

import torch

from .errors import Unsupported

__all__ = ["DRAWN_BY_LAYOUT", "as_eager_draws"]

DRAWN_BY_LAYOUT = frozenset({"bernoulli_", "normal_"})
_FILLED_AT_ONCE = 16  # elements from which normal_ fills memory without gaps at once


def as_eager_draws(name: str, target: torch.Tensor) -> torch.Tensor:
    """What to call the in-place operator ``name`` on instead of ``target`` so that it draws eager's numbers.

    Raises:
        Unsupported: there is no such tensor.
    """
    if target.device.type != "cpu" or target.is_contiguous():
        return target
    strides = target.stride()
    order = sorted(range(target.dim()), key=lambda dim: -strides[dim])
    in_order = order == list(range(target.dim()))
    if name == "bernoulli_":
        return target if in_order else target.permute(order)
    # A copy of it would be contiguous, unless its dimensions lie in another order.
    if in_order and target.numel() >= _FILLED_AT_ONCE:
        raise Unsupported(
            f"normal_ draws into a view of sizes {tuple(target.shape)} with gaps between its elements",
            "the functional form would draw other numbers than eager mode does",
            "Copy the result of torch.randn into the view",
        )
    return target
