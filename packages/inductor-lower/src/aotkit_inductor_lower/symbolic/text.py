"""Reading index expressions back from text: the inverse of ``str(expr)``, written by hand, without ``eval``."""

from __future__ import annotations

import re

from .expr import Expr, Symbol, SymbolKind, floordiv, mod, smax, smin, sym, to_expr

__all__ = ["ScanError", "Scanner", "parse_expr", "scan_expr"]

_SPACE = re.compile(r"[ \t]*")
_NUMBER = re.compile(r"\d+")
_SYMBOL = re.compile(r"([$%]?)([A-Za-z_][A-Za-z0-9_]*)")
_OPERATOR = re.compile(r"//|[*%]")
_KINDS = {"": SymbolKind.INDEX, "$": SymbolKind.SIZE, "%": SymbolKind.VALUE}


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
    """Read one expression: sums of products of symbols, integers, parentheses, ``//``, ``%``, ``min()``, ``max()``."""
    total = -_scan_product(scanner) if scanner.take("-") else _scan_product(scanner)
    while True:
        if scanner.take("+"):
            total = total + _scan_product(scanner)
        elif scanner.take("-"):
            total = total - _scan_product(scanner)
        else:
            return total


def _scan_product(scanner: Scanner) -> Expr:
    result = _scan_atom(scanner)
    while found := scanner.match(_OPERATOR):
        position = scanner.position
        right = _scan_atom(scanner)
        if found[0] == "*":
            result = result * right
            continue
        if right == 0:
            raise ScanError("division by zero", position)
        result = floordiv(result, right) if found[0] == "//" else mod(result, right)
    return result


def _scan_atom(scanner: Scanner) -> Expr:
    if found := scanner.match(_SYMBOL):
        sigil, name = found.groups()
        if not sigil and name in ("min", "max") and scanner.take("("):
            args = [scan_expr(scanner)]
            while scanner.take(","):
                args.append(scan_expr(scanner))
            scanner.expect(")")
            return smin(*args) if name == "min" else smax(*args)
        return to_expr(Symbol(name)) if not sigil else sym(name, _KINDS[sigil])
    if found := scanner.match(_NUMBER):
        return to_expr(int(found[0]))
    if scanner.take("("):
        inner = scan_expr(scanner)
        scanner.expect(")")
        return inner
    raise scanner.error(f"expected a symbol, an integer or '(', found {scanner.rest()!r}")
