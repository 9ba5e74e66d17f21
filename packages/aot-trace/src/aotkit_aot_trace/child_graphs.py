"""Graphs that a graph of Dynamo's calls: bodies of higher-order operators, in copies with others in their place."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch.fx import GraphModule

__all__ = ["child_graphs", "with_child_graphs"]


def child_graphs(graph: GraphModule) -> dict[str, GraphModule]:
    """The graphs that ``graph`` holds itself, by name."""
    return {name: child for name, child in graph.named_children() if isinstance(child, GraphModule)}


def with_child_graphs(graph: GraphModule, children: Mapping[str, GraphModule]) -> GraphModule:
    """A copy of ``graph``, its nodes copied too, that holds these."""
    result = GraphModule(graph, copy.deepcopy(graph.graph))
    result.meta.update(graph.meta)
    for name, child in children.items():
        setattr(result, name, child)
    return result
