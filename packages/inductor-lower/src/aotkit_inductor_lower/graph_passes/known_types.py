"""Graphs that ATen runs as they stand, whatever torch's default type is by then.

Note [Default types of graphs]
    Of what a graph gets and makes, integers become floats of torch's default type, and so do numbers without a type. A
    backward runs under another default than its forward, if that was set in between. It can't be set back for the time
    of the call: it is one for all threads, and two backwards at a time, or anything else that runs, would have each
    other's. So the graph says the types itself: integers are converted before a call, what makes a tensor is told its
    type. Only what is neither (a custom operator that makes floats of integers) still needs the setting.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from ..analysis.default_types import floats_of_integers, reads_default_type

__all__ = ["with_known_types"]


def with_known_types(module: GraphModule) -> tuple[GraphModule, bool]:
    """The graph with types of its own, ``module`` itself if it has them; and whether some call still reads torch's."""
    graphs = [part.graph for part in module.modules() if isinstance(part, GraphModule)]
    if not any(reads_default_type(node) for graph in graphs for node in graph.nodes):
        return module, False
    graph = Graph()
    graph.output(graph.graph_copy(module.graph, {}))
    for node in list(graph.nodes):
        if reads_default_type(node):
            _tell(graph, node)
    inner = graphs[1:]
    rest = [node for part in (graph, *inner) for node in part.nodes if reads_default_type(node)]
    return GraphModule(module, graph), bool(rest)


def _tell(graph: Graph, node: Node) -> None:
    dtype = floats_of_integers(node)
    if dtype is not None:
        with graph.inserting_before(node):
            for given in [arg for arg in node.all_input_nodes if isinstance(arg.meta.get("val"), torch.Tensor)]:
                converted = graph.call_function(torch.ops.aten._to_copy.default, (given,), {"dtype": dtype})
                converted.meta["val"] = torch.empty_like(given.meta["val"], dtype=dtype)
                node.replace_input_with(given, converted)
        return
    target, val = node.target, node.meta["val"]
    takes = isinstance(target, torch._ops.OpOverload) and any(arg.name == "dtype" for arg in target._schema.arguments)
    if takes and isinstance(val, torch.Tensor):
        node.update_kwarg("dtype", val.dtype)
