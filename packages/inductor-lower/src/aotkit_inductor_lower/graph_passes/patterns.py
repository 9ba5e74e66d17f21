"""A small pattern matcher: rows of (pattern, replacement, condition), all of them plain functions.

A pattern is a function of its parameters, written in the operators that it looks for; it is traced to a graph once. Its
parameters match any value, constants match themselves, and the last operation is the *root*. What a match binds goes to
``condition`` and ``replacement`` by name; the replacement returns what takes the root's place, new operations written
in the same way, or one of the bound values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from .node_facts import before_writes, escaping_nodes, same_tensor_type
from .replace import fake_result, replace_node

__all__ = ["Bound", "Rewrite", "apply_rewrites", "emit", "find_match"]

aten = torch.ops.aten
Bound = Mapping[str, Any]
_COMMUTATIVE = frozenset((aten.add.Tensor, aten.mul.Tensor, torch.add, torch.mul))


@dataclass(frozen=True, slots=True)
class Rewrite:
    """One row. ``condition`` sees what the pattern's parameters are bound to, and under ``"root"`` the node that is
    replaced. ``replacement`` takes any of these names."""

    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    condition: Callable[[Bound], bool] = lambda bound: True


@cache
def _root(pattern: Callable[..., Any]) -> Node:
    """The pattern as a graph, by its last node."""
    graph = Graph()
    tracer = GraphAppendingTracer(graph)
    root = pattern(*(Proxy(graph.placeholder(name), tracer) for name in inspect.signature(pattern).parameters))
    assert isinstance(root, Proxy)
    graph.output(root.node)  # the nodes live as long as the graph, and the graph as long as they
    return root.node


def find_match(pattern: Callable[..., Any], node: Node) -> dict[str, Any] | None:
    """What the parameters of ``pattern`` stand for if its root is ``node``, or ``None``.

    What the pattern computes on the way must be used nowhere else.
    """
    for bound, nodes in _match(_root(pattern), node, {}, {}):
        inner = [found for found in nodes.values() if found is not node]
        if all(user in nodes.values() for found in inner for user in found.users):
            return {**bound, "root": node}
    return None


_Found = tuple[dict[str, Any], dict[Node, Node]]


def _match(want: object, got: object, bound: dict[str, Any], nodes: dict[Node, Node]) -> Iterator[_Found]:
    """All ways to read ``got`` as ``want``: parameters bound so far, pattern nodes to graph nodes."""
    if isinstance(want, Node) and want.op == "placeholder":
        name = str(want.target)
        if name not in bound:
            yield {**bound, name: got}, nodes
        elif _same(bound[name], got):
            yield bound, nodes
    elif isinstance(want, Node):
        if not isinstance(got, Node) or got.op != "call_function" or got.target is not want.target:
            return
        if want in nodes:
            if nodes[want] is got:
                yield bound, nodes
            return
        if len(want.args) != len(got.args) or set(want.kwargs) != set(got.kwargs):
            return
        extended = {**nodes, want: got}
        orders = [got.args]
        if want.target in _COMMUTATIVE and len(got.args) == 2:
            orders.append((got.args[1], got.args[0]))
        for args in orders:
            pairs = [*zip(want.args, args, strict=True), *((v, got.kwargs[k]) for k, v in want.kwargs.items())]
            yield from _match_all(pairs, bound, extended)
    elif isinstance(want, list | tuple):
        if isinstance(got, list | tuple) and len(got) == len(want):
            yield from _match_all(list(zip(want, got, strict=True)), bound, nodes)
    elif _same(want, got):
        yield bound, nodes


def _match_all(
    pairs: Sequence[tuple[object, object]], bound: dict[str, Any], nodes: dict[Node, Node]
) -> Iterator[_Found]:
    if not pairs:
        yield bound, nodes
        return
    for first, found in _match(*pairs[0], bound, nodes):
        yield from _match_all(pairs[1:], first, found)


def _same(want: object, got: object) -> bool:
    if isinstance(want, Node) or isinstance(got, Node):
        return want is got
    return type(want) is type(got) and (repr(want) == repr(got) if isinstance(want, float | complex) else want == got)


def apply_rewrites(graph: Graph, rewrites: Sequence[Rewrite], fuel: int) -> int:
    """Apply the rows wherever they fit, in the graph's order; how many times that was.

    A result keeps its dtype, device, sizes and strides; where the replacement's differ, the row does not fit. A value
    that leaves the graph, or shares memory with one that does, is only replaced by a new one.
    """
    by_target: dict[object, list[Rewrite]] = {}
    for rewrite in rewrites:
        by_target.setdefault(_root(rewrite.pattern).target, []).append(rewrite)
    candidates = [node for node in before_writes(graph) if node.op == "call_function" and node.target in by_target]
    escaping = escaping_nodes(graph) if candidates else set()
    done = 0
    for node in candidates:
        for rewrite in by_target[node.target]:
            if done >= fuel:
                return done
            bound = find_match(rewrite.pattern, node)
            if bound is not None and rewrite.condition(bound) and _replace(graph, rewrite, bound, node, escaping):
                done += 1
                break
    return done


def _replace(graph: Graph, rewrite: Rewrite, bound: dict[str, Any], node: Node, escaping: set[Node]) -> bool:
    names = inspect.signature(rewrite.replacement).parameters
    before = node.prev
    new = emit(graph, rewrite.replacement, node, **{name: bound[name] for name in names})
    fits = new is not None and same_tensor_type(new, node) and not (node in escaping and new in bound.values())
    if new is None or not fits or not replace_node(node, new):
        _erase_between(graph, before, node)
        return False
    if node in escaping:
        escaping.add(new)
    graph.erase_node(node)
    return True


def emit(graph: Graph, function: Callable[..., Any], like: Node, **given: Any) -> Node | None:
    """Write ``function`` of nodes and constants into the graph before ``like``, whose user line the new nodes take.

    Returns the result, or ``None`` where an operator refuses its arguments.
    """
    tracer = GraphAppendingTracer(graph)
    last = like.prev

    def traced(value: Any) -> Any:
        return Proxy(value, tracer) if isinstance(value, Node) else value

    with graph.inserting_before(like):
        result = function(**torch.fx.node.map_aggregate(given, traced))  # a list of sizes may hold nodes
    new = last.next
    while new is not like:
        new.meta.update({key: value for key, value in like.meta.items() if key not in ("val", "tensor_meta")})
        try:
            new.meta["val"] = fake_result(new)
        except (RuntimeError, ValueError, TypeError, IndexError):
            return None
        new = new.next
    return result.node if isinstance(result, Proxy) else None


def _erase_between(graph: Graph, before: Node, node: Node) -> None:
    while node.prev is not before:
        graph.erase_node(node.prev)
