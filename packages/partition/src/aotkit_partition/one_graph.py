"""Forward and backward as one graph, for callers that run both at once (F3.49, F3.59); a backward as two (F3.51)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.fx

from ._torch_compat import lazy_graph_module
from .errors import InvalidOptionError
from .joint import RECOMPUTE_POLICIES
from .op_facts import OpFacts, node_facts
from .partition import Partition

__all__ = ["merge", "recompute_by_tags", "split_backward"]


def merge(result: Partition) -> torch.fx.GraphModule:
    """One graph of a partition: takes the forward's inputs and the tangents, returns outputs and gradients.

    The forward runs first; what is recomputed is there twice, the second time just before its use.
    """
    graph = torch.fx.Graph()
    first, second = result.forward.graph, result.backward.graph
    new: dict[torch.fx.Node, Any] = {}
    entering = second.find_nodes(op="placeholder")
    for node in [*first.find_nodes(op="placeholder"), *entering[len(result.saved_names) :]]:
        new[node] = graph.node_copy(node)
    _copy_body(graph, first, new)
    returned = list(first.find_nodes(op="output")[0].args[0])
    saved = returned[result.num_fwd_outputs :]
    split = len(saved) - result.num_saved_symints
    for node, value in zip(entering, [*saved[split:], *saved[:split]], strict=False):
        new[node] = new[value] if isinstance(value, torch.fx.Node) else value
    _copy_body(graph, second, new)
    outputs = [*returned[: result.num_fwd_outputs], *second.find_nodes(op="output")[0].args[0]]
    graph.output([new[item] if isinstance(item, torch.fx.Node) else item for item in outputs])
    module = torch.fx.GraphModule(result.forward, torch.fx.Graph())
    for name, value in [*_attributes(result.forward), *_attributes(result.backward)]:
        if not hasattr(module, name):
            setattr(module, name, value)
    return lazy_graph_module(module, graph, "Joint")


def recompute_by_tags(module: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Honour recompute policies in a graph of forward, loss and backward that has no tangents.

    Nodes of the backward carry ``partitioner_tag`` "is_backward" (or ``autograd_backward``). A forward value with a
    recompute policy is made again just before the first node of the backward that uses it, from what is not to be
    recomputed; random ops, writes and effects run once. Returns a new module.
    """
    graph = torch.fx.Graph()
    new: dict[torch.fx.Node, Any] = {}
    again: dict[torch.fx.Node, torch.fx.Node] = {}
    by_target: dict[Any, OpFacts] = {}
    facts = {node: node_facts(node, module, by_target) for node in module.graph.nodes}

    def remake(node: torch.fx.Node) -> Any:
        pending = [node]
        while pending:
            top = pending[-1]
            missing = [used for used in top.all_input_nodes if used not in again and _is_tagged(used, facts)]
            if missing and top not in again:
                pending.extend(reversed(missing))
                continue
            pending.pop()
            if top not in again:
                again[top] = graph.node_copy(top, lambda used: again.get(used, new[used]))
        return again[node]

    for node in module.graph.nodes:
        if node.op == "output" or not _is_backward(node):
            new[node] = graph.node_copy(node, lambda used: new[used])
        else:
            for used in node.all_input_nodes:
                if _is_tagged(used, facts):
                    remake(used)
            new[node] = graph.node_copy(node, lambda used: again.get(used, new[used]))
    return lazy_graph_module(module, graph, module._get_name())


def split_backward(
    backward: torch.fx.GraphModule, first: Sequence[int]
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """Cut a backward graph in two: some gradients now, the others later, without computing anything twice.

    Args:
        backward: a graph of gradients.
        first: positions of the gradients to compute first, such as those of activations, which the previous stage of
            a pipeline waits for.

    Returns:
        A graph of the same inputs that returns the chosen gradients, then what the second one needs; and one that
        takes this and returns the other gradients, in their order. Effects run in the first.

    Raises:
        InvalidOptionError: no such gradient.
    """
    nodes = list(backward.graph.nodes)
    gradients = list(nodes[-1].args[0])
    if any(not 0 <= place < len(gradients) for place in first):
        raise InvalidOptionError(f"the backward returns {len(gradients)} gradients; there is no {max(first)}.")
    now = {node for node in nodes if node.op == "placeholder"}
    pending = [gradients[place] for place in first if isinstance(gradients[place], torch.fx.Node)]
    pending += [node for node in nodes if _has_effect(node, backward)]
    while pending:
        node = pending.pop()
        if node not in now:
            now.add(node)
            pending.extend(node.all_input_nodes)
    later = [item for place, item in enumerate(gradients) if place not in first]
    used = {item for item in later if isinstance(item, torch.fx.Node)}
    used.update(other for node in nodes[:-1] if node not in now for other in node.all_input_nodes)
    crossing = [node for node in nodes if node in used and node in now and node.op != "get_attr"]
    one, two = torch.fx.Graph(), torch.fx.Graph()
    new: dict[torch.fx.Node, Any] = {}
    for node in nodes:
        if node in now:
            new[node] = one.node_copy(node, lambda item: new[item])
    one.output([*(_mapped(new, gradients[place]) for place in first), *(new[node] for node in crossing)])
    new = {}
    for node in crossing:
        new[node] = two.create_node("placeholder", node.name, name=node.name)
        new[node].meta = dict(node.meta)
    for node in nodes[:-1]:
        if node.op == "get_attr" or node not in now:
            new[node] = two.node_copy(node, lambda item: new[item])
    two.output([_mapped(new, item) for item in later])
    for graph in (one, two):
        graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or _has_effect(node, backward))
    return lazy_graph_module(backward, one, "BackwardFirst"), lazy_graph_module(backward, two, "BackwardSecond")


def _mapped(new: dict[torch.fx.Node, Any], item: Any) -> Any:
    return new[item] if isinstance(item, torch.fx.Node) else item


def _copy_body(graph: torch.fx.Graph, source: torch.fx.Graph, new: dict[torch.fx.Node, Any]) -> None:
    for node in source.nodes:
        if node.op not in ("placeholder", "output"):
            new[node] = graph.node_copy(node, lambda used: new[used])


def _attributes(module: torch.fx.GraphModule) -> list[tuple[str, Any]]:
    names = {str(node.target).split(".")[0] for node in module.graph.find_nodes(op="get_attr")}
    return [(name, getattr(module, name)) for name in sorted(names)]


def _is_backward(node: torch.fx.Node) -> bool:
    return node.meta.get("partitioner_tag") in ("is_backward", "must_be_in_backward") or bool(
        node.meta.get("autograd_backward")
    )


def _is_tagged(node: torch.fx.Node, facts: dict[torch.fx.Node, OpFacts | None]) -> bool:
    known = facts[node]
    if known is None or _is_backward(node) or node.meta.get("recompute") not in RECOMPUTE_POLICIES:
        return False
    if known.is_getitem or known.is_view:
        return _is_tagged(node.all_input_nodes[0], facts) or not known.is_getitem
    return not (known.is_random or known.is_mutating or known.has_side_effects)


def _has_effect(node: torch.fx.Node, module: torch.fx.GraphModule) -> bool:
    known = node_facts(node, module, {})
    return known is not None and (known.is_mutating or known.has_side_effects or known.is_random)
