"""Whether tensors are alike, asked of all at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["tensors_alike"]


def tensors_alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """A function that says in one native pass whether tensors have the classes, types, devices, sizes, strides and
    ``requires_grad`` of these, and no two of them are one. ``None`` where torch has no such function, or not for these.

    It is torch's own check behind the guards of ``torch.compile``, and keeps no tensor. It compares in the modes that
    are active now (grad, inference, autocast): in others it says no.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes: Any = [list(tensor.shape) for tensor in tensors]
        strides: Any = [list(tensor.stride()) for tensor in tensors]
        check: Callable[..., bool] = TensorGuards(
            *tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides
        ).check
        return check if check(*tensors) else None
    except (ImportError, AttributeError, TypeError, RuntimeError):
        return None
