"""In how many parts the sum of a matrix product is computed.

Note [Parts of a product's sum]
    A device computes a product in large tiles, of which the gradient of a weight has too few: 768 by 768 results are 36
    tiles of 128 by 128, for 132 multiprocessors, each with a sum over all 8192 rows of a batch. So the sum is cut, as
    any reduction is: a first kernel computes as many products as there are parts, and a second one adds their results,
    in order, and does what comes after. These results are read and written once more, in float32, so parts are no more
    than keep the device busy, and no shorter than what it takes a tile to begin and to end. Parts are of one length:
    then nothing is masked.
"""

from __future__ import annotations

from ..ir import CONTRACTIONS, Compute, LoopNest, Reduce, Stage
from ..symbolic import to_expr
from ..target import ProductSplit
from .rfactor import ReductionSplit

__all__ = ["is_product", "product_chunks"]

_LEAST = 16  # rows and columns of what tiles compute


def is_product(nest: LoopNest, stage: Stage) -> bool:
    """Whether a stage sums products of matrices: results vary along two loops of some length at least."""
    names = {i.result for i in stage.body if isinstance(i, Compute) and i.op in CONTRACTIONS.values()}
    sums = [i for i in stage.body if isinstance(i, Reduce)]
    large = [r for r in nest.outer[-2:] if r.size.constant is None or r.size.constant >= _LEAST]
    return len(sums) == 1 and sums[0].value in names and len(stage.ranges) == 1 and len(large) == 2


def product_chunks(nest: LoopNest, stage: Stage, policy: ProductSplit) -> ReductionSplit | None:
    """How the sum of a product is cut, if that pays; one of sizes that are not known stays whole."""
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
