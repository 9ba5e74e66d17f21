"""Whether torch computes floats of sizes in the order in which the program does.

Note [Floats that sympy merges]
    A size such as ``int(n * 1.7 * 1.3)`` is a sympy expression, and sympy multiplies constants with each other:
    ``2.21 * n``, which is rounded once, and may be another size than the program's, which is rounded twice. So each
    operation on floats of sizes is compared with the expression that torch gives to its result. Where that is another
    operation, and not for certain the same float, no size may depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from aotkit_functionalize import Unsupported

__all__ = ["FloatOrders"]

_FEW_BITS = 1 << 10


class FloatOrders:
    """Follows the nodes of one graph while they run."""

    def __init__(self) -> None:
        self._merged: set[Any] = set()  # sympy expressions

    def follow(self, node: torch.fx.Node, env: Mapping[torch.fx.Node, Any], result: Any) -> None:
        """Note a float that torch does not compute as the program does. Raises :class:`Unsupported` where a size
        depends on one."""
        given = [env[used] for used in node.all_input_nodes]
        for body in given:
            if isinstance(body, torch.fx.GraphModule):
                self._follow_graph(body)
        floats = [value.node.expr for value in given if isinstance(value, torch.SymFloat)]
        merged = any(expr in self._merged for expr in floats)
        if isinstance(result, torch.SymFloat):
            if merged or not _is_kept(node, env, result.node.expr):
                self._merged.add(result.node.expr)
        elif floats:
            new = _rounded(result).difference(*map(_rounded, given))
            if (merged and new) or not all(any(map(part.has, _both_signs(floats))) for part in new):
                raise Unsupported(
                    "a size depends on floats that torch merges",
                    "its expression is not rounded where the program rounds, so that it may be another size",
                    "Multiply the constants first, or compute the size with integers",
                )

    def _follow_graph(self, graph: torch.fx.GraphModule) -> None:
        """The graph that an operator calls, and runs by itself: its values are those of Dynamo."""
        env: dict[torch.fx.Node, Any] = {}
        for node in graph.graph.nodes:
            if node.op == "get_attr":
                env[node] = getattr(graph, str(node.target), None)
            else:
                env[node] = node.meta.get("example_value", node.meta.get("val"))
                self.follow(node, env, env[node])


def _rounded(value: Any) -> set[Any]:
    """The expressions in a size, in a float, or in the sizes of a tensor, that make integers of floats."""
    from sympy import preorder_traversal

    whole = isinstance(value, torch.Tensor) and value.layout is torch.strided
    sizes = [*value.shape, *value.stride()] if whole else [value]
    return {
        part
        for size in sizes
        if isinstance(size, torch.SymInt | torch.SymFloat)
        for part in preorder_traversal(size.node.expr)
        if type(part).__name__ in ("TruncToInt", "FloorToInt", "CeilToInt", "RoundToInt")
    }


def _both_signs(floats: Iterable[Any]) -> list[Any]:
    return [signed for expr in floats for signed in (expr, -expr)]


def _is_kept(node: torch.fx.Node, env: Mapping[torch.fx.Node, Any], result: Any) -> bool:
    """Whether the result is the float of this operation on its operands."""
    operands = [_expression(env[arg] if isinstance(arg, torch.fx.Node) else arg) for arg in node.args]
    rule = _RULES.get(getattr(node.target, "__name__", str(node.target)).strip("_"))
    if rule is None or len(operands) != 2 or None in operands:
        alone = len(operands) == 1 and operands[0] is not None  # a negation, which rounds nothing, say
        return alone or not (result.is_Add or result.is_Mul or result.is_Pow)  # an argument or an opaque function
    first, second = operands
    return all(map(_is_exact, (first, second, result))) or rule(first, second, result)


def _expression(value: Any) -> Any:
    """The sympy expression of an operand as a float."""
    import sympy
    from torch.utils._sympy.functions import ToFloat

    if isinstance(value, torch.SymFloat):
        return value.node.expr
    if isinstance(value, torch.SymInt):
        return ToFloat(value.node.expr)
    return sympy.Float(float(value)) if isinstance(value, int | float) else None


def _product(a: Any, b: Any, result: Any) -> bool:
    """At most two factors are rounded; powers of two never are. Of a sum, torch multiplies both terms."""
    factors = [factor for operand in (a, b) for factor in (operand.args if operand.is_Mul else (operand,))]
    rounded = sum(not (f.is_number and abs(math.frexp(float(f))[0]) == 0.5) for f in factors)
    return rounded <= (1 if result.is_Add else 2)


def _sum(a: Any, b: Any, result: Any) -> bool:
    return bool(result.is_Add) and {*result.args} == {a, b}


def _quotient(a: Any, b: Any, result: Any) -> bool:
    return type(result).__name__ == "IntTrueDiv" or (type(result).__name__ == "FloatTrueDiv" and result.args == (a, b))


def _power(a: Any, b: Any, result: Any) -> bool:
    return type(result).__name__ == "FloatPow" and result.args == (a, b)


_RULES: dict[str, Callable[[Any, Any, Any], bool]] = {
    "add": _sum,
    "radd": _sum,
    "sub": lambda a, b, result: _sum(a, -b, result),
    "mul": _product,
    "rmul": _product,
    "truediv": _quotient,
    "pow": _power,
    # Of floats, torch divides and rounds down, and Python rounds down without rounding before.
    "floordiv": lambda a, b, result: bool(b.is_Float) and _is_exact(a) and _is_exact(b),
    "mod": lambda a, b, result: False,
}


def _is_exact(expr: Any) -> bool:
    """Whether a float is computed from one size and numbers of few bits, so that it is never rounded."""
    if type(expr).__name__ == "ToFloat":
        return True
    if expr.is_Float or expr.is_Integer:
        return max(map(abs, float(expr).as_integer_ratio())) <= _FEW_BITS
    if len(expr.args) != 2 or not (expr.is_Add or (expr.is_Mul and expr.args[0].is_number)):
        return False
    return all(map(_is_exact, expr.args))
