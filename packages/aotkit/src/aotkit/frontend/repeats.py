"""Layers of a model in Dynamo's graph: stretches of nodes that follow each other and compute the same of other values.

Note [How layers are found]
    Each node gets a number for what it is: its operation, the arguments that are no values, and what is known of its
    result. A model of equal layers repeats these numbers with a period, the count of nodes of a layer. The period comes
    from the distances between equal numbers; the longest stretch that it holds for is cut into layers where the
    least is lost. Numbers say nothing about which values a node takes, so layers are compared once more, with
    their arguments numbered in the order of their first use: equal ones are one function of their inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

__all__ = ["Layers", "body_of", "find_layers", "has_products"]

_PERIODS = 8  # how many periods are tried; the right one is among the commonest distances
_LAYERS_APART = 4  # a node may occur so often in a layer, if none occurs once
_HEAVY = frozenset({"linear", "matmul", "bmm", "mm", "addmm", "baddbmm", "einsum", "embedding", "conv1d", "conv2d"})
_ATTENTION = "scaled_dot_product_attention"
_HEAVY |= {"conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", _ATTENTION}
# Autocast and inference mode, and the levels of torch.func, in which values are wrapped.
_MODES, _LEVELS = ("autocast", "inference_mode", "dual_level"), ("grad", "jvp", "vmap", "func")
_ENTERS = {*(f"_enter_{mode}" for mode in _MODES), *(f"_{level}_increment_nesting" for level in _LEVELS)}
_EXITS = {*(f"_exit_{mode}" for mode in _MODES), *(f"_{level}_decrement_nesting" for level in _LEVELS)}
_VIEWS = frozenset({"view", "reshape", "transpose", "permute", "expand", "squeeze", "unsqueeze", "getitem", "chunk"})
_VIEWS |= {"split", "to", "t", "flatten"}


@dataclass(frozen=True, slots=True)
class Layers:
    """Layers that compute the same.

    Attributes:
        layers: the nodes of each layer, in order; nodes at the same position correspond.
        inputs: per layer the values that it takes from outside, in the order of their first use.
        outputs: positions in a layer of the nodes that something outside of it takes.
    """

    layers: tuple[tuple[Node, ...], ...]
    inputs: tuple[tuple[Node, ...], ...]
    outputs: tuple[int, ...]


def find_layers(gm: GraphModule, least: int) -> list[Layers]:
    """Groups of at least ``least`` equal layers in ``gm``, in the order of the graph."""
    nodes = [n for n in gm.graph.nodes if n.op not in ("placeholder", "get_attr", "output")]
    labels = _labels(nodes)
    positions = {node: i for i, node in enumerate(nodes)}
    found: list[Layers] = []
    taken = [label is None for label in labels]
    while True:
        run = _longest_run(labels, taken, least)
        if run is None:
            break
        first, length, period = run
        taken[first : first + length] = [True] * length
        first += _best_cut(nodes, positions, first, period)
        starts = range(first, run[0] + length - period + 1, period)
        found.extend(_equal_layers([tuple(nodes[s : s + period]) for s in starts], least))
    within = _within_modes(nodes)  # where a layer is not what it is elsewhere
    found = [group for group in found if not within[positions[group.layers[0][0]]]]
    return sorted(found, key=lambda group: positions[group.layers[0][0]])


def has_products(group: Layers) -> bool:
    """Whether there is a product, a convolution or attention in each layer. Without one, all layers together are a few
    kernels, and calls would take longer than what they compute: the update of each of 400 parameters."""
    return any(_name(node) in _HEAVY for node in group.layers[0])


def body_of(gm: GraphModule, group: Layers) -> GraphModule:
    """A layer as a graph of its own, which is the first one's: a function of ``group.inputs``, giving a tuple."""
    graph = Graph()
    new: dict[Node, Node] = {}
    for node in group.inputs[0]:
        new[node] = graph.placeholder(node.name)
        new[node].meta = dict(node.meta)
    for node in group.layers[0]:
        new[node] = graph.node_copy(node, lambda used: new[used])
    graph.output(tuple(new[group.layers[0][position]] for position in group.outputs))
    return GraphModule(gm, graph)


