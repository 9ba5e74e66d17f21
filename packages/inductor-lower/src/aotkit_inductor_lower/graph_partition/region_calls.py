"""Which nested regions are called only with tensors whose layout is known, so that no call has to look."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping

import torch
from torch.fx import Graph, Node

from .modules import BodyModule, PartModule

__all__ = ["bodies_of_known_layouts"]


def bodies_of_known_layouts(graph: Graph, modules: Mapping[str, object]) -> list[BodyModule]:
    """The compiled bodies that an outer graph calls as nested regions only, with nothing but its inputs, whose layout
    the caller promises, and results of compiled parts and of such bodies, which are laid out as their graphs say.

    ``modules``: what the attributes and calls of modules of ``graph`` stand for, by name.
    """
    bodies = {n.target: modules.get(n.target) for n in graph.nodes if n.op == "get_attr"}
    known = {id(body): body for body in bodies.values() if isinstance(body, BodyModule)}
    while doubtful := {id(modules[name]) for name in _doubtful(graph, modules, known)}:
        known = {key: body for key, body in known.items() if key not in doubtful}
    return list(known.values())


def _doubtful(graph: Graph, modules: Mapping[str, object], bodies: Collection[int]) -> Iterator[str]:
    """The names of those of ``bodies``, by id, that are called with anything else, or by another operator, if results
    of all of them are laid out as said."""
    known: set[Node] = set()
    for node in graph.nodes:
        name = _region(node)
        if name is not None and id(modules.get(name)) in bodies:
            if not all(used in known or not _is_tensor(used) for used in node.all_input_nodes[1:]):
                yield name
            known.add(node)
        elif node.op == "get_attr":
            if id(modules.get(node.target)) in bodies and any(_region(user) is None for user in node.users):
                yield node.target
        elif _is_laid_out(node, modules) or (node.target is operator.getitem and node.args[0] in known):
            known.add(node)


def _is_laid_out(node: Node, modules: Mapping[str, object]) -> bool:
    """Whether it is an input of the graph, or what a compiled part gives."""
    compiled = node.op == "call_module" and isinstance(modules[str(node.target)], PartModule)
    return compiled or node.op == "placeholder"


def _region(node: Node) -> str | None:
    """The attribute that a node calls as a nested region."""
    called = node.args[0] if node.target is torch.ops.higher_order.invoke_subgraph else None
    return str(called.target) if isinstance(called, Node) and called.op == "get_attr" else None


def _is_tensor(node: Node) -> bool:
    """Also where it is not known what the node gives."""
    return not isinstance(node.meta.get("val"), int | float | bool | torch.SymInt | torch.SymFloat | torch.SymBool)
