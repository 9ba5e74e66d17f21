"""Frozen graphs: inputs whose values will not change become constants, and the graph is simplified with them.

Note [What freezing does]
    Norms and arithmetic after convolutions go into their weights, computed in float64. What depends on constants alone
    is computed once. Convolutional networks get the layout in which oneDNN is fast, their weights too. Relus and
    residual sums stay kernels of their own: a relu in oneDNN's call makes 0 of a nan. Results agree with eager's to
    rounding, not to the bit.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.fx import Graph, GraphModule, Node

from .._torch_compat import drop_dead_code
from ..ops.aten import is_view
from .channels_last import prefer_channels_last
from .fold_into_convolutions import add_constant, fold_norms, value_of
from .node_facts import escaping_nodes, is_random, writes
from .remove_noops import remove_noops
from .replace import replace_node, views_of

__all__ = ["freeze"]

_MOST_GROWTH = 2  # a computed constant may be so many times as large as what it is computed from


def freeze(gm: GraphModule, constants: Mapping[int, torch.Tensor]) -> GraphModule:
    """A graph of the same inputs that uses ``constants`` instead of the inputs at these positions, and is faster so.

    The inputs remain, unread. Inputs that the graph writes to or returns are left as they are, and so is ``gm``. Every
    tensor node needs its fake value in ``meta["val"]``.
    """
    graph = Graph()
    returned = graph.graph_copy(gm.graph, {})
    old_output = next(node for node in gm.graph.nodes if node.op == "output")
    graph.output(returned).meta.update(old_output.meta)
    frozen = GraphModule(gm, graph)
    drop_dead_code(graph)
    _insert(frozen, constants)
    remove_noops(graph, len(graph.nodes))
    fold_norms(frozen)
    prefer_channels_last(graph, 1)
    fold_constants(frozen)
    drop_dead_code(graph)
    frozen.recompile()
    return frozen


def _insert(gm: GraphModule, constants: Mapping[int, torch.Tensor]) -> None:
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    first = placeholders[-1].next if placeholders else next(iter(gm.graph.nodes))
    escaping = escaping_nodes(gm.graph)
    for position, value in constants.items():
        node = placeholders[position]
        readers = {user for view in (node, *views_of(node)) for user in view.users}
        if any(map(writes, readers)) or node in escaping:
            continue
        constant = add_constant(gm, first, f"frozen_{node.name}", value.detach())
        constant.meta.update(node.meta)
        node.replace_all_uses_with(constant)


def fold_constants(gm: GraphModule) -> int:
    """Compute what depends on constants alone; how many nodes became constants.

    Left are what leaves the graph (it must be new memory at each call), what would take more memory than
    ``_MOST_GROWTH`` times its ingredients, and views.
    """
    values: dict[Node, torch.Tensor] = {}
    origins: dict[Node, int] = {}
    for node in gm.graph.nodes:
        held = value_of(gm, node)
        if held is not None:
            values[node], origins[node] = held, held.numel() * held.element_size()
        elif node.op == "call_function" and _computable(node, values):
            with torch.no_grad():
                args = torch.fx.map_arg(node.args, values.__getitem__)
                result = node.target(*args, **torch.fx.map_arg(node.kwargs, values.__getitem__))
            if isinstance(result, torch.Tensor) and result.layout is torch.strided:
                values[node], origins[node] = result, sum(origins[n] for n in node.all_input_nodes)
    escaping = escaping_nodes(gm.graph)
    folded = 0
    computed_again: set[Node] = set()
    for node in reversed(values):
        if node.op == "get_attr" or all(user in values and user not in computed_again for user in node.users):
            continue
        value, most = values[node], _MOST_GROWTH * origins[node]
        kept = node in escaping or is_view(node) or value.numel() * value.element_size() > most
        if kept or not _as_declared(node, value):
            computed_again.add(node)
            continue
        folded += replace_node(node, add_constant(gm, node, f"folded_{node.name}", value))
    drop_dead_code(gm.graph)
    return folded


def _computable(node: Node, values: Mapping[Node, torch.Tensor]) -> bool:
    if not isinstance(node.target, torch._ops.OpOverload) or is_random(node) or writes(node):
        return False
    if not node.all_input_nodes:
        return False
    return all(source in values for source in node.all_input_nodes)


def _as_declared(node: Node, value: torch.Tensor) -> bool:
    """Whether the real result looks like the fake one, which the graph was made for."""
    declared = node.meta.get("val")
    if not isinstance(declared, torch.Tensor) or declared.dtype is not value.dtype:
        return False
    return tuple(declared.shape) == tuple(value.shape) and declared.stride() == value.stride()
