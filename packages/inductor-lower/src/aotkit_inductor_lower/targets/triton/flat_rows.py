"""Short rows that begin at odd places, taken for one long row.

Note [Flat rows]
    A thread loads several neighbours at once only where they begin at a multiple of as many bytes. Rows of 35 halves
    begin anywhere, so along them it loads one at a time. But where rows touch, in all that has an element for each
    iteration, their elements are one run, and a program instance can take that in pieces which begin where they should.
    What has one number for each row, or one for each column, is then found by a quotient, or a remainder: it is little
    enough to stay in a cache. Long rows stay: they are worth an aligned start each, see Note [Odd rows] in
    :mod:`.map_loops`.
"""

from __future__ import annotations

from dataclasses import replace

from ...ir import Load, Store
from ...ir.walk import instructions
from ...kernel_ir.nodes import Kernel, Loop
from ...kernel_ir.walk import map_expressions
from ...symbolic import Expr, Symbol, floordiv, mod, sym, to_expr
from .sectors import row_start

__all__ = ["flat_rows"]

_SHORT = 512  # elements of a row
_AT_ONCE = 8  # bytes that a thread should load


def flat_rows(kernel: Kernel) -> Kernel:
    """The kernel with its two innermost loops as one, if it is elementwise and they are short rows that begin at odd
    places and touch."""
    if kernel.ordered or len(kernel.grid) < 2 or any(isinstance(stmt, Loop) for stmt in kernel.body):
        return kernel
    *outer, rows, row = kernel.grid
    length, body = row.extent.constant, instructions(kernel.body)
    if not length or not 1 < length <= _SHORT or rows.extent.constant is None:
        return kernel
    accesses = [i for i in body if isinstance(i, Load | Store)]
    both = {Symbol(rows.symbol), Symbol(row.symbol)}
    whole = [i for i in accesses if both <= i.indices[0].symbols]
    read = [i for i in whole if isinstance(i, Load)]
    if not all(_touches(i.indices[0], rows, row) for i in whole) or any(
        isinstance(i, Store) and (i.accumulates or i not in whole) for i in accesses
    ):
        return kernel
    starts = [row_start(i, Symbol(row.symbol)) for i in read]
    flat = [row_start(i, Symbol(row.symbol), also=Symbol(rows.symbol)) for i in read]
    if min(starts, default=_AT_ONCE) >= _AT_ONCE or min(flat) < _AT_ONCE:
        return kernel
    position, size = sym(row.symbol), to_expr(length)
    apart = {Symbol(rows.symbol): floordiv(position, size), Symbol(row.symbol): mod(position, size)}

    def joined(expr: Expr) -> Expr:
        touches = both <= expr.symbols and _touches(expr, rows, row)
        return expr.substitute({Symbol(rows.symbol): to_expr(0)} if touches else apart)

    grid = (*outer, replace(row, extent=rows.extent * row.extent))
    return replace(map_expressions(kernel, joined), grid=grid)


def _touches(expr: Expr, rows: Loop, row: Loop) -> bool:
    """Whether the next row begins where one ends."""
    step, next_row = (expr.coefficient(Symbol(loop.symbol)) for loop in (row, rows))
    return step == 1 and next_row is not None and next_row == row.extent
