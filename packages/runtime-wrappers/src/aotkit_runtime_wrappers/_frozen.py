"""``dataclass(frozen=True, slots=True)`` that costs a start less: its methods are made when they are first called.

This file is the same in every package that has it; the original is tools/shared/_frozen.py.

Note [Why not dataclasses.dataclass]
    Up to Python 3.12 it compiles six methods of each class, half a millisecond in all. A process that loads a compiled
    function imports a hundred such classes, most of which it never makes an instance of: that was half of the time that
    its imports took. Here ``__init__`` is compiled at the first instance, and the other methods are closures, which
    take the fields out of an instance with ``operator.attrgetter``. All else is the standard library's: the class is
    a dataclass to ``fields``, ``replace``, ``asdict``, ``inspect.signature`` and to type checkers.
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
import reprlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

if TYPE_CHECKING:
    from dataclasses import dataclass
else:

    def dataclass(*, frozen: bool, slots: bool, eq: bool = True, repr: bool = True):
        """``dataclasses.dataclass`` with these arguments, of classes that are frozen and have slots."""
        if not (frozen and slots):
            raise TypeError("this is for classes that are frozen and have slots")

        def decorate(cls: type) -> type:
            if any(map(dataclasses.is_dataclass, cls.__mro__[1:])):  # methods of bases are in the way
                return dataclasses.dataclass(frozen=True, slots=True, eq=eq, repr=repr)(cls)
            own = vars(cls).copy()
            made = dataclasses.dataclass(init=False, repr=False, eq=False, slots=True)(cls)
            params = made.__dataclass_params__
            params.init, params.frozen, params.eq, params.repr = True, True, eq, repr
            for name, method in _methods(made, own, eq, repr):
                method.__name__, method.__qualname__ = name, f"{made.__qualname__}.{name}"
                setattr(made, name, method)
            return made

        return decorate


def _methods(cls: type[Any], own: dict[str, Any], eq: bool, repr: bool) -> list[tuple[str, Callable[..., Any]]]:
    """What the class is given; ``own``: what its body defines, which stays where dataclasses let it stay."""
    setter, deleter = _refusals(cls)
    methods: list[tuple[str, Callable[..., Any]]] = [("__init__", _first_init(cls))]
    methods += [("__setattr__", setter), ("__delattr__", deleter)]
    setattr(cls, "__signature__", _Signature())  # noqa: B010 - what type checkers think of it is settled
    if "__getstate__" not in own:
        methods.append(("__getstate__", _getstate))
    if "__setstate__" not in own:
        methods.append(("__setstate__", _setstate))
    if repr and "__repr__" not in own:
        methods.append(("__repr__", reprlib.recursive_repr()(_repr)))
    if eq:
        compared, hashed = _comparisons(cls)
        if "__eq__" not in own:
            methods.append(("__eq__", compared))
        if "__hash__" not in own or (own["__hash__"] is None and "__eq__" in own):
            methods.append(("__hash__", hashed))
    return methods


def _first_init(cls: type[Any]) -> Callable[..., None]:
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        made = _compiled_init(cls)
        cls.__init__ = made
        made(self, *args, **kwargs)

    return init


class _Signature:
    """``__signature__`` of a class, of its ``__init__`` or of that which a subclass has."""

    def __get__(self, instance: object, owner: type[Any]) -> inspect.Signature:
        home = next(cls for cls in owner.__mro__ if "__init__" in vars(cls))
        method = _compiled_init(home) if vars(home).get("__signature__") is self else owner.__init__
        signature = inspect.signature(method)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class _Made:
    """The default of a field whose value a factory makes, as ``inspect`` shows it."""

    def __repr__(self) -> str:
        return "<factory>"


_MADE = _Made()


def _compiled_init(cls: type[Any]) -> Callable[..., None]:
    """The method that the standard library would make: fields are set in order, then ``__post_init__`` is called."""
    names: dict[str, Any] = {"_set": object.__setattr__, "_made": _MADE}
    positional: list[str] = []
    keywords: list[str] = []
    lines: list[str] = []
    for number, each in enumerate(dataclasses.fields(cls)):
        default = value = ""
        if each.default is not dataclasses.MISSING:
            names[f"_default{number}"] = each.default
            default, value = f"=_default{number}", f"_default{number}"
        elif each.default_factory is not dataclasses.MISSING:
            names[f"_factory{number}"] = each.default_factory
            default, value = "=_made", f"_factory{number}()"
        if each.init:
            (keywords if each.kw_only else positional).append(each.name + default)
            made = f"{value} if {each.name} is _made else {each.name}" if default == "=_made" else each.name
            lines.append(f"_set(_self, {each.name!r}, {made})")
        elif value:
            lines.append(f"_set(_self, {each.name!r}, {value})")
    if hasattr(cls, "__post_init__"):
        lines.append("_self.__post_init__()")
    arguments = ", ".join(["_self", *positional, *(["*", *keywords] if keywords else [])])
    exec(f"def __init__({arguments}):\n" + "\n".join(f"    {line}" for line in lines or ["pass"]), names)
    init: Callable[..., None] = names["__init__"]
    init.__qualname__ = f"{cls.__qualname__}.__init__"
    init.__annotations__ = {each.name: each.type for each in dataclasses.fields(cls) if each.init} | {"return": None}
    return init


def _refusals(cls: type[Any]) -> tuple[Callable[..., None], Callable[..., None]]:
    """What sets and deletes attributes: none of this class, whatever an instance of a subclass has."""

    def setter(self: Any, name: str, value: Any) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def deleter(self: Any, name: str) -> None:
        if type(self) is cls or name in cls.__dataclass_fields__:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return setter, deleter


def _comparisons(cls: type[Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Equality and hash, by the fields that are compared."""
    each = dataclasses.fields(cls)
    compared = _values_of([f.name for f in each if f.compare])
    hashed = _values_of([f.name for f in each if (f.compare if f.hash is None else f.hash)])

    def equal(self: Any, other: Any) -> Any:
        return compared(self) == compared(other) if other.__class__ is self.__class__ else NotImplemented

    def hash_of(self: Any) -> int:
        return hash(hashed(self))

    return equal, hash_of


def _values_of(names: list[str]) -> Callable[[Any], tuple[Any, ...]]:
    """What gives the tuple of these attributes."""
    if len(names) > 1:
        return operator.attrgetter(*names)
    return (lambda value: (getattr(value, names[0]),)) if names else (lambda value: ())


def _repr(self: Any) -> str:
    shown = ", ".join(f"{f.name}={getattr(self, f.name)!r}" for f in dataclasses.fields(self) if f.repr)
    return f"{type(self).__qualname__}({shown})"


def _getstate(self: Any) -> list[Any]:
    return [getattr(self, field.name) for field in dataclasses.fields(self)]


def _setstate(self: Any, state: list[Any]) -> None:
    for field, value in zip(dataclasses.fields(self), state, strict=True):
        object.__setattr__(self, field.name, value)
