"""Which convolutions, and which of their gradients, the CPU computes by kernels of its own.

Note [Which convolutions are ours]
    Depthwise convolutions of float32 on processors with 512-bit vectors, where `python -m tools.bench.convolutions`
    shows them at least as fast as oneDNN's: those of few taps (:data:`FEW_TAPS`) and their gradients by the image, with
    the channels of a pixel together or with a stride of 1. What comes before and behind is in their kernels, too. A
    gradient by the image in several parts, see Note [Places of a scattered sum], is ours as long as it fits the caches.
    The gradient by the weights is ours with the channels together, and from :data:`MANY_TAPS` on, for which oneDNN has
    no good kernel (it takes 2 to 12 times as long).

    Those of bfloat16 are ours in the same cases where AMD's processors convert to it (`--dtype bfloat16`: 1.0 to 2.7
    times oneDNN's speed, 2 to 3 times with the pixels of a channel together, with a stride too; by the weights of 7
    by 7 taps 15 to 54). For a gradient by the image with a stride oneDNN has no kernel of vectors (it takes 20 to 190
    times as long): that is ours whatever its size, taps and layout.

    So are those along one dimension with few places (:data:`STEP_PLACES`), as one step of a state-space model or of a
    linear attention has them: the call takes longer than the sums, and what becomes of these is in the same kernel.
    Along any number of places those of up to :data:`FEW_IN_LINE` taps are ours on AMD's processors, with their
    gradients, and those of up to :data:`FEW_TAPS` where places lie side by side, or by the weights: ATen calls a kernel
    for images of one row there, before which it copies into another layout (`--only mamba`, `--only sequence`: 1.3 to
    32 times its speed).

    On Zen 3, with 256-bit vectors, those along one dimension are ours in the same cases:
    1.2 to 19 times ATen's speed. Of images those of few taps, and their gradients by the image, with :data:`WIDE`
    channels or more that lie together, or rows of :data:`LONG_ROW` pixels or more: 0.76 to 2.7 times, 1.38 in the mean
    (`--only "depthwise 3x3"`, both layouts). With a stride of 1 and channels together, gradients by images of up to
    :data:`SMALL_IMAGE` places whose rows have :data:`LARGE_ROW` elements or more are not (0.6 to 0.9 times), nor are
    convolutions of rows twice as long whose pixels are a multiple of :data:`PAGE` elements apart (0.59 to 1.12, 0.87 in
    the mean), nor those of larger images of :data:`MANY` channels or more (0.71 to 1.03) and their gradients by these
    (0.58 to 0.90; `--only many`). Of the
    gradients by weights those of many taps: in rows of pixels, or with channels together for up to
    :data:`SMALL_IMAGE` places, 1.1 to 3.2 times; there are too few registers for the sums of more.

    Convolutions of several channels are products in tile registers (AMX) where there are such, for float32, from about
    :data:`TILED` rows, columns and summed numbers and :data:`WORTH` multiplications on: the same command shows 1.1 to
    1.8 times oneDNN's speed.

    On AMD's processors with 512-bit vectors those of one tap and stride 1 are products in tiles of vectors, and so are
    their gradients by the image, in either layout: 1.1 to 1.6 times oneDNN's speed. In the forward only with sums that
    are one chain (:data:`CHUNK`), as oneDNN's are: then a result has the bits that it has in eager mode, see Note [Taps
    written out]. (With fewer than 16 results and the channels of a pixel together ATen's call has another kernel, which
    does not.)

    Elsewhere convolutions of several channels are ATen's. With ``contractions="generated"`` they are tiles of vectors
    where there is a form for that, and else plain loops.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from ...ir import Buffer, Contraction, DType, ExternCall, Range
from ...ir.walk import loads, without_single_iterations
from ...kernel_ir.matmul_site import MatmulSite
from ...lowering.convolutions import CONVOLUTION
from ...options import LowerOptions
from ...symbolic import product
from ...target import Choice
from .choose_few_rows import AMD, SHORT_AMD
from .machine import Machine
from .products import TiledProduct, multiplies_pairs, product_of
from .render.tile import CHUNK
from .tile_forms import FORMS

__all__ = ["choose_convolution"]

TILED = (96, 64, 128)  # rows, columns, summed numbers
RESULTS = 1 << 15  # of one product
FILLED = 0.75  # of the steps of a sum
WORTH = 1 << 25
WORTH_OF_POINTS = 1 << 22
FEW_TAPS = 9
MANY_TAPS = 25
CACHED = 1 << 20  # elements
SHORT_ROW = 8
STEP_PLACES = 8
FEW_IN_LINE = 6
WIDE = 32  # channels from which 256-bit vectors pay
LONG_ROW = 14  # pixels from which they do
SMALL_IMAGE = 256  # places
LARGE_ROW = 7168  # elements of all channels: rows that a result reads don't fit the first-level cache
MANY = 768  # channels of larger images
PAGE = 1024  # elements between pixels of which all fall on the same lines of the first-level cache


def choose_convolution(
    parts: Sequence[Contraction],
    call: ExternCall,
    buffers: Mapping[str, Buffer],
    options: LowerOptions,
    machine: Machine,
    processor: str,
) -> Choice:
    """``"nest"``, ``"fma"`` or ``"aten"`` for one result of a convolution; see :meth:`.Target.choose_convolution`.
    ``processor``: by LLVM's name, what ATen runs on."""
    if options.contractions == "generated":
        tiled = all(product_of(without_single_iterations(part.as_nest()), buffers, machine) for part in parts)
        return Choice("fma" if tiled else "nest", "every product is generated")
    if not all(map(_is_depthwise, parts)):
        if all(_is_tiled(part, buffers, machine) for part in parts):
            return Choice(FORMS["highest"].name, "tile registers take less time than oneDNN's call")
        if _multiplies_points(parts[0].left.dtype, machine, processor) and _is_of_points(parts, call, buffers, machine):
            return Choice("fma", f"of one tap: kernels of ours take less time than oneDNN's on {processor}")
        return Choice("aten", "convolutions of several channels are left to ATen")
    if not _is_measured(parts[0].left.dtype, machine, processor):
        return Choice("aten", "depthwise convolutions of such numbers are measured on other processors only")
    line = all(len(buffers[part.writes[0]].sizes) == 3 for part in parts)
    if line:
        why = _slower_in_line(parts, call, buffers, processor)
    else:
        why = _slower(parts, call, buffers, processor)
    return Choice("aten", why) if why else Choice("nest", "depthwise: vectors of channels or places take less time")


