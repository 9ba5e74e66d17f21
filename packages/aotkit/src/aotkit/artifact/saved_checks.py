"""What Dynamo relied on beside tensors and sizes, as data: facts about values that a path leads to from the arguments.

Note [Checks of a saved function]
    Dynamo guards on much that a module holds (flags, lengths, hooks, classes of its parts). Each such guard becomes a
    row: a path of attributes and items from an argument, a kind of fact, and what was found when it was compiled. Rows
    are evaluated by this module, without Dynamo. Those about the caller's own arguments and about training modes are
    looked at in every call, all others of a module in the first call with it, and when what they are read from has
    changed (Note [Kept facts]). What classes define is code: its source is
    compared when the function is loaded.
"""

from __future__ import annotations

import enum
import hashlib
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket

from ..errors import GuardError
from .kept_facts import KeptFacts
from .quick_calls import QuickCall
from .quick_checks import MOST_WRITTEN, Written, write_out
from .straight_code import StraightCode
from .values import importable_name, same_json, value_to_json

__all__ = ["CheckTree", "Path", "code_digest", "identity_row", "named_row", "path_text", "resolve", "tree_of_rows"]

Path = Sequence[Sequence[Any]]
"""Steps: ``["local", name]`` first, then ``["attr", name]``, ``["item", key]``, ``["type", None]`` to the class."""

_ABSENT = object()
#: Where builtin functions of torch and Python are found that don't know their module.
_HOMES = (
    "torch",
    "torch._C._nn",
    "torch._C._linalg",
    "torch._C._special",
    "torch._C._fft",
    "torch._C",
    "math",
    "builtins",
)


def resolve(path: Path, scope: Mapping[str, Any]) -> Any:
    """The value at the end of a path. Raises ``LookupError`` or ``AttributeError`` where it leads nowhere."""
    value: Any = scope[path[0][1]]
    for kind, key in path[1:]:
        value = _step(value, kind, key)
    return value


def _step(value: Any, kind: str, key: Any) -> Any:
    if kind == "type":
        return type(value)
    if kind == "item":
        return dict.__getitem__(value, key) if isinstance(value, dict) else value[key]
    # A module's own __getattr__ looks in its dictionaries, which have steps of their own here.
    held = getattr(value, "__dict__", None)
    if isinstance(held, dict):
        found = held.get(key, _ABSENT)
        if found is not _ABSENT:
            return found
    return getattr(value, key)


def path_text(path: Path) -> str:
    """The path as a person writes it: ``self.layers.0.training``."""
    text = str(path[0][1])
    steps = list(path[1:])
    while steps:
        kind, key = steps.pop(0)
        if kind == "type":
            text = f"type({text})"
        elif kind == "attr" and key in ("_modules", "_parameters", "_buffers") and steps and steps[0][0] == "item":
            text += f".{steps.pop(0)[1]}"
        else:
            text += f".{key}" if kind == "attr" else f"[{key!r}]"
    return text


class CheckTree:
    """Rows in the form of a tree, so that the way to a value is gone once for all that is known about it."""

    __slots__ = ("_nodes", "_pairs", "_quick", "_written")

    def __init__(self, nodes: Any, pairs: Sequence[tuple[Path, Path]]) -> None:
        self._nodes, self._pairs = nodes, pairs
        self._quick: Written | None = None
        self._written = 0

    def check_often(self, scope: Mapping[str, Any]) -> None:
        """:meth:`check` for a tree that is asked in every call; see Note [Quick checks]. Safe under threads."""
        if self._quick is not None and self._quick(scope):
            self._check_pairs(scope)
            return
        self.check(scope)
        if self._written < MOST_WRITTEN:
            self._written += 1
            self._quick = write_out(self._nodes, scope, _step, _HOLDS)

    def quick_call(self, scope: Mapping[str, Any], code: StraightCode, kept: tuple[KeptFacts, ...]) -> QuickCall | None:
        """What tells calls like one that passed, as long as what is ``kept`` holds; see Note [Quick calls]."""
        return QuickCall.of(scope, self._nodes, self._pairs, code, _step, _HOLDS, kept)

    def check(self, scope: Mapping[str, Any]) -> None:
        """Raise :class:`GuardError` for the first fact that does not hold."""
        for name, node in self._nodes.items():
            if name not in scope:
                raise GuardError(f"the argument {name} is missing")
            _check(node, scope[name], (("local", name),))
        self._check_pairs(scope)

    def _check_pairs(self, scope: Mapping[str, Any]) -> None:
        for one, other in self._pairs:
            if resolve(one, scope) is not resolve(other, scope):
                raise GuardError(
                    f"{path_text(one)} and {path_text(other)} are two objects, and were one when it was compiled"
                )


