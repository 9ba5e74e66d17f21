"""Frozen dataclasses as JSON and back, by the types of their fields.

This file is the same in every package that has it; the original is tools/shared/_records.py.

Note [How records are written]
    A record is an object of its fields, but for those that are equal to their defaults. A field may hold None, bools,
    integers, floats, strings, literals, enums (by name), other records, tuples, lists and mappings of these, and
    unions: a record in a union of several has the name of its class as ``record``. Floats that JSON does not know are
    ``{"float": "nan"}``. A type that is none of these is written by what :class:`Format` is given for it.

    The text of a root record begins with the name of its format and a version. Another version is refused: whoever
    changes a field's meaning, type or default gives the format a new number. A field that the class does not have, or a
    value of another type, is refused too. Nothing is imported and nothing is called but constructors of known records.

Note [Compiled once]
    Types are looked at when the first record of a class is written or read, and only those of the fields that occur.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import json
import math
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeVar, Union, get_args, get_origin, get_type_hints

__all__ = ["Format", "OwnForm"]

T = TypeVar("T")


class OwnForm(Protocol):
    """What writes and reads values of one type. A :class:`Format` is one, for records with a version of their own."""

    def to_raw(self, value: Any, /) -> Any:
        """JSON values."""

    def from_raw(self, raw: Any, /) -> Any:
        """The inverse."""


class Format(Generic[T]):
    """How records of one root class are written; see Note [How records are written].

    Arguments:
        root: the class.
        name: what the text is called in messages and in its head: "aotkit wrapper plan".
        version: of the format.
        error: what is raised for a text that can't be read, and for a record that can't be written.
        members: the classes of an abstract class, for fields that hold any of them.
        own: how values of other types are written.
    """

    def __init__(
        self,
        root: type[T],
        name: str,
        version: int,
        *,
        error: type[Exception] = ValueError,
        members: Mapping[type[Any], Iterable[type[Any]]] | None = None,
        own: Mapping[Any, OwnForm] | None = None,
    ) -> None:
        self.root, self.name, self.version, self.error = root, name, version, error
        self._form = _Forms(members or {}, own or {}).record(root)

    def to_raw(self, record: T, /) -> dict[str, Any]:
        """The record as JSON values, with its head."""
        try:
            return {"format": self.name, "version": self.version, "record": self._form.write(record)}
        except _Mismatch as found:
            raise self.error(f"the {self.name} can't be written: {found}") from None

    def from_raw(self, raw: Any, /) -> T:
        """The inverse of :meth:`to_raw`. Raises ``error`` for anything that this version did not write."""
        if not isinstance(raw, dict) or raw.get("format") != self.name:
            raise self.error(f"this is no {self.name}")
        if raw.get("version") != self.version:
            raise self.error(
                f"this {self.name} has version {raw.get('version')!r}, and this release reads version {self.version}; "
                "write it again with this release"
            )
        try:
            record: T = self._form.read(raw.get("record"))
        except _Mismatch as found:
            raise self.error(f"the {self.name} can't be read: {found}") from None
        return record

    def to_text(self, record: T) -> str:
        """The record as JSON text; equal records have equal texts."""
        return json.dumps(self.to_raw(record), sort_keys=True, separators=(",", ":"))

    def from_text(self, text: str | bytes) -> T:
        """The inverse of :meth:`to_text`."""
        try:
            raw = json.loads(text)
        except ValueError as error:
            raise self.error(f"this is no {self.name}: {error}") from error
        return self.from_raw(raw)


class _Mismatch(Exception):
    """A value that its field's type does not allow."""


class _Form(NamedTuple):
    """How values of one type are written and read; ``values``, ``json`` are the types that tell them from others."""

    write: Callable[[Any], Any]
    read: Callable[[Any], Any]
    values: frozenset[type[Any]]
    json: frozenset[type[Any]]


_NONE = type(None)
_SCALARS: dict[Any, frozenset[type[Any]]] = {
    None: frozenset({_NONE}),
    _NONE: frozenset({_NONE}),
    bool: frozenset({bool}),
    int: frozenset({bool, int}),
    float: frozenset({bool, int, float}),
    str: frozenset({str}),
}
_DICT, _LIST, _STR = frozenset({dict}), frozenset({list}), frozenset({str})
_MISSING = dataclasses.MISSING


