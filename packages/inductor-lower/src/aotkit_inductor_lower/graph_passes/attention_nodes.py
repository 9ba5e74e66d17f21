"""What single nodes around attention do that is written out: scale, turn over, hide, or pass on."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.fx import Node

from ..ops.positions import Number, same_sizes
from .known_sizes import same_count

__all__ = [
    "RESHAPES",
    "deepest",
    "hiding",
    "is_left",
    "is_made_of_product",
    "is_turned",
    "number_of",
    "same_below",
    "scaled_by",
]

aten = torch.ops.aten
RESHAPES = frozenset(
    (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.expand.default, aten.clone.default)
)
_FACTORS = frozenset((aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar))
_DIVISIONS = frozenset((aten.div.Tensor, aten.div.Scalar))
_MOST_TERMS = 4  # that are added to scores
_FILLS = {
    aten.full.default: 1,
    aten.full_like.default: 1,
    aten.scalar_tensor.default: 0,
    aten.zeros.default: None,
    aten.zeros_like.default: None,
}


def number_of(value: object) -> float | None:
    """A number, or the one that a tensor has which the graph fills with one."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, Node) and value.target is aten._to_copy.default and not isinstance(value.args[0], Node):
        dtype = value.kwargs.get("dtype")  # vmap makes tensors of numbers
        made = number_of(value.args[0]) if isinstance(dtype, torch.dtype) and dtype.is_floating_point else None
        return made if made is None else _held(value.meta["val"].dtype, made)
    if isinstance(value, Node) and value.target in _FILLS:
        place = _FILLS[value.target]
        number = 0.0 if place is None else number_of(value.args[place])
        return number if number is None else _held(value.meta["val"].dtype, number)
    return None


def _held(dtype: torch.dtype, number: float) -> float | None:
    """What a tensor of this type has that is filled with a number: rounded, maybe to infinity. ``None`` where that is
    another number."""
    if dtype.is_floating_point:
        return number if dtype is torch.float64 else torch.tensor(number, dtype=torch.float64).to(dtype).item()
    if number == 0:
        return number
    if dtype is torch.bool or dtype.is_complex or not number.is_integer():
        return None
    return number if torch.iinfo(dtype).min <= number <= torch.iinfo(dtype).max else None


def scaled_by(node: Node) -> float | None:
    """What a node multiplies its first argument by, if that is a number."""
    if node.target not in _FACTORS or node.kwargs:
        return None
    second = node.args[1]
    number = number_of(second)  # None also where it is a float that only a call tells
    if number is None or (isinstance(second, Node) and second.meta["val"].dim()):
        return None
    if node.target not in _DIVISIONS:
        return number
    return 1 / number if number else None


def deepest(node: object, shape: tuple[Number, ...]) -> Node | None:
    """The first tensor of a shape on the way of views and copies to a node, which keep the order of elements."""
    found = None
    while isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor):
        if same_sizes(node.meta["val"].shape, shape):
            found = node
        source = node.args[0] if node.op == "call_function" and node.target in RESHAPES else None
        if not isinstance(source, Node) or not same_count(source.meta["val"], node.meta["val"]):
            return found
        node = source
    return found


def is_turned(node: object, dims: int) -> Node | None:
    """What a node is the transpose of, in the last two of so many dimensions."""
    if not isinstance(node, Node) or node.target is not aten.transpose.int or node.meta["val"].dim() != dims:
        return None
    given, *which = node.args
    numbers = {dim % dims for dim in which if isinstance(dim, int)}
    return given if numbers == {dims - 1, dims - 2} and isinstance(given, Node) else None


def hiding(node: object) -> tuple[Node, bool, float, Node] | None:
    """Of a choice between a tensor and a number: the condition, whether it says where the number is, the number as the
    result has it, and the tensor."""
    if not isinstance(node, Node):
        return None
    if node.target is aten.masked_fill.Scalar:
        tensor, condition, filler = node.args
        number = number_of(filler)
        inverted = True
    elif node.target in (aten.where.self, aten.where.ScalarOther, aten.where.ScalarSelf):
        condition, yes, no = node.args
        inverted = number_of(no) is None or (number_of(yes) is not None and number_of(yes) != 0)
        tensor, number = (no, number_of(yes)) if inverted else (yes, number_of(no))
    else:
        return None
    number = None if number is None else _held(node.meta["val"].dtype, number)
    if not isinstance(condition, Node) or number is None or not isinstance(tensor, Node):
        return None
    return condition, inverted, number, tensor


def same_below(mask: Node) -> Node:
    """What a mask is a copy of."""
    while mask.target is aten.clone.default and isinstance(mask.args[0], Node):
        mask = mask.args[0]
    return mask


def is_made_of_product(node: Node) -> bool:
    """Whether scales and views of a product."""
    return any(below.target is aten.bmm.default for below in _chain(node))


def is_left(left: Node, right: Node) -> bool:
    """Whether the left one of two terms is the scores, maybe with terms of their own."""
    if is_made_of_product(left) or is_made_of_product(right):
        return is_made_of_product(left)
    return _is_sum_with_product(left, _MOST_TERMS)


def _is_sum_with_product(node: Node, depth: int) -> bool:
    for below in _chain(node):
        if below.target in (aten.add.Tensor, aten.sub.Tensor) and depth:
            terms = (term for term in below.args[:2] if isinstance(term, Node))
            return any(_is_sum_with_product(term, depth - 1) for term in terms)
    return is_made_of_product(node)


def _chain(node: object) -> Iterator[Node]:
    while isinstance(node, Node) and node.op == "call_function":
        yield node
        known = node.target in RESHAPES or node.target in (aten._to_copy.default, aten.tanh.default)
        passes = known or scaled_by(node) is not None
        if not passes and hiding(node) is None:
            return
        node = node.args[0] if hiding(node) is None else hiding(node)[3]  # type: ignore[index]
