"""Calls that stay in graphs though nobody uses their result: those that check something, that draw random numbers, or
that have another effect.

This file is the same in every package that has it; the original is tools/shared/_kept_calls.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.node import _side_effectful_functions

__all__ = ["drop_dead_code", "has_effect", "keep_checks"]


def keep_checks() -> None:
    """Tell torch that operators which check something are no dead code, though nobody uses their result. Before torch
    2.13 it does not know so of those that raise the errors of linear algebra, and in no version of an assertion without
    a message."""
    for check in (torch.ops.aten._linalg_check_errors.default, torch.ops.aten._assert_async.default):
        torch.fx.has_side_effect(check)


def has_effect(target: Any) -> bool:
    """Whether torch was told (``torch.fx.has_side_effect``) that calls of this operator or function count: each one
    stays, and runs once. Asked anew each time, since users tell it of their own operators. Waits for collectives are
    none of these here, though torch is told so: their only effect is on the tensor that they give."""
    return target in _side_effectful_functions and getattr(target, "namespace", "") != "_c10d_functional"


def drop_dead_code(graph: Graph) -> None:
    """Without calls that nobody uses, in the graphs that it runs as well.

    torch's own elimination drops random calls while a compile of Dynamo's runs, so that later ones would draw other
    numbers than in eager mode; operators that return nothing, which are called for an effect; and higher-order
    operators, whatever the graphs do that these run.
    """
    for node in reversed(graph.nodes):
        if not node.users and not _counts(node):
            graph.erase_node(node)
    for inner in {id(inner): inner for node in graph.nodes for inner in _graphs_of(node)}.values():
        count = len(inner.graph.nodes)
        drop_dead_code(inner.graph)
        if len(inner.graph.nodes) < count:
            inner.recompile()


def _counts(node: Node) -> bool:
    if node.is_impure():
        return True
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        return torch.Tag.nondeterministic_seeded in target.tags or not target._schema.returns
    if isinstance(target, torch._ops.HigherOrderOperator):
        return any(
            _counts(step) for inner in _graphs_of(node) for step in inner.graph.nodes if step.op == "call_function"
        )
    return False


def _graphs_of(node: Node) -> list[GraphModule]:
    """The graphs that this node stands for (an attribute), or that it is given."""
    owner = node.graph.owning_module
    names = [str(used.target) for used in (node, *node.all_input_nodes) if used.op == "get_attr"]
    found = [getattr(owner, name, None) for name in names if owner is not None]
    return [inner for inner in found if isinstance(inner, GraphModule)]
