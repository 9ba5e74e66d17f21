"""How graph passes run: rewrites of a graph, counted by the fuel, then dead nodes go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Graph, GraphModule

from .._torch_compat import drop_dead_code
from ..passes import PassContext

__all__ = ["copy_graph", "drop_dead_nodes", "has_inner_mutation", "rewriting"]


def rewriting(rewrite: Callable[[Graph, int], int]) -> Callable[[Graph, PassContext], Graph]:
    """A pass out of a function that makes at most so many rewrites in a graph, and returns how many it made."""

    def run(graph: Graph, ctx: PassContext) -> Graph:
        made = rewrite(graph, ctx.fuel.left)
        ctx.fuel.spend(made)
        if made:
            drop_dead_nodes(graph)
        return graph

    return run


def copy_graph(gm: GraphModule) -> Graph:
    """A copy that passes may change; numbers have the types that operators declare."""
    graph = Graph()
    returned = graph.graph_copy(gm.graph, {})
    source = next(node for node in gm.graph.nodes if node.op == "output")
    graph.output(returned).meta.update(source.meta)
    _write_numbers(graph)
    return graph


def _write_numbers(graph: Graph) -> None:
    """Bools in the place of integers become these: eager's operators take them, Python functions do not."""
    for node in graph.nodes:
        given = (*node.args, *node.kwargs.values())
        schema = getattr(node.target, "_schema", None)
        if schema is None or not any(isinstance(arg, bool | list) for arg in given):
            continue
        types = {a.name: str(a.type) for a in schema.arguments}
        named = zip(types.values(), node.args, strict=False)
        node.args = tuple(_as_number(arg) if "int" in type_ else arg for type_, arg in named)
        node.kwargs = {k: _as_number(arg) if "int" in types[k] else arg for k, arg in node.kwargs.items()}


def _as_number(arg: Any) -> Any:
    if isinstance(arg, bool):
        return int(arg)
    return [_as_number(item) for item in arg] if isinstance(arg, list) else arg


def drop_dead_nodes(graph: Graph) -> None:
    """Without calls that nobody uses; see :func:`.drop_dead_code`. Graphs that have none are left alone."""
    if any(not node.users and node.op not in ("placeholder", "output") for node in graph.nodes):
        drop_dead_code(graph)


def has_inner_mutation(gm: GraphModule) -> bool:
    """Whether something but copies into inputs writes memory. Such graphs are lowered as they are."""
    for node in gm.graph.nodes:
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            target = node.args[0] if node.args else None
            if schema.name != "aten::copy_" or getattr(target, "op", None) != "placeholder":
                return True
    return False
