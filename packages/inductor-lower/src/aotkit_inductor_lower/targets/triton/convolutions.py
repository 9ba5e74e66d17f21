"""Which convolutions become implicit products of ours.

Note [Which convolutions are implicit products]
    Kernels (:mod:`.render.implicit`) compute convolutions whose images lie channels last, with one group, of sizes that
    are known: forward, the gradient by the input (a convolution with flipped weights; with a stride one for each
    remainder of places) and that by the weights (a product over all places, whose sum is cut in parts that are added in
    order, so results repeat). cuDNN computes the same in the same number of bytes, so it keeps what is not asked for
    (``contractions="generated"``) or measured to be faster (``tune``); the measure has no epilogue, which ours get for
    nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir import Buffer, Contraction
from ...ops.dtypes import DType, dtype_from_torch_name
from ...symbolic import product
from ...target import Choice

__all__ = ["choose_convolution"]

_LEAST = 16  # rows and columns of a product that tl.dot fills
_CHANNELS = 1  # the dimension of an image


def choose_convolution(
    parts: Sequence[Contraction],
    buffers: Mapping[str, Buffer],
) -> Choice:
    """``"implicit"`` where kernels can compute a result of a convolution: all ``parts`` of it."""
    refused = _refused(parts, buffers)
    return Choice("aten", f"ATen, {refused}") if refused else Choice("implicit", "every convolution is generated")


def _refused(parts: Sequence[Contraction], buffers: Mapping[str, Buffer]) -> str:
    """Why a convolution is ATen's in any case."""
    touched = {name for part in parts for name in (*part.reads, *part.writes)}
    images = [buffers[name] for name in sorted(touched) if len(buffers[name].sizes) > 2]
    known = all(e.constant is not None for b in images for e in (*b.sizes, *b.strides))
    if any(part.accumulate is not DType.F32 for part in parts):
        return "kernels of products sum in f32"
    if not known:
        return "its sizes are known at run time only"
    if any(dtype_from_torch_name(b.dtype) is None for b in images):
        return "its type has no kernels"
    if any(part.batch for part in parts):
        return "it has groups"
    if not all(_channels_last(b) for b in images):
        return "its images are not channels last"
    smallest = min(min(product(r.size for r in side).constant or 0 for side in (p.rows, p.columns)) for p in parts)
    if smallest < _LEAST:
        return f"a product with fewer than {_LEAST} rows or columns fills no tile"
    return ""


def _channels_last(buffer: Buffer) -> bool:
    """Whether channels lie side by side, or nothing else does."""
    return buffer.strides[_CHANNELS] == 1 or buffer.sizes[_CHANNELS] == 1 or _is_point(buffer)


def _is_point(buffer: Buffer) -> bool:
    """Whether there is one place, or one tap: any layout is channels last then."""
    return all(size == 1 for size in buffer.sizes[2:])
