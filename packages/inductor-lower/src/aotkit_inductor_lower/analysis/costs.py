"""How much a nest moves and computes, for people who look at a profile. No decision depends on it."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Buffer, BufferKind, Instr, LoopNest
from ..ir.walk import accesses, computes, reduces
from ..ops.dtypes import is_float, item_bytes
from .nests import numel

__all__ = ["arithmetic", "traffic"]

_MOVES = ("cast", "where", "bitcast")


def traffic(nest: LoopNest, buffers: Mapping[str, Buffer]) -> int | None:
    """Bytes of the buffers that a nest reads and writes, each counted once, and of none more than it has accesses;
    ``None`` where a size is not known before the call."""
    touched: dict[str, int] = {}
    for iterations, body in _bodies(nest):
        if iterations is None:
            return None
        for access in accesses(body):
            touched[access.buffer] = touched.get(access.buffer, 0) + iterations
    total = 0
    for name, count in touched.items():
        buffer = buffers[name]
        size = numel(buffer).constant
        if size is None:
            return None
        total += 0 if buffer.kind is BufferKind.SCRATCH else min(size, count) * item_bytes(buffer.dtype)
    return total


def arithmetic(nest: LoopNest) -> int | None:
    """Operations on floats that a nest computes, any function counted as one; ``None`` as of :func:`traffic`."""
    total = 0
    for iterations, body in _bodies(nest):
        if iterations is None:
            return None
        made = [c for c in computes(body) if c.op not in _MOVES] + reduces(body)
        total += iterations * sum(is_float(each.dtype) for each in made)
    return total


def _bodies(nest: LoopNest) -> list[tuple[int | None, tuple[Instr, ...]]]:
    """How often the body of each stage runs."""
    found: list[tuple[int | None, tuple[Instr, ...]]] = []
    for stage in nest.stages:
        iterations: int | None = 1
        for loop in (*nest.outer, *stage.ranges):
            size = loop.size.constant
            iterations = None if size is None or iterations is None else iterations * size
        found.append((iterations, stage.body))
    return found
