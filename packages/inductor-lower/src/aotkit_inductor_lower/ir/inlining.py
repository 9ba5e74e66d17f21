"""A producer that is computed where its buffer is read: what of its body goes there."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass

from ..ops.dtypes import DType
from ..symbolic import Symbol
from .nodes import Compute, Instr, Load, LoopNest, Store
from .walk import stores

__all__ = ["Inlinable", "under_mask", "without_store"]


@dataclass(frozen=True, slots=True)
class Inlinable:
    """A producer to compute where it is read: its body and the loop symbol of each dimension of its buffer."""

    nest: LoopNest
    symbols: tuple[Symbol | None, ...]


def without_store(body: Sequence[Instr]) -> tuple[list[Instr], Store]:
    """A producer's body without its store, and the store."""
    return [i for i in body if not isinstance(i, Store)], stores(body)[0]


def under_mask(body: Sequence[Instr], names: MutableMapping[str, str], mask: str) -> list[Instr]:
    """A producer's body with every load under ``mask`` too; lanes outside read nothing."""
    outside = "mask:outside"
    names[outside] = mask
    result: list[Instr] = []
    for instr in body:
        if isinstance(instr, Load) and instr.mask is None:
            instr = Load(instr.result, instr.buffer, instr.indices, instr.dtype, outside, 0)
        elif isinstance(instr, Load):
            both = f"mask:{instr.result}"
            result.append(Compute(both, "logical_and", (outside, instr.mask or outside), DType.BOOL))
            instr = Load(instr.result, instr.buffer, instr.indices, instr.dtype, both, instr.other)
        result.append(instr)
    return result
