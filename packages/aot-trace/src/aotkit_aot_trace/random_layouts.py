"""Random operators called so that they draw eager mode's numbers, into eager mode's strides.

Note [Random numbers follow memory]
    ``bernoulli_`` hands out its numbers in the order of the memory that it fills; ``dropout`` and its relatives fill
    a tensor that is laid out like their argument. What is recorded in its place is ``bernoulli.p``, or
    ``bernoulli.Tensor``, which fills a new, contiguous tensor. It is called on the views in which the order of the
    indices is that of the memory. Other operators fill contiguous memory in eager mode too, but their fake kernels say
    that the result is laid out like an argument; these are given contiguous arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from aotkit_functionalize import Unsupported

__all__ = ["drawn_as_in_eager"]

aten = torch.ops.aten
_IN_ORDER_OF_MEMORY = (aten.bernoulli.p, aten.bernoulli.Tensor)
_FROM = getattr(aten.random, "from")  # Python keeps the name to itself, and so does the code that FX writes
_INTO_CONTIGUOUS_MEMORY = frozenset(
    (
        aten.poisson.default,
        aten.normal.Tensor_Tensor,
        aten.normal.float_Tensor,
        aten.normal.Tensor_float,
        aten.rrelu_with_noise.default,
        aten.rrelu_with_noise_functional.default,
    )
)


def drawn_as_in_eager(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``op`` of these arguments; see Note [Random numbers follow memory]."""
    if op is _FROM:
        if args[2] is None:
            raise Unsupported(
                "random_(start, None)", "FX writes no call of it", "Give the end, or call random_() of nothing"
            )
        return aten.randint_like.low_dtype(*args, **{key: value for key, value in kwargs.items() if value is not None})
    if op in _INTO_CONTIGUOUS_MEMORY:
        args = tuple(a.contiguous() if isinstance(a, torch.Tensor) else a for a in args)
    target = args[0] if args else None
    if isinstance(target, torch.Tensor) and _overlaps(target) and "Tensor self" in str(op._schema):
        target = target.clone()  # laid out as eager's result; fake kernels say that the result overlaps itself as well
        args = (target, *args[1:])
    if op not in _IN_ORDER_OF_MEMORY or not isinstance(target, torch.Tensor) or target.device.type != "cpu":
        return op(*args, **kwargs)
    order = _order_of_memory(target)
    if order == sorted(order):
        return op(*args, **kwargs)
    views = [a.expand(target.shape).permute(order) if isinstance(a, torch.Tensor) else a for a in args]
    return op(*views, **kwargs).permute([order.index(dim) for dim in range(len(order))])


def _overlaps(target: torch.Tensor) -> bool:
    """Whether several elements are surely the same memory."""
    places = [(step, size) for size, step in zip(target.shape, target.stride(), strict=True) if size != 1]
    if not all(type(number) is int for place in places for number in place):  # a size that is a symbol is not 1
        steps = [step for step, _ in places if type(step) is int]
        return 0 in steps or len(set(steps)) < len(steps)
    reach = 0
    for step, size in sorted(places):
        if step <= reach:
            return target.numel() > 0
        reach += (size - 1) * step
    return False


def _order_of_memory(target: torch.Tensor) -> list[int]:
    """The dimensions, from the one with the largest steps; one of size 1 has no place of its own."""
    strides = target.stride()
    longer = [dim for dim in range(target.dim()) if target.shape[dim] != 1]
    ordered = iter(sorted(longer, key=lambda dim: -strides[dim]))
    return [next(ordered) if dim in longer else dim for dim in range(target.dim())]
