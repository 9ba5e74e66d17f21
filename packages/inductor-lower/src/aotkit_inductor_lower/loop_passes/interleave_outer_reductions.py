"""Sums down few columns: several rows side by side make rows that fill vectors.

Note [Folded columns]
    Eight columns of float32 are half a vector of AVX-512, and one sum each. Rows of ``n`` elements that follow
    each other in memory are therefore taken ``m`` at once, as one row of ``m * n`` elements:

        part[s, i] = sum of x[q*m + s, i] over q      for s < m: one loop over m * n columns
        part[m, i] = sum over the rows that are left
        out[i] = sum of part[s, i] over s

    ``m`` makes that row four to sixteen whole vectors of AVX-512, whose sums do not wait for each other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from ..ir import Buffer, DType, Index, LoopNest, Range
from ..ir.walk import accesses, instructions
from ..symbolic import Expr, Symbol, floordiv, product, to_expr
from .rfactor import ReductionSplit, arg_reduces

__all__ = ["interleave_outer_reductions"]

WIDTH = 64  # columns that are summed well, half as many of 64-bit types: four vectors of the widest kind
MOST_VECTORS = 16  # sums that fit into registers at once; where it takes more, the last vector of each row is masked
LEAST_ROWS = 4  # folded rows
LEAST_WORK = 1 << 11  # elements below which a second kernel costs more than it saves


def interleave_outer_reductions(nest: LoopNest, buffers: Mapping[str, Buffer]) -> ReductionSplit | None:
    """The rows that are taken at once, if the only stage with loops sums few columns that lie side by side."""
    stage = next(stage for stage in nest.stages if stage.ranges)
    if arg_reduces(stage.body):
        return None  # places would no longer be in order
    inner = {Symbol(r.symbol) for r in stage.ranges}
    offsets = [buffers[i.buffer].offset(i.indices) for i in accesses(stage.body)]
    moving = [flat for flat in offsets if not inner.isdisjoint(flat.symbols)]
    if not moving:
        return None
    width, place = 1, len(nest.outer)
    for column in reversed(nest.outer):  # loops that lie densely inside a row
        size = column.size.constant
        if size is None or (size > 1 and not _step(moving, column, width)):
            break
        width, place = width * size, place - 1
    loop = next((r for r in stage.ranges if _step(moving, r, width)), None)
    wide = any(getattr(i, "dtype", None) in (DType.F64, DType.I64) for i in stage.body)
    full = WIDTH // 2 if wide else WIDTH
    if loop is None or not 1 < width < full or width % (full // 4) == 0:
        return None
    numbered = {Symbol(r.symbol) for r in (loop, *nest.outer[place:])}
    indices = (i.expr for i in instructions(nest.stages) if isinstance(i, Index))
    if not all(numbered.isdisjoint(expr.symbols) for expr in indices):
        return None
    rows = _rows(loop, width, full, product(r.size for r in stage.ranges if r is not loop))
    return (
        ReductionSplit(loop, to_expr(rows), floordiv(loop.size, rows), interleaved=True, place=place) if rows else None
    )


def _step(offsets: list[Expr], loop: Range, step: int) -> bool:
    """Whether all accesses move by ``step`` elements with the loop."""
    return all(flat.coefficient(Symbol(loop.symbol)) == step for flat in offsets)


def _rows(loop: Range, width: int, full: int, others: Expr) -> int:
    """How many rows make one; 0 if there are too few."""
    size, vector = loop.size.constant, full // 4
    rows = vector // math.gcd(width, vector)
    vectors = rows * width // vector
    if vectors <= 3:
        rows *= 4 // vectors if vectors < 3 else 2
    elif vectors > MOST_VECTORS:
        return 0
    if size is None:
        return rows if others.constant == 1 else 0
    if size * width * (others.constant or 1) < LEAST_WORK:
        return 0
    while rows * width > full // 4 and (size < LEAST_ROWS * rows or (others.constant != 1 and size % rows)):
        rows //= 2  # no rest where it would be one of every other iteration
    return rows if rows > 1 and rows * width >= full // 4 and size >= LEAST_ROWS * rows else 0
