"""The one place where sympy enters: SymInts of a traced graph become index expressions.

Note [Integers that may be negative]
    A SIZE symbol is at least 0, on which every prover relies. An integer argument (a step, an offset) need not be: it
    becomes ``$n_above - $n_below``, two symbols of which one is 0. A division by such a number divides by its
    magnitude: ``x // d`` is ``(x * sign) // max(abs(d), 1)``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from .._float_sizes import under_whole_root
from .expr import Expr, SymbolKind, floordiv, isqrt, mod, smax, smin, sym, to_expr

if TYPE_CHECKING:
    import sympy
    import torch

__all__ = ["UnsupportedExpression", "from_symint"]

NameOf = Mapping[str, str] | Callable[[str], str | Expr]


class UnsupportedExpression(ValueError):
    """A symbolic size that integer index expressions cannot hold (a true division, a power by a symbol ...)."""


def from_symint(value: int | torch.SymInt | sympy.Expr, name_of: NameOf = str) -> Expr:
    """An expression over SIZE symbols from an int, a SymInt or a sympy expression of a ``ShapeEnv``.

    ``name_of`` maps the shape environment's symbol names (``"s77"``) to ours, or to expressions. Raises
    :class:`UnsupportedExpression` naming the part that cannot be held.
    """
    if isinstance(value, int):
        return to_expr(int(value))
    node = getattr(value, "node", None)
    if node is not None:
        plain = node.maybe_as_int()
        return to_expr(plain) if plain is not None else _convert(node.expr, name_of)
    return _convert(value, name_of)


def _convert(e: sympy.Expr, name_of: NameOf) -> Expr:
    if e.is_Integer:
        return to_expr(int(e))
    if e.is_Symbol:
        name = name_of[e.name] if isinstance(name_of, Mapping) else name_of(e.name)
        return sym(name, SymbolKind.SIZE) if isinstance(name, str) else name
    rule = _RULES.get(type(e).__name__)
    if rule is None:
        raise UnsupportedExpression(
            f"the size expression {e} holds {type(e).__name__}, which has no integer index form"
        )
    return rule(e, name_of)


def _add(e: sympy.Expr, name_of: NameOf) -> Expr:
    total = to_expr(0)
    for arg in e.args:
        total = total + _convert(arg, name_of)
    return total


def _mul(e: sympy.Expr, name_of: NameOf) -> Expr:
    total = to_expr(1)
    for arg in e.args:
        total = total * _convert(arg, name_of)
    return total


def _pow(e: sympy.Expr, name_of: NameOf) -> Expr:
    base, exponent = e.args
    if not (exponent.is_Integer and int(exponent) >= 0):
        raise UnsupportedExpression(f"the size expression {e} has an exponent that is not a natural number")
    converted, total = _convert(base, name_of), to_expr(1)
    for _ in range(int(exponent)):
        total = total * converted
    return total


def _floor_division(e: sympy.Expr, name_of: NameOf) -> Expr:
    return floordiv(*_quotient(e.args[0], e.args[1], name_of))


def _quotient(x: sympy.Expr, d: sympy.Expr, name_of: NameOf) -> tuple[Expr, Expr]:
    """``x`` and ``d``, both times the sign of ``d`` if that may be negative."""
    above, below = _convert(x, name_of), _convert(d, name_of)
    signs = {factor > 0 for monomial, factor in below.terms if monomial} or {(below.constant or 0) >= 0}
    if signs == {True}:
        return above, below
    if signs == {False}:
        return -above, -below
    return above * smin(smax(below, -1), 1), smax(below, -below, 1)


def _floor(e: sympy.Expr, name_of: NameOf) -> Expr:
    """``floor(3*s0/2)``: a rational factor, whose denominator becomes the divisor; or a root."""
    square = under_whole_root(e)
    if square is not None:
        return isqrt(_convert(square, name_of))
    numerator, denominator = _rational(e).as_numer_denom()
    above, below = _quotient(numerator, denominator, name_of)
    return floordiv(above, below)


def _trunc(e: sympy.Expr, name_of: NameOf) -> Expr:
    """Towards zero: ``int(...)`` of Python."""
    if under_whole_root(e) is not None:
        return _floor(e, name_of)
    value = _rational(e)
    if value.is_nonnegative:
        return _floor(e, name_of)
    above, below = value.as_numer_denom()
    numerator, denominator = _quotient(above, below, name_of)
    return floordiv(smax(numerator, to_expr(0)), denominator) - floordiv(smax(-numerator, to_expr(0)), denominator)


def _ceiling(e: sympy.Expr, name_of: NameOf) -> Expr:
    above, below = _rational(e).as_numer_denom()
    numerator, denominator = _quotient(above, below, name_of)
    return -floordiv(-numerator, denominator)


def _rational(rounded: sympy.Expr) -> sympy.Expr:
    """What ``rounded`` rounds to an integer, without floats. ``int(n * 0.75)`` is ``n * 3 // 4`` exactly, since the
    product of a size and a number of few bits is no rounded float, and no division is rounded up to a whole number."""
    e, name = rounded.args[0], type(rounded).__name__
    if name in ("floor", "ceiling"):
        return e
    if type(e).__name__ == "IntTrueDiv":
        value = e.args[0] / e.args[1]
    elif type(e).__name__ == "FloatTrueDiv":
        above, below = map(_without_floats, e.args)
        value = None if above is None or below is None else above / below
    else:
        value = _without_floats(e)
    if value is None:
        raise UnsupportedExpression(f"the size expression {rounded} holds {name} of a float that may be rounded before")
    return value


def _without_floats(e: sympy.Expr) -> sympy.Expr | None:
    """The rational number that a float, computed without rounding from one size, is."""
    if e.is_integer:
        return e
    if type(e).__name__ == "ToFloat":
        return e.args[0]
    if e.is_Float:
        from sympy import Rational

        p, q = float(e).as_integer_ratio()
        return Rational(p, q) if max(abs(p), q) <= 1 << 10 else None
    if e.is_Add or (e.is_Mul and e.args[0].is_number):
        parts = [_without_floats(arg) for arg in e.args]
        return None if None in parts or len(parts) > 2 else e.func(*parts)
    return None


def _absolute(e: sympy.Expr, name_of: NameOf) -> Expr:
    converted = _convert(e.args[0], name_of)
    return smax(converted, -converted)


def _remainder(e: sympy.Expr, name_of: NameOf) -> Expr:
    x, d = (_convert(arg, name_of) for arg in e.args)
    above, below = _quotient(e.args[0], e.args[1], name_of)
    return mod(x, d) if below == d else x - d * floordiv(above, below)


def _modular_indexing(e: sympy.Expr, name_of: NameOf) -> Expr:
    base, divisor, modulus = (_convert(arg, name_of) for arg in e.args)
    return mod(floordiv(base, divisor), modulus)


def _min(e: sympy.Expr, name_of: NameOf) -> Expr:
    return smin(*(_convert(arg, name_of) for arg in e.args))


def _max(e: sympy.Expr, name_of: NameOf) -> Expr:
    return smax(*(_convert(arg, name_of) for arg in e.args))


# By class name, so that neither sympy nor torch's own sympy functions are imported to convert plain sizes.
_RULES: dict[str, Callable[[sympy.Expr, NameOf], Expr]] = {
    "Add": _add,
    "Mul": _mul,
    "Pow": _pow,
    "PowByNatural": _pow,
    "FloorDiv": _floor_division,
    "CleanDiv": _floor_division,
    "floor": _floor,
    "ceiling": _ceiling,
    "FloorToInt": _floor,
    "TruncToInt": _trunc,
    "CeilToInt": _ceiling,
    "Abs": _absolute,
    "Mod": _remainder,
    "PythonMod": _remainder,
    "ModularIndexing": _modular_indexing,
    "Min": _min,
    "Max": _max,
}
