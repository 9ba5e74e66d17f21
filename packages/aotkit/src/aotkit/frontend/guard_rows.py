"""Dynamo's guards as plain rows: where each looks, what it wants.

Only what is asked when a function is saved; Dynamo is imported then.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch

__all__ = ["IDENTITIES", "GuardRow", "UnknownGuard", "guard_rows", "is_about_torch", "path_of", "rows_of_value"]
__all__ += ["source_path"]

GuardRow = tuple[list[list[Any]], str, Any]

# Facts about the process, which a saved function keeps in another form, or that hold by the way in which it runs.
_STATE = frozenset(
    {
        "GRAD_MODE", "DETERMINISTIC_ALGORITHMS", "GLOBAL_STATE", "TORCH_FUNCTION_STATE", "DEFAULT_DEVICE",
        "AUTOGRAD_SAVED_TENSORS_HOOKS", "SHAPE_ENV", "FSDP_TRAINING_STATE", "DUAL_LEVEL", "FUNCTORCH_STACK_MATCH",
    }
)  # fmt: skip
_CONSTANTS = frozenset({"CONSTANT_MATCH", "EQUALS_MATCH", "BOOL_MATCH", "NONE_MATCH"})
IDENTITIES = frozenset(
    ("ID_MATCH", "FUNCTION_MATCH", "CLASS_MATCH", "MODULE_MATCH", "CLOSURE_MATCH", "NN_MODULE", "BUILTIN_MATCH")
)


class UnknownGuard(ValueError):
    """A guard that has no plain form. Says which."""


def guard_rows(guards: Any, scope: Mapping[str, Any], inputs: frozenset[str]) -> Iterator[GuardRow]:
    """One row per guard that is about an argument: path, kind, value that it was made for.

    Args:
        guards: Dynamo's ``Guard`` objects.
        scope: the arguments by name, as they were when it was compiled.
        inputs: source expressions of the tensors that are inputs of the graph, which checks them itself.

    Raises :class:`UnknownGuard` for one that has no such form.
    """
    for guard in guards:
        kind = guard.create_fn_name()
        name = guard.name() if callable(guard.name) else guard.name
        if kind in _STATE or "type(" in name or is_about_torch(name):
            continue  # see Note [Checks of a saved function]
        path = path_of(name)
        if kind == "TENSOR_MATCH" and name in inputs:
            continue
        if kind == "HASATTR":
            yield _of_attribute(guard, path, scope)
            continue
        value = _value_at(path, scope, guard)
        if not (isinstance(value, torch.Tensor) and kind == "TYPE_MATCH"):
            yield from rows_of_value(guard, path, value)


def is_about_torch(name: str) -> bool:
    """Whether the expression of a Dynamo source leads from modules of torch only, whose version a file names."""
    modules = re.findall(r"__import__\('([^']*)'\)", name)
    return bool(modules) and all(m.split(".")[0] == "torch" for m in modules) and "L[" not in name and "G[" not in name


def rows_of_value(guard: Any, path: list[list[Any]], value: Any) -> Iterator[GuardRow]:
    """The rows of one guard on ``value``, to which ``path`` leads. Raises :class:`UnknownGuard`."""
    kind = guard.create_fn_name()
    if kind == "TYPE_MATCH":
        yield path, "type", type(value)
    elif kind in _CONSTANTS:
        yield path, "equal", value
    elif kind == "SEQUENCE_LENGTH":
        yield path, "type", type(value)
        yield path, "length", len(value)
    elif kind == "DICT_KEYS_MATCH":
        yield path, "keys", list(value)
    elif kind in ("DICT_CONTAINS", "DICT_NOT_CONTAINS"):
        yield path, "contains", (_argument(guard, "key"), kind == "DICT_CONTAINS")
    elif kind == "NOT_PRESENT_IN_GENERIC_DICT":
        yield path, "contains", (_argument(guard, "attr"), False)
    elif kind == "EMPTY_NN_MODULE_HOOKS_DICT":
        yield path, "empty", None
    elif kind in IDENTITIES:
        yield path, "identity", value
    elif kind == "TENSOR_MATCH":
        yield path, "tensor", value
    elif kind == "DUPLICATE_INPUT":
        other = _argument(guard, "source_b")
        yield path, "same", path_of(other.name() if callable(other.name) else other.name)
    else:
        raise UnknownGuard(f"{kind} on {guard.name}")


def _of_attribute(guard: Any, path: list[list[Any]], scope: Mapping[str, Any]) -> GuardRow:
    from .._torch_compat import asked_attribute  # which brings Dynamo

    asked = asked_attribute(guard, path)
    if asked is None:
        raise UnknownGuard(f"HASATTR on {guard.name}")
    path, attribute = asked
    value = _value_at(path, scope, guard)
    # The guard's own text says it; where it has none, what was kept of the value to check guards.
    said = [code for code in guard.code_list or () if "hasattr(" in code]
    has = not said[0].lstrip().startswith("not ") if said else hasattr(value, attribute)
    return path, "hasattr", (attribute, has)


def _argument(guard: Any, name: str) -> Any:
    given = getattr(guard.create_fn, "keywords", None) or {}
    if name not in given:
        raise UnknownGuard(f"{guard.create_fn_name()} on {guard.name}")
    return given[name]


def _value_at(path: list[list[Any]], scope: Mapping[str, Any], guard: Any) -> Any:
    value: Any = scope.get(path[0][1])
    for kind, key in path[1:]:
        try:
            value = getattr(value, key) if kind == "attr" else value[key]
        except (AttributeError, LookupError, TypeError):
            raise UnknownGuard(f"{guard.create_fn_name()} on {guard.name}, of which nothing is known") from None
    return value


def path_of(name: str) -> list[list[Any]]:
    """Steps of the expression of a Dynamo source. Raises :class:`UnknownGuard` for one that is more than that."""
    variable, path = source_path(name)
    if variable != "L" or any(step[0] == "type" for step in path):
        raise UnknownGuard(f"a guard on {name}")
    return path


def source_path(name: str) -> tuple[str, list[list[Any]]]:
    """Whether the expression of a Dynamo source begins with an argument (``L``) or a global variable (``G``), and its
    steps, among which may be those to a class. Raises :class:`UnknownGuard` for one that is more than that."""
    steps: list[list[Any]] = []
    node: Any = ast.parse(name, mode="eval").body
    while not isinstance(node, ast.Name):
        if isinstance(node, ast.Attribute):
            steps.append(["attr", node.attr])
            node = node.value
        elif isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            steps.append(["item", node.slice.value])
            node = node.value
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("type", "dict") and len(node.args) == 1:
            steps += [["type", None]] * (ast.unparse(node.func) == "type")  # a copy as a dictionary has the same items
            (node,) = node.args
        else:
            raise UnknownGuard(f"a guard on {name}")
    if node.id not in ("L", "G") or not steps or steps[-1][0] == "type":
        raise UnknownGuard(f"a guard on {name}")
    (_, variable) = steps.pop()
    return node.id, [["local", variable], *reversed(steps)]
