"""What the graph passes ask about nodes."""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..lowering.library import is_view

__all__ = ["escaping_nodes", "is_random", "same_tensor_type"]


def is_random(node: Node) -> bool:
    """Whether the op draws random numbers or has another effect, so that each call counts."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable


def escaping_nodes(graph: Graph) -> set[Node]:
    """Nodes whose memory an output of the graph is, directly or through views. Eager gives each its own memory, so
    two of them must not become one."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    pending = list(output.all_input_nodes)
    found: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if node.op == "call_function" and is_view(node):
            pending.extend(node.all_input_nodes)
    return found


def same_tensor_type(a: Node, b: Node) -> bool:
    """Whether two nodes have the same dtype, device, sizes and strides for sure."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    same = x.dtype == y.dtype and x.device == y.device and x.layout == y.layout and x.dim() == y.dim()
    return same and all(_equal(p, q) for p, q in zip((*x.shape, *x.stride()), (*y.shape, *y.stride()), strict=True))


def _equal(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    if isinstance(a, torch.SymInt) and isinstance(b, torch.SymInt):
        return bool(a.node.expr == b.node.expr)
    return type(a) is type(b) and a == b
