"""Short rows that begin at odd places, taken for one long row.

Note [Flat rows]
    A thread loads several neighbours at once only where they begin at a multiple of as many bytes. Rows of 35 halves
    begin anywhere, so along them it loads one at a time. But where rows touch, in all that has an element for each
    iteration, their elements are one run, and a program instance can take that in pieces which begin where they should.
    What has one number for each row, or one for each column, is then found by a quotient, or a remainder: it is little
    enough to stay in a cache. Long rows stay: they are worth an aligned start each, see Note [Odd rows] in
    :mod:`.map_loops`.

Note [Rows that are walked together]
    Where a program instance walks over rows and sums their columns (Note [Walked rows] in :mod:`.walked_rows`), rows of
    150 halves, which begin at multiples of four bytes, are taken four by four: 600 halves begin at multiples of
    sixteen. The line of sums is as long then, and its quarters are added at the end, in the memory of the sums, which
    is in a cache: ``tl.gather`` would keep them in registers, but takes long to compile, as each thread chooses
    among all numbers that others have. For this nothing may be one number of a row.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from ...ir import Load, Reduce, Store
from ...ir.walk import accesses, instructions
from ...kernel_ir.nodes import Kernel, Loop
from ...kernel_ir.walk import map_expressions, nested
from ...symbolic import Expr, Symbol, floordiv, mod, sym, to_expr
from .sectors import WIDEST, bytes_of, row_start

__all__ = ["flat_rows", "walked_together"]

_SHORT = 512  # elements of a row
_AT_ONCE = 8  # bytes that a thread should load
_TOGETHER = (2, 4, 8)  # rows


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


def walked_together(kernel: Kernel, walked: Loop) -> tuple[Kernel, Loop]:
    """The kernel with several iterations of the loop ``walked`` of its grid as one, and that loop, where this lets a
    thread load more at once; see Note [Rows that are walked together]."""
    body, count = instructions(kernel.body), walked.extent.constant
    row = kernel.body[0] if len(kernel.body) == 1 else None
    if not isinstance(row, Loop) or any(isinstance(stmt, Loop) for stmt in row.body) or kernel.scratch:
        return kernel, walked
    length, both = row.extent.constant, {Symbol(walked.symbol), Symbol(row.symbol)}
    whole = [i for i in accesses(body) if Symbol(walked.symbol) in i.indices[0].symbols]
    touching = all(both <= i.indices[0].symbols and _touches(i.indices[0], walked, row) for i in whole)
    read = [i for i in whole if isinstance(i, Load)]
    short = length is not None and 1 < length <= _SHORT
    if not count or not length or not short or not touching or any(isinstance(i, Reduce) for i in body):
        return kernel, walked
    if min((row_start(i, Symbol(row.symbol)) for i in read), default=_AT_ONCE) >= _AT_ONCE:
        return kernel, walked
    for rows in _TOGETHER:
        starts = [gcd(_start_of_run(i, walked, row), rows * length * bytes_of(i)) for i in read]
        if count % rows == 0 and min(starts) >= WIDEST:
            return _by_so_many(kernel, replace(walked, extent=to_expr(count // rows)), row, rows)
    return kernel, walked


def _start_of_run(access: Load, rows: Loop, row: Loop) -> int:
    return row_start(access, Symbol(row.symbol), also=Symbol(rows.symbol))


def _by_so_many(kernel: Kernel, walked: Loop, row: Loop, rows: int) -> tuple[Kernel, Loop]:
    """``rows`` iterations of a loop of the grid as each of ``walked``, which takes its place, and a loop over these
    around that over a row."""
    those = Loop(f"{row.symbol}_of", to_expr(rows))
    place = {Symbol(walked.symbol): sym(walked.symbol) * rows + sym(those.symbol)}
    made = map_expressions(kernel, lambda expr: expr.substitute(place))
    (inner,) = made.body
    assert isinstance(inner, Loop)
    grid = tuple(walked if each.symbol == walked.symbol else each for each in kernel.grid)
    return replace(made, grid=grid, body=nested([those, inner], inner.body)), walked


def _touches(expr: Expr, rows: Loop, row: Loop) -> bool:
    """Whether the next row begins where one ends."""
    step, next_row = (expr.coefficient(Symbol(loop.symbol)) for loop in (row, rows))
    return step == 1 and next_row is not None and next_row == row.extent
