"""What the graph passes ask about nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch.fx import Graph, Node

from .._torch_compat import has_effect
from ..ops.aten import is_view
from ..ops.positions import same_sizes

__all__ = [
    "addresses_storage",
    "before_writes",
    "escaping_nodes",
    "is_random",
    "reads_storage",
    "same_tensor_type",
    "shared_heads",
    "tensors_of",
    "until_first_write",
    "writes",
    "written_by",
]


_RESHAPES = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default, torch.ops.aten.reshape.default)


def is_random(node: Node) -> bool:
    """Whether the op draws random numbers or has another effect, so that each call counts."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return isinstance(target, torch._ops.HigherOrderOperator)
    return torch.Tag.nondeterministic_seeded in target.tags or target._schema.is_mutable or has_effect(target)


def escaping_nodes(graph: Graph) -> set[Node]:
    """Nodes whose memory an output of the graph is, directly or through views. Eager gives each its own memory, so
    two of them must not become one."""
    output = next(node for node in reversed(graph.nodes) if node.op == "output")
    pending = list(output.all_input_nodes)
    found: set[Node] = set()
    while pending:
        node = pending.pop()
        if node in found:
            continue
        found.add(node)
        if node.op == "call_function" and is_view(node):
            pending.extend(node.all_input_nodes)
    return found


def before_writes(graph: Graph) -> list[Node]:
    """The nodes before the first write to an input that nothing after it reads, not through a view either.

    Only they may be replaced by values that are as they are now, but maybe not after that write; and only they may be
    computed from such values later than they are. The write itself counts as before it.
    """
    nodes = list(graph.nodes)
    first = next((k for k, node in enumerate(nodes) if writes(node)), len(nodes))
    read_late = set(nodes[first + 1 :])
    if not read_late:
        return nodes
    kept: list[Node] = []
    for node in reversed(nodes[:first]):
        if read_late.isdisjoint(node.users):
            kept.append(node)
        elif node.op == "call_function" and is_view(node):
            read_late.add(node)
    return kept[::-1]


def until_first_write(graph: Graph) -> list[Node]:
    """The nodes that come before anything writes to memory: all that they can reach is as it was when it was made."""
    return list(itertools.takewhile(lambda node: not writes(node), graph.nodes))


def writes(node: Node) -> bool:
    """Whether an op writes to one of its arguments."""
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


def written_by(node: Node) -> list[Node]:
    """The arguments that an op writes to."""
    if not writes(node):
        return []
    arguments = node.target._schema.arguments  # type: ignore[union-attr]
    given = {argument.name: value for argument, value in zip(arguments, node.args)} | node.kwargs
    written = [given.get(a.name) for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    return [value for value in written if isinstance(value, Node)]


def reads_storage(graph: Graph) -> bool:
    """Whether an op counts elements from the start of a storage, as ``as_strided`` does.

    Then a tensor cannot be replaced by one of equal values.
    """
    return any(addresses_storage(target) for target in {node.target for node in graph.nodes})


def addresses_storage(target: object) -> bool:
    """Whether the op counts elements from the start of its argument's storage."""
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return any(argument.name == "storage_offset" for argument in target._schema.arguments)


def same_tensor_type(a: Node, b: Node, *, strides: bool = True) -> bool:
    """Whether two nodes have the same dtype, device, sizes and (unless left out) strides for sure."""
    x, y = a.meta.get("val"), b.meta.get("val")
    if not isinstance(x, torch.Tensor) or not isinstance(y, torch.Tensor):
        return False
    same = x.dtype == y.dtype and x.device == y.device and x.layout == y.layout and x.dim() == y.dim()
    if not same or not same_sizes(x.shape, y.shape):
        return False
    return not strides or same_sizes(x.stride(), y.stride())


def tensors_of(node: Node) -> Iterator[torch.Tensor]:
    """The tensors that a node gives."""
    val = node.meta.get("val")
    for item in val if isinstance(val, list | tuple) else (val,):
        if isinstance(item, torch.Tensor):
            yield item


def shared_heads(node: object) -> Node | None:
    """The heads that ``node`` has copies of, one after the other for each."""
    whole = node
    while isinstance(node, Node) and node.target in _RESHAPES:
        node = node.args[0]
    if isinstance(node, Node) and node.target is torch.ops.aten.clone.default:
        node = node.args[0]
    if not isinstance(node, Node) or node.target is not torch.ops.aten.expand.default or not isinstance(whole, Node):
        return None
    single = node.args[0]
    if not isinstance(single, Node) or single.target is not torch.ops.aten.unsqueeze.default:
        return None
    if single.args[1] not in (2, -3):
        return None
    heads, repeated = single.args[0], tuple(node.meta["val"].shape)
    if not isinstance(heads, Node) or len(repeated) != 5 or heads.meta["val"].dim() != 4:
        return None
    batch, count, times, length, width = repeated
    joined = same_sizes(whole.meta["val"].shape, (batch, count * times, length, width))
    return heads if joined and same_sizes(heads.meta["val"].shape, (batch, count, length, width)) else None
