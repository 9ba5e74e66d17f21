"""Turning a square of vectors over, in registers.

Note [Tiles]
    Where a pointwise nest reads with unit stride along one loop and writes with unit stride along another, the
    first (``tile``) variable takes the place of copies: copy ``k`` is one step of it. A vector load along the tile
    variable for each lane, turned over, gives the vectors along the vector variable, and the same for stores.
"""

from __future__ import annotations

from collections.abc import Sequence

from .emitter import Emitter, Ssa

__all__ = ["transpose"]

Row = tuple[Ssa, tuple[tuple[int, int], ...]]  # a vector, and which (row, column) each of its elements is


def transpose(em: Emitter, rows: Sequence[Ssa], scalar: str, bits: int) -> list[Ssa]:
    """Columns of a square matrix given by its rows. ``bits``: width of an element.

    Interleaves inside 128-bit parts first (one instruction each), then exchanges parts.
    """
    count = len(rows)
    state: list[Row] = [(row, tuple((r, c) for c in range(count))) for r, row in enumerate(rows)]
    part = min(count, 128 // bits)
    step = 1
    while step < count:
        low, high = _masks(count, part, step)
        following = list(state)
        for first in range(count):
            if first & step:
                continue
            a, b = state[first], state[first + step]
            following[first] = _pick(em, a, b, scalar, low)
            following[first + step] = _pick(em, a, b, scalar, high)
        state = following
        step *= 2
    columns: dict[int, Ssa] = {}
    for vector, elements in state:
        assert elements == tuple((r, elements[0][1]) for r in range(count)), "the exchanges do not make columns"
        columns[elements[0][1]] = vector
    return [columns[c] for c in range(count)]


def _masks(count: int, part: int, step: int) -> tuple[list[int], list[int]]:
    """The two shuffles of one round on vectors ``a`` (elements from 0) and ``b`` (from ``count``)."""
    if step < part:  # interleave groups of `step` elements inside each part
        low: list[int] = []
        high: list[int] = []
        for start in range(0, count, part):
            for target, offset in ((low, 0), (high, part // 2)):
                for group in range(start + offset, start + offset + part // 2, step):
                    target += range(group, group + step)
                    target += range(count + group, count + group + step)
        return low, high
    low = [j if not j & step else count + j - step for j in range(count)]
    high = [j + step if not j & step else count + j for j in range(count)]
    return low, high


def _pick(em: Emitter, a: Row, b: Row, scalar: str, mask: list[int]) -> Row:
    elements = a[1] + b[1]
    return em.shuffle(a[0], b[0], scalar, mask), tuple(elements[m] for m in mask)
