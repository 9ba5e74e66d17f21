"""Whether a kernel computes its indices in 64 bits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ...ir import Buffer
from ...kernel_ir.nests import FlatNest
from ...symbolic import Expr, Symbol, SymbolKind, to_expr
from .map_loops import size_hint

__all__ = ["needs_64_bit"]


def needs_64_bit(nest: FlatNest, buffers: Mapping[str, Buffer]) -> bool:
    """Whether an offset or a count might pass 2^31: it does not if all sizes are known and small."""
    limit = 2**31 - 2**20  # room for the last block
    total = to_expr(1)
    for loop in nest.outer:
        total = total * loop.size
    for row in nest.scratch:
        if total.constant is None or total.constant * _extent(row) >= limit:
            return True
    inner = max((size_hint(_inner_size(s.ranges)) for s in nest.stages), default=1)
    for expr in (total, *(loop.size for s in nest.stages for loop in s.ranges)):
        if expr.constant is None:
            return True
    if total.constant * inner >= limit:  # type: ignore[operator]
        return True
    largest = {Symbol(loop.symbol): loop.size for loop in (*nest.outer, *(r for s in nest.stages for r in s.ranges))}
    if any(_magnitude(expr, largest) >= limit for expr in nest.expressions()):
        return True
    return any(_extent(buffers[name]) >= limit for name in nest.memories)


def _inner_size(ranges: Sequence[object]) -> Expr:
    total = to_expr(1)
    for loop in ranges:
        total = total * loop.size  # type: ignore[attr-defined]
    return total


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


def _extent(buffer: Buffer) -> int:
    last = 1
    for size, stride in zip(buffer.sizes, buffer.strides, strict=True):
        last += max(0, size_hint(size) - 1) * size_hint(stride)
    return last
