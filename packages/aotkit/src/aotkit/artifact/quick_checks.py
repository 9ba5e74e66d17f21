"""Checks of a call that passed once, written out as straight-line Python: a step of a language model is called with
thousands of facts about it between two tokens.

Note [Quick checks]
    A tree of facts is walked by an interpreter of rows, which can name what is wrong and costs half a microsecond a
    fact. Once a call has passed, the classes of all objects on the way are known, so the same facts can be written out
    as one function: each object is looked up once and its class compared with what it was; then an attribute that its
    class does not define is the one in its dictionary. What is written out only ever says yes where the walk would:
    for anything else (another class, an attribute that is gone, a number that is equal and of another type) it says no,
    and the walk decides. So a wrong no costs time, and errors are those of the walk.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

__all__ = ["MOST_WRITTEN", "Holds", "Step", "Written", "is_plain", "is_plainly_read", "write_out"]

MOST_WRITTEN = 8  # so often a check is written anew: callers who alternate between two kinds of arguments do without

Step = Callable[[Any, str, Any], Any]
Holds = Mapping[str, Callable[[Any, Any], bool]]
Written = Callable[[Mapping[str, Any]], bool]


def write_out(nodes: Mapping[str, Any], scope: Mapping[str, Any], step: Step, holds: Holds) -> Written:
    """A function that says whether all facts of a tree hold, for a scope in which they held.

    Args:
        nodes: per name of an argument ``(below, facts)``: ``below`` maps a step to the next node, ``facts`` are pairs
            of a kind and what is expected.
        scope: arguments by name, for which the walk found every fact true.
        step: goes one step of a path, by its kind and key.
        holds: per kind of fact whether it holds for a value.
    """
    return _Writer(step, holds).write(nodes, scope)


class _Writer:
    def __init__(self, step: Step, holds: Holds) -> None:
        self._step, self._holds = step, holds
        self._names: dict[str, Any] = {"step": step}
        self._lines: list[str] = []
        self._count = 0

    def write(self, nodes: Mapping[str, Any], scope: Mapping[str, Any]) -> Written:
        for name, node in nodes.items():
            self._node(node, scope[name], f"scope[{name!r}]")
        body = "\n".join(f"        {line}" for line in self._lines)
        source = (
            f"def holds(scope):\n    try:\n{body or '        pass'}\n"
            "    except (LookupError, AttributeError, TypeError):\n        return False\n    return True\n"
        )
        exec(compile(source, "<aotkit facts about a call>", "exec"), self._names)
        written: Written = self._names["holds"]
        return written

    def _node(self, node: Any, value: Any, source: str) -> None:
        below, facts = node
        name = f"v{self._count}"
        self._count += 1
        self._lines.append(f"{name} = {source}")
        if not below and len(facts) == 1 and facts[0][0] == "equal" and is_plain(value):
            self._unless(self._equals(name, value))
            return
        self._unless(f"type({name}) is {self._constant(type(value))}")
        if any(kind == "contains" for kind, _ in facts) and hasattr(value, "__dict__") and not isinstance(value, dict):
            self._lines.append(f"d = {name}.__dict__")
        told = [self._fact(name, kind, expected, value) for kind, expected in facts if kind != "type"]  # by the class
        for condition in dict.fromkeys(told):  # Dynamo notes one fact each time that it comes by
            self._unless(condition)
        for (kind, key), child in below.items():
            self._node(child, self._step(value, kind, key), self._step_source(name, value, kind, key))

    def _unless(self, condition: str) -> None:
        self._lines.append(f"if not ({condition}): return False")

    def _fact(self, name: str, kind: str, expected: Any, value: Any) -> str:
        if kind == "equal" and is_plain(value):
            return self._equals(name, value)
        if kind == "contains" and hasattr(value, "__dict__") and not isinstance(value, dict):
            return f"{expected[0]!r} {'in' if expected[1] else 'not in'} d"
        if kind == "hasattr":
            return f"{'' if expected[1] else 'not '}hasattr({name}, {expected[0]!r})"
        if kind == "length":
            return f"len({name}) == {expected!r}"
        if kind == "empty":
            return f"not {name}"
        return f"{self._constant(self._holds[kind])}({name}, {self._constant(expected)})"

    def _equals(self, name: str, value: Any) -> str:
        if value is None or value is True or value is False:
            return f"{name} is {value}"
        held = self._constant(value)
        return f"type({name}) is {self._constant(type(value))} and {name} == {held}"

    def _step_source(self, name: str, value: Any, kind: str, key: Any) -> str:
        if kind == "type":
            return f"type({name})"
        if kind == "item" and type(value) in (dict, list, tuple):
            return f"{name}[{self._constant(key)}]"
        if kind == "attr" and key.isidentifier() and is_plainly_read(value, key):
            return f"{name}.{key}"
        return f"step({name}, {kind!r}, {self._constant(key)})"

    def _constant(self, value: Any) -> str:
        if type(value) in (int, str):
            return repr(value)
        name = f"c{len(self._names)}"
        self._names[name] = value
        return name


def is_plain(value: Any) -> bool:
    """Constants that are equal to what they are equal to for ever, and compare quickly. Of floats, 0.0 is equal to
    -0.0, and a NaN to nothing."""
    return value is None or type(value) in (bool, int, str, torch.device, torch.dtype)


def is_plainly_read(value: Any, key: str) -> bool:
    """Whether ``value.key`` is what is in its dictionary, as for a class that has no say in it."""
    kind = type(value)
    held = getattr(value, "__dict__", None)
    how: Any = kind.__getattribute__
    return how is object.__getattribute__ and isinstance(held, dict) and key in held and not hasattr(kind, key)
