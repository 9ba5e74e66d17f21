"""Dynamo's graphs whose nested regions (calls of ``invoke_subgraph``) stand where they are called.

Note [Regions that are not run again]
    The backward that torch records of a nested region computes the region once more, from its arguments. That is right
    where a second run gives what the first gave. One that draws random numbers would draw others, and the gradient
    would be that of another forward; an operator of the user's may do anything. A graph with a gradient that has such
    regions is captured again without them, so that its backward takes what the forward saved. Run operator by operator,
    outside of a capture, torch's region has no backward at all, so graphs that run eagerly have none of them either.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch._higher_order_ops.effects import has_effects
from torch.fx import GraphModule, Node, map_arg

from .changed_graphs import change_calls, has_call

__all__ = ["calls_regions", "inline_regions", "regions_differ_when_run_again", "regions_have_effects"]

# Their bodies are looked at themselves.
_CONTROL_FLOW = frozenset(
    ("cond", "while_loop", "while_loop_stack_output", "scan", "associative_scan", "map_impl", "invoke_subgraph")
)


def calls_regions(gm: GraphModule) -> bool:
    """Whether ``gm``, or a graph in it, calls a nested region."""
    return has_call(gm, _is_call)


def inline_regions(gm: GraphModule) -> GraphModule:
    """``gm``, or where it or a graph in it calls a nested region, a copy without such calls."""
    return change_calls(gm, _is_call, _inline)


def regions_have_effects(gm: GraphModule) -> bool:
    """Whether a region of Dynamo's graph prints, say: torch traces no effects within regions."""
    return any(has_effects(node.target) for node in _nodes_in_regions(gm))


def regions_differ_when_run_again(captured: GraphModule) -> bool:
    """Whether a region of a captured graph may give other results in a second run, as far as is known."""
    return any(map(_may_differ, _nodes_in_regions(captured)))


def _nodes_in_regions(gm: GraphModule) -> Iterator[Node]:
    for region in [region for module in _graphs(gm) for region in _called(module)]:
        for module in _graphs(region):
            yield from module.graph.nodes


def _may_differ(node: Node) -> bool:
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        return target.name() not in _CONTROL_FLOW  # others call what is the user's: operators that write, kernels
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return target.namespace not in ("aten", "prims") or torch.Tag.nondeterministic_seeded in target.tags


def _graphs(gm: GraphModule) -> Iterator[GraphModule]:
    return (module for module in gm.modules() if isinstance(module, GraphModule))


def _called(gm: GraphModule) -> list[GraphModule]:
    calls = gm.graph.find_nodes(op="call_function", target=torch.ops.higher_order.invoke_subgraph)
    return [_attribute(gm, call.args[0]) for call in calls]


def _inline(gm: GraphModule, call: Node) -> None:
    """Copy the region's nodes before ``call``, which goes."""
    own: Any = call.args[0]
    region = _attribute(gm, own)
    values: dict[Node, Any] = dict(zip(region.graph.find_nodes(op="placeholder"), call.args[2:], strict=True))
    with gm.graph.inserting_before(call):
        for node in region.graph.nodes:
            if node.op in ("placeholder", "output"):
                continue
            values[node] = copy = gm.graph.node_copy(node, values.__getitem__)
            if node.op in ("get_attr", "call_module"):
                copy.target = _free_name(gm, str(node.target))
                setattr(gm, copy.target, _attribute(region, node))
    results: Any = map_arg(region.graph.output_node().args[0], values.__getitem__)
    if not isinstance(results, tuple | list):
        call.replace_all_uses_with(results)
    for user in list(call.users):
        assert user.target is operator.getitem, f"{user} takes all results of a region at once"
        _replace(user, results[user.args[1]])
    gm.graph.erase_node(call)
    if not own.users:
        gm.graph.erase_node(own)


def _replace(node: Node, result: Any) -> None:
    """By another node, or by a constant that the region returns."""
    if isinstance(result, Node):
        node.replace_all_uses_with(result)
    for user in list(node.users):
        user.args, user.kwargs = map_arg((user.args, user.kwargs), lambda used: result if used is node else used)
    node.graph.erase_node(node)


def _attribute(gm: GraphModule, node: Any) -> Any:
    return operator.attrgetter(str(node.target))(gm)


def _free_name(gm: GraphModule, target: str) -> str:
    name = target.replace(".", "_")
    return next(each for n in itertools.count() if not hasattr(gm, each := f"{name}_{n}"))


def _is_call(node: Node) -> bool:
    return node.target is torch.ops.higher_order.invoke_subgraph
