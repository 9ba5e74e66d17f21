"""Nested arguments and results as JSON: tuples, lists, dicts, constants, and numbered leaves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ..errors import PackageError

__all__ = ["describe_structure", "flatten_like", "rebuild_structure"]

_CONSTANTS = (bool, int, float, str, type(None))


def describe_structure(value: Any, is_leaf: Callable[[Any], bool], leaves: list[Any]) -> Any:
    """``value`` as JSON; what ``is_leaf`` says is appended to ``leaves``. Records with fields become dicts.

    Raises :class:`PackageError` for anything else.
    """
    if is_leaf(value):
        leaves.append(value)
        return {"leaf": len(leaves) - 1}
    if isinstance(value, _CONSTANTS):
        return {"constant": value}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise PackageError(f"a package can't hold a dict with the key {key!r}; use names or numbers")
        return {"dict": [[key, describe_structure(item, is_leaf, leaves)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [describe_structure(item, is_leaf, leaves) for item in value]}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return describe_structure(fields, is_leaf, leaves)
    raise PackageError(
        f"a package can't hold a {type(value).__module__}.{type(value).__qualname__} among its arguments or results"
    )


def rebuild_structure(described: Any, leaves: Any) -> Any:
    """The value with ``leaves`` in their places."""
    ((kind, body),) = described.items()
    if kind == "leaf":
        return leaves[body]
    if kind == "constant":
        return body
    if kind == "dict":
        return {key: rebuild_structure(item, leaves) for key, item in body}
    items = [rebuild_structure(item, leaves) for item in body]
    return tuple(items) if kind == "tuple" else items


def flatten_like(described: Any, value: Any, leaves: list[Any], path: str = "") -> None:
    """Append the leaves of ``value``, which has to be built as ``described`` says.

    Raises ``TypeError`` that names the place where it is not.
    """
    ((kind, body),) = described.items()
    if kind == "leaf":
        leaves.append(value)
    elif kind == "constant":
        if type(value) is not type(body) or repr(value) != repr(body):  # tells 0.0 from -0.0, and a NaN is itself
            raise TypeError(f"argument {path or 'list'} is {value!r}; the package was compiled for {body!r}")
    elif kind == "dict":
        if not isinstance(value, Mapping) or {key for key, _ in body} != set(value):
            given = sorted(map(str, value)) if isinstance(value, Mapping) else type(value).__name__
            raise TypeError(
                f"argument {path or 'names'}: the package takes {sorted(str(key) for key, _ in body)}, not {given}"
            )
        for key, item in body:
            flatten_like(item, value[key], leaves, f"{path}.{key}" if path else str(key))
    else:
        if not isinstance(value, tuple | list) or len(value) != len(body):
            number = str(len(value)) if isinstance(value, tuple | list) else type(value).__name__
            raise TypeError(f"{path or 'the call'}: the package takes {len(body)} values here, not {number}")
        for position, (item, part) in enumerate(zip(body, value, strict=True)):
            flatten_like(item, part, leaves, f"{path}[{position}]")
