"""Arguments that are given by name (``torch.unsafe_chunk(input=x, chunks=2)``), brought to their positions."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

__all__ = ["by_position"]

# What Python calls the argument that the schema of an operator calls ``self``.
_NAMES_OF_SELF = ("input", "tensor")


def by_position(name: str, args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of the call of an operator of torch's, with as few as possible by name: code that asks for the
    second argument of an operator finds it, however it was given."""
    found = [_with(names, args, kwargs) for names in _signatures(name) if len(names) >= len(args)]
    return min(found, key=lambda call: len(call[1]), default=(args, kwargs))


def _with(names: tuple[str, ...], args: Any, kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    rest = {"self" if k in _NAMES_OF_SELF and names[:1] == ("self",) else k: v for k, v in kwargs.items()}
    given = list(args)
    for name in names[len(args) :]:
        if name not in rest:
            break
        given.append(rest.pop(name))
    return (tuple(given), rest) if len(given) > len(args) else (tuple(args), kwargs)


@lru_cache(maxsize=256)
def _signatures(name: str) -> tuple[tuple[str, ...], ...]:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None:
        return ()
    schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    return tuple(tuple(a.name for a in schema.arguments if not a.kwarg_only) for schema in schemas)
