"""A producer that is computed where its buffer is read: what of its body goes there.

Note [Loads that need no mask]
    What reads a producer under a mask takes another value where the mask is false, so nothing of the producer's body is
    seen there, and its loads need the mask only where their elements may not exist. The statistics and weights of a
    norm before a pooling exist for every tap of a window, in the padding too. Without the mask they are the same for
    all taps and lanes, so that they, and what is computed of them alone, are loaded and computed once before the loops
    over the window; under it, they were chosen anew for every tap.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
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


def under_mask(
    body: Sequence[Instr],
    names: MutableMapping[str, str],
    mask: str,
    exists: Callable[[Load], bool] = lambda load: False,
) -> list[Instr]:
    """A producer's body with every load under ``mask`` too, so that lanes outside read nothing, but those of which
    ``exists`` says that they need none, see Note [Loads that need no mask]."""
    outside = "mask:outside"
    names[outside] = mask
    result: list[Instr] = []
    for instr in body:
        if isinstance(instr, Load) and instr.mask is None and not exists(instr):
            instr = Load(instr.result, instr.buffer, instr.indices, instr.dtype, outside, 0)
        elif isinstance(instr, Load) and instr.mask is not None:
            both = f"mask:{instr.result}"
            result.append(Compute(both, "logical_and", (outside, instr.mask), DType.BOOL))
            instr = Load(instr.result, instr.buffer, instr.indices, instr.dtype, both, instr.other)
        result.append(instr)
    return result