class _Forms:
    """The forms of the types that records of one format hold."""

    def __init__(self, members: Mapping[type[Any], Iterable[type[Any]]], own: Mapping[Any, OwnForm]) -> None:
        self.members, self.own = members, own
        self.known: dict[Any, _Form] = {}
        self.hints: dict[tuple[str, str], Any] = {}

    def resolved(self, hint: str, module: str) -> Any:
        """The type that an annotation names, in the module that defines its class."""
        found = self.hints.get((module, hint))
        if found is None:
            found = self.hints[module, hint] = _resolved(hint, vars(sys.modules[module]))
        return found

    def form(self, hint: Any) -> _Form:
        """The form of a type. Raises ``TypeError`` where there is none: a mistake in the record's class."""
        found = self.known.get(hint)
        if found is None:
            found = self.known[hint] = self._make(hint)
        return found

    def _make(self, hint: Any) -> _Form:
        if hint in self.own:
            own = self.own[hint]
            return _Form(own.to_raw, own.from_raw, frozenset({hint}), _DICT)
        if hint in self.members:
            return _tagged({cls: self.record(cls) for cls in self.members[hint]})
        if hint in _SCALARS:
            return _scalar(_SCALARS[hint])
        if isinstance(hint, type) and issubclass(hint, enum.Enum):
            return _enum(hint)
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            return self.record(hint)
        origin, args = get_origin(hint), get_args(hint)
        if origin is Literal:
            return _literal(args)
        if origin in (Union, types.UnionType):
            return self._union(args)
        if origin is tuple:
            return _several(tuple, self.form(args[0])) if args[1:] == (...,) else _fixed([*map(self.form, args)])
        if origin is list:
            return _several(list, self.form(args[0]))
        if isinstance(origin, type) and issubclass(dict, origin) and args[:1] == (str,):
            return _mapping(self.form(args[1]))
        raise TypeError(f"records have no form for {hint}")

    def record(self, cls: type[Any]) -> _Form:
        """The form of a dataclass; its fields are looked at later, since it may hold others of its kind."""
        found = self.known.get(cls)
        if found is None:
            fields = _Fields(cls, self)
            found = self.known[cls] = _Form(fields.write, fields.read, frozenset({cls}), _DICT)
        return found

    def _union(self, args: Sequence[Any]) -> _Form:
        scalars = [_SCALARS[arg] for arg in args if arg in _SCALARS]
        others = [arg for arg in args if arg not in _SCALARS]
        records: dict[Any, _Form] = {
            arg: self.form(arg) for arg in others if dataclasses.is_dataclass(arg) and arg not in self.own
        }
        forms = [self.form(arg) for arg in others if arg not in records]
        if scalars:
            forms.append(_scalar(frozenset().union(*scalars)))
        if records:
            forms.append(_tagged(records) if len(records) > 1 else next(iter(records.values())))
        return forms[0] if len(forms) == 1 else _any_of(forms)


