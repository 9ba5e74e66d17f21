"""Reading index expressions back from text: the inverse of ``str(expr)``, written by hand, without ``eval``."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable
from typing import Any

from .._size_text import SizeTextError, fold, scan_size
from .expr import Expr, Symbol, SymbolKind, floordiv, isqrt, mod, smax, smin, sym, to_expr

__all__ = ["ScanError", "Scanner", "parse_expr", "scan_expr"]

_SPACE = re.compile(r"[ \t]*")


class ScanError(ValueError):
    """Text that does not parse. ``position`` counts characters from 0."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(f"column {position + 1}: {message}")
        self.message = message
        self.position = position


class Scanner:
    """A position in one line of text. Every read skips blanks first."""

    __slots__ = ("position", "text")

    def __init__(self, text: str, position: int = 0) -> None:
        self.text = text
        self.position = position

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """The match at the position, which is moved behind it, or ``None``."""
        start = _SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
        found = pattern.match(self.text, start)
        if found is not None:
            self.position = found.end()
        return found

    def take(self, literal: str) -> bool:
        """Whether ``literal`` comes next; if so, move behind it."""
        text = self.text
        start = self.position
        while text.startswith(" ", start):
            start += 1
        if text.startswith(literal, start):
            self.position = start + len(literal)
            return True
        return False

    def expect(self, literal: str) -> None:
        """Move behind ``literal``. Raises :class:`ScanError` if something else comes."""
        if not self.take(literal):
            raise self.error(f"expected {literal!r}, found {self.rest()!r}")

    def rest(self) -> str:
        """What is left, shortened, for messages."""
        left = self.text[self.position :].strip()
        return left if len(left) <= 40 else left[:37] + "..."

    def at_end(self) -> bool:
        """Whether only blanks are left."""
        return not self.text[self.position :].strip()

    def error(self, message: str) -> ScanError:
        """An error at the position (after blanks)."""
        start = _SPACE.match(self.text, self.position).end()  # type: ignore[union-attr]
        return ScanError(message, start)


def parse_expr(text: str) -> Expr:
    """The expression that prints as ``text`` (or as something equal). Raises :class:`ScanError`."""
    scanner = Scanner(text)
    expr = scan_expr(scanner)
    if not scanner.at_end():
        raise scanner.error(f"expected the end of the expression, found {scanner.rest()!r}")
    return expr


def scan_expr(scanner: Scanner) -> Expr:
    """Read one expression: sums of products of symbols, integers, parentheses, ``//``, ``%``, ``min()``, ``max()``,
    ``isqrt()``.

    It is one of the language of sizes, in which a symbol has the sign of its kind before it.
    """
    start = scanner.position
    try:
        tree, scanner.position = scan_size(scanner.text, start)
    except SizeTextError as error:
        raise ScanError(error.message, error.position) from None

    def operation(sign: str, operands: list[Any]) -> Expr:
        if sign not in _OPERATIONS:
            raise ScanError(f"{sign!r} is no operation of index expressions", start)
        if sign in ("//", "%") and operands[1] == 0:
            raise ScanError("division by zero", start)
        return _OPERATIONS[sign](*map(number, operands))

    def number(value: Any) -> Expr:
        if not isinstance(value, Expr) and type(value) is not int:
            raise ScanError(f"{value!r} is no index expression", start)
        return to_expr(value)

    return number(fold(tree, _symbol, operation))


def _symbol(text: str) -> Expr:
    kind = _KINDS.get(text[0])
    return to_expr(Symbol(text)) if kind is None else sym(text[1:], kind)


_KINDS = {"$": SymbolKind.SIZE, "%": SymbolKind.VALUE}
_OPERATIONS: dict[str, Callable[..., Expr]] = {
    "+": lambda *values: functools.reduce(operator.add, values),
    "-": operator.sub,
    "*": lambda *values: functools.reduce(operator.mul, values),
    "neg": operator.neg,
    "//": floordiv,
    "%": mod,
    "min": smin,
    "max": smax,
    "isqrt": isqrt,
}
