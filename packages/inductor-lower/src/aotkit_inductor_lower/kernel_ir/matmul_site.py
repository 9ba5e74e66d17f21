"""Kernels that compute a product of matrices, whatever is computed before and after it."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import CheckedIndex, Compute, DType, Reduce, Store
from .nodes import Kernel, Loop
from .walk import loops_of_values, perfect_nests

__all__ = ["MatmulSite", "matmul_site"]


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


def matmul_site(kernel: Kernel) -> MatmulSite | None:
    """The matrix product of floats that a kernel computes, if it is one and nothing else is reduced.

    A nest of the form that Note [What a contraction is] tells: one factor does not vary along the columns, the other
    not along the rows, and the product of both need not be rounded. What is summed, and so each factor, is f32 or f64.
    """
    loops = [k for k, stmt in enumerate(kernel.body) if isinstance(stmt, Loop)]
    if len(loops) != 1 or len(kernel.grid) < 2 or kernel.ordered or kernel.scratch or loops[0] != 0:
        return None
    nest = perfect_nests(kernel)[0]
    reduces = [i for i in nest.body if isinstance(i, Reduce)]
    others = any(isinstance(i, Store | CheckedIndex) for i in nest.body)
    if len(nest.loops) != 1 or len(reduces) != 1 or others:
        return None
    reduce = reduces[0]
    made = {i.result: i for i in nest.body if not isinstance(i, Store)}
    product = made.get(reduce.value)
    if reduce.kind != "sum" or reduce.running or reduce.dtype not in (DType.F32, DType.F64):
        return None
    if not isinstance(product, Compute) or product.op != "mul_contract":
        return None
    varies = loops_of_values(nest)
    rows, columns = kernel.grid[-2:]
    left, right = product.args
    if rows.symbol in varies[right] or columns.symbol in varies[left]:
        left, right = right, left
    if rows.symbol in varies[right] or columns.symbol in varies[left]:
        return None
    if rows.symbol not in varies[left] or columns.symbol not in varies[right]:
        return None
    return MatmulSite(reduce, left, right, rows, columns, nest.loops[0])
