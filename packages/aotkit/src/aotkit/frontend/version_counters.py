"""Graphs that read or set the version counters of tensors, which a compiled graph does not keep as eager mode does."""

from __future__ import annotations

import torch
from torch.fx import GraphModule, Node

from .changed_graphs import has_call

__all__ = ["needs_version_counters"]

_READS = "prims::_tensor_version"
_SETS = "prims::_unsafe_set_version_counter"


def needs_version_counters(gm: GraphModule) -> str | None:
    """Why only eager mode runs ``gm`` as it is meant, or ``None``.

    Writes become new values, which are counted once, when they are written back. A counter that is read for what
    Dynamo itself returns (it reads that of the caller's tensor after the call) is of no interest.
    """
    if has_call(gm, lambda node: _name(node) == _SETS):
        return "it sets the version counter of a tensor, so that writes do not count"
    if has_call(gm, lambda node: _name(node) == _READS and bool(node.users)):
        return "it computes with the version counter of a tensor, or returns the one of a tensor that it made"
    return None


def _name(node: Node) -> str:
    return node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""
