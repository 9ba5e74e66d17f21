"""Kernels that compute a product of matrices, whatever is computed before and after it."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import CONTRACTIONS, CheckedIndex, Compute, DType, Reduce, Store
from ..ir.walk import loops_of_places
from .nodes import Kernel, Loop
from .walk import PerfectNest, loops_of_values, perfect_nests

__all__ = ["FewRowsSite", "MatmulSite", "few_rows_site", "matmul_site", "sum_of_products"]


@dataclass(frozen=True, slots=True)
class MatmulSite:
    """Where a kernel is a matrix product: the reduce that sums ``left * right``; ``rows`` and ``columns`` are the loops
    of the result, ``inner`` the summed one."""

    reduce: Reduce
    left: str
    right: str
    rows: Loop
    columns: Loop
    inner: Loop


@dataclass(frozen=True, slots=True)
class FewRowsSite:
    """Where a kernel is a product with one row, or a constant number of them: ``rows`` is ``None`` for one. ``inner``:
    the summed loops, outer before inner."""

    reduce: Reduce
    left: str
    right: str
    rows: Loop | None
    columns: Loop
    inner: tuple[Loop, ...]

    @property
    def count(self) -> int:
        """How many rows there are."""
        return 1 if self.rows is None else self.rows.extent.constant or 1


def matmul_site(kernel: Kernel, *, whole: bool = False) -> MatmulSite | None:
    """The matrix product of floats that a kernel computes, if it is one and nothing else is reduced; with ``whole``
    also one of whole numbers in i32.

    A nest of the form that Note [What a contraction is] tells: one factor does not vary along the columns, the other
    not along the rows, and the product of both need not be rounded. What is summed, and so each factor, is f32 or f64.
    """
    found = sum_of_products(kernel, whole=whole)
    if found is None or len(kernel.grid) < 2 or len(found[0].loops) != 1:
        return None
    nest, reduce, factors = found
    varies = loops_of_values(nest)
    rows, columns = kernel.grid[-2:]
    for left, right in (factors, factors[::-1]):
        apart = rows.symbol not in varies[right] and columns.symbol not in varies[left]
        if apart and rows.symbol in varies[left] and columns.symbol in varies[right]:
            return MatmulSite(reduce, left, right, rows, columns, nest.loops[0])
    return None


def few_rows_site(kernel: Kernel, most: int) -> FewRowsSite | None:
    """The product of at most ``most`` rows with a matrix that a kernel computes: the last loop of its grid runs over
    columns, and at most one of the others is one that only the left factor varies along. Which matrix it is may be
    loaded from memory (:func:`~..ir.walk.places_in`), for each product of a batch."""
    found = sum_of_products(kernel, few=True)
    if found is None:
        return None
    nest, reduce, factors = found
    varies = loops_of_values(nest)
    *others, columns = kernel.grid
    places = loops_of_places(nest.body)
    for left, right in (factors, factors[::-1]):
        if columns.symbol in varies[left] or columns.symbol not in varies[right]:
            continue
        rows = [loop for loop in others if loop.symbol not in varies[right]]
        if not places.isdisjoint(loop.symbol for loop in (*rows, columns, *nest.loops)):
            continue
        if not rows or (len(rows) == 1 and 1 <= (rows[0].extent.constant or 0) <= most):
            return FewRowsSite(reduce, left, right, rows[0] if rows else None, columns, tuple(nest.loops))
    return None


def sum_of_products(
    kernel: Kernel, *, few: bool = False, whole: bool = False
) -> tuple[PerfectNest, Reduce, tuple[str, str]] | None:
    """A kernel's only nest, if a sum of products is all that is reduced in it, with the sum and its factors. With
    ``whole`` it may be one of whole numbers in i32; with ``few``, as products of few rows, also that, and check
    indices."""
    loops = [k for k, stmt in enumerate(kernel.body) if isinstance(stmt, Loop)]
    if loops != [0] or not kernel.grid or kernel.ordered or kernel.scratch:
        return None
    nest = perfect_nests(kernel)[0]
    reduces = [i for i in nest.body if isinstance(i, Reduce)]
    excluded = Store if few else Store | CheckedIndex
    if len(reduces) != 1 or any(isinstance(i, excluded) for i in nest.body):
        return None
    (reduce,) = reduces
    product = next((i for i in nest.body if not isinstance(i, Store) and i.result == reduce.value), None)
    if reduce.kind != "sum" or reduce.running or not isinstance(product, Compute):
        return None
    floats = reduce.dtype in (DType.F32, DType.F64) and product.op in CONTRACTIONS.values()
    if not floats and not ((few or whole) and (reduce.dtype, product.op) == (DType.I32, "mul")):
        return None
    first, second = product.args
    return nest, reduce, (first, second)
