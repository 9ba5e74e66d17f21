"""Which convolutions become implicit products of ours.

Note [Which convolutions are implicit products]
    Kernels (:mod:`.render.implicit`) compute convolutions whose images lie channels last, with one group, of sizes that
    are known: forward, the gradient by the input (a convolution with flipped weights; with a stride one for each
    remainder of places) and that by the weights (a product over all places, whose sum is cut in parts that are added in
    order, so results repeat). cuDNN computes the same in the same number of bytes, so it keeps what is not asked for
    (``contractions="generated"``) or measured to be faster (``tune``); the measure has no epilogue, which ours get for
    nothing.

    Two classes were faster by much on an H200 (``python -m tools.bench.triton_convolutions``, bfloat16), and are ours
    by default on devices of its architecture, forward, as large as they were there: of images of three channels, of
    which a tile of cuDNN's is mostly padding (2.2 times its speed), and those whose places don't overlap, as patches of
    an image have it: plain products (1.85 times, of three channels 5).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir import Arg, Buffer, BufferRef, Contraction, ExternCall, Literal
from ...lowering.convolutions import CONVOLUTION
from ...ops.dtypes import DType, dtype_from_torch_name
from ...options import LowerOptions
from ...symbolic import product
from ...target import Choice

__all__ = ["choose_convolution"]

_LEAST = 16  # rows and columns of a product that tl.dot fills
_CHANNELS = 1  # the dimension of an image
_PICTURE = 3  # channels of an image that is the input of a network
_PLACES = 50176  # of all results, at least: the fewest that were measured, 28 by 28 of 64 images


def choose_convolution(
    parts: Sequence[Contraction],
    call: ExternCall,
    buffers: Mapping[str, Buffer],
    options: LowerOptions,
    *,
    known: bool,
) -> Choice:
    """``"implicit"`` where kernels can compute a result of a convolution: all ``parts`` of it. ``known``: the device is
    of the kind that was measured; some are taken there without a measure."""
    refused = _refused(parts, buffers)
    if refused:
        return Choice("aten", f"ATen, {refused}")
    faster = _measured_faster(call, buffers) if known else ""
    if faster and options.contractions == "auto":
        return Choice("implicit", f"generated, {faster}", unmeasured=True)
    return Choice("implicit", "every convolution is generated")


def _measured_faster(call: ExternCall, buffers: Mapping[str, Buffer]) -> str:
    """Why a convolution is of those that were faster than cuDNN's by much; nothing where it isn't known to be."""
    tensors = [buffers[arg.name] for arg in call.args[:2] if isinstance(arg, BufferRef)]
    out = buffers.get(call.results[0] or "")
    if call.target != CONVOLUTION or call.args[6] != Literal("bool", False) or len(tensors) != 2 or out is None:
        return ""
    image, weights = tensors
    places = product((out.sizes[0], *out.sizes[2:])).constant or 0
    if image.dtype != "bfloat16" or len(image.sizes) != 4 or places < _PLACES:
        return ""
    taps = [size.constant for size in weights.sizes[2:]]
    stride, pad, dilation = ([_number(each) for each in _items(arg)] for arg in call.args[3:6])
    if set(dilation) != {1} or max(taps, key=lambda n: n or 0) == 1:
        return ""
    if stride == taps and set(pad) == {0}:
        return "its places don't overlap: as measured on an H200, cuDNN takes 1.85 to 5 times as long"
    if image.sizes[_CHANNELS] == _PICTURE:
        return "an image of three channels: as measured on an H200, cuDNN takes 2.2 to 5 times as long"
    return ""


def _items(arg: Arg) -> tuple[Arg, ...]:
    return arg if isinstance(arg, tuple) else (arg,)


def _number(arg: Arg) -> object:
    return arg.value if isinstance(arg, Literal) else None


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
