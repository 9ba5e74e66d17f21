"""Linear upsampling in one, two and three dimensions, as sums of neighbours times weights.

Note [Weights of neighbours]
    An element between two is ``a * (1 - part) + b * part``, as in eager mode, also where ``part`` is 0: infinities next
    to a place make it nan. ``a + (b - a) * part`` would be one product less, and nan for other places; for large
    numbers it overflows. A dimension that keeps its size is not resampled, whatever factor is given.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch._prims_common import suggest_memory_format
from torch.fx.experimental.symbolic_shapes import guard_or_false

__all__ = ["upsample_linear"]

Line = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def upsample_linear(
    decompose: Callable[..., Any], x: torch.Tensor, size: Sequence[Any], corners: bool, *factors: float | None
) -> Any:
    """Of floats; see Note [Weights of neighbours]."""
    if not x.is_floating_point() or x.device.type != "cpu":
        return decompose(x, size, corners, *factors)
    count = len(size)
    wide = x.float() if x.dtype.itemsize < 4 else x
    factors = (*factors, *[None] * (count - len(factors)))
    lines = [_line(wide, k - count, size[k], corners, factors[k]) for k in range(count)]
    values = [
        torch.ops.aten._unsafe_index(wide, [None, None, *(line[far] for line, far in zip(lines, corner, strict=True))])
        for corner in product((0, 1), repeat=count)
    ]
    for _, _, part in reversed(lines):
        values = [a * (1 - part) + b * part for a, b in zip(values[::2], values[1::2], strict=True)]
    return values[0].to(x.dtype).contiguous(memory_format=suggest_memory_format(x))


def _line(x: torch.Tensor, dim: int, count: Any, corners: bool, factor: float | None) -> Line:
    """For each place of a new dimension the two old places around it, and how far it is on the way to the second."""
    size = x.shape[dim]
    shape = (-1, *[1] * (-dim - 1))
    place = torch.arange(count, device=x.device)
    if guard_or_false(size == count):
        low, high, part = place, place, x.new_zeros(count)
    else:
        if corners:
            ratio = (size - 1.0) / (count - 1.0) if count > 1 else 0.0
            exact = place.to(x.dtype) * ratio
        else:
            ratio = 1.0 / factor if factor is not None and factor > 0 else size / count
            exact = ((place.to(x.dtype) + 0.5) * ratio - 0.5).clamp(min=0.0)
        low = exact.to(torch.int64).clamp(max=size - 1)
        high = (low + 1).clamp(max=size - 1)
        part = (exact - low).clamp(0.0, 1.0)
    return low.view(shape), high.view(shape), part.view(shape)
