"""Pass: ops that give back what they got.

Before ``clone(x)``, ``_to_copy(x)``, ``copy(y, x)``, ``view(x)`` ... with the result's dtype, device, sizes and strides
those of ``x``. After ``x``. Requires that the result is not an output: the caller gets memory of its own from a clone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph

from ..ops.aten import is_view, may_alias_arguments
from ..passes import Pass
from .node_facts import before_writes, escaping_nodes, is_random, reads_storage, same_tensor_type
from .replace import replace_node
from .rewriting import rewriting

__all__ = ["PASS", "remove_noops"]

aten = torch.ops.aten

_COPIES = frozenset(
    (
        aten.clone.default,
        aten.copy.default,
        aten._to_copy.default,
        aten.contiguous.default,
        aten.lift_fresh_copy.default,
        torch.ops.prims.convert_element_type.default,
    )
)
_VIEWS = frozenset(
    (
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.expand.default,
        aten.permute.default,
        aten.slice.Tensor,
        aten.detach.default,
        aten.alias.default,
    )
)


def remove_noops(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of nodes removed."""
    escaping = escaping_nodes(graph)
    candidates = _VIEWS if reads_storage(graph) else _VIEWS | _COPIES
    removed = 0
    early = dict.fromkeys(before_writes(graph))
    copied = graph.find_nodes(op="call_function", target=aten.copy.default)
    for node in (*early, *(node for node in copied if node not in early)):
        if removed >= fuel:
            break
        if node not in early and not _copies_fresh(node):  # asked now: what it copies may have been replaced
            continue
        if node.op != "call_function" or node.target not in candidates or node in escaping:
            continue
        source = node.args[1 if node.target is aten.copy.default else 0]
        if not isinstance(source, torch.fx.Node) or not same_tensor_type(node, source):
            continue
        if node.target is aten.permute.default and not _is_identity(node.args[1]):
            continue
        if node.target is aten.slice.Tensor and not _whole(node, source):
            continue
        if not replace_node(node, source):
            continue
        graph.erase_node(node)
        removed += 1
    return removed


def _copies_fresh(copy: torch.fx.Node) -> bool:
    """Whether what is copied has memory of its own, which nothing writes to: then it is the same at any time. So is the
    new value of a state that is written to an input behind other writes."""
    node = copy.args[1]
    while isinstance(node, torch.fx.Node) and node.op == "call_function" and is_view(node):
        node = node.args[0]
    if not isinstance(node, torch.fx.Node) or node.op != "call_function" or is_random(node):
        return False
    if may_alias_arguments(str(node.target)):
        return False
    family = [node]
    for seen in family:
        family += [user for user in seen.users if is_view(user) and user not in family]
    users = {(user, seen) for seen in family for user in seen.users if user.op == "call_function" and is_random(user)}
    return all(user.target is aten.copy_.default and user.args[0] is not seen for user, seen in users)


def _is_identity(dims: Any) -> bool:
    return list(dims) == list(range(len(dims)))


def _whole(node: torch.fx.Node, source: torch.fx.Node) -> bool:
    offset, base = node.meta["val"].storage_offset(), source.meta["val"].storage_offset()
    return isinstance(offset, int) and isinstance(base, int) and offset == base


PASS = Pass(
    "remove-noops",
    rewriting(remove_noops),
    why="an operator that gives back what it got costs a copy and hides equal values",
)
