"""Calls of a saved function like one that passed: its facts and the graph's inputs are looked up in one native walk.

Note [Quick calls]
    Facts about a call are written out once it has passed (Note [Quick checks]), and still are some hundred lines, after
    which Dynamo's bytecode goes the same ways once more to find the graph's inputs. Where that bytecode is straight
    (Note [Straight code]), both are one tree of attributes and items, which native code walks in a part of the time
    (Note [What a walk reads] in inductor-lower's ``runtime/object_walk.py``). As there, only a yes counts: for anything
    else the facts are checked one by one, and the bytecode runs. Facts for which code would have to run (a property, a
    tensor's type) stay written out. That a module's other facts were checked is known of the very module, as long as
    what they were read from is as it was (Note [Kept facts]).
"""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from aotkit_inductor_lower.runtime import Fact, Node, ObjectWalk

from .kept_facts import KeptFacts
from .quick_checks import Holds, Step, Written, is_plain, is_plainly_read, write_out
from .straight_code import Path, StraightCode
from .torch_state import quick_state

__all__ = ["QuickCall"]

_STEP_OF: dict[type, str] = {dict: "dict", collections.OrderedDict: "dict", list: "list", tuple: "tuple"}
_INTO_DICT = ("__dict__", None)


class QuickCall:
    """What a call that passed has found, for others that are like it. Safe under threads."""

    __slots__ = ("_count", "_facts", "_kept", "_modules", "_names", "_rest", "_state", "_walk")

    def __init__(
        self,
        names: Sequence[str],
        arguments: Sequence[Any],
        walk: ObjectWalk,
        facts: Written | None,
        code: StraightCode,
        kept: tuple[KeptFacts, ...],
    ) -> None:
        modules = [(k, value) for k, value in enumerate(arguments) if isinstance(value, nn.Module)]
        self._modules = tuple((k, weakref.ref(module)) for k, module in modules)
        self._names, self._walk, self._facts, self._kept = tuple(names), walk, facts, kept
        self._count, self._rest, self._state = len(code.arguments), code.rest, quick_state()

    @staticmethod
    def of(
        scope: Mapping[str, Any],
        tree: Mapping[str, Any],
        pairs: Sequence[tuple[Any, Any]],
        code: StraightCode,
        step: Step,
        holds: Holds,
        kept: tuple[KeptFacts, ...] = (),
    ) -> QuickCall | None:
        """For calls like one that passed; ``None`` where there can be none.

        Args:
            scope: its arguments by name, in the order of the parameters.
            tree: facts, as of :func:`.write_out`.
            pairs: paths that lead to one object.
            code: of the function.
            step: as of :func:`.write_out`.
            holds: as of :func:`.write_out`.
            kept: facts that were looked at and may have changed since.
        """
        plan = _Plan(dict(scope), step)
        left = plan.left_of(tree)
        try:
            wanted = [plan.node(path) for path in (*code.arguments, *code.kept)]
            for one, other in pairs:
                plan.facts.append(("same", plan.node(_path(one)), plan.node(_path(other))))
        except _Unknown:
            return None
        walk = plan.walk(wanted)
        if walk is None or quick_state() is None:
            return None
        facts = write_out(left, scope, step, holds) if left else None
        call = QuickCall(tuple(scope), tuple(scope.values()), walk, facts, code, kept)
        found = call.found(tuple(scope.values()))
        expected = [plan.values[node] for node in wanted]
        same = found is not None and all(one is other for one, other in zip(found, expected, strict=True))
        return call if same else None

    def found(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """The graph's inputs and what the rest of the function needs, if the call is like the one that passed."""
        if len(arguments) != len(self._names) or quick_state() != self._state:
            return None
        for place, module in self._modules:
            if module() is not arguments[place]:
                return None
        for each in self._kept:
            if not each.hold():
                return None
        if self._facts is not None and not self._facts(dict(zip(self._names, arguments, strict=True))):
            return None
        return self._walk.objects(arguments)

    def run(self, found: tuple[Any, ...], graph: Callable[[tuple[Any, ...]], Any]) -> Any:
        """The function's result."""
        if len(found) == self._count:
            return self._rest(graph(found), ())
        return self._rest(graph(found[: self._count]), found[self._count :])


class _Unknown(Exception):
    """A step that native code can't go as Python does."""


def _path(steps: Any) -> Path:
    return tuple((kind, key) for kind, key in steps)


@dataclass(slots=True)
class _Plan:
    """Nodes by path, with what they lead to in the call that passed. ``("__dict__", None)`` is the step to an object's
    dictionary."""

    scope: dict[str, Any]
    step: Step
    numbers: dict[Path, int] = field(default_factory=dict)
    values: list[Any] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    typed: set[int] = field(default_factory=set)
    facts: list[tuple[str, int, Any]] = field(default_factory=list)

    def node(self, path: Path) -> int:
        """The number of the node that a path leads to. Raises :class:`_Unknown`."""
        found = self.numbers.get(path)
        if found is not None:
            return found
        if len(path) == 1:
            name = path[0][1]
            if name not in self.scope:
                raise _Unknown
            return self._new(path, Node("argument", 0, list(self.scope).index(name), None), self.scope[name])
        kind, key = path[-1]
        parent = self.node(path[:-1])
        value = self.values[parent]
        if kind == "attr":
            if not is_plainly_read(value, key) or not _has_plain_dictionary(type(value)):
                raise _Unknown
            held = self.node((*path[:-1], _INTO_DICT))
            return self._new(path, Node("dict", held, key, None), value.__dict__[key])
        if (kind, key) == _INTO_DICT:
            if not _has_plain_dictionary(type(value)):
                raise _Unknown
            self.typed.add(parent)
            return self._new(path, Node("attributes", parent, None, None), value.__dict__)
        step = _step_into(value, key) if kind == "item" else None
        if step is None:
            raise _Unknown
        try:
            below = self.step(value, kind, key)
        except LookupError:
            raise _Unknown from None
        self.typed.add(parent)
        return self._new(path, Node(step, parent, key, None), below)

    def _new(self, path: Path, node: Node, value: Any) -> int:
        self.nodes.append(node)
        self.values.append(value)
        self.numbers[path] = len(self.nodes) - 1
        return len(self.nodes) - 1

    def left_of(self, tree: Mapping[str, Any]) -> dict[str, Any]:
        """Note all facts of a tree; returns, as a tree, those for which that can't be done."""
        rests = ((name, self._left_of_node(node, (("local", name),))) for name, node in tree.items())
        return {name: rest for name, rest in rests if rest is not None}

    def _left_of_node(self, node: Any, path: Path) -> Any:
        below, facts = node
        try:
            number = self.node(path)
        except _Unknown:
            return node
        value = self.values[number]
        left = [(kind, expected) for kind, expected in facts if not self._fact(path, kind, expected, value)]
        rests = ((step, self._left_of_node(child, (*path, step))) for step, child in below.items())
        rest = {step: each for step, each in rests if each is not None}
        return (rest, left) if rest or left else None

    def _fact(self, path: Path, kind: str, expected: Any, value: Any) -> bool:
        """Note a fact, or say that it can't be."""
        number, sizes = self.numbers[path], type(value) in _STEP_OF
        if kind == "equal" and is_plain(value):
            alone = value is None or type(value) in (bool, torch.dtype)
            self._note("is" if alone else "equal", number, value)
        elif kind == "type":
            self.typed.add(number)
        elif kind == "contains":
            return self._contains(path, *expected)
        elif kind == "hasattr" and expected[1] and isinstance(expected[0], str):
            self.typed.add(number)
            return _is_had_by_class(type(value), expected[0]) or (
                is_plainly_read(value, expected[0]) and self._contains(path, *expected)
            )
        elif kind in ("length", "empty") and sizes:
            self._note("size", number, 0 if kind == "empty" else expected)
        else:
            return False
        return True

    def _contains(self, path: Path, key: Any, wanted: bool) -> bool:
        if type(key) is not str:
            return False
        value = self.values[self.numbers[path]]
        if _STEP_OF.get(type(value)) != "dict":
            if isinstance(value, dict):
                return False
            try:
                path = (*path, _INTO_DICT)
                self.node(path)
            except _Unknown:
                return False
        self._note("contains" if wanted else "lacks", self.numbers[path], key)
        return True

    def _note(self, name: str, number: int, value: Any) -> None:
        if name != "is":
            self.typed.add(number)
        self.facts.append((name, number, value))

    def walk(self, wanted: Sequence[int]) -> ObjectWalk | None:
        """The walk, whose nodes are in the order of their depth: those that follow each other don't wait for each
        other."""
        depths: list[int] = []
        for node in self.nodes:
            depths.append(0 if node.step == "argument" else depths[node.parent] + 1)
        order = sorted(range(len(depths)), key=depths.__getitem__)
        place = {number: k for k, number in enumerate(order)}
        nodes = []
        for number in order:
            node = self.nodes[number]
            kind = type(self.values[number]) if number in self.typed and node.step != "attributes" else None
            nodes.append(Node(node.step, place[node.parent], node.key, kind))
        moved = {"same": lambda value: place[value]}
        facts = [
            Fact(name, place[at], moved.get(name, lambda v: v)(value)) for name, at, value in dict.fromkeys(self.facts)
        ]
        return ObjectWalk.of(nodes, facts, [place[number] for number in wanted])


def _step_into(value: Any, key: Any) -> str | None:
    """How native code finds an item, if it does."""
    step = _STEP_OF.get(type(value))
    if step == "dict":
        return step if type(key) is str else None
    return step if type(key) is int and key >= 0 else None


def _has_plain_dictionary(kind: type) -> bool:
    """Whether an object's ``__dict__`` is where its attributes are."""
    how: Any = kind.__getattribute__
    named = [vars(each)["__dict__"] for each in kind.__mro__ if "__dict__" in vars(each)]
    plain = all(isinstance(each, types.GetSetDescriptorType) for each in named)
    return how is object.__getattribute__ and kind.__dictoffset__ != 0 and plain


def _is_had_by_class(kind: type, name: str) -> bool:
    """Whether all objects of a class have an attribute, without a function being called for it."""
    how: Any = kind.__getattribute__
    if how is not object.__getattribute__:
        return False
    held = next((vars(each)[name] for each in kind.__mro__ if name in vars(each)), None)
    return held is not None and (isinstance(held, types.FunctionType) or not hasattr(type(held), "__get__"))
