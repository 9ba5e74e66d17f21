"""What Dynamo's bytecode of a function does, where it only looks up a graph's inputs, calls the graph and puts the
results together.

Note [Straight code]
    The bytecode of a model's step goes some thousand attributes and items down to its weights, one instruction after
    the other. Where all instructions before the call of the graph only follow attributes and items from the arguments,
    that part is a list of paths, which native code can follow, and what comes after the call is written out as one
    Python function. Both are read off the bytecode by running it with names in the place of values. An instruction that
    isn't known here, a jump that depends on an argument, a call of anything before the graph: then there are no paths,
    and the bytecode runs as it is. Instructions that the versions of Python have under one name and mean differently
    are told apart by their flags.
"""

from __future__ import annotations

import dis
import inspect
import keyword
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Path", "StraightCode", "straight_code"]

Path = tuple[tuple[str, Any], ...]
"""Steps: ``("local", name)`` first, then ``("attr", name)`` and ``("item", key)``."""


@dataclass(frozen=True, slots=True)
class StraightCode:
    """A function in two parts, around its call of a graph.

    Attributes:
        arguments: where the graph's arguments are found.
        kept: where other values are found that the rest needs, as they were before the call.
        rest: from the graph's result and the values of ``kept`` to the function's result.
    """

    arguments: Sequence[Path]
    kept: Sequence[Path]
    rest: Callable[[Any, Sequence[Any]], Any]


class _NotStraight(Exception):
    """Something else than attributes, items and one call."""


@dataclass(frozen=True, slots=True)
class _Known:
    """A value that is the same in every call."""

    value: Any


@dataclass(frozen=True, slots=True)
class _Global:
    name: str


@dataclass(frozen=True, slots=True)
class _Text:
    """A variable of the function that is written."""

    name: str


_NULL = _Known(object())
_METHOD_FLAG = sys.version_info >= (3, 12)  # LOAD_ATTR says by a bit that it finds a method
_OURS = "_rest_"  # what variables of the function that is written begin with
_IGNORED = {"RESUME", "NOP", "CACHE", "PRECALL", "NOT_TAKEN", "EXTENDED_ARG", "DELETE_FAST"}
_OTHER_KINDS = inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR
_JUMPS_IF: dict[str, Callable[[Any], bool]] = {
    "FALSE": lambda value: not value,
    "TRUE": bool,
    "NOT_NONE": lambda value: value is not None,
    "NONE": lambda value: value is None,
}
_LOADS = {"LOAD_FAST", "LOAD_FAST_CHECK", "LOAD_FAST_BORROW"}
Value = Path | _Known | _Global | _Text


def straight_code(
    function: types.FunctionType, graph: str, helpers: Sequence[Callable[..., Any]] = ()
) -> StraightCode | None:
    """The two parts of a function, or ``None`` where it is more than that.

    Args:
        function: with Dynamo's bytecode.
        graph: the global variable by which it calls the graph.
        helpers: functions that do nothing and return ``None``, which may be called before the graph.
    """
    try:
        return _Reader(function, graph, helpers).read()
    except _NotStraight:
        return None


