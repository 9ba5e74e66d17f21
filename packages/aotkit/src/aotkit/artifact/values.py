"""Python values as JSON: constants, containers of them, code, and what can be imported by its name.

Nothing here runs what it reads: a code object is put together and not called, and a name is looked up in a module.
"""

from __future__ import annotations

import base64
import enum
import importlib
import sys
import types
from typing import Any

import torch

__all__ = ["NoForm", "importable_name", "same_json", "value_from_json", "value_to_json"]

_CODE = (
    "co_argcount", "co_posonlyargcount", "co_kwonlyargcount", "co_nlocals", "co_stacksize", "co_flags", "co_code",
    "co_consts", "co_names", "co_varnames", "co_filename", "co_name", "co_qualname", "co_firstlineno", "co_linetable",
    "co_exceptiontable", "co_freevars", "co_cellvars",
)  # fmt: skip
_TORCH = (torch.dtype, torch.layout, torch.memory_format)


class NoForm(ValueError):
    """A value that has no JSON form here. Says what it is."""


def value_to_json(value: Any) -> Any:
    """The JSON form. Raises :class:`NoForm`."""
    kind = type(value)
    if value is None or kind in (bool, int, str):
        return value
    if value is Ellipsis:
        return {"ellipsis": None}
    if kind in (float, complex):
        return {kind.__name__: repr(value)}  # infinities and NaN, too
    if kind is bytes:
        return {"bytes": base64.b64encode(value).decode()}
    if kind in (tuple, list, torch.Size):
        return {"size" if kind is torch.Size else kind.__name__: [value_to_json(item) for item in value]}
    if kind in (set, frozenset):
        return {kind.__name__: [value_to_json(item) for item in sorted(value, key=repr)]}
    if kind is dict:
        return {"dict": [[value_to_json(key), value_to_json(item)] for key, item in value.items()]}
    if kind is slice:
        return {"slice": [value_to_json(part) for part in (value.start, value.stop, value.step)]}
    if kind is types.CodeType:
        return {"code": [value_to_json(getattr(value, name)) for name in _CODE]}
    if isinstance(value, _TORCH):
        return {"torch": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    name = importable_name(value)
    if name is not None:
        return {"import": list(name)}
    if isinstance(value, enum.Enum) and importable_name(kind) is not None:
        return {"import": [kind.__module__, f"{kind.__qualname__}.{value.name}"]}
    raise NoForm(f"a {kind.__module__}.{kind.__qualname__}")


def same_json(one: Any, other: Any) -> bool:
    """Whether two JSON forms are those of equal values of the same types: ``True`` is equal to 1 and no number."""
    if type(one) is not type(other):
        return False
    if type(one) is dict:
        return one.keys() == other.keys() and all(same_json(item, other[key]) for key, item in one.items())
    if type(one) is list:
        return len(one) == len(other) and all(map(same_json, one, other))
    return bool(one == other)


def value_from_json(data: Any) -> Any:
    """The inverse of :func:`value_to_json`. Raises ``ImportError`` or ``AttributeError`` for a name that is not there,
    ``ValueError`` for no such form."""
    if not isinstance(data, dict):
        return data
    ((kind, body),) = data.items()
    if kind in ("tuple", "list", "set", "frozenset"):
        items = [value_from_json(item) for item in body]
        return {"tuple": tuple, "list": list, "set": set, "frozenset": frozenset}[kind](items)
    if kind == "dict":
        return {value_from_json(key): value_from_json(item) for key, item in body}
    if kind == "code":
        fields = dict(zip(_CODE, map(value_from_json, body), strict=True))
        return _TEMPLATE.replace(**fields)
    if kind == "import":
        return _imported(*body)
    return _SIMPLE[kind](body)


def importable_name(value: Any) -> tuple[str, str] | None:
    """Module and path under which imports find this very function or class, or ``None``."""
    module, path = getattr(value, "__module__", None), getattr(value, "__qualname__", getattr(value, "__name__", None))
    if isinstance(value, types.BuiltinFunctionType) and module is None:
        module = "builtins"
    if not isinstance(module, str) or not isinstance(path, str) or module == "__main__" or "<" in path:
        return None
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    return (module, path) if found is value else None


def _imported(module: str, path: str) -> Any:
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def _slice(parts: list[Any]) -> slice:
    return slice(*map(value_from_json, parts))


def _dtype(name: str) -> Any:
    return getattr(torch, name)


_SIMPLE: dict[str, Any] = {
    "ellipsis": lambda body: Ellipsis,
    "float": float,
    "complex": complex,
    "bytes": base64.b64decode,
    "size": torch.Size,
    "slice": _slice,
    "torch": _dtype,
    "device": torch.device,
    "module": importlib.import_module,
}
_TEMPLATE = (lambda: None).__code__
