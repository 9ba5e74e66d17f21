"""The language of sizes: integer expressions as text, read by hand into tuples. No ``eval``, no tree of Python.

This file is the same in every package that has it; the original is tools/shared/_size_text.py, beside the cases that
each reader must pass.

Note [Sizes as text]
    The operators are Python's, with its precedences: ``or  and  not  == != < <= > >=  + -  * // / %  -x  **`` and
    ``min(a, b)``, ``max(a, b)``, ``isqrt(a)``, the square root rounded down. A comparison has two sides. Atoms are
    integers, floats, ``True``, ``False`` and symbols: identifiers, maybe with a ``$`` or a ``%`` before them, which say
    of what kind the symbol is. Which of all this a reader takes is its own decision.

    What a program computes with floats (see _float_sizes.py) is written with ``float(n)``, ``/``, ``sqrt(x)`` and
    ``pow(x, y)``, and made an integer again by ``trunc``, ``floor``, ``ceil`` or ``round``, all of them Python's.

    A tree is an ``int``, a ``float``, a ``bool``, a ``str`` (a symbol) or a tuple of an operator and its operands:
    ``"s0*4 - 1"`` is ``("-", ("*", "s0", 4), 1)``. Negation is ``("neg", x)``, but for a number, which it makes
    negative. ``+``, ``*``, ``and``, ``or``, ``min`` and ``max`` have two operands or more, taken from the left. Trees
    that were JSON have lists for tuples.
"""

from __future__ import annotations

import functools
import math
import operator
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, TypeVar

__all__ = [
    "FUNCTIONS",
    "OPERATIONS",
    "ROUNDING",
    "SizeTextError",
    "Tree",
    "evaluate_tree",
    "fold",
    "parse_size",
    "scan_size",
    "symbols_in",
    "write_size",
]

Tree = int | float | bool | str | tuple[Any, ...] | list[Any]
T = TypeVar("T")


class SizeTextError(ValueError):
    """Text that is no expression of the language. ``position`` counts characters from 0."""

    def __init__(self, message: str, position: int) -> None:
        super().__init__(f"column {position + 1}: {message}")
        self.message = message
        self.position = position


def parse_size(text: str) -> Tree:
    """The tree of a whole text. Raises :class:`SizeTextError`."""
    reader = _Reader(text, 0)
    tree = reader.read(0)
    reader.skip_blanks()
    if reader.position < len(text):
        raise reader.error("expected the end of the expression")
    return tree


def scan_size(text: str, position: int = 0) -> tuple[Tree, int]:
    """The tree of the sum (no comparison) that begins at ``position``, and the position behind it."""
    reader = _Reader(text, position)
    return reader.read(_SUM), reader.position


def fold(tree: Tree, symbol: Callable[[str], T], operation: Callable[[str, list[T | Any]], T]) -> T | Any:
    """What a tree becomes from the leaves up: ``symbol`` makes something of a name, ``operation`` of an operator and
    its operands; numbers stay what they are."""
    if isinstance(tree, str):
        return symbol(tree)
    if isinstance(tree, (tuple, list)):
        return operation(tree[0], [fold(operand, symbol, operation) for operand in tree[1:]])
    return tree


def symbols_in(tree: Tree) -> set[str]:
    """The symbols of a tree."""
    if isinstance(tree, str):
        return {tree}
    return set().union(*map(symbols_in, tree[1:])) if isinstance(tree, (tuple, list)) else set()


OPERATIONS: Mapping[str, Callable[..., Any]] = MappingProxyType(
    {
        "or": lambda *values: any(values),
        "and": lambda *values: all(values),
        "not": operator.not_,
        "==": operator.eq,
        "!=": operator.ne,
        "<": operator.lt,
        "<=": operator.le,
        ">": operator.gt,
        ">=": operator.ge,
        "+": lambda *values: functools.reduce(operator.add, values),
        "-": operator.sub,
        "*": lambda *values: functools.reduce(operator.mul, values),
        "//": operator.floordiv,
        "%": operator.mod,
        "neg": operator.neg,
        "**": operator.pow,
        "min": min,
        "max": max,
        "isqrt": math.isqrt,
        "/": operator.truediv,
        "float": float,
        "sqrt": math.sqrt,
        "pow": math.pow,
        "trunc": math.trunc,
        "floor": math.floor,
        "ceil": math.ceil,
        "round": round,
    }
)
"""What the operators are for Python's numbers."""


def evaluate_tree(
    tree: Tree, values: Mapping[str, Any], operations: Mapping[str, Callable[..., Any]] = OPERATIONS
) -> Any:
    """The value of a tree for these values of its symbols. Raises ``KeyError`` for a symbol that has none."""
    if isinstance(tree, str):
        return values[tree]
    if isinstance(tree, (tuple, list)):
        return operations[tree[0]](*[evaluate_tree(operand, values, operations) for operand in tree[1:]])
    return tree


def write_size(tree: Tree) -> str:
    """The text of a tree, with no more parentheses than it needs; ``parse_size`` gives the tree back."""
    return _write(tree)[0]


# -- precedences, from weak to strong --------------------------------------------------------------------------------

