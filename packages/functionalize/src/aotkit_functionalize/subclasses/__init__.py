"""Tensor subclasses: how they are made of dense tensors, and what a function does to them.

See Note [Tensor subclasses at the boundary] in :mod:`.meta`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .._lazy import names_of, value_of

if TYPE_CHECKING:
    from .arguments import SubclassArguments, subclass_arguments
    from .context import SymbolicDim, encode_class, encode_context
    from .keys import sizes_and_tensors, subclass_key
    from .meta import (
        Opaque,
        SubclassBoundary,
        SubclassMeta,
        SubclassValue,
        TensorSource,
        is_subclass,
        rebuild,
        tensors_inside,
    )
    from .placements import placement_to_raw

__all__ = [
    "Opaque",
    "SubclassArguments",
    "SubclassBoundary",
    "SubclassMeta",
    "SubclassValue",
    "SymbolicDim",
    "TensorSource",
    "encode_class",
    "encode_context",
    "is_subclass",
    "placement_to_raw",
    "rebuild",
    "sizes_and_tensors",
    "subclass_arguments",
    "subclass_key",
    "tensors_inside",
]

_HOMES = {
    name: home
    for home, names in {
        ".arguments": (
            "SubclassArguments",
            "subclass_arguments",
        ),
        ".context": (
            "SymbolicDim",
            "encode_class",
            "encode_context",
        ),
        ".keys": (
            "sizes_and_tensors",
            "subclass_key",
        ),
        ".meta": (
            "Opaque",
            "SubclassBoundary",
            "SubclassMeta",
            "SubclassValue",
            "TensorSource",
            "is_subclass",
            "rebuild",
            "tensors_inside",
        ),
        ".placements": ("placement_to_raw",),
    }.items()
    for name in names
}


def __getattr__(name: str) -> Any:
    return value_of(name, _HOMES, globals())


def __dir__() -> list[str]:
    return names_of(globals())
