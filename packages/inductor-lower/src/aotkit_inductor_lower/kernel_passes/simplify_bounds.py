"""Divisions and remainders vanish that follow from what the loops run over, and so do variables of one iteration."""

from __future__ import annotations

from ..kernel_ir.bounds import drop_divisions
from ..kernel_ir.nodes import Kernel
from ..kernel_ir.walk import all_loops, expressions, map_expressions
from ..symbolic import Symbol, has_calls, to_expr
from .each_kernel import kernel_pass

__all__ = ["PASS", "simplify_bounds"]


def simplify_bounds(kernel: Kernel) -> Kernel:
    """The kernel with simpler index expressions, the same object if there is nothing to simplify."""
    sizes = {Symbol(loop.symbol): loop.extent.constant for loop in all_loops(kernel)}
    upper = {symbol: size - 1 for symbol, size in sizes.items() if size}
    zero = {symbol: to_expr(0) for symbol, size in sizes.items() if size == 1}
    if not zero and not any(has_calls(expr) for expr in expressions(kernel)):
        return kernel
    return map_expressions(kernel, lambda e: drop_divisions(e.substitute(zero) if zero else e, upper))


PASS = kernel_pass(
    "simplify-bounds",
    simplify_bounds,
    why="divisions that follow from what loops run over vanish",
    required=True,  # merge-loops drops loops of one iteration: their variables are gone by then
)
