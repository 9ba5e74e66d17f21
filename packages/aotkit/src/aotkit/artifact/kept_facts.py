"""Facts about a module that held in one call, and hold as long as nothing that they were read from is changed.

Note [Kept facts]
    A module of some hundred layers has thousands of facts (numbers, hooks, classes of its parts): to look at all of
    them takes milliseconds, where a step of a language model takes a few. What they are read from are dictionaries: of
    attributes, of submodules, of hooks. As long as each is as it was, the facts are what they were.
    Python 3.11 tells that for all of them in a few microseconds (:class:`~aotkit_inductor_lower.runtime.DictStates`).
    Of one that has changed those items are compared that facts were read from, by their identity; only if one of these
    is another, the facts are looked at again. On other Pythons they are looked at once for each module.

    Most of a module's dictionaries are for hooks, and empty. That none was registered since is told by the number of
    the next hook, which torch counts for the process.

    What is held here are dictionaries and what lies in them. A module's own ``__dict__`` that is replaced by another
    dictionary, and a hook that is put into a dictionary by hand, go unnoticed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

from torch.utils.hooks import RemovableHandle

from aotkit_inductor_lower.runtime import DictStates

__all__ = ["KeptFacts"]

_ABSENT = object()
_LOOKS_INSIDE = ("length", "keys", "empty", "equal")


class KeptFacts:
    """What rows (:mod:`.saved_checks`) were read from. Safe under threads."""

    __slots__ = ("_read_from", "_rows")

    def __init__(self, rows: Sequence[Any], scope: Mapping[str, Any]) -> None:
        self._rows = rows
        self._read_from: _ReadFrom | None = None
        self.renew(scope)

    def renew(self, scope: Mapping[str, Any]) -> None:
        """Note what all facts are read from now, of arguments by name."""
        if DictStates.of(()) is None:
            return  # changes will not be told
        next_hook, read = RemovableHandle.next_id, _Read()
        for path, kind, expected in self._rows:
            for each in (path, expected) if kind == "same" else (path,):
                if each[0][1] in scope:
                    read.fact(scope[each[0][1]], each[1:], kind, expected)
        self._read_from = _ReadFrom(read, next_hook)

    def hold(self) -> bool:
        """Whether nothing has changed that a fact was read from, as far as this Python tells."""
        return self._read_from is None or self._read_from.is_as_before()


class _ReadFrom:
    """Dictionaries, lists, and what was in them."""

    __slots__ = ("_empty", "_items", "_lists", "_next_hook", "_states")

    def __init__(self, read: _Read, next_hook: int) -> None:
        self._items, self._empty, self._next_hook = read.items(), list(read.empty.values()), next_hook
        self._lists = [(each, tuple(each)) for each in read.lists.values()]
        states = DictStates.of([held for held, _ in self._items])
        assert states is not None  # as it was asked for before
        self._states = states

    def is_as_before(self) -> bool:
        states, next_hook = self._states, RemovableHandle.next_id
        if self._next_hook != next_hook:
            if any(self._empty):
                return False
            self._next_hook = next_hook
        for each, before in self._lists:
            if len(each) != len(before) or not all(map(operator.is_, each, before)):
                return False
        if states.unchanged():
            return True
        changed = states.changed()
        if not all(map(self._holds_the_same, changed)):
            return False
        states.note(changed)
        return True

    def _holds_the_same(self, number: int) -> bool:
        """Whether a dictionary that has changed is as it was where facts are read from it."""
        held, (count, items) = self._items[number]
        return count in (-1, len(held)) and all(held.get(key, _ABSENT) is value for key, value in items)


class _Read:
    """Dictionaries and lists that facts are read from, and which items: of a dictionary ``None`` for all."""

    def __init__(self) -> None:
        self.keys: dict[int, tuple[dict[Any, Any], set[Any] | None]] = {}
        self.lists: dict[int, list[Any]] = {}
        self.empty: dict[int, dict[Any, Any]] = {}  # for hooks

    def items(self) -> list[tuple[dict[Any, Any], tuple[int, list[tuple[Any, Any]]]]]:
        """Each dictionary with its size, or -1 if that doesn't matter, and the items."""
        found = []
        for held, keys in self.keys.values():
            chosen = list(held) if keys is None else keys
            items = [(key, held.get(key, _ABSENT)) for key in chosen]
            found.append((held, (len(held) if keys is None else -1, items)))
        return found

    def fact(self, value: Any, steps: Sequence[Any], kind: str, expected: Any) -> None:
        """Note what one fact about an argument is read from."""
        for step, key in steps:
            if step == "type":
                return  # what classes define is code
            if step == "attr":
                held = getattr(value, "__dict__", None)
                if isinstance(held, dict):
                    self._item(held, key)
                    if key in held:
                        value = held[key]
                        continue
                value = getattr(value, key)
                continue
            if isinstance(value, dict):
                self._item(value, key)
                value = dict.__getitem__(value, key)
            else:
                self._whole(value)
                value = value[key]
        if kind in ("contains", "hasattr"):
            held = value if isinstance(value, dict) else getattr(value, "__dict__", None)
            if isinstance(held, dict):
                self._item(held, expected[0])
        elif kind == "empty" and steps and str(steps[-1][1]).endswith("_hooks") and value == {}:
            self.empty[id(value)] = value
        elif kind in _LOOKS_INSIDE:
            self._whole(value)

    def _item(self, held: dict[Any, Any], key: Any) -> None:
        _, keys = self.keys.setdefault(id(held), (held, set()))
        if keys is not None:
            keys.add(key)

    def _whole(self, value: Any) -> None:
        if isinstance(value, dict):
            self.keys[id(value)] = (value, None)
        elif isinstance(value, list):
            self.lists[id(value)] = value
