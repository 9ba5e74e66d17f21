"""Heads that are transposed before they are copied to another type are copied first, so that attention is found.

Note [Casts of transposed heads]
    Autocast copies the operands of a product to bfloat16: keys whose rotary embedding is in float32 are transposed, and
    the transpose is copied. A copy of each element is the same before and after a transpose, so the copy is taken of
    the heads, where attention reads them with their numbers side by side. Which numbers are rounded stays as it was:
    a product of two that are copied to a shorter type is one of the rounded numbers, here and there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from .attention_nodes import RESHAPES, is_turned
from .attention_parts import is_cast
from .node_facts import before_writes, escaping_nodes, same_tensor_type
from .patterns import emit
from .replace import replace_node

__all__ = ["copy_before_turning"]

aten = torch.ops.aten


def copy_before_turning(graph: Graph) -> int:
    """Rewrite such copies in front of products; how many."""
    found, escaping = 0, escaping_nodes(graph)
    for node in before_writes(graph):
        heads = is_turned(node.args[0], 4) if is_cast(node) and node not in escaping else None
        if heads is not None and node.kwargs.keys() == {"dtype"} and _is_multiplied(node):
            made = emit(graph, _copied_and_turned, node, x=heads, dtype=node.kwargs["dtype"])
            if made is not None and same_tensor_type(made, node) and replace_node(node, made):
                graph.erase_node(node)
                found += 1
    return found


def _copied_and_turned(x: Any, dtype: torch.dtype) -> Any:
    return aten.transpose.int(aten._to_copy.default(x, dtype=dtype), 2, 3)


def _is_multiplied(node: Node) -> bool:
    """Whether heads are the second factor of a product, behind views and copies."""
    for user in node.users:
        if user.target is aten.bmm.default and user.args[1] is node:
            return True
        if user.target in RESHAPES and _is_multiplied(user):
            return True
    return False