def _is_depthwise(part: Contraction) -> bool:
    """Whether each channel has weights of its own and one result."""
    channels = [loop for loop in (*part.rows, *part.columns, *part.reduced) if loop.symbol in ("c", "o")]
    return bool(part.batch) and all(loop.size == 1 for loop in channels)


def _is_tiled(part: Contraction, buffers: Mapping[str, Buffer], machine: Machine) -> bool:
    """Whether a part is a product in tile registers that is worth it."""
    if part.left.dtype is not DType.F32:
        return False
    found = product_of(without_single_iterations(part.as_nest()), buffers, machine)
    if not isinstance(found, TiledProduct):
        return False
    sizes = [size.constant or 1 for size in found.site.sizes]
    batch = product(loop.extent for loop in found.site.batch).constant or 1
    long = all(size >= least for size, least in zip(sizes, TILED, strict=True)) and sizes[0] * sizes[1] >= RESULTS
    return long and found.filled >= FILLED and batch * sizes[0] * sizes[1] * sizes[2] >= WORTH


def _multiplies_points(dtype: DType, machine: Machine, processor: str) -> bool:
    """Whether products of pixels are faster than oneDNN's convolutions on processors of this kind, as measured."""
    if dtype is DType.BF16:
        return machine.vector_bits == 256 and processor in SHORT_AMD
    return machine.vector_bits == 512 and processor in AMD and dtype is DType.F32


def _is_of_points(
    parts: Sequence[Contraction], call: ExternCall, buffers: Mapping[str, Buffer], machine: Machine
) -> bool:
    """Whether the result, or gradient by the image, is a product of the pixels with one tap, and large enough."""
    part = parts[0]
    sides = part.rows, part.columns, part.reduced
    if len(parts) > 1 or _is_by_weights(part):
        return False
    if any(loop.symbol[0] == "k" and loop.size != 1 for loop in part.reduced) or _steps(part) > 1:
        return False
    sizes = [product(loop.size for loop in loops).constant or 0 for loops in (part.batch, *sides)]
    if sizes[0] * sizes[1] * sizes[2] * sizes[3] < WORTH_OF_POINTS or any(load.mask for load in loads(part.body)):
        return False
    if product(buffers[part.writes[0]].sizes).constant != sizes[0] * sizes[1] * sizes[2]:
        return False  # the gradient by an image of which pixels are left out
    chained = sizes[3] <= CHUNK or call.target != CONVOLUTION or part.left.dtype is DType.BF16
    return chained and isinstance(product_of(without_single_iterations(part.as_nest()), buffers, machine), MatmulSite)


def _is_measured(dtype: DType, machine: Machine, processor: str) -> bool:
    """Whether depthwise convolutions of such numbers were compared with oneDNN's on processors of this kind."""
    if machine.vector_bits < 512:
        return machine.vector_bits == 256 and processor in SHORT_AMD and dtype in (DType.F32, DType.BF16)
    return dtype is DType.F32 or (dtype is DType.BF16 and processor in AMD and multiplies_pairs(machine))


