"""The plainest operation that takes a view of a base, worked out from both records."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from .records import TensorMeta, ViewSpec

__all__ = ["ViewMethod", "view_method"]

ViewMethod = Literal["as_strided", "view", "permute", "expand"]


def view_method(base: TensorMeta, view: ViewSpec) -> tuple[ViewMethod, tuple[int, ...]]:
    """The plainest way to take ``view`` of ``base``.

    ``view``, ``permute`` and ``expand`` have a cheaper backward than ``as_strided``, which scatters, and that of
    ``expand`` adds float16 up in float32. Everything with symbols, another dtype, an offset or a gap stays with
    ``as_strided``.
    """
    dims = (*base.sizes, *base.strides, *view.sizes, *view.strides, view.offset_delta)
    if base.dtype != view.dtype or view.offset_delta != 0 or not all(isinstance(d, int) for d in dims):
        return "as_strided", ()
    base_sizes, view_sizes = [int(s) for s in base.sizes], [int(s) for s in view.sizes]
    if list(base.strides) == _contiguous(base_sizes) and list(view.strides) == _contiguous(view_sizes):
        if _product(base_sizes) == _product(view_sizes) > 0:
            return "view", ()
        return "as_strided", ()
    if _is_expanded(base_sizes, base.strides, view_sizes, view.strides):
        return "expand", ()
    if len(base_sizes) != len(view_sizes) or len(set(base.strides)) != len(base_sizes):
        return "as_strided", ()  # equal strides leave the order of dimensions open
    position = {(s, t): i for i, (s, t) in enumerate(zip(base.sizes, base.strides, strict=True))}
    order = [position.get(pair) for pair in zip(view.sizes, view.strides, strict=True)]
    if all(p is not None for p in order) and len(set(order)) == len(order):
        return "permute", tuple(p for p in order if p is not None)
    return "as_strided", ()


def _is_expanded(
    base_sizes: Sequence[int], base_strides: Sequence[object], sizes: Sequence[int], strides: Sequence[object]
) -> bool:
    """Whether the view repeats the base along new leading dimensions and ones of size 1, and is the base otherwise."""
    added = len(sizes) - len(base_sizes)
    if added < 0:
        return False
    whole = [*(1 for _ in range(added)), *base_sizes]
    old_strides = [*(0 for _ in range(added)), *base_strides]
    repeated = [old == 1 and size > 1 and stride == 0 for old, size, stride in zip(whole, sizes, strides, strict=True)]
    kept = zip(whole, old_strides, sizes, strides, repeated, strict=True)
    return any(repeated) and all(more or (old, step) == (size, stride) for old, step, size, stride, more in kept)


def _contiguous(sizes: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(sizes):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _product(sizes: list[int]) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
