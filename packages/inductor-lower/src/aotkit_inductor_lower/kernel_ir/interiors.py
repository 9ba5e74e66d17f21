"""Where in an image no window hangs over an edge."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

from ..ir import Compute, Const, Index, Instr
from ..symbolic import Expr, Symbol, has_calls, to_expr
from .bounds import bounds

__all__ = ["interior"]


def interior(
    body: Iterable[Instr], whole: Mapping[Symbol, tuple[int, int]], within: Mapping[Symbol, int]
) -> dict[Symbol, tuple[int, int]]:
    """The ranges, ends included, in which every condition ``index >= number`` or ``index < number`` of a body holds,
    for all iterations of the loops within (``within``: the last of each).

    Only symbols whose range is smaller than in ``whole``; empty if there is no such place. Who asks proves each
    condition again in these ranges, so a poor answer costs time alone."""
    found = dict(whole)
    numbers: dict[str, Expr] = {}
    for instr in body:
        if isinstance(instr, Index):
            numbers[instr.result] = instr.expr
        elif isinstance(instr, Const) and isinstance(instr.value, int):
            numbers[instr.result] = to_expr(instr.value)
        elif isinstance(instr, Compute) and instr.op in ("ge", "lt") and all(arg in numbers for arg in instr.args):
            first, second = (numbers[arg] for arg in instr.args)
            _narrow(found, first - second if instr.op == "ge" else second - first - 1, within)
    if any(first > last for first, last in found.values()):
        return {}
    return {symbol: places for symbol, places in found.items() if places != whole[symbol]}


def _narrow(found: dict[Symbol, tuple[int, int]], number: Expr, within: Mapping[Symbol, int]) -> None:
    """To where a number is not negative, if it is a multiple of one symbol and what is within."""
    if has_calls(number) or len(others := number.symbols - within.keys()) != 1:
        return
    (symbol,) = others
    slope = number.coefficient(symbol)
    if symbol not in found or slope is None or not slope.constant:
        return
    factor, (least, _) = slope.constant, bounds(number.substitute({symbol: to_expr(0)}), within)
    if least == -math.inf:
        return
    first, last = found[symbol]
    if factor > 0:
        found[symbol] = max(first, -(int(least) // factor)), last
    else:
        found[symbol] = first, min(last, int(least) // -factor)
