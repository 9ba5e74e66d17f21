"""What the function promised about sizes that depend on data (``torch._check``) is looked at when the graph runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

__all__ = ["add_runtime_checks"]

aten = torch.ops.aten


def add_runtime_checks(graph: torch.fx.Graph, env: ShapeEnv | None) -> None:
    """Put an assertion behind the node that makes the last of the symbols it is about; of one stated twice only one."""
    if env is None or not env.deferred_runtime_asserts:
        return
    symbols: dict[Any, torch.fx.Node] = {}
    waiting = {str(check.expr): check for checks in env.deferred_runtime_asserts.values() for check in checks}
    for node in list(graph.nodes):
        found = _symbol_of(graph, node, symbols.keys())
        if not found:
            continue
        symbols.update(found)
        place = list(found.values())[-1]
        for text, check in list(waiting.items()):
            if check.expr.free_symbols <= symbols.keys():
                del waiting[text]
                place = _add_check(graph, place, env, check, symbols)


def _symbol_of(graph: torch.fx.Graph, node: torch.fx.Node, known: Any) -> dict[Any, torch.fx.Node]:
    """Symbols that ``node`` tells first, each with a node that is its value."""
    val = node.meta.get("val")
    if isinstance(val, torch.SymInt) and val.node.expr.is_symbol and val.node.expr not in known:
        return {val.node.expr: node}
    found: dict[Any, torch.fx.Node] = {}
    place = node
    if isinstance(val, torch.Tensor) and val.layout is torch.strided and node.op != "output":
        for dim, size in enumerate(tuple[Any, ...](val.shape)):
            new = isinstance(size, torch.SymInt) and size.node.expr.is_symbol
            if new and size.node.expr not in known and size.node.expr not in found and not _is_tangent(node):
                with graph.inserting_after(place if place.op != "placeholder" else _last_placeholder(graph)):
                    place = graph.call_function(aten.sym_size.int, (node, dim))
                place.meta = _meta_like(node, size)
                found[size.node.expr] = place
    return found


def _is_tangent(node: torch.fx.Node) -> bool:
    return node.op == "placeholder" and str(node.target).startswith("tangents_")


def _last_placeholder(graph: torch.fx.Graph) -> torch.fx.Node:
    return graph.find_nodes(op="placeholder")[-1]


def _meta_like(node: torch.fx.Node, val: Any) -> dict[str, Any]:
    meta: dict[str, Any] = {key: node.meta[key] for key in ("partitioner_tag", "stack_trace") if key in node.meta}
    meta["val"] = val
    return meta


def _add_check(
    graph: torch.fx.Graph, place: torch.fx.Node, env: ShapeEnv, check: Any, symbols: dict[Any, torch.fx.Node]
) -> torch.fx.Node:
    before = set(graph.nodes)
    with graph.inserting_after(place if place.op != "placeholder" else _last_placeholder(graph)):
        marker = graph.call_function(aten._assert_scalar.default)
    with graph.inserting_before(marker):
        proxies = {s: torch.fx.Proxy(symbols[s]) for s in check.expr.free_symbols}
        holds = sympy_interp(PythonReferenceAnalysis, proxies, check.expr)
    marker.args = (holds.node, f"a size or number that depends on data is not what was promised: {check.expr}")
    for made in graph.nodes:
        if made not in before:
            val = None if made is marker else _computed(made)
            made.meta = _meta_like(place, val)
    return marker


def _computed(node: torch.fx.Node) -> Any:
    assert callable(node.target)
    args = torch.fx.node.map_arg(node.args, lambda used: used.meta["val"])
    return node.target(*args)
