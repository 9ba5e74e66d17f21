"""Tensor subclasses: how they are made of dense tensors, and what a function does to them.

See Note [Tensor subclasses at the boundary] in :mod:`.meta`.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    "rebuild",
    "sizes_and_tensors",
    "subclass_arguments",
    "subclass_key",
    "tensors_inside",
]

# Where each name is defined. It is imported when it is asked for: what was compiled before needs the records only.
_HOMES = {
    "SubclassArguments": "arguments",
    "subclass_arguments": "arguments",
    "SymbolicDim": "context",
    "encode_class": "context",
    "encode_context": "context",
    "sizes_and_tensors": "keys",
    "subclass_key": "keys",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_HOMES.get(name, 'meta')}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
