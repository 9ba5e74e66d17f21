"""Hundreds of objects found by attributes and items from the arguments of a call, and facts about them, in one native
pass.

Note [What a walk reads]
    A step of a language model is given a module and a cache, and reads some hundred tensors out of them, by a thousand
    attributes and items: any may be another object than at the last token. The walk looks all of them up in every call
    anew, as Python does: in the dictionary of an object, a dictionary, list or tuple. The classes of objects on the way
    are compared with those that were found when the walk was made, so an attribute that a class doesn't define is the
    one in the object's dictionary. Nodes are in the order of their depth: what neighbours read doesn't depend on each
    other, so their cache misses overlap.
    A dictionary that is as it was at the last walk, which Python 3.11 tells by a number that no other state of any
    dictionary has, holds what it held then, and isn't searched. Objects are borrowed from those that hold them while
    the walk lasts. Nothing runs then that could let them go: the interpreter's lock is held, what is looked for are
    strings, what is compared are numbers, strings and devices, and collections of garbage, which may call a finalizer,
    are put off. What is handed out is owned. (A dictionary may hold a key of a user's class with the hash of a string
    that is looked for; its ``__eq__`` would run, and must not take the model apart.)
"""

from __future__ import annotations

import collections
import ctypes
import functools
import sys
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .argument_reader import array_of, loaded_function

__all__ = ["Fact", "Node", "ObjectWalk", "state_place"]

_WORD = 8
_DICTS = (dict, collections.OrderedDict)
_COMPARED = (int, str, torch.device)  # equal by what they are, without a user's code
_IMPORTS = (
    "PyDict_Contains",
    "PyDict_GetItemWithError",
    "PyErr_Clear",
    "PyGC_Disable",
    "PyGC_Enable",
    "PyList_GetItem",
    "PyObject_RichCompareBool",
    "PyObject_Size",
    "PyTuple_GetItem",
    "PyTuple_New",
    "PyTuple_SetItem",
    "Py_DecRef",
    "Py_IncRef",
    "_PyObject_GetDictPtr",
)
_STEPS = {name: number for number, name in enumerate(("argument", "attributes", "dict", "list", "tuple"))}
_FACTS = {name: number for number, name in enumerate(("is", "equal", "same", "contains", "lacks", "size"))}
Walk = Callable[[tuple[Any, ...], int], "tuple[Any, ...] | None"]


@dataclass(frozen=True, slots=True)
class Node:
    """One step.

    Attributes:
        step: ``argument`` number ``key`` of the call; ``attributes``, the dictionary of the object ``parent``; what a
            ``dict``, ``list`` or ``tuple`` holds under ``key``.
        parent: the number of another node.
        key: a string or a number.
        kind: the class of what is found; ``None`` for any.
    """

    step: str
    parent: int
    key: Any
    kind: type | None


@dataclass(frozen=True, slots=True)
class Fact:
    """What has to hold for the object of a node: it ``is`` a value or is ``equal`` to it, is the ``same`` as another
    node's; a dictionary ``contains`` a key or ``lacks`` it; its ``size``."""

    name: str
    node: int
    value: Any


