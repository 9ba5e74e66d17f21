"""Operators on lists of tensors (``_foreach_add`` and its relatives, what optimizers are written in), taken apart.

On the CPU eager computes them tensor by tensor with the ordinary operators, so that is what they become; then each
parameter's whole update is one kernel, and kernels of equal shape share their code.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

__all__ = ["foreach_decompositions"]

aten = torch.ops.aten

_NAMES = """
abs acos add addcdiv addcmul asin atan ceil clamp_max clamp_min clone copy cos cosh div erf erfc exp expm1 floor frac
lerp lgamma log log10 log1p log2 maximum minimum mul neg pow reciprocal round rsqrt sigmoid sign sin sinh sqrt sub tan
tanh trunc zero
"""
_FACTORS = ("addcdiv", "addcmul")  # their scale is a keyword of the ordinary operator


def foreach_decompositions() -> dict[Any, Callable[..., Any]]:
    """The functional overloads over lists, each as a function that calls the ordinary operator per tensor."""
    table: dict[Any, Callable[..., Any]] = {}
    for name in _NAMES.split():
        packet = getattr(aten, f"_foreach_{name}", None)
        if packet is None:
            continue
        for overload in packet.overloads():
            if not overload.endswith("out") and not (name in _FACTORS and overload == "Tensor"):
                op = getattr(packet, overload)
                table[op] = _per_tensor(name, op._schema)
    return table


def _per_tensor(name: str, schema: torch._C.FunctionSchema) -> Callable[..., list[torch.Tensor]]:
    ordinary = getattr(aten, name)
    bounds = {"maximum": aten.clamp_min, "minimum": aten.clamp_max}
    if name in bounds and schema.overload_name != "List":
        ordinary = bounds[name]  # a number on one side

    def run(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        lists = [arg for arg in args if isinstance(arg, list | tuple)]
        return [_call(name, ordinary, row, kwargs) for row in _rows(args, len(lists[0]))]

    return run


def _rows(args: Sequence[Any], count: int) -> Iterator[list[Any]]:
    for position in range(count):
        yield [arg[position] if isinstance(arg, list | tuple) else arg for arg in args]


def _call(name: str, ordinary: Callable[..., torch.Tensor], row: list[Any], kwargs: dict[str, Any]) -> torch.Tensor:
    if name in _FACTORS and len(row) == 4:
        return ordinary(*row[:3], value=row[3])
    if name == "copy":
        return ordinary(row[0], row[1])
    return ordinary(*row, **kwargs)