# -- numbers for what nodes are ----------------------------------------------------------------------------


def _labels(nodes: Sequence[Node]) -> list[int | None]:
    numbers: dict[Hashable, int] = {}
    labels: list[int | None] = []
    for node in nodes:
        try:
            key = (node.op, node.target, _plain(node.args), _plain(node.kwargs), _value(node.meta.get("example_value")))
            labels.append(numbers.setdefault(key, len(numbers)))
        except (_NoLabel, TypeError):
            labels.append(None)
    return labels


class _NoLabel(Exception):
    """The node is like no other."""


def _plain(argument: Any) -> Hashable:
    """An argument without the values in it."""
    if isinstance(argument, Node):
        return Node
    if isinstance(argument, list | tuple):
        return (type(argument), *map(_plain, argument))
    if isinstance(argument, dict):
        return tuple((name, _plain(value)) for name, value in argument.items())
    if isinstance(argument, slice):
        return (slice, _plain(argument.start), _plain(argument.stop), _plain(argument.step))
    if isinstance(argument, torch.SymInt | torch.SymFloat | torch.SymBool):
        raise _NoLabel
    if isinstance(argument, float | complex):  # zeros of both signs are equal
        return (type(argument), repr(argument))
    return (type(argument), argument)


def _value(value: Any) -> Hashable:
    """What is known of a result."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or type(value).__module__.partition(".")[0] != "torch":
            raise _NoLabel
        sizes = (*value.shape, *value.stride())
        if not all(type(size) is int for size in sizes):
            raise _NoLabel
        return (value.dtype, value.device, sizes, value.requires_grad, value.is_conj(), value.is_neg())
    if isinstance(value, list | tuple):
        return (type(value), *map(_value, value))
    return _plain(value)


# -- the period --------------------------------------------------------------------------------------------


def _longest_run(labels: Sequence[int | None], taken: Sequence[bool], least: int) -> tuple[int, int, int] | None:
    """``(first, length, period)`` of the longest stretch of free nodes that repeats at least ``least`` times."""
    best: tuple[int, int, int] | None = None
    for period in sorted(_periods(labels, taken, least)):
        first, matched = _longest_match(labels, taken, period)
        length = matched + period
        if length >= least * period and (best is None or length > best[1]):
            best = first, length, period
    return best


def _periods(labels: Sequence[int | None], taken: Sequence[bool], least: int) -> list[int]:
    where: dict[int, list[int]] = {}
    for position, label in enumerate(labels):
        if label is not None and not taken[position]:
            where.setdefault(label, []).append(position)
    distances: Counter[int] = Counter()
    for places in where.values():
        for step in range(1, _LAYERS_APART + 1):
            distances.update(b - a for a, b in zip(places, places[step:], strict=False))
    return [period for period, count in distances.most_common(_PERIODS) if count >= (least - 1) and period > 1]


def _longest_match(labels: Sequence[int | None], taken: Sequence[bool], period: int) -> tuple[int, int]:
    best = first = length = 0
    start = 0
    for position in range(len(labels) - period):
        other = position + period
        if labels[position] == labels[other] and not (taken[position] or taken[other]):
            length += 1
            if length > best:
                best, start = length, first
        else:
            first, length = position + 1, 0
    return start, best


# -- where a layer begins ----------------------------------------------------------------------------------


# Note [Where to cut]
# What is lost at an edge of layers is what one kernel would compute on both sides of it: a sum and the norm of it, or
# in the backward their gradients. A product is a kernel of its own, mostly; attention that is written out as products
# writes its result in the layout that what takes it copies it to, so behind it is no place to cut. Among cuts that lose
# nothing the one with the fewest bytes is taken.


def _best_cut(nodes: Sequence[Node], positions: Mapping[Node, int], first: int, period: int) -> int:
    """How many nodes behind ``first`` a layer begins; see Note [Where to cut]."""
    begin, end = first + period, min(first + 2 * period, len(nodes))
    last_use = [max((positions.get(u, len(nodes)) for u in n.users), default=i) for i, n in enumerate(nodes[first:end])]

    inside = _within_modes(nodes[first:end])

    def cost(cut: int) -> tuple[bool, int, int, int, int]:
        at = begin + cut
        crossing = [nodes[p] for p in range(first, at) if last_use[p - first] >= at]
        lost = sum(_bytes(node) for node in crossing if _is_fused(node, nodes, positions, at))
        views = sum(map(_is_view, crossing))
        return inside[at - first], lost, views, sum(map(_bytes, crossing)), cut

    return min(range(end - begin), key=cost)


def _within_modes(nodes: Sequence[Node]) -> list[bool]:
    """Per node whether gradients are off, or a mode or a transform was entered, when it runs, since the first node."""
    depth, silent, found = 0, False, []
    for node in nodes:
        found.append(depth > 0 or silent)
        name = _name(node)
        depth += (name in _ENTERS) - (name in _EXITS)
        silent = not node.args[0] if name == "_set_grad_enabled" else silent
    return found


def _is_fused(node: Node, nodes: Sequence[Node], positions: Mapping[Node, int], cut: int) -> bool:
    """Whether what makes a value that crosses a cut would be fused with what takes it, or their gradients would."""
    if _name(node) in _HEAVY:
        return _name(node) == _ATTENTION
    behind = sorted(p for user in _takers(node) if (p := positions.get(user, len(nodes))) >= cut)
    if len(behind) != 1:
        return bool(behind)
    between = nodes[positions[node] + 1 : behind[0] + 1]
    return not any(_name(other) in _HEAVY for other in between)


def _takers(node: Node) -> Iterator[Node]:
    """What computes something of a value, or of views of it."""
    for user in node.users:
        if _is_view(user):
            yield from _takers(user)
        else:
            yield user


def _is_view(node: Node) -> bool:
    """Whether its result lies in memory of what it takes; of ``contiguous`` that depends on what it is given."""
    if _name(node) != "contiguous":
        return _name(node) in _VIEWS
    given = node.args[0].meta.get("example_value") if isinstance(node.args[0], Node) else None
    return isinstance(given, torch.Tensor) and given.is_contiguous()


def _name(node: Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def _bytes(node: Node) -> int:
    value = node.meta.get("example_value")
    return value.numel() * value.element_size() if isinstance(value, torch.Tensor) else 1 << 40


# -- equal layers ------------------------------------------------------------------------------------------


def _equal_layers(layers: Sequence[tuple[Node, ...]], least: int) -> Iterator[Layers]:
    forms = [_form(layer) for layer in layers]
    first = 0
    while first < len(layers):
        last = first + 1
        while last < len(layers) and forms[last][0] == forms[first][0]:
            last += 1
        form, _, outputs = forms[first]
        if form is not None and last - first >= least:
            yield Layers(tuple(layers[first:last]), tuple(inputs for _, inputs, _ in forms[first:last]), outputs)
        first = last


def _form(layer: Sequence[Node]) -> tuple[Hashable, tuple[Node, ...], tuple[int, ...]]:
    """What a layer computes of its inputs, which are numbered; these inputs; positions of what others take."""
    inside = {node: position for position, node in enumerate(layer)}
    inputs: dict[Node, int] = {}
    takes: list[Hashable] = []
    for node in layer:
        used = _in_order(node)
        for value in used:
            if value not in inside:
                inputs.setdefault(value, len(inputs))
        takes.append(tuple(inside[value] if value in inside else ~inputs[value] for value in used))
    outputs = tuple(p for p, node in enumerate(layer) if any(user not in inside for user in node.users))
    try:
        values = tuple(_tensor(node.meta.get("example_value")) for node in inputs)
    except _NoLabel:
        return None, (), ()
    return (tuple(takes), values, outputs), tuple(inputs), outputs


def _in_order(node: Node) -> list[Node]:
    found: list[Node] = []
    torch.fx.map_arg((node.args, node.kwargs), lambda used: found.append(used) or used)  # type: ignore[func-returns-value]
    return found


def _tensor(value: Any) -> Hashable:
    if not isinstance(value, torch.Tensor):
        raise _NoLabel
    return _value(value)
