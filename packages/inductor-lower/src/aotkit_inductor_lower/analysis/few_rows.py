"""Products of a few rows with a matrix, whatever is computed before and after them.

They are looked for in stages of the loop IR and in perfect nests of the kernel IR: both are loops around instructions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

from ..ir import CONTRACTIONS, Compute, DType, Instr, Range, Reduce, Store
from ..ir.walk import index_exprs, operands
from ..symbolic import SymbolKind
from .reduction_patterns import Ranged, size_of

__all__ = ["MOST_ROWS", "FewRows", "few_rows"]

MOST_ROWS = 8


@dataclass(frozen=True, slots=True)
class FewRows:
    """The stage at ``position`` sums products of a few ``rows`` with matrices, all of the same ``columns``: symbols of
    the outer loops that the one factor varies along and the other does not. ``right``: the values that are a number of
    a matrix each."""

    position: int
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    right: tuple[str, ...]


def few_rows(outer: Sequence[Range], stages: Sequence[Ranged]) -> FewRows | None:
    """The products of at most :data:`MOST_ROWS` rows that are summed in one of the stages, if that sums nothing else,
    and all that is summed elsewhere has as many elements."""
    varies = _loops_of_values(stages)
    found = [(k, factors) for k, stage in enumerate(stages) if stage.ranges and (factors := _factors(stage, varies))]
    if len(found) != 1:
        return None
    ((position, factors),) = found
    size = size_of(stages[position])
    summing = [stage for stage in stages if any(isinstance(i, Reduce) for i in stage.body)]
    if size.constant is None or any(size_of(stage) != size for stage in summing):
        return None
    left, right = (frozenset[str]().union(*(varies[pair[k]] for pair in factors)) for k in (0, 1))
    rows = [r for r in outer if r.symbol not in right]
    columns = [
        r.symbol for r in outer if r.symbol not in left and all(r.symbol in varies[value] for _, value in factors)
    ]
    extents = [r.size.constant for r in rows]
    if not columns or None in extents or not 1 <= prod(n or 0 for n in extents) <= MOST_ROWS:
        return None
    return FewRows(position, tuple(r.symbol for r in rows), tuple(columns), tuple(value for _, value in factors))


def _loops_of_values(stages: Sequence[Ranged]) -> dict[str, frozenset[str]]:
    """The loops that each value may vary along."""
    found: dict[str, frozenset[str]] = {}
    for stage in stages:
        own = {r.symbol for r in stage.ranges}
        for i in stage.body:
            if isinstance(i, Store):
                continue
            symbols = {s for expr in index_exprs(i) for s in expr.symbols}
            names = {*operands(i), *(s.name for s in symbols if s.kind is SymbolKind.VALUE)}
            loops = frozenset(s.name for s in symbols if s.kind is not SymbolKind.VALUE)
            loops = loops.union(*(found.get(name, frozenset()) for name in names))
            found[i.result] = loops - own if isinstance(i, Reduce) and not i.running else loops
    return found


def _factors(stage: Ranged, varies: Mapping[str, frozenset[str]]) -> list[tuple[str, str]]:
    """The left and right factors whose products a stage sums in f32, if it does nothing else."""
    made: dict[str, Instr] = {i.result: i for i in stage.body if not isinstance(i, Store)}
    found = []
    for i in stage.body:
        if isinstance(i, Store):
            return []
        if not isinstance(i, Reduce):
            continue
        multiplied = made.get(i.value)
        if i.kind != "sum" or i.running or i.dtype is not DType.F32 or not isinstance(multiplied, Compute):
            return []
        if multiplied.op not in CONTRACTIONS.values():
            return []
        left, right = multiplied.args
        more = len(varies[right] - varies[left]) >= len(varies[left] - varies[right])
        found.append((left, right) if more else (right, left))
    return found