class _Fields:
    """The fields of a dataclass, by name; their forms are made when they occur first."""

    def __init__(self, cls: type[Any], forms: _Forms) -> None:
        self.cls, self.forms = cls, forms
        self.defaults: dict[str, Any] | None = None
        self.known: dict[str, _Form] = {}

    def form(self, name: str) -> _Form:
        """The form of a field."""
        if name not in self._defaults():
            raise _Mismatch(f"a {self.cls.__name__} has no field {name!r}")
        field = self.cls.__dataclass_fields__[name]
        hint = field.type
        if isinstance(hint, str):
            bases = [b for b in self.cls.__mro__ if getattr(b, "__dataclass_fields__", {}).get(name) is field]
            hint = self.forms.resolved(hint, bases[-1].__module__)  # the last one is where it was declared
        found = self.known[name] = self.forms.form(hint)
        return found

    def _defaults(self) -> dict[str, Any]:
        if self.defaults is None:
            self.defaults = {
                field.name: field.default if field.default_factory is _MISSING else field.default_factory()
                for field in dataclasses.fields(self.cls)
                if field.init and field.metadata.get("stored", True)
            }
        return self.defaults

    def write(self, record: Any) -> dict[str, Any]:
        """The fields that differ from their defaults."""
        if type(record) is not self.cls:
            raise _Mismatch(f"a {type(record).__name__} stands where a {self.cls.__name__} should")
        raw: dict[str, Any] = {}
        for name, default in self._defaults().items():
            value = getattr(record, name)
            if value is default or _equal(value, default):
                continue
            form = self.known.get(name) or self.form(name)
            try:
                raw[name] = form.write(value)
            except _Mismatch as found:
                raise _Mismatch(f"{self.cls.__name__}.{name}: {found}") from None
        return raw

    def read(self, raw: Any) -> Any:
        """A record of these fields."""
        if type(raw) is not dict:
            raise _Mismatch(f"{_brief(raw)} stands where a {self.cls.__name__} should")
        known, values = self.known, {}
        for name, value in raw.items():
            form = known.get(name) or self.form(name)
            try:
                values[name] = form.read(value)
            except _Mismatch as found:
                raise _Mismatch(f"{self.cls.__name__}.{name}: {found}") from None
        try:
            return self.cls(**values)
        except TypeError as error:  # a field is missing
            raise _Mismatch(f"{self.cls.__name__}: {error}") from None


def _equal(value: Any, default: Any) -> bool:
    """Whether a value need not be written. Floats are: -0.0 equals 0.0 and is another number."""
    kind = type(value)
    if kind is not type(default) or kind not in _COMPARED:
        return False
    return bool(value == default) if kind in _JSON_SCALARS else not value and not default


_COMPARED = frozenset({bool, int, str, tuple, list, dict})
_JSON_SCALARS = frozenset({bool, int, str})


# -- forms ---------------------------------------------------------------------------------------------------------


def _scalar(kinds: frozenset[type[Any]]) -> _Form:
    def checked(value: Any) -> Any:
        if type(value) not in kinds:
            raise _Mismatch(f"{_brief(value)} is none of {_names(kinds)}")
        return value

    return _Form(checked, checked, kinds, kinds) if float not in kinds else _float(kinds)


def _float(kinds: frozenset[type[Any]]) -> _Form:
    def write(value: Any) -> Any:
        if type(value) is float and not math.isfinite(value):
            return {"float": str(value)}
        if type(value) not in kinds:
            raise _Mismatch(f"{_brief(value)} is none of {_names(kinds)}")
        return value

    def read(raw: Any) -> Any:
        if type(raw) in kinds:
            return raw
        if isinstance(raw, dict) and raw.get("float") in ("nan", "inf", "-inf"):
            return float(raw["float"])
        raise _Mismatch(f"{_brief(raw)} is none of {_names(kinds)}")

    return _Form(write, read, kinds, kinds | _DICT)


def _literal(values: Sequence[Any]) -> _Form:
    def checked(value: Any) -> Any:
        if not any(value == known and type(value) is type(known) for known in values):
            raise _Mismatch(f"{_brief(value)} is none of {', '.join(map(repr, values))}")
        return value

    kinds = frozenset(map(type, values))
    return _Form(checked, checked, kinds, kinds)


def _enum(cls: type[enum.Enum]) -> _Form:
    members = cls.__members__

    def read(raw: Any) -> Any:
        if type(raw) is not str or raw not in members:
            raise _Mismatch(f"{_brief(raw)} is no {cls.__name__}")
        return members[raw]

    def write(value: Any) -> Any:
        if type(value) is not cls:
            raise _Mismatch(f"{_brief(value)} is no {cls.__name__}")
        return value.name

    return _Form(write, read, frozenset({cls}), _STR)


def _several(kind: type[Any], each: _Form) -> _Form:
    """A tuple or a list of any length."""
    each_write, each_read = each.write, each.read

    def write(value: Any) -> Any:
        if type(value) is not kind:
            raise _Mismatch(f"{_brief(value)} is no {kind.__name__}")
        return [each_write(item) for item in value]

    def read(raw: Any) -> Any:
        if type(raw) is not list:
            raise _Mismatch(f"{_brief(raw)} is no list")
        return kind(map(each_read, raw))

    return _Form(write, read, frozenset({kind}), _LIST)


