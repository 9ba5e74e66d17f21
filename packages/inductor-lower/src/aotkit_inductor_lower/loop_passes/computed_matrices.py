"""Products of one row with a matrix that a kernel has just computed, summed in that kernel.

Note [Matrices that are computed and kept]
    A step of a state-space model or of a linear attention computes its state anew from the last one, element by
    element, multiplies it with a vector, and keeps it. The product reads each number once, as it is made, so the kernel
    that makes it can sum as well: no call, and the state is not read again. So such a product is the nest that it
    means, and the ordinary passes fuse it. Without the call nothing needs the new state in memory of its own, and it is
    written where it is kept (pass ``write-through``).

    A matrix that only the product reads is another matter, see Note [Factors that are computed on the way].
"""

from __future__ import annotations

from collections.abc import Mapping

from ..analysis.dependencies import Dependencies
from ..analysis.nests import identity_store
from ..ir import Alias, Buffer, BufferKind, Contraction, Load, LoopNest, Program
from ..ops.dtypes import dtype_from_torch_name
from ..symbolic import product as product_of
from .reshaped_views import is_reshaped

__all__ = ["is_kept_matrix"]

LONGEST = 1 << 10  # numbers that are summed: a row of the matrix, which one iteration goes along
LARGEST = 1 << 22  # numbers of the matrix


def is_kept_matrix(
    program: Program,
    contraction: Contraction,
    buffers: Mapping[str, Buffer],
    dependencies: Dependencies,
    views: Mapping[str, Alias],
) -> bool:
    """Whether a product has one row, and its matrix is made by an elementwise nest for others to read as well."""
    load = contraction.right.body[0] if len(contraction.right.body) == 1 else None
    if not isinstance(load, Load) or load.mask is not None or load.dtype is not contraction.accumulate:
        return False
    rows, summed = (
        product_of(loop.size for loop in loops).constant for loops in (contraction.rows, contraction.reduced)
    )
    numbers = product_of(buffers[load.buffer].sizes).constant
    if rows != 1 or not summed or summed > LONGEST or not numbers or numbers > LARGEST:
        return False
    name, read = load.buffer, len(dependencies.readers.get(load.buffer, ()))
    while name in views and is_reshaped(views[name], buffers):
        name = views[name].base
        read += len(dependencies.readers.get(name, ())) - 1  # the view
    made = buffers[name]
    writers = dependencies.writers.get(name, ())
    if made.kind is not BufferKind.TEMPORARY or len(writers) != 1 or read < 2:
        return False
    nest = program.steps[writers[0]]
    whole = product_of(made.sizes).constant == numbers and dtype_from_torch_name(made.dtype) is load.dtype
    return whole and isinstance(nest, LoopNest) and identity_store(nest, buffers) is not None
