"""Kernels that compute a product over any number of loops: convolutions are such products, too."""

from __future__ import annotations

from dataclasses import dataclass

from ..ir import CONTRACTIONS, Compute, Precision, Reduce
from ..symbolic import Expr, product
from .matmul_site import sum_of_products
from .nodes import Kernel, Loop
from .walk import loops_of_values

__all__ = ["ProductSite", "product_site"]


@dataclass(frozen=True, slots=True)
class ProductSite:
    """Where a kernel is a product: the reduce that sums ``left * right``, and its loops, outer before inner. ``rows``
    vary the left factor alone, ``columns`` the right one, ``batch`` both; ``inner`` are summed. ``precision``: of the
    contraction that it was."""

    reduce: Reduce
    precision: Precision
    left: str
    right: str
    batch: tuple[Loop, ...]
    rows: tuple[Loop, ...]
    columns: tuple[Loop, ...]
    inner: tuple[Loop, ...]

    @property
    def sizes(self) -> tuple[Expr, Expr, Expr]:
        """How many rows, columns and summed numbers there are."""
        rows, columns, inner = (product(lo.extent for lo in side) for side in (self.rows, self.columns, self.inner))
        return rows, columns, inner


def product_site(kernel: Kernel, *, whole: bool = False) -> ProductSite | None:
    """The product of floats that a kernel computes, with ``whole`` also one of whole numbers in i32, if it is one and
    nothing else is reduced. Its columns are those loops that end with the grid's innermost one."""
    found = sum_of_products(kernel, whole=whole)
    if found is None:
        return None
    nest, reduce, factors = found
    (op,) = (i.op for i in nest.body if isinstance(i, Compute) and i.result == reduce.value)
    told: list[Precision] = [precision for precision, name in CONTRACTIONS.items() if name == op]
    precision: Precision = told[0] if told else "highest"  # whole numbers are exact
    varies = loops_of_values(nest)
    last = kernel.grid[-1].symbol
    for left, right in (factors, factors[::-1]):
        if left not in varies or right not in varies or last in varies[left] or last not in varies[right]:
            continue
        sides: dict[tuple[bool, bool], list[Loop]] = {}
        for loop in kernel.grid:
            sides.setdefault((loop.symbol in varies[left], loop.symbol in varies[right]), []).append(loop)
        batch, rows, columns = (tuple(sides.get(key, ())) for key in ((True, True), (True, False), (False, True)))
        if (False, False) in sides or not rows or not nest.loops:
            return None
        return ProductSite(reduce, precision, left, right, batch, rows, columns, tuple(nest.loops))
    return None