_NOT, _COMPARISON, _SUM, _PRODUCT, _UNARY, _POWER, _ATOM = 2, 3, 4, 5, 6, 7, 8
_BINARY = {
    "or": 0, "and": 1, "==": _COMPARISON, "!=": _COMPARISON, "<": _COMPARISON, "<=": _COMPARISON, ">": _COMPARISON,
    ">=": _COMPARISON, "+": _SUM, "-": _SUM, "*": _PRODUCT, "//": _PRODUCT, "/": _PRODUCT, "%": _PRODUCT,
    "**": _POWER,
}  # fmt: skip
_OPERAND = re.compile(
    r"[ \t]*(?:(?P<float>\d+(?:\.\d*(?:e[+-]?\d+)?|e[+-]?\d+))|(?P<int>\d+)|(?P<name>[$%]?[A-Za-z_]\w*)"
    r"|(?P<sign>[-(]))",
    re.ASCII,
)
_OPERATOR = re.compile(r"[ \t]*(//|\*\*|[=!<>]=|[-+*/%<>]|(?:and|or)\b)", re.ASCII)
_ANY_NUMBER = frozenset({"or", "and", "+", "*"})
_CONSTANTS = {"True": True, "False": False}

ROUNDING = frozenset({"trunc", "floor", "ceil", "round"})
"""What makes an integer of a float."""
FUNCTIONS = frozenset({"min", "max", "isqrt", "float", "sqrt", "pow", *ROUNDING})
"""What is written as a call."""


class _Reader:
    """A position in a text, and the trees that begin there."""

    __slots__ = ("position", "text")

    def __init__(self, text: str, position: int) -> None:
        self.text, self.position = text, position

    def read(self, least: int) -> Tree:
        """The tree of operators that bind at least so tightly."""
        left = self.operand(least)
        before = -1
        while found := _OPERATOR.match(self.text, self.position):
            sign = found[1]
            level = _BINARY[sign]
            if level < least:
                break
            if level == before == _COMPARISON:
                raise self.error("a comparison has two sides")
            self.position = found.end()
            right = self.read(_UNARY if sign == "**" else level + 1)
            if sign in ("//", "/", "%") and right == 0 and type(right) is int:
                raise SizeTextError("division by zero", found.end())
            joined = sign in _ANY_NUMBER and isinstance(left, tuple) and left[0] == sign
            left = (*left, right) if joined and isinstance(left, tuple) else (sign, left, right)
            before = level
        return left

    def operand(self, least: int) -> Tree:
        """What an operator stands before: a number, a symbol, a call, something negated or in parentheses."""
        found = _OPERAND.match(self.text, self.position)
        if found is None:
            raise self.error("expected a symbol, an integer or '('")
        kind, text = str(found.lastgroup), found[str(found.lastgroup)]
        if kind == "name" and text == "not" and least > _NOT:
            raise self.error("'not' needs parentheses here")
        self.position = found.end()
        if kind == "int":
            return int(text)
        if kind == "float":
            return float(text)
        if text == "-":
            value = self.read(_UNARY)
            return -value if isinstance(value, (int, float)) and value >= 0 and value is not True else ("neg", value)
        if text == "(":
            value = self.read(0)
            self.expect(")")
            return value
        if text == "not":
            return ("not", self.read(_NOT))
        if text in FUNCTIONS:
            self.expect("(")
            return self.call(text)
        if text in ("and", "or"):
            raise self.error(f"{text!r} has no left side")
        return _CONSTANTS.get(text, text)

    def call(self, name: str) -> Tree:
        """The operands of a function, behind the parenthesis."""
        operands = [self.read(0)]
        while self.take(","):
            operands.append(self.read(0))
        self.expect(")")
        least, most = (2, None) if name in ("min", "max") else (2, 2) if name == "pow" else (1, 1)
        if len(operands) < least or (most is not None and len(operands) > most):
            raise self.error(f"{name} takes {('one operand', 'two operands')[least - 1]}{'' if most else ' or more'}")
        return (name, *operands)

    def skip_blanks(self) -> None:
        """Move behind blanks."""
        while self.text.startswith((" ", "\t"), self.position):
            self.position += 1

    def take(self, literal: str) -> bool:
        """Whether ``literal`` comes next; if so, move behind it."""
        self.skip_blanks()
        if not self.text.startswith(literal, self.position):
            return False
        self.position += len(literal)
        return True

    def expect(self, literal: str) -> None:
        """Move behind ``literal``."""
        if not self.take(literal):
            raise self.error(f"expected {literal!r}")

    def error(self, message: str) -> SizeTextError:
        """An error at the position."""
        self.skip_blanks()
        rest = self.text[self.position :].strip()
        return SizeTextError(f"{message}, found {rest if len(rest) <= 40 else rest[:37] + '...'!r}", self.position)


def _write(tree: Tree) -> tuple[str, int]:
    """The text of a tree and how tightly its outermost operator binds."""
    if isinstance(tree, str):
        return tree, _ATOM
    if not isinstance(tree, (tuple, list)):
        if type(tree) is float and not math.isfinite(tree):
            raise ValueError(f"{tree} is no size")
        return repr(tree), _UNARY if tree < 0 or str(tree).startswith("-") else _ATOM
    sign, *operands = tree
    if sign in FUNCTIONS:
        return f"{sign}({', '.join(_write(operand)[0] for operand in operands)})", _ATOM
    if sign == "neg":
        return f"-{_in_parentheses(operands[0], _UNARY)}", _UNARY
    if sign == "not":
        return f"not {_in_parentheses(operands[0], _NOT)}", _NOT
    level = _BINARY[sign]
    first = level + 1 if level == _COMPARISON or sign == "**" else level
    texts = [_in_parentheses(operands[0], first)]
    texts += [_in_parentheses(operand, _UNARY if sign == "**" else level + 1) for operand in operands[1:]]
    return f" {sign} ".join(texts), level


def _in_parentheses(tree: Tree, least: int) -> str:
    text, level = _write(tree)
    return text if level >= least else f"({text})"