class ObjectWalk:
    """Looks up the objects of ``wanted``, nodes by their numbers, if all facts hold; see Note [What a walk reads]. Safe
    under threads."""

    __slots__ = ("_counts", "_free", "_held", "_tables", "_walk")

    def __init__(self, nodes: Sequence[Node], facts: Sequence[Fact], wanted: Sequence[int], walk: Walk) -> None:
        self._walk, self._counts = walk, (len(nodes), len(facts), len(wanted))
        self._held = (*nodes, *facts)  # keys, classes and values, whose addresses are in the tables
        rows = [[_STEPS[n.step], n.parent, _operand(n.key, n.step), 0 if n.kind is None else id(n.kind)] for n in nodes]
        told = [[_FACTS[f.name], f.node, _operand(f.value, f.name)] for f in facts]
        self._tables = tuple(array_of([word for row in each for word in row]) for each in (rows, told, [wanted]))
        self._free = [self._memory()]

    @staticmethod
    def of(nodes: Sequence[Node], facts: Sequence[Fact], wanted: Sequence[int]) -> ObjectWalk | None:
        """A walk; ``None`` where one can't be made of these, or Python is not as it takes it."""
        if not all(_is_possible(nodes, k) for k in range(len(nodes))) or not all(_is_told(f, nodes) for f in facts):
            return None
        walk = _compiled()
        return None if walk is None else ObjectWalk(nodes, facts, wanted, walk)

    def objects(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """What is wanted, or ``None`` if an object isn't there, or a class or fact is another."""
        try:
            memory = self._free.pop()
        except IndexError:  # other threads have it
            memory = self._memory()
        found = self._walk(arguments, memory[0])
        self._free.append(memory)
        return found

    def _memory(self) -> tuple[int, Any, Any]:
        """What the native function takes: its address, and what has to stay as long."""
        nodes, facts, _ = self._counts
        arrays = [array_of([0] * count) for count in (nodes, nodes, facts)]
        words = [word for pair in zip(self._counts, map(ctypes.addressof, self._tables), strict=True) for word in pair]
        state = array_of([*words, id(None), *map(ctypes.addressof, arrays)])
        return ctypes.addressof(state), state, arrays


def _is_possible(nodes: Sequence[Node], number: int) -> bool:
    """Whether a step can be gone, from a node before it whose class is known to be of those that it is for."""
    node = nodes[number]
    if node.step == "argument":
        return True
    if not 0 <= node.parent < number:
        return False
    kind = nodes[node.parent].kind
    if node.step == "attributes":
        return kind is not None
    if node.step == "dict":
        return type(node.key) is str and (kind in _DICTS or nodes[node.parent].step == "attributes")
    return type(node.key) is int and node.key >= 0 and kind is {"list": list, "tuple": tuple}[node.step]


def _is_told(fact: Fact, nodes: Sequence[Node]) -> bool:
    """Whether a fact can be looked at without any code of a user's."""
    node = nodes[fact.node]
    if fact.name == "is":
        return True
    if fact.name == "same":
        return 0 <= fact.value < len(nodes)
    if fact.name == "equal":
        return type(fact.value) in _COMPARED and node.kind is type(fact.value)
    if fact.name == "size":
        return type(fact.value) is int and fact.value >= 0 and node.kind in (*_DICTS, list, tuple)
    return type(fact.value) is str and (node.kind in _DICTS or node.step == "attributes")


def _operand(value: Any, use: str) -> int:
    if use in ("argument", "list", "tuple", "same", "size"):
        return int(value)
    return 0 if use == "attributes" else id(value)


@functools.cache
def _compiled() -> Walk | None:
    """The native function, or ``None`` where Python is not as it takes it."""
    if not _is_as_taken():
        return None
    kind = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.py_object, ctypes.c_void_p)
    walk: Walk | None = loaded_function(_text(state_place()), _IMPORTS, "walk", kind)
    return walk


def _is_as_taken() -> bool:
    """Whether objects of Python lie as native code takes it."""
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED") or sys.maxsize < 2**32:
        return False
    samples: tuple[Any, ...] = (0, "", {}, Node)
    return all(_word(value, _WORD) == id(type(value)) for value in samples)


def _word(value: Any, offset: int) -> int:
    return ctypes.c_uint64.from_address(id(value) + offset).value


@functools.cache
def state_place() -> int | None:
    """Bytes to the number of a dictionary's state, which no other dictionary or state has; ``None`` where there is
    none. That is Python 3.11, and if what changes a dictionary is seen to change that number."""
    if sys.version_info[:2] != (3, 11) or not _is_as_taken():
        return None
    place = 3 * _WORD  # behind reference count, class and length
    holder = type("Holder", (), {})()
    held: dict[Any, Any] = holder.__dict__
    seen = [{"a": 1}, {"a": 1}, {}]
    tags = [_word(each, place) for each in seen]

    def store() -> None:
        for number in range(64):  # often enough for the interpreter to specialise it
            holder.a = number

    changes: list[Callable[[], Any]] = [
        store,
        store,
        lambda: setattr(holder, "b", 1),
        lambda: delattr(holder, "b"),
        lambda: held.update(a=-1),
        lambda: held.__setitem__("a", -2),
        lambda: held.setdefault("c", 0),
        lambda: held.pop("c"),
        lambda: held.__ior__({"a": -3}),
        lambda: held.popitem(),
        lambda: held.__setitem__("a", -4),
        held.clear,
    ]
    for change in changes:
        tags.append(_word(held, place))
        change()
    tags.append(_word(held, place))
    return place if len(set(tags)) == len(tags) else None


