"""Walks over objects: what they find is what Python finds, after any change of the objects between two walks."""

from __future__ import annotations

import collections
import gc
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch

from aotkit_inductor_lower.runtime import Fact, Node, ObjectWalk, object_walk

KNOWN = sys.implementation.name == "cpython" and sys.version_info[:2] == (3, 11)
pytestmark = pytest.mark.skipif(
    not KNOWN and object_walk._compiled() is None,
    reason="no walks here: they are for CPython of 64 bits with its lock, as 3.11 is, which must have them",
)


class Part:
    def __init__(self, value: Any) -> None:
        self.value, self.flag, self.size = value, False, 1000
        self.parts: Any = {"a": [1, (2, 3)], "b": None}


class Other(Part):
    pass


NODES = (
    Node("argument", 0, 0, Part),
    Node("argument", 0, 1, None),
    Node("attributes", 0, None, None),
    Node("dict", 2, "value", None),
    Node("dict", 2, "flag", None),
    Node("dict", 2, "size", int),
    Node("dict", 2, "parts", dict),
    Node("dict", 6, "a", list),
    Node("dict", 6, "b", None),
    Node("list", 7, 1, tuple),
    Node("tuple", 9, 0, None),
)
FACTS = (
    Fact("is", 4, False),
    Fact("equal", 5, 1000),
    Fact("contains", 6, "b"),
    Fact("lacks", 2, "hidden"),
    Fact("size", 7, 2),
    Fact("same", 3, 8),
)
WANTED = (1, 3, 10, 1)


def looked_up(one: Any, other: Any) -> tuple[Any, ...] | None:
    """What a walk is to find, in Python."""
    if type(one) is not Part:
        return None
    held = one.__dict__
    try:
        value, flag, size, parts = (dict.__getitem__(held, name) for name in ("value", "flag", "size", "parts"))
        if type(parts) is not dict or type(size) is not int:
            return None
        items, b = parts["a"], parts["b"]
        if type(items) is not list or type(items[1]) is not tuple:
            return None
        found = items[1][0]
    except LookupError:
        return None
    holds = flag is False and size == 1000 and "hidden" not in held and len(items) == 2 and value is b
    return (other, value, found, other) if holds else None


def freed_and_made_again(part: Any) -> None:
    kept = dict(part.parts)
    part.parts = None
    gc.collect()
    part.parts = {"a": kept["a"], "b": object()}


CHANGES: dict[str, Callable[[Any], object]] = {
    "nothing": lambda p: None,
    "another value": lambda p: setattr(p, "value", 3),
    "another value on both sides": lambda p: (setattr(p, "value", p), p.parts.update(b=p)),
    "in the dictionary": lambda p: p.__dict__.update(value=4),
    "an attribute less": lambda p: delattr(p, "flag"),
    "an attribute more": lambda p: setattr(p, "hidden", 1),
    "a flag": lambda p: setattr(p, "flag", True),
    "equal to a flag": lambda p: setattr(p, "flag", 0),
    "a number": lambda p: setattr(p, "size", 1001),
    "an equal number": lambda p: setattr(p, "size", int("1000")),
    "an equal number of another class": lambda p: setattr(p, "size", 1000.0),
    "a key less": lambda p: p.parts.pop("b"),
    "a key moved": lambda p: p.parts.__setitem__("b", p.parts.pop("b")),
    "an item more": lambda p: p.parts["a"].append(1),
    "an item less": lambda p: p.parts["a"].pop(),
    "no items": lambda p: p.parts["a"].clear(),
    "another item": lambda p: p.parts["a"].__setitem__(1, (7,)),
    "an empty tuple": lambda p: p.parts["a"].__setitem__(1, ()),
    "a list for a tuple": lambda p: p.parts["a"].__setitem__(1, [2, 3]),
    "another list": lambda p: p.parts.update(a=[1, (9, 9)]),
    "another dictionary": lambda p: setattr(p, "parts", dict(p.parts)),
    "a dictionary of a class": lambda p: setattr(p, "parts", collections.defaultdict(None, p.parts)),
    "no dictionary": lambda p: setattr(p, "parts", None),
    "other attributes": lambda p: setattr(p, "__dict__", dict(p.__dict__)),
    "other attributes with another value": lambda p: setattr(p, "__dict__", {**p.__dict__, "value": 5}),
    "another class": lambda p: setattr(p, "__class__", Other),
    "freed and made again": freed_and_made_again,
    "emptied": lambda p: p.__dict__.clear(),
    "merged": lambda p: p.__dict__.__ior__({"value": 6}),
    "in a loop": lambda p: [setattr(p, "value", k) for k in range(70)],
}


