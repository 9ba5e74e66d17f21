"""Where in a dimension an integer argument points: negative ones count from the end, and any may be symbolic.

Note [Positions that a call tells]
    ``a[n]`` with an integer argument ``n`` is one graph for many ``n``. torch's fake kernels ask for the sign of ``n``
    and whether it is in range, so the guards of the graph tell both, mostly; but what they say of is the argument as
    given, and -1 is the last element. What is not known here must not be guessed: an address computed of a wrong sign
    lies outside of the tensor. Such a call is left to ATen, or checked in the kernel.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

__all__ = ["Number", "at_hand", "begin_of", "length_of", "lies_in_order", "same_number", "same_sizes"]
__all__ += ["select_position", "sign"]

Number = int | torch.SymInt


def sign(value: Number) -> int | None:
    """1 for what is certainly not negative, -1 for what certainly is, else ``None``."""
    if isinstance(value, int):
        return 1 if value >= 0 else -1
    if statically_known_true(value >= 0):
        return 1
    return -1 if statically_known_true(value < 0) else None


def select_position(position: object, size: Number) -> Number | None:
    """The element that ``select`` takes, counted from the start; ``None`` where it is not known, or may not exist."""
    given = _number(position)
    if given is None:
        return None
    direction = sign(given)
    if direction is None:
        return None
    at = given if direction > 0 else given + size
    inside = at < size if direction > 0 else at >= 0
    return at if statically_known_true(inside) else None


def begin_of(start: object, size: Number) -> Number | None:
    """Where a slice begins: counted from the start and clamped. ``None`` where that is not known."""
    return 0 if start is None else _clamped(start, size)


def length_of(start: object, end: object, step: object, size: Number) -> Number | None:
    """How many elements a slice has, ``None`` where that is not known."""
    first, last, stride = begin_of(start, size), size if end is None else _clamped(end, size), _number(step)
    if first is None or last is None or stride is None or sign(stride - 1) != 1:
        return None
    if statically_known_true(last <= first):
        return 0
    return (last - first + stride - 1) // stride if statically_known_true(last >= first) else None


def same_number(a: Number, b: Number) -> bool:
    """Whether two sizes, strides or offsets are certainly equal."""
    return statically_known_true(a == b)


def same_sizes(one: Sequence[Number], other: Sequence[Number]) -> bool:
    """Whether there are as many sizes, which are certainly equal."""
    return len(one) == len(other) and all(map(same_number, one, other))


def lies_in_order(x: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether a tensor is certainly without gaps in memory, with the largest steps along the first of ``dims``."""
    step: Number = 1
    for dim in reversed(dims):
        if not same_number(x.shape[dim], 1) and not same_number(x.stride(dim), step):
            return False
        step = step * x.shape[dim]
    return True


def _clamped(given: object, size: Number) -> Number | None:
    number = _number(given)
    direction = None if number is None else sign(number)
    if number is None or direction is None:
        return None
    if direction < 0:
        number = number + size
        return number if statically_known_true(number >= 0) else torch.sym_max(number, 0)
    if isinstance(number, int) and number >= sys.maxsize:  # as ``x[:]`` has it
        return size
    return number if statically_known_true(number <= size) else torch.sym_min(number, size)


def _number(value: object) -> Number | None:
    if isinstance(value, Node):
        value = value.meta.get("val")
    return value if isinstance(value, int | torch.SymInt) else None


def at_hand(number: int | torch.SymInt) -> int:
    """What the number was when the graph was captured, 0 if nothing is known of it."""
    if isinstance(number, torch.SymInt):
        return number.node.hint if number.node.has_hint() else 0
    return number
