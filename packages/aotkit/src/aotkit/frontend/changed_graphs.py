"""Changes of Dynamo's graphs, which are left as they are: what is changed is a copy."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.fx import Graph, GraphModule, Node

__all__ = ["change_calls", "copy_graph", "has_call"]

Wanted = Callable[[Node], bool]


def has_call(gm: GraphModule, wanted: Wanted) -> bool:
    """Whether ``gm``, or a graph in it, has such a call."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, torch.fx.GraphModule))
    return any(node.op == "call_function" and wanted(node) for graph in graphs for node in graph.nodes)


def change_calls(gm: GraphModule, wanted: Wanted, change: Callable[[GraphModule, Node], None]) -> GraphModule:
    """``gm``, or where it or a graph in it has such calls, a copy in which ``change`` was done to each."""
    inner = {name: change_calls(child, wanted, change) for name, child in _graphs_in(gm)}
    changed = {name: child for name, child in inner.items() if child is not getattr(gm, name)}
    calls = [node for node in gm.graph.nodes if node.op == "call_function" and wanted(node)]
    if not calls and not changed:
        return gm
    copied, values = copy_graph(gm)
    for name, child in changed.items():
        setattr(copied, name, child)
    for call in calls:
        change(copied, values[call])
    copied.recompile()
    return copied


def copy_graph(gm: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """A copy that shares what ``gm`` holds, and which of its nodes stands for which."""
    values: dict[Node, Node] = {}
    graph = Graph(tracer_cls=gm.graph._tracer_cls)
    returned = graph.graph_copy(gm.graph, values)
    graph.output(returned).meta = dict(gm.graph.output_node().meta)
    for node in gm.graph.find_nodes(op="placeholder"):
        if hasattr(node, "_dynamo_source"):
            values[node]._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    copied = GraphModule(gm, graph, type(gm).__name__)
    copied.meta = dict(gm.meta)
    return copied, values


def _graphs_in(gm: GraphModule) -> Iterator[tuple[str, GraphModule]]:
    for node in gm.graph.find_nodes(op="get_attr"):
        child = getattr(gm, str(node.target), None)
        if isinstance(child, GraphModule):
            yield str(node.target), child
