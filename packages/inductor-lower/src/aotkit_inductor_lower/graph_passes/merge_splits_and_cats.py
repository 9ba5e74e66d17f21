"""Pass: tensors that are taken apart and put together again.

Before ``cat([x[:3], x[3:]])``. After ``x``. Likewise a part that is cut out of a ``cat`` is what was put there, nested
``cat`` are one, a split into one part is its argument, and ``unbind`` and ``stack`` undo each other. Requires that the
result does not leave the graph: the caller gets memory of its own from a ``cat``.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from ..passes import Pass
from .node_facts import before_writes, escaping_nodes, reads_storage, same_tensor_type
from .replace import replace_node
from .rewriting import rewriting

__all__ = ["PASS", "join_splits_and_cats"]

aten = torch.ops.aten
_Part = tuple[Node, int, int, int]  # source, dimension, first, one past the last


def join_splits_and_cats(graph: Graph, fuel: int) -> int:
    """Run the pass; the number of nodes replaced."""
    done = 0
    if reads_storage(graph):
        return 0
    escaping = escaping_nodes(graph)
    for node in before_writes(graph):
        rule = _RULES.get(node.target) if node.op == "call_function" else None
        if rule is None or done >= fuel:
            continue
        if node.target is aten.cat.default:
            done += _flatten(node)
        new = rule(node)
        if new is not None and node not in escaping and _takes_the_place(new, node):
            done += replace_node(node, new)
    return done


def _takes_the_place(new: Node, old: Node) -> bool:
    """Whether ``new`` has the sizes and type of ``old``, and its strides or those that allow every view."""
    if same_tensor_type(new, old):
        return True
    value = new.meta["val"]
    return same_tensor_type(new, old, strides=False) and bool(value.is_contiguous())


def _args(node: Node, *defaults: Any) -> tuple[Any, ...]:
    """A node's arguments, the last ones by default."""
    return (*node.args, *defaults[len(node.args) :])


def _dim(node: Node, given: object) -> int:
    return given % max(1, node.meta["val"].dim()) if isinstance(given, int) else -1


def _part(node: Node) -> _Part | None:
    """The node as a range of another tensor's dimension, or ``None``."""
    if node.target is aten.slice.Tensor:
        source, dim, first, last, step = _args(node, None, 0, None, None, 1)
        size = _size(source, dim)
        if size is None or step != 1 or not isinstance(first, int | None) or not isinstance(last, int | None):
            return None
        first, last, _ = slice(first, last).indices(size)
        return (source, _dim(source, dim), first, last)
    if node.target is not operator.getitem:
        return None
    split, index = _args(node)
    if split.target not in (aten.split.Tensor, aten.split_with_sizes.default):
        return None
    source, _, dim = _args(split, None, None, 0)
    sizes = [_size_of(value, _dim(source, dim)) for value in split.meta["val"]]
    known = [size for size in sizes if size is not None]
    if len(known) != len(sizes):
        return None
    return (source, _dim(source, dim), sum(known[:index]), sum(known[: index + 1]))


def _size(node: Node, dim: object) -> int | None:
    return _size_of(node.meta["val"], _dim(node, dim))


def _size_of(value: torch.Tensor, dim: int) -> int | None:
    size = value.shape[dim] if value.dim() else None
    return size if isinstance(size, int) else None


def _inputs(node: Node) -> tuple[list[Node], int]:
    """The tensors and the dimension of a ``cat`` or ``stack``."""
    given, dim = _args(node, None, 0)
    return list(given), _dim(node, dim)


def _whole(node: Node) -> Node | None:
    """What all inputs of a ``cat`` or ``stack`` are the parts of, in order and complete."""
    inputs, dim = _inputs(node)
    if node.target is aten.cat.default and len(inputs) == 1:
        return inputs[0]
    place = 0
    whole: Node | None = None
    for item in inputs:
        part = _part(item) if node.target is aten.cat.default else _unbound(item)
        if part is None or part[1:3] != (dim, place) or (whole is not None and part[0] is not whole):
            return None
        whole, place = part[0], part[3]
    return whole if whole is not None and place == _size(whole, dim) else None


def _unbound(node: Node) -> _Part | None:
    """The node as one entry of another tensor's dimension, which it lacks itself."""
    if node.target is aten.select.int:
        source, dim, index = _args(node)
        size = _size(source, dim)
        if not size or not isinstance(index, int):
            return None
        return (source, _dim(source, dim), index % size, index % size + 1)
    if node.target is operator.getitem and _args(node)[0].target is aten.unbind.int:
        source, dim = _args(_args(node)[0], None, 0)
        index = _args(node)[1]
        return (source, _dim(source, dim), index, index + 1)
    return None


def _flatten(node: Node) -> int:
    """``cat([cat([a, b]), c])`` reads ``a, b, c``; 1 if it was so."""
    inputs, dim = _inputs(node)
    flat = list(_leaves(inputs, dim))
    if flat == inputs or len({item.meta["val"].dtype for item in flat}) != 1:
        return 0
    node.update_arg(0, flat)
    return 1


def _leaves(inputs: list[Node], dim: int) -> Iterator[Node]:
    for item in inputs:
        if item.target is aten.cat.default and len(item.users) == 1 and _inputs(item)[1] == dim:
            yield from _leaves(_inputs(item)[0], dim)
        else:
            yield item


def _cut(node: Node) -> Node | None:
    """What was put into a ``cat`` at the place that is cut out of it, or the whole that is split into one part."""
    part = _part(node)
    if part is None:
        return None
    source, dim, first, last = part
    if first == 0 and last == _size(source, dim):
        return source
    if source.target is not aten.cat.default:
        return None
    inputs, cat_dim = _inputs(source)
    place = 0
    for item in inputs:
        size = _size(item, dim)
        if cat_dim != dim or size is None or item.meta["val"].dim() != source.meta["val"].dim():
            return None
        if (place, place + size) == (first, last):
            return item
        place += size
    return None


def _entry(node: Node) -> Node | None:
    """What was put into a ``stack`` at the place that is taken out of it."""
    entry = _unbound(node)
    if entry is None or entry[0].target is not aten.stack.default:
        return None
    inputs, dim = _inputs(entry[0])
    return inputs[entry[2]] if dim == entry[1] and entry[2] < len(inputs) else None


def _getitem(node: Node) -> Node | None:
    return _entry(node) or _cut(node)


_RULES: dict[object, Callable[[Node], Node | None]] = {
    aten.cat.default: _whole,
    aten.stack.default: _whole,
    aten.slice.Tensor: _cut,
    aten.select.int: _entry,
    operator.getitem: _getitem,
}


PASS = Pass(
    "merge-splits-and-cats",
    rewriting(join_splits_and_cats),
    why="what is taken apart and put together again need not be copied",
    after=("simplify",),
)
