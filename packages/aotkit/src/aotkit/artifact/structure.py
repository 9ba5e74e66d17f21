"""Nested arguments and results as JSON: tuples, lists, dicts, records, constants, and numbered leaves.

Note [Records]
    A record is an object with named fields: a dataclass, a named tuple, a ``ModelOutput`` of Transformers. A file has
    the name of its class, which nothing imports: it is only compared. Whoever reads the file gives the classes that are
    to be made again; without its class a record comes back as a :class:`Record`, a dict whose values are attributes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from ..errors import PackageError

__all__ = ["Record", "describe_structure", "flatten_like", "rebuild_structure"]

_CONSTANTS = (bool, int, float, str, type(None))


class Record(dict[str, Any]):
    """The fields of a record whose class was not given; see Note [Records]. ``record.x`` is ``record["x"]``."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the record has no field {name!r}; it has {', '.join(self)}")
        return self[name]


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _fields_of(value: Any) -> dict[str, Any] | None:
    """The fields of a record, or ``None`` for what is none."""
    if isinstance(value, Mapping):
        own = dataclasses.is_dataclass(value) or isinstance(value, Record)
        return dict(value) if own and all(isinstance(key, str) for key in value) else None
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(zip(value._fields, value, strict=True))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def describe_structure(value: Any, is_leaf: Callable[[Any], bool], leaves: list[Any]) -> Any:
    """``value`` as JSON; what ``is_leaf`` says is appended to ``leaves``.

    Raises :class:`PackageError` for anything else.
    """
    if is_leaf(value):
        leaves.append(value)
        return {"leaf": len(leaves) - 1}
    if isinstance(value, _CONSTANTS):
        return {"constant": value}
    fields = _fields_of(value)
    if fields is not None:
        described = [[key, describe_structure(item, is_leaf, leaves)] for key, item in fields.items()]
        return {"record": {"class": _name_of(type(value)), "fields": described}}
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int):
                raise PackageError(f"a package can't hold a dict with the key {key!r}; use names or numbers")
        return {"dict": [[key, describe_structure(item, is_leaf, leaves)] for key, item in value.items()]}
    if isinstance(value, tuple | list):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [describe_structure(item, is_leaf, leaves) for item in value]}
    raise PackageError(
        f"a package can't hold a {type(value).__module__}.{type(value).__qualname__} among its arguments or results"
    )


def rebuild_structure(described: Any, leaves: Any, classes: Mapping[str, type] = MappingProxyType({})) -> Any:
    """The value with ``leaves`` in their places; ``classes`` by name make records."""
    ((kind, body),) = described.items()
    if kind == "leaf":
        return leaves[body]
    if kind == "constant":
        return body
    if kind == "dict":
        return {key: rebuild_structure(item, leaves, classes) for key, item in body}
    if kind == "record":
        fields = {key: rebuild_structure(item, leaves, classes) for key, item in body["fields"]}
        return classes.get(body["class"], Record)(**fields)
    items = [rebuild_structure(item, leaves, classes) for item in body]
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
    elif kind == "record":
        fields = value if isinstance(value, Mapping) else _fields_of(value)
        if fields is None or {key for key, _ in body["fields"]} != set(fields):
            raise TypeError(
                f"argument {path or 'record'}: the package takes a {body['class']}, not {type(value).__name__}"
            )
        for key, item in body["fields"]:
            flatten_like(item, fields[key], leaves, f"{path}.{key}" if path else str(key))
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
