"""Dead code and repeated computations leave before the cut (F3.8).

Note [What CSE must not merge]
- Random ops: two dropouts draw two masks. Ops with side effects or mutations, and anything with a mutation in
  between: equal text no longer means equal values.
- Sizes are merged by what they are, not by how they are computed, so that none is saved twice.
- Values that differ in ``requires_grad``, or in their recompute policy or checkpoint region: the tags decide later.
- Two values that both end up in the memory of a graph output: the caller may write to one of them, and must not see
  the other change.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from .op_facts import OpFacts, node_facts


@dataclass(frozen=True, slots=True)
class Cleaned:
    """The nodes that stay, in order, and for every live node its position among them or that of its twin."""

    nodes: list[torch.fx.Node]
    position: dict[torch.fx.Node, int]


def clean_joint(module: torch.fx.GraphModule, cse: bool = True) -> Cleaned:
    """Leave out dead code and, if ``cse``, repeated computations. Nothing is copied, and the graph is not changed."""
    by_target: dict[Any, OpFacts] = {}
    facts = {node: node_facts(node, module, by_target) for node in module.graph.nodes}
    live = _live_nodes(module.graph, facts)
    escaping = _nodes_in_output_memory(module.graph, facts) if cse else set()
    cleaned = Cleaned([], {})
    first_with: dict[Hashable, torch.fx.Node] = {}
    kept_escaping: set[torch.fx.Node] = set()
    epoch = 0
    for node in module.graph.nodes:
        if node not in live:
            continue
        known = facts[node]
        if known is not None and (known.is_mutating or known.has_side_effects):
            epoch += 1
        key = _key(node, known, cleaned.position, epoch) if cse else None
        twin = first_with.get(key) if key is not None and node.op != "placeholder" else None
        if twin is not None and not (node in escaping and twin in kept_escaping):
            cleaned.position[node] = cleaned.position[twin]
            if node in escaping:
                kept_escaping.add(twin)
            continue
        cleaned.position[node] = len(cleaned.nodes)
        cleaned.nodes.append(node)
        if key is not None and twin is None:
            first_with[key] = node
        if node in escaping:
            kept_escaping.add(node)
    return cleaned


def _live_nodes(graph: torch.fx.Graph, facts: dict[torch.fx.Node, OpFacts | None]) -> set[torch.fx.Node]:
    """Inputs, output, side effects, and all they use. A dead random op stays: dropping it would shift the generator."""
    live: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        known = facts[node]
        if known is None:
            keep = node.op in ("placeholder", "output", "call_module", "call_method")
        else:
            keep = known.is_mutating or known.has_side_effects or known.is_random
        if keep or any(user in live for user in node.users):
            live.add(node)
    return live


def _nodes_in_output_memory(graph: torch.fx.Graph, facts: dict[torch.fx.Node, OpFacts | None]) -> set[torch.fx.Node]:
    """Nodes whose memory a graph output may share: outputs, and through views and getitem what they look at."""
    found: set[torch.fx.Node] = set()
    for node in reversed(graph.nodes):
        if node.op == "output":
            found.update(node.all_input_nodes)
        elif node in found:
            known = facts[node]
            if known is not None and (known.is_view or known.is_getitem):
                found.update(node.all_input_nodes[:1])
    return found


def _key(node: torch.fx.Node, known: OpFacts | None, position: dict[torch.fx.Node, int], epoch: int) -> Hashable | None:
    """Equal keys mean equal values; None where nothing may be merged."""
    size = node.meta.get("val")
    if isinstance(size, torch.SymInt) and (node.op == "placeholder" or (known is not None and known.is_symbolic)):
        return ("size", size.node.expr)  # the same number, whatever tensor it is read from
    if known is None or known.is_random or known.is_mutating or known.has_side_effects or known.is_collective:
        return None
    if not (known.is_builtin or known.is_symbolic or known.is_getitem):
        return None
    try:
        arguments = (_freeze(node.args, position), _freeze(node.kwargs, position))
        hash(arguments)
    except TypeError:
        return None
    tags = (node.meta.get("recompute"), node.meta.get("ac_graph_id"))
    side = node.meta.get("partitioner_tag") == "must_be_in_backward"
    return (node.target, arguments, _requires_grad(node.meta.get("val")), tags, side, epoch)


def _freeze(value: Any, position: dict[torch.fx.Node, int]) -> Hashable:
    """A hashable stand-in that tells 1, 1.0 and True apart, and 0.0 from -0.0."""
    if isinstance(value, torch.fx.Node):
        return ("node", position[value])
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, *(_freeze(item, position) for item in value))
    if isinstance(value, dict):
        return ("dict", *((key, _freeze(item, position)) for key, item in sorted(value.items())))
    if isinstance(value, slice):
        return ("slice", _freeze(value.start, position), _freeze(value.stop, position), _freeze(value.step, position))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return (type(value).__name__, value.node.expr)
    if isinstance(value, (float, complex)):
        return (type(value).__name__, repr(value))
    return (type(value).__name__, value)


def _requires_grad(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return value.requires_grad
    if isinstance(value, (tuple, list)):
        return tuple(_requires_grad(item) for item in value)
    return None
