"""IR text back to IR, see Note [IR text] in :mod:`.print`. Written by hand; nothing is evaluated."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace

from ..errors import IRSyntaxError
from ..symbolic import Expr
from ..symbolic.text import ScanError, Scanner, scan_expr
from .nodes import (
    STORE_MODES,
    Alias,
    Arg,
    Buffer,
    BufferKind,
    BufferRef,
    CheckedIndex,
    Compute,
    Const,
    DType,
    ExternCall,
    Index,
    Instr,
    Literal,
    Load,
    LoopNest,
    Origin,
    Program,
    Range,
    Reduce,
    Stage,
    Step,
    Store,
    SymInput,
)
from .print import IR_TEXT_VERSION, LITERAL_KINDS, RESERVED

__all__ = ["parse_nest", "parse_program"]

_NAME = re.compile(r'[A-Za-z_][A-Za-z0-9_]*|"(?:[^"\\]|\\.)*"')
_PATH = re.compile(r'[A-Za-z_][A-Za-z0-9_.:]*|"(?:[^"\\]|\\.)*"')
_VALUE = re.compile(r'%([A-Za-z_][A-Za-z0-9_]*|"(?:[^"\\]|\\.)*")')
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
_WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INTEGER = re.compile(r"-?\d+")
_SCALAR = re.compile(r'-?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf)|nan|none|true|false|"(?:[^"\\]|\\.)*"')
_STRINGS = re.compile(r'\[\s*(?:"(?:[^"\\]|\\.)*"(?:\s*,\s*"(?:[^"\\]|\\.)*")*)?\s*\]')
_CONSTANTS = {"none": None, "true": True, "false": False, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DTYPES = {dtype.value: dtype for dtype in DType}
_BUFFER_KINDS = {kind.value: kind for kind in BufferKind}


def parse_program(text: str) -> Program:
    """The program that :func:`print_program` wrote. Raises :class:`IRSyntaxError` with line and column."""
    parser = _Parser(text)
    try:
        program = parser.program()
        parser.end()
    except ScanError as error:
        raise IRSyntaxError(error.message, parser.line, error.position + 1) from None
    return program


def parse_nest(text: str) -> LoopNest:
    """The loop nest that :func:`print_nest` wrote. Raises :class:`IRSyntaxError` with line and column."""
    parser = _Parser(text)
    try:
        nest = parser.nest()
        parser.end()
    except ScanError as error:
        raise IRSyntaxError(error.message, parser.line, error.position + 1) from None
    return nest


class _Parser:
    """The statements of the text, one line at a time; ``scan`` is inside the current one.

    Index lists are kept by their text: the same few come back all the time.
    """

    def __init__(self, text: str) -> None:
        lines = text.split("\n")
        self.statements = [(n, line) for n, line in enumerate(lines, 1) if _is_statement(line)]
        self.statements.append((len(lines), ""))
        self.current = 0
        self.scan = Scanner(self.statements[0][1])
        self.known: dict[str, tuple[Expr, ...]] = {}

    # -- lines -----------------------------------------------------------------------------------

    @property
    def line(self) -> int:
        return self.statements[self.current][0]

    def finish_line(self) -> None:
        """Check that the statement is complete and go to the next."""
        if not self.scan.at_end():
            raise self.scan.error(f"expected the end of the line, found {self.scan.rest()!r}")
        self.current = min(self.current + 1, len(self.statements) - 1)
        self.scan = Scanner(self.statements[self.current][1])

    def end(self) -> None:
        if self.current != len(self.statements) - 1:
            raise self.scan.error(f"expected the end of the text, found {self.scan.rest()!r}")

    def take_word(self, word: str) -> bool:
        """Whether the statement goes on with this whole word."""
        position = self.scan.position
        found = self.scan.match(_WORD)
        if found is not None and found[0] == word:
            return True
        self.scan.position = position
        return False

    # -- names and numbers -----------------------------------------------------------------------

    def token(self, pattern: re.Pattern[str], what: str) -> str:
        found = self.scan.match(pattern)
        if found is None:
            raise self.scan.error(f"expected {what}, found {self.scan.rest()!r}")
        return _unquote(found[0])

    def name(self) -> str:
        return self.token(_NAME, "a name")

    def integer(self) -> int:
        return int(self.token(_INTEGER, "an integer"))

    def value(self) -> str:
        found = self.scan.match(_VALUE)
        if found is None:
            raise self.scan.error(f"expected a value like %v0, found {self.scan.rest()!r}")
        return _unquote(found[1])

    def scalar(self) -> bool | int | float | str | None:
        found = self.scan.match(_SCALAR)
        if found is None:
            raise self.scan.error(f"expected a literal, found {self.scan.rest()!r}")
        return _scalar(found[0])

    def number(self) -> bool | int | float:
        position = self.scan.position
        value = self.scalar()
        if value is None or isinstance(value, str):
            self.scan.position = position
            raise self.scan.error(f"expected a number, true or false, found {self.scan.rest()!r}")
        return value

    def dtype(self) -> DType:
        self.scan.expect(":")
        position = self.scan.position
        found = _DTYPES.get(self.token(_WORD, "an element type"))
        if found is None:
            self.scan.position = position
            raise self.scan.error(f"{self.scan.rest()!r} is no element type; there are {', '.join(_DTYPES)}")
        return found

    def exprs(self) -> tuple[Expr, ...]:
        """``[a, b]``."""
        self.scan.expect("[")
        start = self.scan.position
        text = self.scan.text[start : self.scan.text.find("]", start)]
        known = self.known.get(text)
        if known is not None:
            self.scan.position = start + len(text) + 1
            return known
        result: list[Expr] = []
        while not self.scan.take("]"):
            if result:
                self.scan.expect(",")
            result.append(scan_expr(self.scan))
        self.known[text] = tuple(result)
        return self.known[text]

    # -- program ---------------------------------------------------------------------------------

    def program(self) -> Program:
        self.scan.expect("aotkit-ir")
        version = self.integer()
        if version != IR_TEXT_VERSION:
            raise self.scan.error(f"IR text of version {version}; this package reads version {IR_TEXT_VERSION}")
        self.finish_line()
        self.scan.expect("program")
        name = self.name()
        self.finish_line()
        sources: list[tuple[str, int, str, int]] = []
        inputs: list[str] = []
        buffers: list[Buffer] = []
        steps: list[Step] = []
        while not self.take_word("return"):
            if self.take_word("symbol"):
                sources.append(self.symbol_source())
            elif self.take_word("input"):
                inputs.append(("$" if self.scan.take("$") else "") + self.name())
                self.finish_line()
            elif self.take_word("buffer"):
                buffers.append(self.buffer())
            else:
                steps.append(self.step())
        outputs: list[BufferRef | SymInput | None] = []
        while not self.scan.at_end():
            if outputs:
                self.scan.expect(",")
            outputs.append(self.output())
        self.finish_line()
        return Program(name, tuple(inputs), tuple(buffers), tuple(steps), tuple(outputs), tuple(sources))

    def symbol_source(self) -> tuple[str, int, str, int]:
        self.scan.expect("$")
        name = self.name()
        self.scan.expect("=")
        self.scan.expect("input")
        source = (name, self.integer(), self.name(), self.integer())
        self.finish_line()
        return source

    def buffer(self) -> Buffer:
        name = self.name()
        self.scan.expect(":")
        dtype, sizes = self.name(), self.exprs()
        self.scan.expect("strides")
        strides = self.exprs()
        position = self.scan.position
        kind = _BUFFER_KINDS.get(self.token(_WORD, "a buffer kind"))
        if kind is None:
            self.scan.position = position
            raise self.scan.error(f"{self.scan.rest()!r} is no buffer kind; there are {', '.join(_BUFFER_KINDS)}")
        self.scan.expect("on")
        device = self.token(_PATH, "a device")
        self.finish_line()
        return Buffer(name, dtype, sizes, strides, kind, device)

    def output(self) -> BufferRef | SymInput | None:
        if self.take_word("none"):
            return None
        arg = self.arg()
        if not isinstance(arg, BufferRef | SymInput):
            raise self.scan.error("an output is a buffer, sym(...) or none")
        return arg

    def step(self) -> Step:
        if self.take_word("extern"):
            step: Step = self.extern()
        elif self.take_word("alias"):
            step = self.alias()
        elif self.scan.text.lstrip().startswith("loop "):
            return self.nest()
        else:
            raise self.scan.error(f"expected a buffer, loop, extern, alias or return, found {self.scan.rest()!r}")
        self.finish_line()
        return replace(step, origin=self.origin()) if self.take_word("origin") else step

    def origin(self) -> Origin:
        """The rest of an origin line."""
        fields: list[tuple[str, ...]] = []
        for word in ("nodes", "ops"):
            self.scan.expect(word)
            found = self.scan.match(_STRINGS)
            if found is None:
                raise self.scan.error(f"expected a list of strings, found {self.scan.rest()!r}")
            fields.append(tuple(json.loads(found[0])))
        self.scan.expect("line")
        line = self.token(_STRING, "a quoted source line")
        self.finish_line()
        return Origin(fields[0], fields[1], line)

    # -- extern calls and aliases ----------------------------------------------------------------

    def extern(self) -> ExternCall:
        name = self.name()
        self.scan.expect(":")
        results: list[str | None] = []
        if not self.scan.take("()"):
            results.append(self.result_name())
            while self.scan.take(","):
                results.append(self.result_name())
        self.scan.expect("=")
        target = self.token(_PATH, "an operator name")
        args: list[Arg] = []
        kwargs: list[tuple[str, Arg]] = []
        self.scan.expect("(")
        while not self.scan.take(")"):
            if args or kwargs:
                self.scan.expect(",")
            keyword = self.keyword()
            if keyword is not None:
                kwargs.append((keyword, self.arg()))
            else:
                args.append(self.arg())
        mutates: list[str] = []
        if self.take_word("mutates"):
            mutates.append(self.name())
            while self.scan.take(","):
                mutates.append(self.name())
        reason = self.token(_STRING, "a quoted reason") if self.take_word("reason") else ""
        return ExternCall(name, target, tuple(args), tuple(kwargs), tuple(results), tuple(mutates), reason)

    def result_name(self) -> str | None:
        return None if self.take_word("_") else self.name()

    def keyword(self) -> str | None:
        """The name of ``name=``, if that comes next."""
        position = self.scan.position
        found = self.scan.match(_NAME)
        if found is not None and self.scan.take("="):
            return _unquote(found[0])
        self.scan.position = position
        return None

    def arg(self) -> Arg:
        if self.scan.take("["):
            items: list[Arg] = []
            while not self.scan.take("]"):
                if items:
                    self.scan.expect(",")
                items.append(self.arg())
            return tuple(items)
        position = self.scan.position
        found = self.scan.match(_NAME)
        if found is not None and self.scan.take("("):
            if found[0] == "sym":
                result: Arg = SymInput(scan_expr(self.scan))
            elif found[0] == "item":
                result = BufferRef(self.name(), number=True)
            else:
                result = Literal(_unquote(found[0]), self.scalar())
            self.scan.expect(")")
            return result
        if found is not None and found[0] not in RESERVED:
            return BufferRef(_unquote(found[0]))
        self.scan.position = position
        value = self.scalar()
        return Literal(LITERAL_KINDS[type(value)], value)

    def alias(self) -> Alias:
        name = self.name()
        self.scan.expect(":")
        result = self.name()
        self.scan.expect("=")
        base = self.name()
        self.scan.expect("+")
        return Alias(name, result, base, scan_expr(self.scan))

    # -- loop nests ------------------------------------------------------------------------------

    def nest(self) -> LoopNest:
        if not self.take_word("loop"):
            raise self.scan.error(f"expected a loop, found {self.scan.rest()!r}")
        name, outer = self.name(), self.ranges()
        self.finish_line()
        origin = self.origin() if self.take_word("origin") else Origin()
        stages: list[Stage] = []
        while self.take_word("stage"):
            ranges = self.ranges()
            self.finish_line()
            body: list[Instr] = []
            while (instr := self.instr()) is not None:
                body.append(instr)
                self.finish_line()
            stages.append(Stage(ranges, tuple(body)))
        return LoopNest(name, outer, tuple(stages), origin)

    def ranges(self) -> tuple[Range, ...]:
        self.scan.expect("(")
        result: list[Range] = []
        while not self.scan.take(")"):
            if result:
                self.scan.expect(",")
            symbol = self.token(_WORD, "a loop variable")
            self.scan.expect("<")
            result.append(Range(symbol, scan_expr(self.scan)))
        self.scan.expect(":")
        return tuple(result)

    def instr(self) -> Instr | None:
        """The instruction on this line, ``None`` if it is some other statement."""
        if not self.scan.text.lstrip().startswith("%"):
            return self.store() if self.take_word("store") else None
        result = self.value()
        self.scan.expect("=")
        op = self.token(_WORD, "an operation")
        if op == "load":
            return self.load(result)
        if op == "const":
            return Const(result, self.number(), self.dtype())
        if op == "index":
            return Index(result, scan_expr(self.scan), self.dtype())
        if op == "check":
            value = self.value()
            self.scan.expect("<")
            return CheckedIndex(result, value, scan_expr(self.scan))
        if op in ("reduce", "scan"):
            return Reduce(result, self.token(_WORD, "a reduction"), self.value(), self.dtype(), op == "scan")
        args = [self.value()]
        while self.scan.take(","):
            args.append(self.value())
        return Compute(result, op, tuple(args), self.dtype())

    def load(self, result: str) -> Load:
        buffer, indices = self.name(), self.exprs()
        mask = self.value() if self.take_word("mask") else None
        other = self.number() if self.take_word("other") else 0
        return Load(result, buffer, indices, self.dtype(), mask, other)

    def store(self) -> Store:
        buffer, indices = self.name(), self.exprs()
        mode = next((mode for mode, sign in STORE_MODES.items() if mode != "set" and self.scan.take(sign)), "set")
        if mode == "set":
            self.scan.expect("=")
        value = self.value()
        mask = self.value() if self.take_word("mask") else None
        return Store(buffer, indices, value, mode, mask)


def _is_statement(line: str) -> bool:
    stripped = line.lstrip()
    return bool(stripped) and not stripped.startswith("#")


def _unquote(text: str) -> str:
    return str(json.loads(text)) if text.startswith('"') else text


def _scalar(text: str) -> bool | int | float | str | None:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text.startswith('"'):
        return str(json.loads(text))
    return int(text) if _INTEGER.fullmatch(text) else float(text)
