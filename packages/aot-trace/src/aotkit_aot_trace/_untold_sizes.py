"""Sizes that torch's recorder was not told of, where it must name the node that gives them.

Note [Sizes of three factors]
    Outer sizes of a distributed tensor are multiplied while nothing is recorded. The recorder then takes their
    expression apart and looks for the parts. Of a product or sum with more than two parts it makes one call of
    ``operator.mul`` with all of them, which that refuses (up to torch 2.13 at least). Here such expressions are
    registered as calls of two, before the recorder tries.
"""

from __future__ import annotations

import operator
from functools import reduce
from typing import Any

import sympy
import torch
from torch.fx.experimental import proxy_tensor

__all__ = ["make_sizes_in_pairs"]

_OPERATORS = {sympy.Mul: operator.mul, sympy.Add: operator.add}


def make_sizes_in_pairs(tracer: Any) -> None:
    """From now on ``tracer`` knows products and sums of sizes with any number of parts."""
    known = tracer.symnode_tracker

    class Sizes(type(known)):  # type: ignore[misc]  # its type is torch's own
        """As torch's; see Note [Sizes of three factors]."""

        def get(self, key: Any, default: Any = None) -> Any:
            found = super().get(key)
            if found is None and _has_many_parts(tracer, key):
                _register(tracer, key)
                found = super().get(key)
            return default if found is None else found

    known.__class__ = Sizes


def _has_many_parts(tracer: Any, value: Any) -> bool:
    """Whether the recorder would come to such a product or sum while it takes the expression of ``value`` apart."""
    if not isinstance(value, torch.SymInt) or not value.node.is_symbolic():
        return False
    left = [value.node.expr]
    while left:
        expression = left.pop()
        if expression in tracer.sympy_expr_tracker:
            continue
        if expression.func in _OPERATORS and len(expression.args) > 2:
            return True
        left += expression.args
    return False


def _register(tracer: Any, value: Any) -> None:
    """``value`` as calls of at most two arguments, if all that it is made of is known."""
    expression = value.node.expr
    parts = [_value(tracer, part) for part in expression.args]
    call = _OPERATORS.get(expression.func) or proxy_tensor._sympy_handlers().get(expression.func)
    if call is None or any(part is None for part in parts):
        return
    while expression.func in _OPERATORS and len(parts) > 2:
        total = call(*parts[:2])
        proxy_tensor._sym_register(tracer, call, tuple(parts[:2]), total)  # type: ignore[arg-type]  # as torch does
        parts[:2] = [total]
    proxy_tensor._sym_register(tracer, call, tuple(parts), value)  # type: ignore[arg-type]


def _value(tracer: Any, expression: Any) -> Any:
    """A number that the recorder knows, or can make, or ``None``."""
    known = tracer.sympy_expr_tracker.get(expression)
    if known is not None:
        return known.value
    if not expression.args:
        return proxy_tensor._build_proxy_for_sym_expr(tracer, expression)
    parts = [_value(tracer, part) for part in expression.args]
    if any(part is None for part in parts):
        return None
    if expression.func in _OPERATORS:
        return reduce(_OPERATORS[expression.func], parts)
    call = proxy_tensor._sympy_handlers().get(expression.func)
    return None if call is None else call(*parts)
