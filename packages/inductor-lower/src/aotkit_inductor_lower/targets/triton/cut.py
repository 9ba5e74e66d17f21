"""Which nests of few long rows become one nest per pass over the row, see Note [Loop fission]."""

from __future__ import annotations

from collections.abc import Mapping

from ...ir import Buffer, BufferKind, CheckedIndex, LoopNest, Reduce, Store
from ...loop_passes.fission_long_rows import fission_long_rows
from .map_loops import size_hint, stage_size
from .render.welford import welford_pair

__all__ = ["fission"]

_LONGEST = 1 << 14  # a row that one program instance may walk several times


def fission(
    nest: LoopNest, declared: Mapping[str, Buffer], names: set[str], rows: int
) -> tuple[list[LoopNest], list[Buffer]] | None:
    """The passes of a nest of at most ``rows`` long rows, and the memory between them; ``None`` to leave it whole.
    ``names``: those of buffers that are taken; it grows."""
    starts = _passes(nest)
    if len(starts) < 2 or not _may_cut(nest, declared, starts[0], rows):
        return None
    return fission_long_rows(nest, starts, declared, names)


def _passes(nest: LoopNest) -> list[int]:
    """Where each pass over the row begins; a sum and the squares around its mean are one."""
    found: list[int] = []
    together = -1
    for position, stage in enumerate(nest.stages):
        if stage.ranges and position != together:
            found.append(position)
            pair = welford_pair(nest.stages, position)
            together = pair.position if pair is not None else -1
    return found


def _may_cut(nest: LoopNest, declared: Mapping[str, Buffer], first: int, rows: int) -> bool:
    """Whether few rows are summed over, long ones, and passes do not depend on each other through memory."""
    results = 1
    for r in nest.outer:
        results *= size_hint(r.size)
    instrs = [i for s in nest.stages for i in s.body]
    if not 0 < results <= rows or size_hint(stage_size(nest.stages[first])) < _LONGEST or not nest.reads:
        return False
    if any(isinstance(i, Reduce) and (i.running or i.kind != "sum") for i in instrs):
        return False
    if any(isinstance(i, CheckedIndex) or (isinstance(i, Store) and i.accumulates) for i in instrs):
        return False
    rowwise = any(declared[name].kind is BufferKind.SCRATCH for name in (*nest.reads, *nest.writes))
    return not rowwise and not set(nest.reads) & set(nest.writes)
