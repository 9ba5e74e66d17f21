"""Rows of an image below each other, for what they compute from their columns alone.

Note [Strips]
    Where an image is resampled, the place that a pixel comes from and its weights depend on the column: most of what a
    vector of pixels takes is computed again for every row. So the rows run within a vector of columns, not the columns
    within a row, and what depends on the column only moves out of them by construction. Not all rows do: so many are
    one unit of work that what they read stays in a cache, and that threads have something to share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from ...ir import CheckedIndex, Compute, Instr, Load
from ...kernel_ir.bounds import hint
from ...kernel_ir.nodes import Kernel, Loop
from ...kernel_ir.walk import PerfectNest, loops_of_values
from ...symbolic import SymbolKind

__all__ = ["ROWS", "loop_within"]

ROWS = 32  # of a strip
FEWEST_SAVED = 4  # instructions that depend on the column alone


def loop_within(kernel: Kernel, nests: Sequence[PerfectNest], lanes: Loop) -> Loop | None:
    """The loop of the grid that runs within each vector of ``lanes``, see Note [Strips]; ``None`` where that would save
    little."""
    others = [loop for loop in kernel.grid if loop is not lanes]
    if len(nests) != 1 or nests[0].loops or kernel.ordered or kernel.scratch or not others:
        return None
    varying = loops_of_values(nests[0])
    rows = others[-1]
    if hint(rows.extent) < 2 or not any(_is_computed(instr, lanes, varying) for instr in nests[0].body):
        return None
    computed = (instr for instr in nests[0].body if isinstance(instr, Compute | CheckedIndex))
    alone = sum(varying.get(instr.result) == frozenset({lanes.symbol}) for instr in computed)
    return rows if alone >= FEWEST_SAVED else None


def _is_computed(instr: Instr, lanes: Loop, varying: Mapping[str, AbstractSet[str]]) -> bool:
    """Whether the lanes of a load lie at places that are computed."""
    if not isinstance(instr, Load):
        return False
    values = (symbol.name for symbol in instr.indices[0].symbols if symbol.kind is SymbolKind.VALUE)
    return any(lanes.symbol in varying.get(value, ()) for value in values)
