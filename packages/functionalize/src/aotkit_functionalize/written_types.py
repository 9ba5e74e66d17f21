"""Writes of numbers that a tensor's type does not hold (``integers.mul_(0.5)``): eager mode raises, torch's functional
forms convert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from .errors import Unsupported

__all__ = ["refuse_other_types"]

_NAMES = ["add", "sub", "subtract", "mul", "multiply", "addcmul", "addcdiv"]
_FACTORS = ("alpha", "value", "scalars")  # which eager mode converts to the type that it computes in
_PROMOTING = frozenset(
    [*(f"{n}_" for n in _NAMES), *(f"_foreach_{n}_" for n in _NAMES), "ldexp_", "__iadd__", "__isub__", "__imul__"]
)
_OF_ONE_TYPE = {"index_put_": 2, "_foreach_lerp_": 1}  # and which argument has the target's


def refuse_other_types(name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
    """Raise :class:`Unsupported` for an in-place operation that eager mode refuses for its types, so that it does."""
    if name in _PROMOTING:
        operands = args[1:3] if "addc" in name else args[1:]
        read = [*operands, *(value for key, value in kwargs.items() if key not in ("self", *_FACTORS))]
        if name == "ldexp_":
            read.append(2.0)  # to the power of the other
        for target, value in _pairs(args[0] if args else kwargs.get("self"), read):
            if _rank(value) > _rank(target):
                raise _refusal(name, target, value)
    elif (place := _OF_ONE_TYPE.get(name)) is not None and len(args) > place:
        for target, value in _pairs(args[0], [args[place]]):
            if isinstance(value, torch.Tensor) and value.dtype != target.dtype:
                raise _refusal(name, target, value)


def _pairs(targets: Any, read: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """What is written to, member by member, with each argument that is read for it."""
    for k, target in enumerate(targets if isinstance(targets, list | tuple) else [targets]):
        for value in read:
            member = value[k : k + 1] if isinstance(value, list | tuple) else [value]
            yield from ((target, other) for other in member)


def _rank(value: Any) -> int:
    """Of bools, integers, floats and complex numbers, in this order. A result has the highest of its operands."""
    if isinstance(value, torch.Tensor):
        dtype = value.dtype
        return 3 if dtype.is_complex else 2 if dtype.is_floating_point else int(dtype is not torch.bool)
    if isinstance(value, bool | torch.SymBool):
        return 0
    return 3 if isinstance(value, complex) else 2 if isinstance(value, float | torch.SymFloat) else 1


def _refusal(name: str, target: Any, value: Any) -> Unsupported:
    what = value.dtype if isinstance(value, torch.Tensor) else type(value).__name__
    return Unsupported(
        f"{name} writes a result of {what} to a tensor of {target.dtype}",
        "eager mode refuses it",
        "Use the function without the underscore, which returns a new tensor",
    )