_WORDS = (
    "count.nodes",
    "nodes",
    "count.facts",
    "facts",
    "count.wanted",
    "wanted",
    "none",
    "objects",
    "tags",
    "fact.tags",
)
_STATE = "\n".join(
    f"  %at.{name} = getelementptr i64, ptr %state, i64 {k}\n"
    f"  %{name} = load {'i64' if name.startswith('count') else 'ptr'}, ptr %at.{name}"
    for k, name in enumerate(_WORDS)
)
_FOUND_BY = {
    "argument": "call ptr @PyTuple_GetItem(ptr %arguments, i64 %key)",
    "list": "call ptr @PyList_GetItem(ptr %holder, i64 %key)",
    "tuple": "call ptr @PyTuple_GetItem(ptr %holder, i64 %key)",
}
_FINDS = "\n".join(f"{name}:\n  %found.{name} = {call}\n  br label %found" for name, call in _FOUND_BY.items())
_CHOICES = " ".join(f"i64 {number}, label %{name}" for name, number in _STEPS.items())
_COME_TOGETHER = ", ".join(f"[ %found.{name}, %{name} ]" for name in _FOUND_BY)
_TELLS = "\n".join(
    f"{name}:\n  %told.{name} = call i32 @PyDict_Contains(ptr %about, ptr %value.object)\n"
    f"  %holds.{name} = icmp eq i32 %told.{name}, {wanted}\n  br i1 %holds.{name}, label %note, label %no"
    for name, wanted in (("look.contains", 1), ("look.lacks", 0))
)


def _same_dict(name: str, dictionary: str, tags: str, tag_at: int | None, then: tuple[str, str]) -> str:
    """Text that goes to the first of two labels where a dictionary is the one of the last call, as it was then.
    ``tags``: where its number was noted."""
    same, other = then
    if tag_at is None:
        return f"  %{name}.tag = add i64 0, 0\n  br label %{other}"
    return f"""  %{name}.tag.at = getelementptr i8, ptr {dictionary}, i64 {tag_at}
  %{name}.tag.was.at = getelementptr i64, ptr {tags}
  %{name}.tag = load i64, ptr %{name}.tag.at
  %{name}.tag.was = load i64, ptr %{name}.tag.was.at
  %{name}.tag.same = icmp eq i64 %{name}.tag.was, %{name}.tag
  br i1 %{name}.tag.same, label %{same}, label %{other}"""