@dataclass(slots=True)
class _Reader:
    function: types.FunctionType
    graph: str
    helpers: Sequence[Callable[..., Any]]
    stack: list[Value] = field(default_factory=list)
    locals: dict[str, Value] = field(default_factory=dict)
    keywords: tuple[str, ...] = ()
    arguments: list[Path] | None = None
    kept: list[Path] = field(default_factory=list)
    constants: list[Any] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    next: int = 0  # where the instruction begins that is read next

    def read(self) -> StraightCode:
        code = self.function.__code__
        count = code.co_argcount + code.co_kwonlyargcount
        count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
        if code.co_flags & _OTHER_KINDS or code.co_freevars or code.co_cellvars or code.co_exceptiontable:
            raise _NotStraight
        self.locals = {name: (("local", name),) for name in code.co_varnames[:count]}
        for instruction in dis.get_instructions(code):
            if instruction.offset >= self.next and self._step(instruction):
                return self._finished()
        raise _NotStraight

    def _finished(self) -> StraightCode:
        if self.arguments is None:
            raise _NotStraight
        body = "\n".join(f"    {line}" for line in self.lines)
        space: dict[str, Any] = {}
        source = f"def rest({_OURS}result, {_OURS}kept, {_OURS}constants=()):\n{body}\n"
        exec(compile(source, f"<aotkit rest of {self.function.__name__}>", "exec"), space)
        rest = types.FunctionType(space["rest"].__code__, self.function.__globals__, "rest", (tuple(self.constants),))
        return StraightCode(tuple(self.arguments), tuple(self.kept), rest)

    def _step(self, instruction: dis.Instruction) -> bool:
        """Follow one instruction; whether the function ends."""
        name, arg = instruction.opname, instruction.arg or 0
        if name in _IGNORED:
            return False
        if name == "RETURN_VALUE":
            self.lines.append(f"return {self._text(self.stack.pop())}")
            return True
        if name in _LOADS:
            self.stack.append(self._local(instruction.argval))
        elif name == "STORE_FAST":
            self.locals[instruction.argval] = self.stack.pop()
        elif name == "LOAD_CONST":
            self.stack.append(_Known(instruction.argval))
        elif name == "LOAD_SMALL_INT":
            self.stack.append(_Known(arg))
        elif name == "PUSH_NULL":
            self.stack.append(_NULL)
        elif name == "LOAD_GLOBAL":
            null = [_NULL] * (arg & 1)
            self.stack += [*null, self._global(instruction.argval)]
        elif name == "COPY":
            self.stack.append(self.stack[-arg])
        elif name == "SWAP":
            self.stack[-1], self.stack[-arg] = self.stack[-arg], self.stack[-1]
        elif name == "POP_TOP":
            self.stack.pop()
        else:
            self._computes(instruction, name, arg)
        return False

    def _computes(self, instruction: dis.Instruction, name: str, arg: int) -> None:
        if name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._attribute(instruction)
        elif name == "BINARY_SUBSCR" or (name == "BINARY_OP" and instruction.argrepr == "[]"):
            self._item()
        elif name == "CALL":
            self._call(arg)
        elif "JUMP" in name:
            self._jump(instruction)
        elif name in ("IS_OP", "TO_BOOL"):
            self._asks(name, arg)
        elif name == "KW_NAMES":
            self.keywords = self.function.__code__.co_consts[arg]
        elif self.arguments is None:
            raise _NotStraight
        else:
            self._builds(instruction, name, arg)

    def _builds(self, instruction: dis.Instruction, name: str, arg: int) -> None:
        if name in ("BUILD_LIST", "BUILD_TUPLE"):
            items = "".join(f"{self._text(value)}, " for value in self._popped(arg))
            self._write(f"[{items}]" if name == "BUILD_LIST" else f"({items})")
        elif name == "BUILD_MAP":
            pairs = self._popped(2 * arg)
            self._write_dict(pairs[::2], pairs[1::2])
        elif name == "BUILD_CONST_KEY_MAP":
            *values, keys = self._popped(arg + 1)
            if not isinstance(keys, _Known):
                raise _NotStraight
            self._write_dict([_Known(key) for key in keys.value], values)
        elif name == "LIST_EXTEND":
            more = self._text(self.stack.pop())
            self.lines.append(f"{self._text(self.stack[-arg])}.extend({more})")
        elif name == "STORE_ATTR":
            owner = self._text(self.stack.pop())
            self.lines.append(f"{owner}.{_written(instruction.argval)} = {self._text(self.stack.pop())}")
        elif name == "STORE_SUBSCR":
            value, owner, key = (self._text(each) for each in self._popped(3))
            self.lines.append(f"{owner}[{key}] = {value}")
        elif name == "UNPACK_SEQUENCE":
            names = [f"{_OURS}{len(self.lines)}_{k}" for k in range(arg)]
            self.lines.append(f"[{', '.join(names)}] = {self._text(self.stack.pop())}")
            self.stack += [_Text(each) for each in reversed(names)]
        else:
            raise _NotStraight

    def _local(self, name: Any) -> Value:
        if name not in self.locals:  # two names at once, as of superinstructions, or an error in what is read
            raise _NotStraight
        return self.locals[name]

    def _global(self, name: str) -> Value:
        if self.arguments is None or name == self.graph:
            return _Global(name)
        self._write(_written(name))
        return self.stack.pop()

    def _attribute(self, instruction: dis.Instruction) -> None:
        owner, key = self.stack.pop(), instruction.argval
        if instruction.opname == "LOAD_METHOD" or (_METHOD_FLAG and (instruction.arg or 0) & 1):
            self.stack.append(_NULL)  # in the place of what the method is of, as if it were found as an attribute
        if isinstance(owner, tuple) and self.arguments is None:
            self.stack.append((*owner, ("attr", key)))
            return
        if isinstance(owner, _Global):
            held = self.function.__globals__.get(owner.name)
            if not isinstance(held, types.SimpleNamespace):
                raise _NotStraight
            self.stack.append(_Known(getattr(held, key)))
            return
        self._write(f"{self._text(owner)}.{_written(key)}")

    def _jump(self, instruction: dis.Instruction) -> None:
        """Forward, and where a value decides it, by one that is the same in every call."""
        name, target = instruction.opname, instruction.argval
        jumps = True
        if name != "JUMP_FORWARD":
            holds = _JUMPS_IF.get(name.rpartition("IF_")[2])
            value = self.stack.pop()
            if not name.startswith("POP_JUMP") or holds is None or not isinstance(value, _Known):
                raise _NotStraight
            jumps = holds(value.value)
        if target <= instruction.offset:
            raise _NotStraight
        self.next = target if jumps else self.next

    def _asks(self, name: str, arg: int) -> None:
        values = [value.value for value in self._popped(2 if name == "IS_OP" else 1) if isinstance(value, _Known)]
        if name == "IS_OP" and len(values) == 2:
            self.stack.append(_Known((values[0] is values[1]) != bool(arg)))
        elif name == "TO_BOOL" and values:
            self.stack.append(_Known(bool(values[0])))
        else:
            raise _NotStraight

    def _item(self) -> None:
        owner, key = self._popped(2)
        if self.arguments is not None:
            self._write(f"{self._text(owner)}[{self._text(key)}]")
        elif isinstance(owner, tuple) and isinstance(key, _Known) and type(key.value) in (int, str):
            self.stack.append((*owner, ("item", key.value)))
        else:
            raise _NotStraight

    def _call(self, count: int) -> None:
        given = self._popped(count)
        keywords, self.keywords = self.keywords, ()
        called = [value for value in self._popped(2) if value is not _NULL]
        if len(called) != 1:
            raise _NotStraight
        function = called[0]
        if function == _Global(self.graph):
            paths = [value for value in given if isinstance(value, tuple)]
            if keywords or len(paths) != len(given) or self.arguments is not None:
                raise _NotStraight
            self.arguments = paths
            self.stack.append(_Text(f"{_OURS}result"))
        elif isinstance(function, _Known) and any(function.value is helper for helper in self.helpers):
            self.stack.append(_Known(None))
        elif self.arguments is None:
            raise _NotStraight
        else:
            texts = [self._text(value) for value in given]
            first = len(texts) - len(keywords)
            texts[first:] = [f"{_written(key)}={text}" for key, text in zip(keywords, texts[first:], strict=True)]
            self._write(f"{self._text(function)}({', '.join(texts)})")

    def _write_dict(self, keys: Sequence[Value], values: Sequence[Value]) -> None:
        pairs = [f"{self._text(key)}: {self._text(value)}" for key, value in zip(keys, values, strict=True)]
        self._write(f"{{{', '.join(pairs)}}}")

    def _popped(self, count: int) -> list[Value]:
        if count > len(self.stack):
            raise _NotStraight
        values = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return values

    def _write(self, expression: str) -> None:
        if self.arguments is None:
            raise _NotStraight
        name = f"{_OURS}{len(self.lines)}"
        self.lines.append(f"{name} = {expression}")
        self.stack.append(_Text(name))

    def _text(self, value: Value) -> str:
        if isinstance(value, _Text):
            return value.name
        if isinstance(value, tuple):
            if value not in self.kept:
                self.kept.append(value)
            return f"{_OURS}kept[{self.kept.index(value)}]"
        if not isinstance(value, _Known) or value is _NULL:
            raise _NotStraight
        if type(value.value) is int:
            return f"({value.value})"  # an attribute of it may follow
        if value.value is None or type(value.value) in (bool, str):
            return repr(value.value)
        self.constants.append(value.value)
        return f"{_OURS}constants[{len(self.constants) - 1}]"


def _written(name: str) -> str:
    """A name as it stands in a program."""
    if not name.isidentifier() or keyword.iskeyword(name) or name.startswith(_OURS):
        raise _NotStraight
    return name
