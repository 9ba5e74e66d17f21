"""The place of an element among the elements of its buffer."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from ..symbolic import Expr, Ranges, contiguous_strides, has_calls, simplify, to_expr
from .nodes import Buffer

__all__ = ["flat_index"]


def flat_index(buffer: Buffer, indices: Sequence[Expr], ranges: Ranges | None = None) -> Expr:
    """The row-major position of an element among the buffer's elements, whatever its strides are."""
    total = indices[0] if len(indices) == 1 else _joined(buffer.sizes, tuple(indices))
    return simplify(total, ranges) if ranges is not None and has_calls(total) else total


@lru_cache(maxsize=1 << 14)
def _joined(sizes: tuple[Expr, ...], indices: tuple[Expr, ...]) -> Expr:
    """A pure function, kept because fusion asks for the same positions again and again."""
    total = to_expr(0)
    for index, stride in zip(indices, _row_major(sizes), strict=True):
        if index.terms:
            total = total + (index if stride == 1 else index * stride)
    return total


@lru_cache(maxsize=4096)
def _row_major(sizes: tuple[Expr, ...]) -> tuple[Expr, ...]:
    return contiguous_strides(sizes)
