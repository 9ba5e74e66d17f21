"""Sums over few taps as plain arithmetic: what depthwise convolutions become.

Note [Taps written out]
    A depthwise convolution sums some 9 to 49 products for each element. As a loop that is a reduction too short to fill
    vectors. Written out it is elementwise arithmetic: neighbours in memory, channels or places, are in the lanes, a
    mask is computed once for all channels, and what comes before and behind is fused as with any elementwise kernel.
    The taps are added one after the other, row by row, as oneDNN's kernels add them, so that the result has the bits
    that it has in eager mode. A sum for each row of taps would be no faster and a little nearer to the true sum; but
    what lies within rounding of zero would fall on the other side of a relu than in eager mode now and then, and every
    such element changes gradients by more than all roundings do.

    Weights are read as they lie if places are in the lanes, for each of which they are the same. If channels are, those
    of a tap have to lie side by side; so they are put that way first, once for the whole image.

    Gradients by the weights are sums over images and places of as many products as there are taps, and each element of
    either tensor is in several. So the taps of a row become sums beside each other in one loop.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..ir import Buffer, BufferKind, Contraction, DType, LoopNest, Operand, Range
from ..ir.builder import NestBuilder, Value
from ..ir.walk import loads, with_buffers, without_single_iterations
from ..symbolic import Expr, Symbol, sym, to_expr

__all__ = [
    "MOST_TAPS",
    "iterations",
    "own_masks",
    "sums_beside_each_other",
    "taps_of",
    "with_channels_together",
    "written_out",
]

MOST_TAPS = 81
MOST_SUMS = 9  # as many accumulators fit the registers


def taps_of(loops: Sequence[Range]) -> int | None:
    """How many taps loops have, if it is known and few enough to write out."""
    count = 1
    for loop in loops:
        if loop.size.constant is None:
            return None
        count *= loop.size.constant
    return count if 0 < count <= MOST_TAPS else None


def written_out(product: Contraction) -> LoopNest:
    """The nest of a contraction with few iterations to sum over, see Note [Taps written out]."""
    outer = tuple(loop for loop in product.outer if loop.size != 1)
    builder = NestBuilder(product.name, outer, product.origin)
    single = {Symbol(loop.symbol): to_expr(0) for loop in product.outer if loop.size == 1}
    total: Value | None = None
    for taps in iterations(product.reduced):
        factors, mask = _factors(product, builder, single | taps)
        if total is None and mask is None:
            total = builder.op("mul_contract", *factors)
            continue
        former = builder.const(0.0, product.accumulate) if total is None else total
        added = builder.op("fma", *factors, former)
        total = added if mask is None else builder.where(mask, added, former)
    assert total is not None, "a contraction of taps has one at least, see `taps_of`"
    builder.copy(product.epilogue, single, {product.result: total.name})
    return builder.finish()


def sums_beside_each_other(product: Contraction) -> LoopNest:
    """The nest of a gradient by weights whose taps, or those of a row, are sums of one loop, see Note [Taps written
    out]."""
    beside = [loop for loop in product.columns if loop.size != 1] or list(product.columns[:1])
    beside = beside if (taps_of(beside) or 0) <= MOST_SUMS else beside[-1:]
    single = {Symbol(loop.symbol): to_expr(0) for loop in product.outer if loop.size == 1}
    outer = tuple(loop for loop in product.outer if loop.size != 1 and loop not in beside)
    builder = NestBuilder(product.name, outer, product.origin)
    builder.begin_stage(product.reduced)
    ways = [single | taps for taps in iterations(beside)]
    sums: list[Value] = []
    for env in ways:
        factors, mask = _factors(product, builder, env)
        value = builder.op("mul_contract", *factors)
        if mask is not None:
            value = builder.where(mask, value, builder.const(0.0, product.accumulate))
        sums.append(builder.reduce("sum", value))
    builder.begin_stage()
    for env, total in zip(ways, sums, strict=True):
        builder.copy(product.epilogue, dict(env), {product.result: total.name})
    return builder.finish()


def with_channels_together(
    product: Contraction, buffers: Mapping[str, Buffer]
) -> tuple[Contraction, tuple[tuple[Buffer, LoopNest], ...]]:
    """A contraction of a depthwise convolution that reads the weights of a tap side by side, with the buffer and the
    nest that put them so, where images have their channels together and weights do not."""
    (image,), (load,) = loads(product.left.body), loads(product.right.body)
    weights, channels = buffers[load.buffer], buffers[load.buffer].sizes[0]
    if buffers[image.buffer].strides[1] != 1 or weights.strides[0] == 1 or channels == 1:
        return product, ()
    name = f"{product.name}_weights"
    strides, step = [to_expr(1)] * len(weights.sizes), channels
    for dim in reversed(range(1, len(weights.sizes))):
        strides[dim], step = step, step * weights.sizes[dim]
    made = Buffer(name, weights.dtype, weights.sizes, tuple(strides), BufferKind.TEMPORARY, weights.device)
    names = [f"k{dim}" for dim in range(1, len(weights.sizes))]
    builder = NestBuilder(name, tuple(map(Range, names, weights.sizes[1:])), product.origin)
    builder.begin_stage((Range("c", channels),))
    place = (sym("c"), *map(sym, names))
    builder.store_element(name, place, builder.load_element(weights.name, place, load.dtype))
    right = Operand(tuple(with_buffers(i, {weights.name: name}) for i in product.right.body), product.right.value)
    return replace(product, right=right), ((made, without_single_iterations(builder.finish())),)


def own_masks(product: Contraction) -> list[str]:
    """The masks of factors that are nothing but a load: where a convolution pads."""
    sides = (product.left, product.right)
    own = (load for side in sides for load in loads(side.body) if load.result == side.value)
    return [load.mask for load in own if load.mask is not None]


def iterations(loops: Sequence[Range]) -> Iterator[dict[Symbol, Expr]]:
    """Where loops of known sizes are at in each iteration, the last of them moving first."""
    for at in itertools.product(*(range(loop.size.constant or 0) for loop in loops)):
        yield {Symbol(loop.symbol): to_expr(k) for loop, k in zip(loops, at, strict=True)}


def _factors(
    product: Contraction, builder: NestBuilder, env: dict[Symbol, Expr]
) -> tuple[tuple[Value, Value], Value | None]:
    """Both factors at one tap, and where they are multiplied: where a factor that is nothing but a load has no mask,
    see Note [Pads as masks]."""
    names: dict[str, str] = {}
    found: list[Value] = []
    for operand in (product.left, product.right):
        builder.copy(operand.body, dict(env), names)
        value = Value(names[operand.value], operand.dtype)
        found.append(builder.cast(value, product.accumulate))
    masks = [names[mask] for mask in own_masks(product)]
    return (found[0], found[1]), Value(masks[0], DType.BOOL) if masks else None
