"""Loads of views as loads of what is viewed."""

from __future__ import annotations

from collections.abc import Mapping

from ..ir import Alias, Buffer, Instr, Load, LoopNest
from ..ir.walk import load_at, map_nest
from ..symbolic import contiguous_strides, reshape_indices

__all__ = ["is_reshaped", "through_views"]


def through_views(nest: LoopNest, views: Mapping[str, Alias], buffers: Mapping[str, Buffer]) -> LoopNest:
    """The nest that loads what its views of other sizes are made of, where both are whole tensors in the order of
    memory: so that fusion sees who makes it, which an alias hides."""

    def seen(instr: Instr) -> Instr:
        while isinstance(instr, Load) and instr.buffer in views:
            view = views[instr.buffer]
            base, result = buffers[view.base], buffers[view.result]
            if not is_reshaped(view, buffers):
                break
            instr = load_at(instr, base.name, tuple(reshape_indices(instr.indices, result.sizes, base.sizes)))
        return instr

    return map_nest(nest, seen)


def is_reshaped(view: Alias, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a view and its base are both whole tensors in the order of memory."""
    base, result = buffers[view.base], buffers[view.result]
    plain = view.offset.constant == 0 and not view.reuses
    return plain and _is_whole(base, result) and _is_whole(result, base)


def _is_whole(buffer: Buffer, other: Buffer) -> bool:
    """Whether a buffer lies in the order of memory without gaps, with as many elements of the same type as another."""
    counts = [1, 1]
    for k, each in enumerate((buffer, other)):
        for size in each.sizes:
            if size.constant is None:
                return False
            counts[k] *= size.constant
    plain = zip(buffer.sizes, buffer.strides, contiguous_strides(buffer.sizes), strict=True)
    dense = all(size == 1 or stride == own for size, stride, own in plain)
    return dense and counts[0] == counts[1] and buffer.dtype == other.dtype
