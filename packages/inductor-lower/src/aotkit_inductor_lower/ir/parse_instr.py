"""The lines of IR text, and the instructions that loop IR and kernel IR share, back to nodes."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import TypeVar

from ..errors import IRSyntaxError
from ..symbolic import Expr
from ..symbolic.text import ScanError, Scanner, scan_expr
from .nodes import STORE_MODES, CheckedIndex, Compute, Const, DType, Index, Instr, Load, Origin, Reduce, Store

__all__ = ["NAME", "PATH", "STRING", "WORD", "InstrParser", "unquote"]

T = TypeVar("T")

NAME = re.compile(r'[A-Za-z_][A-Za-z0-9_]*|"(?:[^"\\]|\\.)*"')
PATH = re.compile(r'[A-Za-z_][A-Za-z0-9_.:]*|"(?:[^"\\]|\\.)*"')
_VALUE = re.compile(r'%([A-Za-z_][A-Za-z0-9_]*|"(?:[^"\\]|\\.)*")')
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
WORD = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_INTEGER = re.compile(r"-?\d+")
_SCALAR = re.compile(r'-?(?:\d+\.?\d*(?:e[-+]?\d+)?|inf)|nan|none|true|false|"(?:[^"\\]|\\.)*"')
_STRINGS = re.compile(r'\[\s*(?:"(?:[^"\\]|\\.)*"(?:\s*,\s*"(?:[^"\\]|\\.)*")*)?\s*\]')
_CONSTANTS = {"none": None, "true": True, "false": False, "nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_DTYPES = {dtype.value: dtype for dtype in DType}


class InstrParser:
    """The statements of a text, one line at a time; ``scan`` is inside the current one.

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

    def whole(self, rule: Callable[[], T]) -> T:
        """All of the text by one rule. Raises :class:`IRSyntaxError` with line and column."""
        try:
            found = rule()
            if self.current != len(self.statements) - 1:
                raise self.scan.error(f"expected the end of the text, found {self.scan.rest()!r}")
        except ScanError as error:
            raise IRSyntaxError(error.message, self.line, error.position + 1) from None
        return found

    def finish_line(self) -> None:
        """Check that the statement is complete and go to the next."""
        if not self.scan.at_end():
            raise self.scan.error(f"expected the end of the line, found {self.scan.rest()!r}")
        self.current = min(self.current + 1, len(self.statements) - 1)
        self.scan = Scanner(self.statements[self.current][1])

    def take_word(self, word: str) -> bool:
        """Whether the statement goes on with this whole word."""
        position = self.scan.position
        found = self.scan.match(WORD)
        if found is not None and found[0] == word:
            return True
        self.scan.position = position
        return False

    # -- names and numbers -----------------------------------------------------------------------

    def token(self, pattern: re.Pattern[str], what: str) -> str:
        found = self.scan.match(pattern)
        if found is None:
            raise self.scan.error(f"expected {what}, found {self.scan.rest()!r}")
        return unquote(found[0])

    def name(self) -> str:
        return self.token(NAME, "a name")

    def integer(self) -> int:
        return int(self.token(_INTEGER, "an integer"))

    def value(self) -> str:
        found = self.scan.match(_VALUE)
        if found is None:
            raise self.scan.error(f"expected a value like %v0, found {self.scan.rest()!r}")
        return unquote(found[1])

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

    def one_of(self, table: Mapping[str, T], what: str) -> T:
        """What the next word stands for; ``table`` holds all there are."""
        position = self.scan.position
        found = table.get(self.token(WORD, what))
        if found is None:
            self.scan.position = position
            raise self.scan.error(f"{self.scan.rest()!r} is no {what.split(' ', 1)[1]}; there are {', '.join(table)}")
        return found

    def dtype(self) -> DType:
        self.scan.expect(":")
        return self.one_of_dtypes()

    def one_of_dtypes(self) -> DType:
        return self.one_of(_DTYPES, "an element type")

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

    # -- what all steps have -------------------------------------------------------------------------

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
        line = self.token(STRING, "a quoted source line")
        self.finish_line()
        return Origin(fields[0], fields[1], line)

    # -- instructions ----------------------------------------------------------------------------

    def instr(self) -> Instr | None:
        """The instruction on this line, ``None`` if it is some other statement."""
        if not self.scan.text.lstrip().startswith("%"):
            return self.store() if self.take_word("store") else None
        result = self.value()
        self.scan.expect("=")
        op = self.token(WORD, "an operation")
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
            kind, value = self.token(WORD, "a reduction"), self.value()
            position = scan_expr(self.scan) if self.take_word("at") else None
            return Reduce(result, kind, value, self.dtype(), op == "scan", position)
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


def unquote(text: str) -> str:
    """A name as it is meant: what :func:`.print.name_text` wrote."""
    return str(json.loads(text)) if text.startswith('"') else text


def _scalar(text: str) -> bool | int | float | str | None:
    if text in _CONSTANTS:
        return _CONSTANTS[text]
    if text.startswith('"'):
        return str(json.loads(text))
    return int(text) if _INTEGER.fullmatch(text) else float(text)
