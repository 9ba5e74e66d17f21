"""How torch's distributed tensors are spread over a mesh, as JSON.

Placements (``Shard(0)``, ``Replicate()``) are in the contexts of distributed tensors and arguments of operations on
them. They are values: equal ones mean the same in every process, whatever the mesh is.
"""

from __future__ import annotations

import sys
from typing import Any

__all__ = ["placement_from_raw", "placement_to_raw"]

_MODULE = "torch.distributed.tensor.placement_types"
# What makes an instance, in the order in which its class takes it. A subclass of a user's, and the partial sums of
# which an embedding keeps the mask, have more to them.
_ATTRIBUTES: dict[str, tuple[str, ...]] = {
    "Replicate": (),
    "Shard": ("dim",),
    "Partial": ("reduce_op",),
    "_StridedShard": ("dim", "split_factor"),
}


def placement_to_raw(value: Any) -> dict[str, Any] | None:
    """JSON values for a placement; ``None`` for anything else, and for a placement with symbolic numbers."""
    kind = type(value)
    attributes = _ATTRIBUTES.get(kind.__name__) if kind.__module__ == _MODULE else None
    if attributes is None:
        return None
    given = [getattr(value, name) for name in attributes]
    plain = all(type(item) in (int, str) for item in given)
    return {"placement": kind.__name__, "given": given} if plain else None


def placement_from_raw(raw: dict[str, Any]) -> Any:
    """The inverse of :func:`placement_to_raw`. Raises ``ValueError`` for what it did not write."""
    name, given = raw["placement"], raw["given"]
    kind: Any = getattr(sys.modules.get(_MODULE), name, None) if name in _ATTRIBUTES else None
    if kind is None or len(given) != len(_ATTRIBUTES[name]) or not all(type(item) in (int, str) for item in given):
        raise ValueError(f"{raw!r} is no stored placement of a distributed tensor")
    return kind(**dict(zip(_ATTRIBUTES[name], given, strict=True)))