def _fixed(parts: Sequence[_Form]) -> _Form:
    """A tuple of so many values, each with a type of its own."""

    def check(value: Any, kind: type[Any]) -> None:
        if type(value) is not kind or len(value) != len(parts):
            raise _Mismatch(f"{_brief(value)} is no {kind.__name__} of {len(parts)}")

    def write(value: Any) -> Any:
        check(value, tuple)
        return [part.write(item) for part, item in zip(parts, value)]

    def read(raw: Any) -> Any:
        check(raw, list)
        return tuple(part.read(item) for part, item in zip(parts, raw))

    return _Form(write, read, frozenset({tuple}), _LIST)


def _mapping(each: _Form) -> _Form:
    """An object with names that are data. What is read is a ``dict``."""

    def check(value: Any) -> Any:
        if not isinstance(value, Mapping) or not all(type(name) is str for name in value):
            raise _Mismatch(f"{_brief(value)} is no mapping of strings")
        return value

    def write(value: Any) -> Any:
        return {name: each.write(item) for name, item in check(value).items()}

    def read(raw: Any) -> Any:
        return {name: each.read(item) for name, item in check(raw).items()}

    return _Form(write, read, frozenset({dict}), _DICT)


def _tagged(records: Mapping[type[Any], _Form]) -> _Form:
    """One of several records, told apart by ``record``, the name of its class."""
    by_name = {cls.__name__: form.read for cls, form in records.items()}
    writes = {cls: (cls.__name__, form.write) for cls, form in records.items()}

    def write(value: Any) -> Any:
        found = writes.get(type(value))
        if found is None:
            raise _Mismatch(f"a {type(value).__name__} is none of {_names(records)}")
        return {"record": found[0], **found[1](value)}

    def read(raw: Any) -> Any:
        name = raw.get("record") if type(raw) is dict else None
        found = by_name.get(name) if type(name) is str else None
        if found is None:
            raise _Mismatch(f"{_brief(raw)} is none of {_names(records)}")
        return found({key: value for key, value in raw.items() if key != "record"})

    return _Form(write, read, frozenset(records), _DICT)


def _any_of(forms: Sequence[_Form]) -> _Form:
    """One of several types whose JSON tells them apart."""
    reads: dict[type[Any], Callable[[Any], Any]] = {}
    writes: dict[type[Any], Callable[[Any], Any]] = {}
    for form in forms:
        if form.json & reads.keys():
            raise TypeError(f"the members of a union of {_names(form.values)} can't be told apart")
        reads.update(dict.fromkeys(form.json, form.read))
        writes.update(dict.fromkeys(form.values, form.write))

    def write(value: Any) -> Any:
        found = writes.get(type(value))
        if found is None:
            raise _Mismatch(f"{_brief(value)} is none of {_names(writes)}")
        return found(value)

    def read(raw: Any) -> Any:
        found = reads.get(type(raw))
        if found is None:
            raise _Mismatch(f"{_brief(raw)} is none of {_names(writes)}")
        return found(raw)

    return _Form(write, read, frozenset(writes), frozenset(reads))


def _names(kinds: Iterable[type[Any]]) -> str:
    return ", ".join(sorted(kind.__name__ for kind in kinds))


def _resolved(hint: str, names: Mapping[str, Any]) -> Any:
    """The type of an annotation. The three commonest kinds are looked up: ``typing`` takes ten times as long."""
    if hint.isidentifier():
        return names[hint] if hint in names else getattr(builtins, hint)
    inner = hint.removesuffix(" | None")
    if inner.isidentifier() and inner != hint:
        return _resolved(inner, names) | None
    inner = hint.removeprefix("tuple[").removesuffix(", ...]")
    if inner.isidentifier() and hint == f"tuple[{inner}, ...]":
        return types.GenericAlias(tuple, (_resolved(inner, names), ...))
    holder = types.SimpleNamespace(__annotations__={"field": hint})
    return get_type_hints(holder, dict(names))["field"]


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