def _text(tag_at: int | None) -> str:
    """LLVM text of ``walk(arguments, state)``, which returns a tuple, or ``None``."""
    return f"""
declare i32 @PyDict_Contains(ptr, ptr)
declare ptr @PyDict_GetItemWithError(ptr, ptr)
declare void @PyErr_Clear()
declare i32 @PyGC_Disable()
declare i32 @PyGC_Enable()
declare ptr @PyList_GetItem(ptr, i64)
declare i32 @PyObject_RichCompareBool(ptr, ptr, i32)
declare i64 @PyObject_Size(ptr)
declare ptr @PyTuple_GetItem(ptr, i64)
declare ptr @PyTuple_New(i64)
declare i32 @PyTuple_SetItem(ptr, i64, ptr)
declare void @Py_DecRef(ptr)
declare void @Py_IncRef(ptr)
declare ptr @_PyObject_GetDictPtr(ptr)

define ptr @walk(ptr %arguments, ptr %state) {{
entry:
{_STATE}
  %result = call ptr @PyTuple_New(i64 %count.wanted)
  %is.result = icmp ne ptr %result, null
  br i1 %is.result, label %begin, label %failed
failed:
  ret ptr null
begin:
  %collects = call i32 @PyGC_Disable()
  br label %node
node:
  %i = phi i64 [ 0, %begin ], [ %i.next, %node.next ]
  %row = getelementptr [4 x i64], ptr %nodes, i64 %i
  %parent.at = getelementptr i64, ptr %row, i64 1
  %key.at = getelementptr i64, ptr %row, i64 2
  %kind.at = getelementptr i64, ptr %row, i64 3
  %step = load i64, ptr %row
  %parent = load i64, ptr %parent.at
  %key = load i64, ptr %key.at
  %key.object = inttoptr i64 %key to ptr
  %kind = load i64, ptr %kind.at
  %holder.at = getelementptr ptr, ptr %objects, i64 %parent
  %holder = load ptr, ptr %holder.at
  switch i64 %step, label %no [ {_CHOICES} ]
attributes:
  %held.at = call ptr @_PyObject_GetDictPtr(ptr %holder)
  %is.held = icmp ne ptr %held.at, null
  br i1 %is.held, label %held, label %no
held:
  %found.held = load ptr, ptr %held.at
  br label %found
dict:
{_same_dict("node", "%holder", "%tags, i64 %i", tag_at, ("kept", "look"))}
kept:
  %kept.at = getelementptr ptr, ptr %objects, i64 %i
  %found.kept = load ptr, ptr %kept.at
  br label %found
look:
  %found.look = call ptr @PyDict_GetItemWithError(ptr %holder, ptr %key.object)
  %is.found = icmp ne ptr %found.look, null
  br i1 %is.found, label %keep, label %no
keep:
  %keep.at = getelementptr ptr, ptr %objects, i64 %i
  %keep.tag.at = getelementptr i64, ptr %tags, i64 %i
  store ptr %found.look, ptr %keep.at
  store i64 %node.tag, ptr %keep.tag.at
  br label %found
{_FINDS}
found:
  %object = phi ptr [ %found.held, %held ], [ %found.kept, %kept ], [ %found.look, %keep ], {_COME_TOGETHER}
  %is.there = icmp ne ptr %object, null
  br i1 %is.there, label %there, label %no
there:
  %object.to = getelementptr ptr, ptr %objects, i64 %i
  store ptr %object, ptr %object.to
  %is.any = icmp eq i64 %kind, 0
  br i1 %is.any, label %node.next, label %typed
typed:
  %class.at = getelementptr i8, ptr %object, i64 {_WORD}
  %class = load i64, ptr %class.at
  %class.same = icmp eq i64 %class, %kind
  br i1 %class.same, label %node.next, label %no
node.next:
  %i.next = add i64 %i, 1
  %i.more = icmp slt i64 %i.next, %count.nodes
  br i1 %i.more, label %node, label %all
all:
  %any.facts = icmp sgt i64 %count.facts, 0
  br i1 %any.facts, label %fact, label %hand
fact:
  %f = phi i64 [ 0, %all ], [ %f.next, %fact.next ]
  %fact.row = getelementptr [3 x i64], ptr %facts, i64 %f
  %about.number.at = getelementptr i64, ptr %fact.row, i64 1
  %value.at = getelementptr i64, ptr %fact.row, i64 2
  %fact.kind = load i64, ptr %fact.row
  %about.number = load i64, ptr %about.number.at
  %value = load i64, ptr %value.at
  %value.object = inttoptr i64 %value to ptr
  %about.at = getelementptr ptr, ptr %objects, i64 %about.number
  %about = load ptr, ptr %about.at
  switch i64 %fact.kind, label %no [ {" ".join(f"i64 {number}, label %{name}" for name, number in _FACTS.items())} ]
is:
  %is.it = icmp eq ptr %about, %value.object
  br i1 %is.it, label %fact.next, label %no
same:
  %other.at = getelementptr ptr, ptr %objects, i64 %value
  %other = load ptr, ptr %other.at
  %is.same = icmp eq ptr %about, %other
  br i1 %is.same, label %fact.next, label %no
size:
  %told.size = call i64 @PyObject_Size(ptr %about)
  %same.size = icmp eq i64 %told.size, %value
  br i1 %same.size, label %fact.next, label %no
equal:
  %told.equal = call i32 @PyObject_RichCompareBool(ptr %about, ptr %value.object, i32 2)
  %holds.equal = icmp eq i32 %told.equal, 1
  br i1 %holds.equal, label %fact.next, label %no
contains:
  br label %dictionary
lacks:
  br label %dictionary
dictionary:
  %wants = phi i1 [ true, %contains ], [ false, %lacks ]
{_same_dict("fact", "%about", "%fact.tags, i64 %f", tag_at, ("fact.next", "ask"))}
ask:
  br i1 %wants, label %look.contains, label %look.lacks
{_TELLS}
note:
  %note.tag.at = getelementptr i64, ptr %fact.tags, i64 %f
  store i64 %fact.tag, ptr %note.tag.at
  br label %fact.next
fact.next:
  %f.next = add i64 %f, 1
  %f.more = icmp slt i64 %f.next, %count.facts
  br i1 %f.more, label %fact, label %hand
hand:
  %any.wanted = icmp sgt i64 %count.wanted, 0
  br i1 %any.wanted, label %give, label %yes
give:
  %w = phi i64 [ 0, %hand ], [ %w.next, %give ]
  %wanted.at = getelementptr i64, ptr %wanted, i64 %w
  %wanted.number = load i64, ptr %wanted.at
  %given.at = getelementptr ptr, ptr %objects, i64 %wanted.number
  %given = load ptr, ptr %given.at
  call void @Py_IncRef(ptr %given)
  %set = call i32 @PyTuple_SetItem(ptr %result, i64 %w, ptr %given)
  %w.next = add i64 %w, 1
  %w.more = icmp slt i64 %w.next, %count.wanted
  br i1 %w.more, label %give, label %yes
no:
  call void @PyErr_Clear()
  call void @Py_DecRef(ptr %result)
  call void @Py_IncRef(ptr %none)
  br label %yes
yes:
  %answer = phi ptr [ %result, %hand ], [ %result, %give ], [ %none, %no ]
  %collected = icmp ne i32 %collects, 0
  br i1 %collected, label %again, label %end
again:
  %enabled = call i32 @PyGC_Enable()
  br label %end
end:
  ret ptr %answer
}}
"""
