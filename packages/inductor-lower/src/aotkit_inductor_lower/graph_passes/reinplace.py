"""Pass: a part of an input that is overwritten is written in place.

Before ``new = slice_scatter(x, part, ..)`` and ``copy_(x, new)``: a copy of all of ``x``, and another one back. After
``copy_(slice(x, ..), part)`` where ``new`` was made; who read ``new`` reads ``x``. Likewise ``select_scatter``, and
``index_put``, ``index_copy``, ``index_add``, ``scatter`` and ``scatter_add``, which get their in-place forms. Requires
that nobody reads the old ``x``, or a view of it, from then on, and that ``new`` does not leave the graph.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, Node

from ..ops.aten import is_view
from ..ops.positions import begin_of, select_position
from ..passes import Pass
from .node_facts import escaping_nodes, reads_storage
from .replace import fake_result, replace_node
from .rewriting import rewriting

__all__ = ["PASS", "write_in_place"]

aten = torch.ops.aten
_PARTS = {aten.slice_scatter.default: aten.slice.Tensor, aten.select_scatter.default: aten.select.int}
_IN_PLACE = {
    aten.index_put.default: aten.index_put_.default,
    aten.index_copy.default: aten.index_copy_.default,
    aten.index_add.default: aten.index_add_.default,
    aten.scatter.src: aten.scatter_.src,
    aten.scatter.value: aten.scatter_.value,
    aten.scatter_add.default: aten.scatter_add_.default,
}


def write_in_place(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of inputs that are written to in place."""
    copies = graph.find_nodes(op="call_function", target=aten.copy_.default)
    done = 0
    if not copies or reads_storage(graph):
        return 0
    for copy in copies:
        done += done < fuel and _rewrite(graph, copy)
    return done


def _rewrite(graph: Graph, copy: Node) -> bool:
    target, new = copy.args[:2]
    if not isinstance(target, Node) or target.op != "placeholder" or copy.users or not isinstance(new, Node):
        return False
    chain = _chain(new, target)
    if not all(map(_known_part, chain)):
        return False
    if not chain or _written_twice(target):
        return False
    place = {node: number for number, node in enumerate(graph.nodes)}
    family = _views(target)
    readers = {user for view in family for user in view.users} - set(family) - {copy}
    readers -= {chain[0]} if _only_scattered_into(chain[0], family) else set()
    if any(place[reader] >= place[chain[0]] for reader in readers) or not escaping_nodes(graph).isdisjoint(
        {*family, new}
    ):
        return False
    if any(place[user] > place[copy] for user in new.users):
        return False
    for node in chain:
        _write(graph, node, target)
    replace_node(new, target)
    graph.erase_node(copy)
    for node in reversed(chain):
        graph.erase_node(node)
    return True


def _chain(new: Node, target: Node) -> list[Node]:
    """The scatters from ``target`` to ``new``, first one first, of which each but the last is read by the next only."""
    chain: list[Node] = []
    node: Any = new
    while node is not target:
        if not isinstance(node, Node) or (node.target not in _PARTS and node.target not in _IN_PLACE):
            return []
        if node is not new and len(node.users) != 1:
            return []
        chain.append(node)
        node = node.args[0]
    return chain[::-1]


def _known_part(node: Node) -> bool:
    """Whether the part that is written to is a view that needs no ATen call, which would hide what memory it is."""
    if node.target not in _PARTS:
        return True
    dim, place, *_ = (*node.args[2:], *node.kwargs.values(), None)
    if not isinstance(dim, int) or len(node.args) + len(node.kwargs) < 4:
        return False
    size = node.meta["val"].shape[dim]
    known = begin_of if node.target is aten.slice_scatter.default else select_position
    return known(place, size) is not None


def _only_scattered_into(node: Node, family: list[Node]) -> bool:
    """Whether what is written is not made of the old values itself."""
    others: list[Node] = []
    torch.fx.map_arg((node.args[1:], node.kwargs), others.append)
    return set(family).isdisjoint(others)


def _views(node: Node) -> list[Node]:
    """The node and all its views."""
    found = [node]
    for view in found:
        found += [user for user in view.users if user.op == "call_function" and is_view(user) and user not in found]
    return found


def _written_twice(target: Node) -> bool:
    """Whether another node writes to the input too."""
    calls = [user.target for user in target.users if isinstance(user.target, torch._ops.OpOverload)]
    return sum(call._schema.is_mutable for call in calls) != 1


def _write(graph: Graph, node: Node, target: Node) -> None:
    with graph.inserting_before(node):
        if node.target in _PARTS:
            part = graph.call_function(_PARTS[node.target], (target, *node.args[2:]), dict(node.kwargs))
            part.meta.update(node.meta)
            part.meta["val"] = fake_result(part)
            written = graph.call_function(aten.copy_.default, (part, node.args[1]))
            written.meta.update(part.meta)
        else:
            in_place: Any = _IN_PLACE[node.target]  # type: ignore[index]
            written = graph.call_function(in_place, (target, *node.args[1:]), dict(node.kwargs))
            written.meta.update(node.meta)


PASS = Pass(
    "reinplace",
    rewriting(write_in_place),
    why="a part of an input that is overwritten needs no copy of the rest",
    after=("common-subexpressions", "channels-last"),
)
