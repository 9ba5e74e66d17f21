"""Graphs whose nested regions (calls of ``invoke_subgraph``) are written out, each where it is called."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, map_arg

__all__ = ["calls_regions", "write_out_regions"]


def calls_regions(gm: GraphModule) -> bool:
    """Whether ``gm`` calls a nested region."""
    return any(_is_call(node) for node in gm.graph.nodes)


def write_out_regions(gm: GraphModule) -> tuple[GraphModule, dict[Node, Node]]:
    """``gm`` with the nodes of each region where it is called, and the new node of each of its nodes that gives one
    value. Names count the calls of an operator, as those of a captured graph do."""
    graph, new = Graph(), {}
    writer = _Writer(graph)
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            new[node] = graph.placeholder(node.name)
            new[node].meta = dict(node.meta)
        elif node.op == "output":
            graph.output(map_arg(node.args[0], lambda used: new[used])).meta = dict(node.meta)
        else:
            writer.write(gm, "", node, new)
    return GraphModule(gm, graph), {old: made for old, made in new.items() if isinstance(made, Node)}


class _Writer:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def write(self, gm: GraphModule, path: str, node: Node, new: dict[Node, Any]) -> None:
        """Add a node of ``gm``, which stands at ``path`` in the whole, with what it calls."""
        target: Any = node.target
        if node.op == "get_attr" and node.users and all(_is_call(user) for user in node.users):
            return
        if _is_call(node):
            new[node] = self._inline(gm, path, node, new)
            return
        args: Any
        args, kwargs = map_arg((node.args, node.kwargs), lambda used: new[used])
        if target is operator.getitem and isinstance(args[0], tuple | list):
            new[node] = args[0][args[1]]
            return
        name = target.overloadpacket.__name__ if isinstance(target, torch._ops.OpOverload) else None
        target = f"{path}{target}" if node.op in ("get_attr", "call_module") else target
        new[node] = self.graph.create_node(node.op, target, args, kwargs, name=name)
        new[node].meta = dict(node.meta)

    def _inline(self, gm: GraphModule, path: str, call: Node, new: dict[Node, Any]) -> Any:
        """The results of a region, whose nodes are added."""
        name = str(call.args[0].target)  # type: ignore[union-attr]
        region, given = getattr(gm, name), iter(call.args[2:])
        inside: dict[Node, Any] = {}
        for node in region.graph.nodes:
            if node.op == "placeholder":
                inside[node] = map_arg(next(given), lambda used: new[used])
            elif node.op == "output":
                return map_arg(node.args[0], lambda used: inside[used])
            else:
                self.write(region, f"{path}{name}.", node, inside)
        return None


def _is_call(node: Node) -> bool:
    return node.target is torch.ops.higher_order.invoke_subgraph
