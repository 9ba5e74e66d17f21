"""What of a tensor subclass a compiled graph is specialised to."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch

from .meta import attributes, is_subclass

__all__ = ["sizes_and_tensors", "subclass_key"]


@dataclass(frozen=True, slots=True, eq=False)
class _Context:
    """A context, which need not be hashable, as a part of a key."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Context) and type(other.value) is type(self.value) and other.value == self.value

    def __hash__(self) -> int:
        return hash(type(self.value))


def subclass_key(value: Any, *, sizes: bool) -> Hashable:
    """Equal for arguments that one graph can serve: classes, contexts, dtypes, and, if ``sizes``, sizes and strides."""
    layout = (value.shape, value.stride()) if sizes else value.dim()
    own = (type(value), value.dtype, value.device, value.requires_grad, layout)
    if not is_subclass(value):
        return own
    held, context = attributes(value)
    inner = [
        (name, subclass_key(v, sizes=sizes) if isinstance(v, torch.Tensor) else (type(v), id(v))) for name, v in held
    ]
    return own, _Context(context), tuple(inner)


def sizes_and_tensors(value: Any, like: Any) -> list[Any]:
    """The tensors inside ``value``, and sizes and strides of the wrappers where those of the fake ``like`` are symbols.

    A value that is no subclass stands for itself.
    """
    if not is_subclass(like):
        return [value]
    pairs = zip((*value.shape, *value.stride()), (*like.shape, *like.stride()), strict=True)
    found: list[Any] = [size for size, symbol in pairs if isinstance(symbol, torch.SymInt)]
    for name, inner in attributes(like)[0]:
        if isinstance(inner, torch.Tensor):
            found += sizes_and_tensors(getattr(value, name), inner)
    return found