def tree_of_rows(rows: Sequence[tuple[Path, str, Any]]) -> CheckTree:
    """The tree of rows (path, kind, expected); the path of the other object is expected of the kind ``same``."""
    nodes: dict[str, Any] = {}
    pairs = []
    for path, kind, expected in rows:
        if kind == "same":
            pairs.append((path, expected))
            continue
        node = nodes.get(path[0][1]) or nodes.setdefault(path[0][1], ({}, []))
        for kind_of_step, key in path[1:]:
            node = node[0].get((kind_of_step, key)) or node[0].setdefault((kind_of_step, key), ({}, []))
        node[1].append((kind, expected))
    return CheckTree(nodes, pairs)


def _check(node: Any, value: Any, path: Any) -> None:
    below, facts = node
    for kind, expected in facts:
        if not _HOLDS[kind](value, expected):
            found, name = _FOUND[kind](value, expected), path_text(path)
            raise GuardError(f"{name} {found}, and was compiled for {_shown(kind, expected)}")
    for (kind, key), child in below.items():
        try:
            found = _step(value, kind, key)
        except (LookupError, AttributeError, TypeError):
            where = path_text((*path, (kind, key)))
            raise GuardError(f"{where} is not there, and was when the function was compiled") from None
        _check(child, found, (*path, (kind, key)))


def _shown(kind: str, expected: Any) -> str:
    if kind in ("contains", "hasattr"):
        return f"one {'with' if expected[1] else 'without'} {expected[0]!r}"
    if kind == "empty":
        return "an empty one"
    if kind == "tensor":
        return f"{expected[0]} of shape {tuple(expected[1])}"
    if kind == "code":
        return "one with other code"
    if kind == "named":
        return str(expected)
    if kind in ("class", "is", "type"):
        return f"{'a ' * (kind == 'type')}{'.'.join(expected)}"
    return {"length": "{} items", "keys": "the keys {}", "equal": "{!r}"}[kind].format(expected)


def _same_constant(value: Any, expected: Any) -> bool:
    try:
        return same_json(value_to_json(value), expected)
    except ValueError:
        return False


def identity_row(path: Path, value: Any) -> list[Any] | None:
    """What stands for the identity of a value: its name, its code, or, of a module, its class; ``None`` for others."""
    found = importable_name(value)
    if isinstance(value, nn.Module):
        return [path, "type", [type(value).__module__, type(value).__qualname__]]
    if isinstance(value, type):
        return [path, "class", [value.__module__, value.__qualname__]]
    if found is not None:
        return [path, "is", list(found)]
    code = getattr(getattr(value, "__func__", value), "__code__", value)
    return [path, "code", code_digest(code)] if isinstance(code, types.CodeType) else None


def named_row(path: Path, value: Any) -> list[Any] | None:
    """As :func:`identity_row`, for operators, members of enumerations, process groups, and builtin functions that don't
    know their module."""
    found = _known_name(value)
    return None if found is None else [path, "named", found]


