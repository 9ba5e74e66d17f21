"""Gradients of padding by the tensor's own elements, which eager lays out like the tensor that was padded, where
torch's fake kernels say that they are contiguous."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["with_eager_pads"]

_GRADIENTS = tuple(
    getattr(torch.ops.aten, f"{kind}_pad{rank}d_backward").default
    for kind in ("reflection", "replication")
    for rank in (2, 3)
)


def with_eager_pads(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table`` with the gradients of pads that are not in it."""
    return {**{op: functools.partial(_laid_out_like_the_padded, op) for op in _GRADIENTS}, **table}


def _laid_out_like_the_padded(op: Any, *args: Any) -> Any:
    x = args[1]
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided or x.device.type != "cpu":
        return NotImplemented
    order = torch._prims_common.suggest_memory_format(x)
    if order is torch.contiguous_format:
        return NotImplemented
    return compat.record_operator(op, args, lambda: op(*args).contiguous(memory_format=order))
