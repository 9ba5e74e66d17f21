"""Sizes that a program computes with floats, as shape environments write them.

This file is the same in every package that has it; the original is in tools/shared.

Note [Sizes computed with floats]
    ``int(n * 1.7)``, ``math.ceil(n ** 0.5)`` or ``round(n / 3)`` have the value that Python's floats give: ``0.7 * 10``
    is ``7.0``, and less than 7 in truth. So the float operations themselves are kept, in their order, and carried out
    by the host in double precision: by Python, or by C++, whose ``double`` is the same. What could be computed in more
    than one order, as a sum of three terms whose order sympy does not keep, has no such form.

Note [Roots of sizes]
    ``int(n ** 0.5)`` and ``int(math.sqrt(n))``, the side of a square image of ``n`` patches, are computed with floats.
    For sizes below 2**50 they are ``math.isqrt(n)``: ``n`` is a float without rounding, the root of a square is exact,
    and that of ``k*k - 1`` is further below ``k`` than a float's root is off.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

__all__ = ["ROUNDED", "float_tree", "rounded_float", "under_whole_root"]


def under_whole_root(expr: Any) -> Any:
    """The sympy expression of ``n`` if ``expr`` is a shape environment's ``int(n ** 0.5)``, else ``None``."""
    if type(expr).__name__ not in ("TruncToInt", "FloorToInt"):
        return None
    root = expr.args[0]
    name = type(root).__name__
    if name != "OpaqueUnaryFn_sqrt" and not (name == "FloatPow" and root.args[1] == 0.5):
        return None
    below = root.args[0]
    return below.args[0] if type(below).__name__ == "ToFloat" else None


_ROUNDINGS = {"TruncToInt": "trunc", "FloorToInt": "floor", "CeilToInt": "ceil", "RoundToInt": "round"}
ROUNDED = frozenset(_ROUNDINGS)
"""The names of sympy's functions that make an integer of a float."""
_FUNCTIONS = {
    "FloatTrueDiv": "/",
    "FloatPow": "pow",
    "OpaqueUnaryFn_sqrt": "sqrt",
    "Max": "max",
    "Min": "min",
}


def rounded_float(expr: Any, integer: Callable[[Any], Any]) -> Any:
    """The tree (see Note [Sizes as text]) of a float that is made an integer; ``None`` for any other expression, and
    for one whose floats have no form. ``integer``: gives the tree of an expression over integers.

    What is rounded may be an integer already, as in ``math.ceil(math.floor(n * 1.8))``; then it is the result.
    """
    sign = _ROUNDINGS.get(type(expr).__name__)
    if sign is None:
        return None
    (inside,) = expr.args
    if inside.is_integer and not inside.is_number:
        return integer(inside)
    tree = float_tree(inside, integer)
    return None if tree is None else (sign, tree)


def float_tree(expr: Any, integer: Callable[[Any], Any]) -> Any:
    """The tree of a float; ``None`` where it has none. ``integer`` is asked for the symbols of floats, too."""
    kind = type(expr).__name__
    if expr.is_Float or expr.is_Integer:
        return float(expr) if math.isfinite(float(expr)) else None
    if expr.is_Symbol:
        return integer(expr)
    if kind == "ToFloat":
        return ("float", integer(expr.args[0]))
    if kind == "IntTrueDiv":
        return ("/", *map(integer, expr.args))
    if kind in _FUNCTIONS:
        sign, operands = _FUNCTIONS[kind], expr.args
    elif expr.is_Add and len(expr.args) == 2:
        sign, operands = "+", expr.args
    elif expr.is_Mul:
        sign, operands = "*", _in_any_order(expr.args)
    else:
        return None
    trees = [float_tree(operand, integer) for operand in operands]
    return None if len(trees) == 0 or None in trees else (sign, *trees)


def _in_any_order(factors: Any) -> Any:
    """The factors, if their product is the same float in any order: at most two that may have to be rounded, others
    are powers of two; else none."""
    rounded = [factor for factor in factors if not (factor.is_number and _is_power_of_two(float(factor)))]
    others = [factor for factor in factors if factor not in rounded]
    return [*rounded, *others] if len(rounded) <= 2 else []


def _is_power_of_two(number: float) -> bool:
    return abs(math.frexp(number)[0]) == 0.5 and 2.0**-64 <= abs(number) <= 2.0**64
