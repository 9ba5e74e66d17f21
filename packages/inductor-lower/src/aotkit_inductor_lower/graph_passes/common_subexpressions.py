"""Pass: equal calls become one.

Before two nodes with the same op and arguments. After one. Requires that the op draws no random numbers and writes
nothing, and that not both are memory of outputs.
"""

from __future__ import annotations

import torch
from torch.fx import Graph, Node

from ..ops.aten import is_view
from ..passes import Pass
from .node_facts import escaping_nodes, is_random, written_by
from .replace import replace_node
from .rewriting import rewriting

__all__ = ["PASS", "merge_common_subexpressions"]


def merge_common_subexpressions(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of nodes removed."""
    escaping = escaping_nodes(graph)
    first: dict[object, Node] = {}
    removed = 0
    late = _read_after_writes(graph)
    for node in list(graph.nodes):
        if node.op != "call_function" or is_random(node) or removed >= fuel:
            continue
        if node in late:
            continue
        key = _key((node.target, node.args, tuple(sorted(node.kwargs.items()))))
        if key is None:
            continue
        earlier = first.setdefault(key, node)
        if earlier is node or (node in escaping and earlier in escaping):
            continue
        if not replace_node(node, earlier):
            continue
        graph.erase_node(node)
        if node in escaping:
            escaping.add(earlier)
        removed += 1
    return removed


def _read_after_writes(graph: Graph) -> set[Node]:
    """The nodes that read an input, or a view of it, behind a write to it."""
    late, whole, written = set[Node](), dict[Node, Node](), set[Node]()
    for node in graph.nodes:
        read = {whole.get(source, source) for source in node.all_input_nodes}
        if not read.isdisjoint(written):
            late.add(node)
        if targets := [whole.get(target, target) for target in written_by(node)]:
            written.update(targets)
            whole[node] = targets[0]
        elif node.op == "call_function" and node.args and isinstance(node.args[0], Node) and is_view(node):
            whole[node] = whole.get(node.args[0], node.args[0])
    return late


def _key(value: object) -> object | None:
    """A hashable key in which 1, 1.0 and True differ, so do zeros by sign, and nan equals itself; or ``None``."""
    if isinstance(value, Node):
        return value
    if isinstance(value, tuple | list):
        parts = tuple(_key(item) for item in value)
        return None if any(p is None for p in parts) else (type(value).__name__, parts)
    if isinstance(value, slice):
        return ("slice", _key((value.start, value.stop, value.step)))
    if isinstance(value, torch.SymInt):
        return ("symint", str(value))
    try:
        hash(value)
    except TypeError:
        return None
    return (type(value).__name__, repr(value) if isinstance(value, float | complex) else value)


PASS = Pass(
    "common-subexpressions",
    rewriting(merge_common_subexpressions),
    why="equal calls are computed once",
    after=("simplify", "merge-splits-and-cats"),
)
