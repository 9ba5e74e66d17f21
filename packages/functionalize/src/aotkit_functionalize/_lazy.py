"""Names of a package that are imported when they are asked for.

A process that only loads what was compiled before needs a small part of this package.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

__all__ = ["names_of", "value_of"]


def names_of(namespace: Mapping[str, Any]) -> list[str]:
    """What ``dir`` shows of a module that has all of its ``__all__``, imported or not."""
    return sorted({*namespace, *namespace["__all__"]})


def value_of(name: str, homes: Mapping[str, str], namespace: dict[str, Any]) -> Any:
    """The value of ``name``, from the module that ``homes`` names, relative to the one with this ``namespace``."""
    module = namespace["__name__"]
    if name not in homes:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    value = getattr(import_module(homes[name], namespace["__package__"]), name)
    namespace[name] = value
    return value
