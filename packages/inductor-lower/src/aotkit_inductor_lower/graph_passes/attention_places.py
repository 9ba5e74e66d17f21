"""Which keys a query sees, where a condition says it by their positions: found in a graph.

Note [Conditions of positions]
    A condition is a conjunction of comparisons. One that compares sums of positions and whole numbers says
    ``a*query + b*key + c >= 0``; two of these are known: no later keys (``query - key >= 0``), and no keys further back
    than a window (``key - query + window - 1 >= 0``). What else is in the conjunction stays a mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.fx import Node

from ..ops.positions import same_number, same_sizes

__all__ = ["Places", "seen_places"]

aten = torch.ops.aten
_SAME = (aten.view.default, aten.reshape.default, aten._unsafe_view.default, aten.unsqueeze.default)
_ANDS = (aten.bitwise_and.Tensor, aten.logical_and.default)
_AT_LEAST = {"ge": (1, 0), "gt": (1, -1), "le": (-1, 0), "lt": (-1, -1)}
_COMPARISONS = {
    getattr(getattr(aten, name), kind): signs for name, signs in _AT_LEAST.items() for kind in ("Tensor", "Scalar")
}
_TYPES = (torch.int64, torch.int32)
_MOST = 1 << 30  # of all numbers that are added to positions, so that no sum of them wraps around
_SUMS = {aten.add.Tensor: 1, aten.add.Scalar: 1, aten.sub.Tensor: -1, aten.sub.Scalar: -1}
Sum = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Places:
    """What a condition says: ``causal``: no later keys; ``window``: not more than so many keys, the last of which has
    the query's own position (0: any); ``rest``: a condition beside that."""

    causal: bool
    window: int
    rest: Node | None


def seen_places(seen: Node, sizes: tuple[int, ...], *, windows: bool) -> Places | None:
    """What a condition of scores of such sizes says, if it hides later keys; ``windows``: those may be told, too."""
    causal, window, rest = False, 0, list[Node]()
    for part in _conjuncts(seen):
        known = _comparison(expanded(part), sizes[-2:])
        if known == (1, -1, 0):
            causal = True
        elif windows and known is not None and known[:2] == (-1, 1) and known[2] >= 0:
            window = min(window or known[2] + 1, known[2] + 1)
        else:
            rest.append(part)
    if not causal:
        return None
    return Places(True, window, None if not rest else rest[0] if len(rest) == 1 else seen)


def _conjuncts(seen: Node) -> list[Node]:
    node = expanded(seen)
    if node.target not in _ANDS or node.kwargs or not all(isinstance(part, Node) for part in node.args):
        return [seen]
    return [found for part in node.args if isinstance(part, Node) for found in _conjuncts(part)]


def expanded(node: Node) -> Node:
    """What a node repeats along dimensions before all that it has, of which some may be of one element."""
    while isinstance(source := _repeated(node), Node):
        last = list(source.meta["val"].shape)
        while last and same_number(last[0], 1):
            del last[0]
        if not last or not same_sizes(node.meta["val"].shape[-len(last) :], last):
            return node
        node = source
    return node


def _repeated(node: Node) -> object:
    before_all = node.target is aten.unsqueeze.default and node.args[1] == 0
    return node.args[0] if before_all or node.target is aten.expand.default else None


def _comparison(node: Node, lengths: tuple[int, ...]) -> Sum | None:
    """What a comparison says is at least 0: how often the query's position, the key's, and a number."""
    signs = _COMPARISONS.get(node.target)  # type: ignore[call-overload]
    if signs is None or not same_sizes(node.meta["val"].shape, lengths) or any(same_number(n, 1) for n in lengths):
        return None
    left, right = (_sum(part, lengths, None) for part in node.args[:2])
    if left is None or right is None:
        return None
    sign, more = signs
    a, b, c = (sign * (x - y) for x, y in zip(left, right, strict=True))
    return a, b, c + more


def _sum(value: object, lengths: tuple[int, ...], of: int | None) -> Sum | None:
    """The positions and the number that a value is the sum of. ``of``: its elements are those of queries (0) or keys
    (1), which else its sizes say."""
    if isinstance(value, Node) and not _counts_all(value.meta.get("val")):
        return None
    number = _whole_number(value)
    if number is not None:
        return (0, 0, number) if abs(number) < _MOST else None
    if not isinstance(value, Node):
        return None
    if of is None:
        of = _axis(value.meta["val"].shape, lengths)
    if value.target in _SUMS and not value.kwargs:
        parts = [_sum(part, lengths, of) for part in value.args]
        if len(parts) != 2 or None in parts:
            return None
        (a, b, c), (d, e, f) = parts  # type: ignore[misc]
        sign = _SUMS[value.target]  # type: ignore[index]
        return (a + sign * d, b + sign * e, c + sign * f) if abs(c + sign * f) < _MOST else None
    if of is None or not same_number(value.meta["val"].numel(), lengths[of]):
        return None
    if value.target in _SAME:
        return _sum(value.args[0], lengths, of)
    if value.target is aten.arange.default and len(value.args) == 1:
        return (1, 0, 0) if of == 0 else (0, 1, 0)
    return None


def _counts_all(value: object) -> bool:
    """Whether a tensor is of whole numbers among which there are all differences of positions."""
    return isinstance(value, torch.Tensor) and value.dtype in _TYPES


def _axis(shape: Sequence[int], lengths: tuple[int, ...]) -> int | None:
    """Whether a tensor of such sizes has an element for each query (0) or key (1)."""
    queries, keys = lengths
    for of, each in ((0, (queries, 1)), (1, (keys,)), (1, (1, keys))):
        if same_sizes(shape, each):
            return of
    return None


def _whole_number(value: object) -> int | None:
    """A whole number, or a tensor without dimensions that is one."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, Node) or value.all_input_nodes:
        return None
    if value.target in (aten._to_copy.default, aten.scalar_tensor.default):
        return _whole_number(value.args[0])
    if value.target is aten.full.default and value.args[0] == []:
        return _whole_number(value.args[1])
    return None