def _slower_in_line(
    parts: Sequence[Contraction], call: ExternCall, buffers: Mapping[str, Buffer], processor: str
) -> str:
    """Why ATen is as fast or faster for a depthwise convolution along one dimension; ``""`` if it is not."""
    first = parts[0]
    result = buffers[first.writes[0]]
    if _varies(parts, buffers):
        return "a size is known at run time only"
    by_weights = _is_by_weights(first)
    taps = _count(first.columns) if by_weights else sum(_count(part.reduced) for part in parts)
    images = {name for part in parts for name in (part.writes[0], *(load.buffer for load in loads(part.body)))}
    flat = all(buffers[name].strides[-1] == 1 for name in images)
    if processor in (*AMD, *SHORT_AMD) and taps <= (FEW_TAPS if by_weights or flat else FEW_IN_LINE):
        return ""
    step = call.target == CONVOLUTION and _is_step(first, result)
    return "" if step else "along one dimension, of many taps or on a processor on which it was not measured"


def _slower(parts: Sequence[Contraction], call: ExternCall, buffers: Mapping[str, Buffer], processor: str) -> str:
    """Why ATen is as fast or faster for a depthwise convolution of images; ``""`` if it is not."""
    first = parts[0]
    narrow = first.left.dtype is DType.BF16
    tensors = [buffers[load.buffer] for part in parts for load in loads(part.body)]
    result = buffers[first.writes[0]]
    if _varies(parts, buffers):
        return "a size is known at run time only"
    if len(result.sizes) != 4:
        return "images have no two dimensions"
    if by_weights := _is_by_weights(first):
        images, taps = tensors[0], _count(first.columns)
    else:
        images, taps = result, sum(_count(part.reduced) for part in parts)
    together = images.strides[1] == 1
    strided = _steps(first) > 1
    if processor in SHORT_AMD:
        side = (images.sizes[1] if together else images.sizes[-1]).constant or 0
        few = side < WIDE if together else side < LONG_ROW * math.isqrt(len(parts))  # a part has every other pixel
        if narrow or by_weights or few:
            return _slower_in_short_vectors(images, taps, narrow, by_weights)
        if together and not strided and len(parts) == 1 and _are_many(images, side, call.target == CONVOLUTION):
            return "many channels, which oneDNN takes in parts"
    if by_weights:
        taken = together or taps >= MANY_TAPS
        return "" if taken else "sums over pixels of a row, a few at a time"
    if narrow and len(parts) > 1:
        return ""
    if taps > FEW_TAPS:
        return "oneDNN reads neighbouring pixels once for many taps"
    apart = not together and processor not in SHORT_AMD
    if len(parts) > 1 and (apart or (product(result.sizes).constant or 0) > CACHED):
        return "parts of the result lie between each other"
    if apart and ((strided and not narrow) or (result.sizes[-1].constant or 0) < SHORT_ROW):
        return "pixels of a row fill no vectors"
    return ""


def _slower_in_short_vectors(images: Buffer, taps: int, narrow: bool, by_weights: bool) -> str:
    """The same on processors with vectors of 256 bits, where it is not as with those of 512."""
    together = images.strides[1] == 1
    if narrow:  # ATen has no vectors for it
        taken = together or (taps <= FEW_TAPS and not by_weights)
        return "" if taken else "sums over many taps or pixels of a row"
    if not by_weights:
        return "few channels or pixels lie together for vectors of 256 bits"
    return "" if taps >= MANY_TAPS and (_is_small(images) or not together) else "sums over many places in few registers"


def _are_many(images: Buffer, channels: int, forward: bool) -> bool:
    """Whether the rows that a result reads lie in so many lines of memory that they push each other out of the cache,
    with a stride of 1."""
    row = channels * (images.sizes[-1].constant or 0)
    if not _is_small(images):
        return channels >= MANY
    return row >= 2 * LARGE_ROW and channels % PAGE == 0 if forward else row >= LARGE_ROW


def _is_small(images: Buffer) -> bool:
    """Whether images have few places."""
    return (product(images.sizes[2:]).constant or 0) <= SMALL_IMAGE


def _varies(parts: Sequence[Contraction], buffers: Mapping[str, Buffer]) -> bool:
    """Whether a size is known at run time only."""
    names = {name for part in parts for name in (part.writes[0], *(load.buffer for load in loads(part.body)))}
    return any(size.constant is None for name in names for size in buffers[name].sizes)


def _is_by_weights(part: Contraction) -> bool:
    """Whether a part's result are weights: places are summed, and taps are not."""
    return any(loop.symbol.startswith("k") for loop in part.columns)


def _is_step(part: Contraction, result: Buffer) -> bool:
    """Whether a convolution along one dimension has so few places and taps that it is one step of a model of sequences,
    with a state before it: then the call takes longer than the sums."""
    return (result.sizes[-1].constant or 0) <= STEP_PLACES and _count(part.reduced) <= FEW_TAPS


def _count(loops: Sequence[Range]) -> int:
    return product(loop.size for loop in loops).constant or 1


def _steps(part: Contraction) -> int:
    """The longest step between places that neighbouring elements of the result read."""
    places = [loop.symbol for loop in (*part.rows, *part.reduced) if loop.symbol.startswith("y")]
    indices = [index for load in loads((*part.left.body, *part.right.body)) for index in load.indices]
    steps = [index.coefficient(s) for index in indices for s in index.symbols if s.name in places]
    return max((step.constant or 1 for step in steps if step is not None), default=1)
