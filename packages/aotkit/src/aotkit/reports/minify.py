"""A wrong graph made small: the fewest operators, and the smallest inputs, that are still wrong in the same way.

Note [How a graph is made small]
    First the end: which operator is the first whose result is wrong if it is the only result? Then the beginning: what
    comes before the last operators becomes an input, with the value that eager mode gives it. Both are found by
    halving, which may miss the very smallest graph, since what is fused changes with the graph. Then every size that
    inputs have is tried smaller, in the inputs and wherever the graph has the same number. Whatever is tried is
    compiled and compared: what is returned fails as the whole graph does.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from .repro import SeenGraph

__all__ = ["minify"]

_MOST_CHECKS = 80
_SIZES = (1, 2, 3, 4, 8, 16, 32, 64, 128)
_COMPUTE = ("call_function", "call_method")


def minify(found: SeenGraph, outcome: Callable[[SeenGraph], str]) -> SeenGraph:
    """The smallest graph found with the same ``outcome``: ``right``, ``wrong``, or the name of what was raised."""
    search = _Search(outcome, outcome(found))
    return _with_smaller_sizes(_without_beginning(_without_end(found, search), search), search)


@dataclass
class _Search:
    outcome: Callable[[SeenGraph], str]
    wanted: str
    checks: int = 0

    def fails(self, candidate: SeenGraph | None) -> bool:
        """Whether it fails as the whole does; what can't even be built, or runs no more in eager mode, does not."""
        if candidate is None or self.checks >= _MOST_CHECKS:
            return False
        self.checks += 1
        try:
            candidate.graph.forward(*_copies(candidate.inputs or ()))  # a call would print what is raised
        except Exception:  # noqa: BLE001  # a graph that was cut anywhere may raise anything
            return False
        return self.outcome(candidate) == self.wanted

    def halve(self, best: SeenGraph, fails: int, works: int, part: Callable[[int], SeenGraph | None]) -> SeenGraph:
        """``best`` is the part at the place ``fails``: the one that fails nearest to ``works``, where none does."""
        while abs(fails - works) > 1:
            middle = (fails + works) // 2
            candidate = part(middle)
            if candidate is not None and self.fails(candidate):
                fails, best = middle, candidate
            else:
                works = middle
        return best


def _without_end(found: SeenGraph, search: _Search) -> SeenGraph:
    """With one operator's value as the only result, an early one."""
    steps, values = _steps(found), _values(found)
    results = set(found.graph.graph.output_node().all_input_nodes)
    for place in [place for place, step in enumerate(steps) if step in results]:
        candidate = _part(found, steps, values, 0, place)
        if candidate is not None and search.fails(candidate):
            return search.halve(candidate, place, -1, lambda at: _part(found, steps, values, 0, at))
    return found


def _without_beginning(found: SeenGraph, search: _Search) -> SeenGraph:
    """With what comes before as inputs, as late as can be."""
    steps, values = _steps(found), _values(found)
    results = found.graph.graph.output_node().all_input_nodes
    if len(results) != 1 or results[0] not in steps:
        return found
    end = steps.index(results[0])
    return search.halve(found, 0, end + 1, lambda place: _part(found, steps, values, place, end))


def _with_smaller_sizes(found: SeenGraph, search: _Search) -> SeenGraph:
    sizes = {size for value in _tensors(found) for size in value.shape if size > 1}
    for size in sorted(sizes, reverse=True):
        for smaller in (each for each in _SIZES if each < size):
            candidate = _resized(found, size, smaller)
            if search.fails(candidate):
                found = candidate
                break
    return found


def _resized(found: SeenGraph, size: int, smaller: int) -> SeenGraph:
    """With ``smaller`` for ``size``, in the inputs and in the graph's own numbers."""
    graph = Graph()
    copied: dict[Node, Node] = {}
    for node in found.graph.graph.nodes:
        copied[node] = graph.node_copy(node, lambda used: copied[used])
        args, kwargs = torch.fx.node.map_aggregate(
            (copied[node].args, copied[node].kwargs),
            lambda leaf: smaller if type(leaf) is int and leaf == size else leaf,
        )
        copied[node].args, copied[node].kwargs = args, kwargs
    inputs = [_narrowed(value, size, smaller) for value in found.inputs or ()]
    return SeenGraph(GraphModule(found.graph, graph), inputs)


def _narrowed(value: Any, size: int, smaller: int) -> Any:
    if not isinstance(value, torch.Tensor):
        return smaller if type(value) is int and value == size else value
    part = value.detach()
    for dim, own in enumerate(value.shape):
        part = part.narrow(dim, 0, smaller) if own == size else part
    return part.clone().requires_grad_(value.requires_grad)


def _steps(found: SeenGraph) -> list[Node]:
    return [node for node in found.graph.graph.nodes if node.op in _COMPUTE]


def _values(found: SeenGraph) -> dict[Node, Any]:
    """What eager mode gives each node."""
    values: dict[Node, Any] = {}

    class Noting(torch.fx.Interpreter):
        def run_node(self, n: Node) -> Any:
            values[n] = super().run_node(n)
            return values[n]

    Noting(found.graph).run(*_copies(found.inputs or ()))
    return values


def _part(found: SeenGraph, steps: Sequence[Node], values: dict[Node, Any], first: int, last: int) -> SeenGraph | None:
    """The steps that number ``last`` needs, from number ``first`` on; its value is the only result."""
    if not isinstance(values.get(steps[last]), torch.Tensor):
        return None
    inside, needed = set(steps[first : last + 1]), set[Node]()
    stack = [steps[last]]
    while stack:
        node = stack.pop()
        if node not in needed:
            needed.add(node)
            stack += node.all_input_nodes if node in inside else ()
    graph, copied, inputs = Graph(), dict[Node, Node](), list[Any]()
    for node in found.graph.graph.nodes:
        if node in needed and node not in inside and node.op != "get_attr":
            if not isinstance(values[node], torch.Tensor | int | float | bool):
                return None
            copied[node] = graph.placeholder(node.name)
            inputs.append(values[node])
    for node in found.graph.graph.nodes:
        if node in needed and node not in copied:
            copied[node] = graph.node_copy(node, lambda used: copied[used])
    graph.output((copied[steps[last]],))
    return SeenGraph(GraphModule(found.graph, graph), _copies(inputs))


def _copies(values: Sequence[Any]) -> list[Any]:
    return [
        value.detach().clone().requires_grad_(value.requires_grad) if isinstance(value, torch.Tensor) else value
        for value in values
    ]


def _tensors(found: SeenGraph) -> list[torch.Tensor]:
    return [value for value in found.inputs or () if isinstance(value, torch.Tensor)]
