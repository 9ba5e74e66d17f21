"""Ops that are bodies of other ops: what a row of :mod:`.scalar` may say instead of text for each machine.

A body is a function of a writer and the operands. ``write(op, *args)`` adds one op and gives its value; a Python number
among the arguments is a constant of the operands' type. A body must give what the op means, on every operand.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from .dtypes import ARITHMETIC_INTS, FLOATS, DType

__all__ = ["Expansion", "Write"]

V = TypeVar("V")


class Write(Protocol[V]):
    """Adds one op to what is being written."""

    def __call__(self, op: str, /, *args: V | float) -> V: ...


@dataclass(frozen=True, slots=True)
class Expansion:
    """``body``: the op in other ops. ``domain``: the operand types that it is for. ``where``: the operands that must be
    constants, and which."""

    body: Callable[..., Any]
    domain: frozenset[DType] = FLOATS
    where: tuple[tuple[int, float], ...] = ()


def sigmoid(write: Write[V], x: V) -> V:
    """``1 / (1 + exp(-x))``."""
    return write("div", 1.0, write("add", 1.0, write("exp", write("neg", x))))


def rsqrt(write: Write[V], x: V) -> V:
    """In two roundings."""
    return write("reciprocal", write("sqrt", x))


def isinf(write: Write[V], x: V) -> V:
    """Of both signs."""
    return write("eq", write("abs", x), math.inf)


def spherical_bessel_j0(write: Write[V], x: V) -> V:
    """``sin(x) / x``; near 0 its series."""
    squared = write("mul", x, x)
    series = write("mul", squared, 1.0 / math.factorial(13))
    for order in (11, 9, 7, 5, 3):
        sign = 1.0 if order % 4 == 1 else -1.0
        series = write("mul", squared, write("add", sign / math.factorial(order), series))
    series = write("add", 1.0, series)
    size = write("abs", x)
    wave = write("where", write("eq", size, math.inf), 0.0, write("div", write("sin", x), x))
    return write("where", write("lt", size, 0.5), series, wave)


def square(write: Write[V], x: V, _: V) -> V:
    """``x**2``."""
    return write("mul", x, x)


def cube(write: Write[V], x: V, _: V) -> V:
    """``x**3``."""
    return write("mul", write("mul", x, x), x)


def reciprocal(write: Write[V], x: V, _: V) -> V:
    """``x**-1``."""
    return write("reciprocal", x)


def reciprocal_square(write: Write[V], x: V, _: V) -> V:
    """``x**-2``."""
    return write("reciprocal", write("mul", x, x))


POWERS = (
    Expansion(square, FLOATS | ARITHMETIC_INTS, ((1, 2.0),)),
    Expansion(cube, FLOATS | ARITHMETIC_INTS, ((1, 3.0),)),
    Expansion(reciprocal, where=((1, -1.0),)),
    Expansion(reciprocal_square, where=((1, -2.0),)),
)


def truncdiv(write: Write[V], a: V, b: V) -> V:
    """Rounded towards zero."""
    return write("trunc", write("div", a, b))


def mod(write: Write[V], a: V, b: V) -> V:
    """``fmod``, moved to the sign of the divisor."""
    rest = write("fmod", a, b)
    return write("where", _moves(write, rest, b), write("add", rest, b), rest)


def _moves(write: Write[V], rest: V, b: V) -> V:
    """Whether a remainder with the sign of the dividend is not the one with the sign of ``b``."""
    apart = write("ne", write("lt", b, 0.0), write("lt", rest, 0.0))
    return write("logical_and", write("ne", rest, 0.0), apart)


def floordiv(write: Write[V], a: V, b: V) -> V:
    """``(a - a mod b) / b`` made whole: exact where ``floor(a / b)`` would round up."""
    plain = write("div", a, b)
    rest = write("fmod", a, b)
    whole = write("div", write("sub", a, rest), b)
    whole = write("where", _moves(write, rest, b), write("sub", whole, 1.0), whole)
    down = write("floor", whole)
    far = write("gt", write("sub", whole, down), 0.5)
    down = write("where", far, write("add", down, 1.0), down)
    down = write("where", write("eq", whole, 0.0), write("copysign", 0.0, plain), down)
    return write("where", write("eq", b, 0.0), plain, down)