def _known_name(value: Any) -> str | None:
    if isinstance(value, OpOverload | OpOverloadPacket):
        return str(value)
    if torch.distributed.is_available() and isinstance(value, torch.distributed.ProcessGroup):
        return f"the process group {value.group_name}"
    if isinstance(value, enum.Enum):
        return f"{type(value).__module__}.{type(value).__qualname__}.{value.name}"
    name = getattr(value, "__name__", None)
    if isinstance(name, str):
        for home in _HOMES:
            if getattr(sys.modules.get(home), name, None) is value:
                return f"{home}.{name}"
    return None


def code_digest(code: types.CodeType) -> str:
    """Of what a function does: its code and that within it, without names of files and numbers of lines."""
    return hashlib.sha256(repr(_form_of(code)).encode()).hexdigest()


def _form_of(value: Any) -> Any:
    """A constant of a function, or code, as texts in tuples: equal for equal ones in every process, and only there."""
    if isinstance(value, types.CodeType):
        arguments = value.co_argcount, value.co_posonlyargcount, value.co_kwonlyargcount, value.co_flags
        names = value.co_names, value.co_varnames, value.co_freevars, value.co_cellvars
        handlers = getattr(value, "co_exceptiontable", b"")
        return ("code", value.co_code, handlers, arguments, names, tuple(map(_form_of, value.co_consts)))
    if isinstance(value, tuple):
        return ("tuple", tuple(map(_form_of, value)))
    if isinstance(value, frozenset):  # in an order that differs from process to process
        return ("frozenset", tuple(sorted(map(_form_of, value), key=repr)))
    return (type(value).__name__, repr(value))


def _has_code(value: Any, expected: Any) -> bool:
    code = getattr(getattr(value, "__func__", value), "__code__", value)
    return isinstance(code, types.CodeType) and code_digest(code) == expected


def _is_named(value: Any, expected: Any) -> bool:
    name = importable_name(value)
    return name is not None and list(name) == expected


def _is_class(value: Any, expected: Any) -> bool:
    return isinstance(value, type) and [value.__module__, value.__qualname__] == expected


def _has_type(value: Any, expected: Any) -> bool:
    return [type(value).__module__, type(value).__qualname__] == expected


def _has_attribute(value: Any, expected: Any) -> bool:
    return hasattr(value, expected[0]) is expected[1]


def _holds_key(value: Any, expected: Any) -> bool:
    # Of an object without a dictionary nothing can be in it.
    held = value if isinstance(value, dict) else getattr(value, "__dict__", {})
    return (expected[0] in held) is expected[1]


def _is_tensor(value: Any, expected: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and [str(value.dtype), list(value.shape), str(value.device), value.requires_grad] == expected
    )


_HOLDS: dict[str, Any] = {
    "named": lambda value, expected: _known_name(value) == expected,
    "class": _is_class,
    "code": _has_code,
    "is": _is_named,
    "type": _has_type,
    "equal": _same_constant,
    "length": lambda value, expected: len(value) == expected,
    "keys": lambda value, expected: same_json([value_to_json(key) for key in value], expected),
    "contains": _holds_key,
    "hasattr": _has_attribute,
    "empty": lambda value, expected: not value,
    "tensor": _is_tensor,
}
_FOUND: dict[str, Any] = {
    "named": lambda value, expected: f"is {value!r}",
    "class": lambda value, expected: f"is {value!r}",
    "code": lambda value, expected: "is another function",
    "is": lambda value, expected: f"is {value!r}",
    "type": lambda value, expected: f"is a {type(value).__module__}.{type(value).__qualname__}",
    "equal": lambda value, expected: f"is {value!r}",
    "length": lambda value, expected: f"has {len(value)} items",
    "keys": lambda value, expected: f"has the keys {list(value)}",
    "contains": lambda value, expected: f"is one {'without' if expected[1] else 'with'} {expected[0]!r}",
    "hasattr": lambda value, expected: f"is one {'without' if expected[1] else 'with'} {expected[0]!r}",
    "empty": lambda value, expected: f"holds {len(value)} items",
    "tensor": lambda value, expected: (
        f"is {value.dtype} of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "is no tensor"
    ),
}