@pytest.fixture(params=["tags", "no tags"])
def walk(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> ObjectWalk:
    if request.param == "no tags":  # as of versions of Python whose dictionaries have no number for their state
        monkeypatch.setattr(object_walk, "state_place", lambda: None)
        monkeypatch.setattr(object_walk, "_compiled", object_walk._compiled.__wrapped__)
    made = ObjectWalk.of(NODES, FACTS, WANTED)
    assert made is not None
    return made


def compare(walk: ObjectWalk, part: Any, other: Any) -> bool:
    expected, found = looked_up(part, other), walk.objects((part, other))
    assert (found is None) is (expected is None)
    if found is None or expected is None:
        return False
    assert all(one is another for one, another in zip(found, expected, strict=True)) and len(found) == len(expected)
    return True


def test_python_has_numbers_of_states_in_the_version_that_is_known() -> None:
    assert (object_walk.state_place() is not None) is KNOWN


@pytest.mark.parametrize("name", CHANGES, ids=lambda name: name.replace(" ", "_"))
def test_a_change_is_seen(walk: ObjectWalk, name: str) -> None:
    part = Part(None)
    for _ in range(2):
        assert compare(walk, part, object())
    CHANGES[name](part)
    for _ in range(2):
        compare(walk, part, object())


def test_random_changes(walk: ObjectWalk) -> None:
    """Several changes to several objects, which are walked in turns by one walk; each is found as Python finds it."""
    random, right = Random(1), 0
    for _ in range(20):
        parts = [Part(None) for _ in range(2)]
        for _ in range(8):
            right += compare(walk, part := random.choice(parts), object())
            try:
                CHANGES[random.choice([*CHANGES])](part)
            except (AttributeError, LookupError, TypeError):
                continue  # nothing left to change
    assert right > 20


def test_nothing_is_held_and_nothing_is_lost(walk: ObjectWalk) -> None:
    part, other, wrong = Part(None), object(), Part(None)
    del wrong.flag
    objects = (part, other, part.parts, part.parts["a"], part.parts["a"][1], None)
    before = [*map(sys.getrefcount, objects)]
    for _ in range(500):
        assert walk.objects((part, other)) is not None
        assert walk.objects((wrong, other)) is None
        assert walk.objects((3, other)) is None
    after = [*map(sys.getrefcount, objects)]
    assert all(abs(one - another) < 50 for one, another in zip(before, after, strict=True))
    assert gc.isenabled()


def test_collections_stay_off_where_they_were(walk: ObjectWalk) -> None:
    gc.disable()
    try:
        assert walk.objects((Part(None), 1)) is not None
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_too_few_arguments(walk: ObjectWalk) -> None:
    assert walk.objects((Part(None),)) is None
    assert walk.objects(()) is None


def test_a_walk_within_a_walk(walk: ObjectWalk) -> None:
    """Memory that another call has is not used."""
    memory = walk._free.pop()
    assert compare(walk, Part(None), 1)
    walk._free.append(memory)
    assert compare(walk, Part(None), 2)


def test_devices_are_compared() -> None:
    nodes = (Node("argument", 0, 0, torch.device),)
    walk = ObjectWalk.of(nodes, (Fact("equal", 0, torch.device("cpu")),), ())
    assert walk is not None
    assert walk.objects((torch.device("cpu"),)) == ()
    assert walk.objects((torch.device("meta"),)) is None and walk.objects(("cpu",)) is None


ARGUMENT = Node("argument", 0, 0, None)
IMPOSSIBLE: dict[str, tuple[tuple[Node, ...], tuple[Fact, ...]]] = {
    "a key of any class": ((Node("argument", 0, 0, dict), Node("dict", 0, 3, None)), ()),
    "items of any class": ((ARGUMENT, Node("list", 0, 1, None)), ()),
    "attributes of any class": ((ARGUMENT, Node("attributes", 0, None, None)), ()),
    "a dictionary's class": ((Node("argument", 0, 0, collections.defaultdict), Node("dict", 0, "a", None)), ()),
    "from the end": ((Node("argument", 0, 0, list), Node("list", 0, -1, None)), ()),
    "before its holder": ((Node("list", 1, 0, None), Node("argument", 0, 0, list)), ()),
    "equal to a float": ((Node("argument", 0, 0, float),), (Fact("equal", 0, 1.0),)),
    "equal to what may be of any class": ((ARGUMENT,), (Fact("equal", 0, 1),)),
    "the size of anything": ((ARGUMENT,), (Fact("size", 0, 1),)),
    "a key of anything": ((ARGUMENT,), (Fact("contains", 0, "a"),)),
    "as a node that isn't there": ((ARGUMENT,), (Fact("same", 0, 7),)),
}


@pytest.mark.parametrize("name", IMPOSSIBLE, ids=lambda name: name.replace(" ", "_"))
def test_what_could_call_others_code_is_no_walk(name: str) -> None:
    assert ObjectWalk.of(*IMPOSSIBLE[name], ()) is None
    assert ObjectWalk.of((ARGUMENT,), (), (0,)) is not None


def test_a_python_without_a_function_has_no_walks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_walk, "_IMPORTS", ("PyDict_NoSuchFunction",))
    assert object_walk._compiled.__wrapped__() is None
