"""Tensors that a graph holds as attributes become its arguments.

The frontend stores what never changes identity (parameters of an optimizer and their state) on the graph module
itself. As attributes they would be constants: not written to, not differentiated. As arguments they are tensors like
any other.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch

__all__ = ["held_tensors", "lift_attributes"]


def held_tensors(gm: torch.fx.GraphModule) -> list[torch.Tensor]:
    """The tensors that :func:`lift_attributes` makes arguments, in their order."""
    held = {str(node.target): _attribute(gm, node) for node in gm.graph.find_nodes(op="get_attr")}
    return [value for value in held.values() if isinstance(value, torch.Tensor)]


def lift_attributes(gm: torch.fx.GraphModule) -> tuple[torch.fx.GraphModule, Sequence[torch.Tensor]]:
    """The graph with one more argument per tensor attribute that it reads, and these tensors, in order.

    The module given is not changed; without such attributes it is the one returned.
    """
    nodes = [node for node in gm.graph.nodes if node.op == "get_attr"]
    held = {str(node.target): value for node in nodes if isinstance(value := _attribute(gm, node), torch.Tensor)}
    if not held:
        return gm, ()
    graph = copy.deepcopy(gm.graph)
    arguments: dict[str, torch.fx.Node] = {}
    before = next(node for node in graph.nodes if node.op != "placeholder")
    for node in list(graph.nodes):
        if node.op != "get_attr" or str(node.target) not in held:
            continue
        name = str(node.target)
        if name not in arguments:
            with graph.inserting_before(before):
                arguments[name] = graph.placeholder(f"held_{name.replace('.', '_')}")
            arguments[name].meta.update(node.meta)
        node.replace_all_uses_with(arguments[name])
        if node is before:
            before = node.next
        graph.erase_node(node)
    lifted = torch.fx.GraphModule(gm, graph)  # takes along only what the graph still names
    lifted.meta = dict(gm.meta)
    return lifted, tuple(held[name] for name in arguments)


def _attribute(gm: torch.fx.GraphModule, node: torch.fx.Node) -> object:
    value: object = gm
    for part in str(node.target).split("."):
        value = getattr(value, part)
    return value
