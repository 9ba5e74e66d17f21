"""Batch norms that average over all batches so far, without reading the number of batches from its tensor.

Note [Cumulative averages]
    A batch norm with ``momentum=None`` weighs a batch by ``1 / float(num_batches_tracked)``: a Python float that
    depends on the elements of a buffer and changes at every call. While such a module is captured, its forward is
    replaced by one that takes the statistics of the batch alone and averages them by tensor operations.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

__all__ = ["averages_without_numbers"]

_BatchNorm = nn.modules.batchnorm._BatchNorm


@contextmanager
def averages_without_numbers(module: nn.Module) -> Iterator[None]:
    """See Note [Cumulative averages]."""
    changed: list[Any] = [m for m in module.modules() if isinstance(m, _BatchNorm) and _averages(m)]
    for norm in changed:
        norm.forward = partial(_forward, norm)
    try:
        yield
    finally:
        for norm in changed:
            del norm.__dict__["forward"]


def _averages(norm: Any) -> bool:
    ordinary = type(norm).forward is _BatchNorm.forward and "forward" not in norm.__dict__
    return ordinary and norm.momentum is None and norm.training and norm.num_batches_tracked is not None


def _forward(norm: Any, x: torch.Tensor) -> torch.Tensor:
    norm._check_input_dim(x)
    norm.num_batches_tracked.add_(1)
    # Momentum 1 leaves the statistics of this batch, the variance as the running one wants it.
    mean, var = torch.zeros_like(norm.running_mean), torch.zeros_like(norm.running_var)
    result = F.batch_norm(x, mean, var, norm.weight, norm.bias, True, 1.0, norm.eps)
    with torch.no_grad():
        weight = 1.0 / norm.num_batches_tracked.to(torch.float64)
        norm.running_mean.copy_(norm.running_mean * (1 - weight) + mean * weight)
        norm.running_var.copy_(norm.running_var * (1 - weight) + var * weight)
    return result
