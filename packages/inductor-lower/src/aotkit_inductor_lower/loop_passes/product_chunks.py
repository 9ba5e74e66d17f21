"""In how many parts the sum of a matrix product is computed.

Note [Parts of a product's sum]
    A device computes a product in large tiles, of which the gradient of a weight has too few: 768 by 768 results are 36
    tiles of 128 by 128, for 132 multiprocessors, each with a sum over all 8192 rows of a batch. So the sum is cut, as
    any reduction is: a first kernel computes as many products as there are parts, and a second one adds their results,
    in order, and does what comes after. These results are read and written once more, in float32, so parts are no more
    than keep the device busy, and no shorter than what it takes a tile to begin and to end. Parts are of one length:
    then nothing is masked.

    The gradient of a convolution by its weights is such a product over images and places (Note [Implicit products] in
    the Triton target), which is cut between images, as long as they are an even number, and then between their rows.
"""

from __future__ import annotations

from ..ir import CONTRACTIONS, Compute, LoopNest, Reduce, Stage
from ..ir.walk import loads
from ..symbolic import to_expr
from ..target import ProductSplit
from .rfactor import ReductionSplit

__all__ = ["is_product", "product_chunks"]

_LEAST = 16  # rows and columns of what tiles compute


def is_product(nest: LoopNest, stage: Stage) -> bool:
    """Whether a stage sums products of matrices: results vary along two loops of some length at least."""
    names = {i.result for i in stage.body if isinstance(i, Compute) and i.op in CONTRACTIONS.values()}
    sums = [i for i in stage.body if isinstance(i, Reduce)]
    if len(sums) != 1 or sums[0].value not in names:
        return False
    if len(stage.ranges) > 1:
        return all(size >= _LEAST for size in _sides(nest, stage))
    large = [r for r in nest.outer[-2:] if r.size.constant is None or r.size.constant >= _LEAST]
    return len(large) == 2


def _sides(nest: LoopNest, stage: Stage) -> tuple[int, int]:
    """How many rows and columns a product over several loops has, of known sizes: those loops that its last one's
    factor varies along, and those that the other one does."""
    symbols = [frozenset(s.name for e in load.indices for s in e.symbols) for load in loads(stage.body)]
    last = nest.outer[-1].symbol if nest.outer else ""
    of_last = frozenset[str]().union(*(each for each in symbols if last in each))
    others = frozenset[str]().union(*(each for each in symbols if last not in each))
    rows, columns = 1, 1
    for r in nest.outer:
        size = r.size.constant or 0
        if r.symbol in of_last and r.symbol in others:
            continue
        columns, rows = (columns * size, rows) if r.symbol in of_last else (columns, rows * size)
    return rows, columns


def product_chunks(nest: LoopNest, stage: Stage, policy: ProductSplit) -> ReductionSplit | None:
    """How the sum of a product is cut, if that pays; one of sizes that are not known stays whole."""
    if len(stage.ranges) > 1:
        return _of_several_loops(nest, stage, policy)
    (loop,) = stage.ranges
    sizes = [r.size.constant for r in nest.outer]
    length = loop.size.constant
    if length is None or None in sizes:
        return None
    *several, rows, columns = (size or 1 for size in sizes)
    tiles = -(-rows // policy.side) * -(-columns // policy.side)
    for count in several:
        tiles *= count
    parts = 1
    while tiles * parts < policy.units and length % (2 * parts * policy.step) == 0:
        if length // (2 * parts) < policy.shortest:
            break
        parts *= 2
    if parts == 1:
        return None
    return ReductionSplit(loop, to_expr(parts), to_expr(length // parts), place=0)


def _of_several_loops(nest: LoopNest, stage: Stage, policy: ProductSplit) -> ReductionSplit | None:
    """The first loop that can be cut in the most parts that pay."""
    rows, columns = _sides(nest, stage)
    lengths = [r.size.constant for r in stage.ranges]
    if None in lengths:
        return None
    total = 1
    for length in lengths:
        total *= length or 1
    tiles = -(-rows // policy.side) * -(-columns // policy.side)
    found: ReductionSplit | None = None
    most = 1
    for loop, length in zip(stage.ranges, lengths, strict=True):
        parts = 1
        while tiles * parts < policy.units and (length or 1) % (2 * parts) == 0:
            if total // (2 * parts) < policy.shortest:
                break
            parts *= 2
        if parts > most:
            most, found = parts, ReductionSplit(loop, to_expr(parts), to_expr((length or 1) // parts), place=0)
    return found
