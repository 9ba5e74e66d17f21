"""The context of a wrapper subclass: written as JSON, read back, and symbols in it.

Note [How a subclass is written down]
    A class is written by its qualified name, and found again among the modules that are loaded: reading a record
    imports nothing. A context may hold scalars, strings, torch's dtypes, devices, layouts, memory formats and
    sizes, enums, placements of distributed tensors, tuples, named tuples, lists, dicts and frozen dataclasses of these.
    A class whose context holds something else has two static methods, ``__aotkit_encode_context__(context)`` to JSON
    values and ``__aotkit_decode_context__(raw)`` back; without them the record can be used in its process, and writing
    it is refused.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from ..errors import Unsupported
from .placements import placement_from_raw, placement_to_raw

__all__ = ["SymbolicDim", "contains_symbols", "decode_class", "decode_context", "encode_class", "encode_context"]


@dataclass(frozen=True, slots=True)
class SymbolicDim:
    """A SymInt in a context, as text over the graph's symbols."""

    text: str


def contains_symbols(value: Any, depth: int = 4) -> bool:
    """Whether a SymInt is left in ``value`` or in the fields of a dataclass that it holds."""
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return True
    if depth == 0 or isinstance(value, type):
        return False
    if isinstance(value, tuple | list | set | frozenset):
        return any(contains_symbols(item, depth - 1) for item in value)
    if isinstance(value, Mapping):
        return any(contains_symbols(item, depth - 1) for item in value.values())
    if is_dataclass(value):
        return any(contains_symbols(getattr(value, f.name, None), depth - 1) for f in fields(value))
    return False


def encode_class(cls: type[Any]) -> str:
    """``module:qualified.name``. Raises :class:`Unsupported` for a class that is not found by it."""
    name = f"{cls.__module__}:{cls.__qualname__}"
    if _find(name) is not cls:
        raise Unsupported(
            f"class {name} cannot be written down",
            "it is not found by this name, so that a reader would not find it either",
            "Define it at the top level of a module",
        )
    return name


def decode_class(name: str) -> type[Any]:
    """The class of this name, from a module that is loaded. Raises :class:`Unsupported` if there is none."""
    found = _find(name)
    if not isinstance(found, type):
        raise Unsupported(
            f"a record names the class {name!r}",
            "no module that is loaded defines it, and reading a record imports none",
            "Import the module that defines it first",
        )
    return found


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return found


def encode_context(cls: type[Any], context: Any) -> Any:
    """JSON values for the context of a wrapper of class ``cls``."""
    own: Callable[[Any], Any] | None = getattr(cls, "__aotkit_encode_context__", None)
    if own is not None:
        return {"own": own(context)}
    return _encode(context, cls)


def decode_context(cls: type[Any], raw: Any) -> Any:
    """The inverse of :func:`encode_context`."""
    if isinstance(raw, dict) and "own" in raw:
        own: Any = getattr(cls, "__aotkit_decode_context__", None)
        if own is None:
            raise Unsupported(
                f"a stored context of {cls.__name__} was written by its own __aotkit_encode_context__",
                "the class has no __aotkit_decode_context__ to read it",
                "Define it",
            )
        return own(raw["own"])
    return _decode(raw)


_NAMED: tuple[type[Any], ...] = (torch.dtype, torch.layout, torch.memory_format)


def _encode(value: Any, cls: type[Any]) -> Any:
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, SymbolicDim):
        return {"dim": value.text}
    if isinstance(value, _NAMED):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, enum.Enum):
        return {"enum": encode_class(type(value)), "name": value.name}
    if type(value) in (tuple, list, torch.Size):
        return {type(value).__name__: [_encode(item, cls) for item in value]}
    if isinstance(value, tuple) and hasattr(type(value), "_fields"):
        return {"named": encode_class(type(value)), "items": [_encode(item, cls) for item in value]}
    if type(value) is dict:
        return {"dict": [[_encode(k, cls), _encode(v, cls)] for k, v in value.items()]}
    if is_dataclass(value) and not isinstance(value, type) and type(value).__dataclass_params__.frozen:  # type: ignore[attr-defined]
        return {
            "record": encode_class(type(value)),
            "fields": {f.name: _encode(getattr(value, f.name), cls) for f in fields(value) if f.init},
        }
    if (placement := placement_to_raw(value)) is not None:
        return placement
    raise Unsupported(
        f"the context of tensor subclass {cls.__name__} holds a {type(value).__name__}",
        "it has no JSON form that is known here",
        "Give the class static methods __aotkit_encode_context__ and __aotkit_decode_context__",
    )


def _decode(raw: Any) -> Any:
    if not isinstance(raw, dict):
        return raw
    match raw:
        case {"dim": text}:
            return SymbolicDim(text)
        case {"torch": name}:
            return _checked(getattr(torch, name, None), _NAMED, raw)
        case {"device": name}:
            return torch.device(name)
        case {"enum": name, "name": member}:
            cls = decode_class(name)
            return _checked(getattr(cls, member, None) if issubclass(cls, enum.Enum) else None, (enum.Enum,), raw)
        case {"tuple": items}:
            return tuple(_decode(item) for item in items)
        case {"list": items}:
            return [_decode(item) for item in items]
        case {"Size": items}:
            return torch.Size(_decode(item) for item in items)
        case {"named": name, "items": items}:
            cls = decode_class(name)
            if issubclass(cls, tuple) and len(getattr(cls, "_fields", ())) == len(items):
                return cls(*(_decode(item) for item in items))
        case {"placement": _, "given": _}:
            return placement_from_raw(raw)
        case {"dict": pairs}:
            return {_decode(k): _decode(v) for k, v in pairs}
        case {"record": name, "fields": values}:
            cls = decode_class(name)
            if is_dataclass(cls):
                return cls(**{key: _decode(value) for key, value in values.items()})
    return _checked(None, (), raw)


def _checked(value: Any, kinds: tuple[type[Any], ...], raw: Any) -> Any:
    """The text may come from a file: only what :func:`_encode` writes gets through."""
    if not isinstance(value, kinds):
        raise ValueError(f"{raw!r} is no stored context of a tensor subclass")
    return value
