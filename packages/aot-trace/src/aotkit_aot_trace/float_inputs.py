"""Python floats that Dynamo passes as tensors, kept variable where that changes no result.

Note [Floats as 0-d tensors]
    With dynamic sizes Dynamo passes a Python float as a 0-d float64 tensor and reads it with ``.item()``, as a
    symbol whose value has to be fixed before an operator can be recorded. Yet ``x * tensor`` is ``x * float``, bit by
    bit, if ``x`` is a float32 or float64 tensor with dimensions: a tensor without any does not take part in type
    promotion then, and is rounded to ``x``'s type as a number is. So sums, differences, products and quotients of such
    tensors by the number take the tensor itself, and the number can change without another compile. A float with any
    other use is left alone.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Node

__all__ = ["floats_as_tensors"]

_EITHER_SIDE = frozenset({operator.mul, operator.add, torch.mul, torch.add, torch.multiply})
_RIGHT_SIDE = frozenset({operator.sub, operator.truediv, torch.sub, torch.div, torch.true_divide})


def floats_as_tensors(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """``graph``, or a copy in which floats are tensors; see Note [Floats as 0-d tensors]. Their ``.item()`` is gone."""
    eligible = [node.name for node in graph.graph.find_nodes(op="placeholder") if _is_float(node) and _may_stay(node)]
    if not eligible:
        return graph
    copied = torch.fx.Graph()
    values: dict[Node, Node] = {}
    result = copied.graph_copy(graph.graph, values)
    copied.output(result)
    (output,) = graph.graph.find_nodes(op="output")
    copied.find_nodes(op="output")[0].meta.update(output.meta)
    for node in copied.find_nodes(op="placeholder"):
        if node.name in eligible:
            for read in list(node.users):
                read.replace_all_uses_with(node)
                copied.erase_node(read)
    return torch.fx.GraphModule(graph, copied)


def _is_float(node: Node) -> bool:
    seen = node.meta.get("example_value")
    memo = getattr(seen, "item_memo", None) if isinstance(seen, torch.Tensor) and seen.dim() == 0 else None
    # Without a value it is the memo of ``.item()`` on a tensor of the user's.
    return isinstance(memo, torch.SymFloat) and memo.node.has_hint()


def _may_stay(node: Node) -> bool:
    reads = list(node.users)
    return bool(reads) and all(
        read.op == "call_method" and read.target == "item" and all(_is_exact(use, read) for use in read.users)
        for read in reads
    )


def _is_exact(use: Node, number: Node) -> bool:
    """Whether ``use`` gives the same bits with a 0-d tensor in the place of ``number``."""
    if use.op != "call_function" or use.kwargs or len(use.args) != 2:
        return False
    left, right = use.args
    if use.target in _EITHER_SIDE:
        other = right if left is number else left
    elif use.target in _RIGHT_SIDE and right is number:
        other = left
    else:
        return False
    return isinstance(other, Node) and other is not number and _is_wide(other.meta.get("example_value"))


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.dtype in (torch.float32, torch.float64)
