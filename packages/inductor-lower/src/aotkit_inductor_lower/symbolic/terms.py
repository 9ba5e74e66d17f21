"""Symbols, and products and sums of atoms as plain tuples: what :mod:`.expr` is built of."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from math import gcd
from typing import TypeVar

__all__ = ["Symbol", "SymbolKind", "common_factor", "divide_monomial", "sum_text"]

A = TypeVar("A", bound=str)


class SymbolKind(Enum):
    """What a symbol stands for. The value is the sigil it is printed with."""

    INDEX = ""  # a loop variable, in [0, its range)
    SIZE = "$"  # a dynamic size of the graph, an i64 kernel argument
    VALUE = "%"  # a computed i64 value of the kernel body (indirect addressing)


class Symbol(str):
    """A named unknown. As a string it is the sigil of its kind followed by its name."""

    __slots__ = ("kind", "name")
    kind: SymbolKind
    name: str

    def __new__(cls, name: str, kind: SymbolKind = SymbolKind.INDEX) -> Symbol:
        self = str.__new__(cls, kind.value + name)
        self.name = name
        self.kind = kind
        return self

    def __getnewargs__(self) -> tuple[str, SymbolKind]:  # type: ignore[override]
        return self.name, self.kind

    def __repr__(self) -> str:
        return f"Symbol({self!s})"


# Below, a product is a tuple of atoms (strings), and a sum is a tuple of (product, integer factor).


def sum_text(terms: tuple[tuple[tuple[A, ...], int], ...]) -> str:
    text = ""
    for monomial, factor in terms:
        body = "*".join(monomial)
        sign, size = ("-", -factor) if factor < 0 else ("+", factor)
        piece = body if body and size == 1 else f"{size}*{body}" if body else str(size)
        text += f" {sign} {piece}" if text else (f"-{piece}" if sign == "-" else piece)
    return text or "0"


def common_factor(terms: Iterable[tuple[tuple[A, ...], int]]) -> tuple[tuple[A, ...], int] | None:
    """The largest (product, positive integer) that divides every term; ``None`` if that is 1."""
    number = 0
    shared: list[A] | None = None
    for monomial, factor in terms:
        number = gcd(number, factor)
        if shared is None:
            shared = list(monomial)
        elif shared:
            left = list(monomial)
            kept = []
            for atom in shared:
                if atom in left:
                    left.remove(atom)
                    kept.append(atom)
            shared = kept
        if number == 1 and not shared:
            return None
    return None if number <= 1 and not shared else (tuple(shared or ()), number)


def divide_monomial(monomial: tuple[A, ...], divisor: tuple[A, ...]) -> tuple[A, ...] | None:
    """``monomial / divisor``, ``None`` if it is not a multiple."""
    left = list(monomial)
    for atom in divisor:
        if atom not in left:
            return None
        left.remove(atom)
    return tuple(left)
