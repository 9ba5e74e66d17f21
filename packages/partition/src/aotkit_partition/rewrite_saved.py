"""Change how values travel from forward to backward: another device, fewer bits.

A value to recode is encoded behind the op that makes it, its encoded parts are saved in its place, and it is decoded in
the backward before its first use. Chosen values are activations with memory of their own: no inputs, no outputs of the
user, nothing that shares a storage with another saved value.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
import torch.fx

from ._torch_compat import copy_module, without_modes
from .errors import InvalidOptionError
from .joint import value_bytes
from .partition import Partition
from .report import SavedValue
from .timeline import simulate_modules, storages_of


class Emit(Protocol):
    """Adds a call to a graph, with its value computed from those of its arguments."""

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        """The new node."""


@dataclass(frozen=True, slots=True)
class ActivationCodec:
    """How a saved value is written, and read again.

    Attributes:
        kind: how the report calls what is saved instead.
        encode: from a node of the forward to the nodes to save.
        decode: from the saved nodes and the original value's description to the value in the backward.
        lead: how many ops of the backward before its first use a value is decoded.
        settle: where encoding only starts: from the node and what ``encode`` gave to the nodes to save.
        lag: how many ops of the forward behind ``encode`` that is done.
        arrive: where decoding only starts: from the saved nodes and what ``decode`` gave to the value, done right
            before its first use.
    """

    kind: str
    encode: Callable[[Emit, torch.fx.Node], Sequence[torch.fx.Node]]
    decode: Callable[[Emit, Sequence[torch.fx.Node], torch.Tensor], torch.fx.Node]
    lead: Callable[[torch.fx.Node, Sequence[torch.fx.Node]], int]
    settle: Callable[[Emit, torch.fx.Node, Sequence[torch.fx.Node]], Sequence[torch.fx.Node]] | None = None
    lag: Callable[[torch.fx.Node, Sequence[torch.fx.Node]], int] = lambda part, behind: 0
    arrive: Callable[[Emit, Sequence[torch.fx.Node], torch.fx.Node], torch.fx.Node] | None = None


def recode(result: Partition, names: Sequence[str], codec: ActivationCodec) -> Partition:
    """The partition with the named saved values in another form; the old one stays as it is."""
    if not names:
        return result
    forward, backward = copy_module(result.forward), copy_module(result.backward)
    targets = {node.name: node for node in backward.graph.find_nodes(op="placeholder")}
    output = forward.graph.find_nodes(op="output")[0]
    returned, described = list(output.args[0]), output.meta.get("desc")
    saved, rows = list(result.saved_names), {row.name: row for row in result.report.saved}
    for name in names:
        at = result.num_fwd_outputs + saved.index(name)
        source = returned[at]
        parts = _encode(forward.graph, source, codec)
        _name(parts, f"{name}_saved", forward.graph, backward.graph)
        returned[at : at + 1] = parts
        saved[saved.index(name) : saved.index(name) + 1] = [part.name for part in parts]
        if isinstance(described, list):
            described = [*described[:at], *([None] * len(parts)), *described[at + 1 :]]
        _decode(backward, targets[name], parts, codec)
        del rows[name]
        for part in parts:
            rows[part.name] = SavedValue(part.name, "tensor", value_bytes(part.meta["val"]), codec.kind, False, "")
    output.args = (tuple(returned),)
    if isinstance(described, list):
        output.meta["desc"] = described
    forward.recompile()
    backward.recompile()
    report = replace(result.report, saved=tuple(rows[name] for name in saved))
    if report.timeline is not None:
        report = replace(report, timeline=simulate_modules(forward, backward, result.num_fwd_outputs))
    return replace(result, forward=forward, backward=backward, saved_names=tuple(saved), report=report)


def recodable(result: Partition, min_bytes: int, names: Sequence[str] | None) -> list[torch.fx.Node]:
    """Saved activations with memory of their own and at least ``min_bytes``; or those named, checked.

    Raises:
        InvalidOptionError: a named value is not saved, or has no memory of its own.
    """
    returned = list(result.forward.graph.find_nodes(op="output")[0].args[0])
    count = len(result.saved_names) - result.num_saved_symints - result.num_saved_without_version_check
    start = result.num_fwd_outputs
    candidates = dict(zip(result.saved_names[:count], returned[start : start + count], strict=True))
    holders: dict[Any, int] = {}
    inputs = result.forward.graph.find_nodes(op="placeholder")
    for node in [*returned, *inputs]:
        for key, _ in storages_of(node.meta.get("val")) if isinstance(node, torch.fx.Node) else []:
            holders[key] = holders.get(key, 0) + 1
    own = {
        name: node
        for name, node in candidates.items()
        if node.op != "placeholder"
        and isinstance(node.meta.get("val"), torch.Tensor)
        and all(holders[key] == 1 for key, _ in storages_of(node.meta["val"]))
        and _is_dense(node.meta["val"])
    }
    for name in names or ():
        if name not in own:
            raise InvalidOptionError(
                f"'{name}' is no saved activation with memory of its own; candidates are {', '.join(own) or 'none'}."
            )
    if names is not None:
        return [own[name] for name in names]
    return [node for node in own.values() if value_bytes(node.meta["val"]) >= min_bytes]


def _is_dense(value: torch.Tensor) -> bool:
    return value.layout is torch.strided and all(type(stride) is not int or stride != 0 for stride in value.stride())


def _emitter(graph: torch.fx.Graph, after: torch.fx.Node) -> Emit:
    last = after

    def emit(target: Any, *args: Any, **kwargs: Any) -> torch.fx.Node:
        nonlocal last
        with graph.inserting_after(last):
            last = graph.call_function(target, args, kwargs)
        with without_modes():
            given = torch.fx.node.map_arg(args, lambda used: used.meta["val"])
            options = dict(torch.fx.node.map_arg(kwargs, lambda used: used.meta["val"]))
            options.pop("pin_memory", None)  # fake values know no pinned memory
            last.meta["val"] = target(*given, **options)
        return last

    return emit


def _after_tuples(node: torch.fx.Node) -> torch.fx.Node:
    """A place behind all items of the tuple that a node is an item of, so that the items stay together."""
    following = node
    while following.next.op == "call_function" and following.next.args[:1] == node.args[:1] and "getitem" in node.name:
        following = following.next
    return following


def _encode(graph: torch.fx.Graph, source: torch.fx.Node, codec: ActivationCodec) -> Sequence[torch.fx.Node]:
    parts = codec.encode(_emitter(graph, _after_tuples(source)), source)
    if codec.settle is None:
        return parts
    body = [node for node in graph.nodes if node.op != "output"]
    behind = body[body.index(parts[-1]) + 1 :]
    last = [parts[-1], *behind][codec.lag(parts[0], behind)]
    return codec.settle(_emitter(graph, _after_tuples(last)), source, parts)


def _name(parts: Sequence[torch.fx.Node], wanted: str, *graphs: torch.fx.Graph) -> None:
    """Give the parts names that are free in both graphs. The backward knows them by these, and its code would mix up
    arguments that have names of its own values."""
    for part in parts:
        taken = {node.name for graph in graphs for node in graph.nodes}
        part._rename(next(name for name in _numbered(wanted) if name not in taken))


def _numbered(name: str) -> Iterator[str]:
    yield name
    for number in itertools.count(1):
        yield f"{name}_{number}"


def _decode(
    backward: torch.fx.GraphModule, placeholder: torch.fx.Node, parts: Sequence[torch.fx.Node], codec: ActivationCodec
) -> None:
    graph = backward.graph
    value = placeholder.meta["val"]
    given = []
    for part in parts:
        with graph.inserting_before(placeholder):
            given.append(graph.create_node("placeholder", part.name, name=part.name))
        given[-1].meta["val"] = part.meta["val"]
    body = [node for node in graph.nodes if node.op != "placeholder"]
    first = next(place for place, node in enumerate(body) if node in placeholder.users)
    start = max(0, first - codec.lead(parts[0], body[:first]))
    anchor = body[start].prev
    before_use = body[first].prev
    decoded = codec.decode(_emitter(graph, anchor), given, value)
    if codec.arrive is not None:
        decoded = codec.arrive(_emitter(graph, decoded if start == first else before_use), given, decoded)
    placeholder.replace_all_uses_with(decoded)
    graph.erase_node(placeholder)
