"""Offsets are computed in 32 bits where all that goes into them is known to be small enough."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import DType
from ..kernel_ir.bounds import hint
from ..kernel_ir.nodes import Kernel
from ..kernel_ir.walk import all_loops, expressions, perfect_nests
from ..symbolic import Expr, Symbol, SymbolKind, product, to_expr

__all__ = ["FIRST_WIDE", "choose_index_width"]

FIRST_WIDE = 2**31 - 2**20  # elements: there is room for the last block below 2^31
_UNKNOWN = 4096  # what an unknown size counts as


def choose_index_width(kernel: Kernel) -> Kernel:
    """The kernel with 32 bits for its offsets where those do.

    Each offset and each position along a loop (along all loops of a nest, which are counted through) is looked at, and
    nothing else: how often the body runs in all, and how large the memory around what is accessed is, is no number of
    the kernel.
    """
    return replace(kernel, index_type=DType.I64 if _is_large(kernel) else DType.I32)


def _is_large(kernel: Kernel) -> bool:
    """Whether an offset or a count might pass 2^31: it does not if all sizes are known and small."""
    sizes = {Symbol(loop.symbol): loop.extent for loop in all_loops(kernel)}
    if any(size.constant is None for size in sizes.values()):
        return True
    total = hint(product(loop.extent for loop in kernel.grid))
    if any(total * hint(row.extent, _UNKNOWN) >= FIRST_WIDE for row in kernel.scratch):
        return True
    if any(hint(size) >= FIRST_WIDE for size in (*sizes.values(), *(nest.extent for nest in perfect_nests(kernel)))):
        return True
    return any(_magnitude(expr, sizes) >= FIRST_WIDE for expr in expressions(kernel))


def _magnitude(expr: Expr, sizes: Mapping[Symbol, Expr]) -> float:
    """A bound of what computing ``expr`` goes through, its parts included; infinite if a size is not known. Values of
    the kernel are 64 bits wide, and so is what they are part of: they count as 1."""
    total = 0.0
    for monomial, factor in expr.terms:
        product = inner = float(abs(factor))
        for atom in monomial:
            if isinstance(atom, Symbol):
                size = to_expr(1) if atom.kind is SymbolKind.VALUE else sizes.get(atom)
                part = float("inf") if size is None or size.constant is None else float(max(1, size.constant))
            else:
                part = max(1.0, *(_magnitude(arg, sizes) for arg in atom.args))
            product, inner = product * part, max(inner, part)
        total += max(product, inner)
    return total
