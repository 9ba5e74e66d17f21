"""The caller's decomposition table, without what breaks gradients and with what must not pass silently."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import guard_or_false

from aotkit_functionalize import OverlappingWrite, Unsupported

from . import _torch_compat as compat
from .eager_indices import with_eager_indices
from .eager_layouts import with_eager_layouts
from .eager_norms import with_eager_norms
from .eager_pads import with_eager_pads
from .eager_spectra import with_eager_spectra
from .eager_strides import with_eager_strides
from .known_shapes import recorded_with_known_shapes
from .lazy_bits import without_bits_first

__all__ = ["guarded_table"]

aten = torch.ops.aten
Table = Mapping[Any, Callable[..., Any]]


def guarded_table(table: Table, in_forward: Callable[[], bool], sums_windows: Callable[[], bool]) -> Table:
    """``table`` made safe; ``in_forward`` says whether the run has not begun its backward yet, ``sums_windows`` whether
    an operation runs that sums overlapping windows itself.

    Note [Writes that functionalization gets wrong]
        A write through a view becomes a scatter of the new values into the base. For a view whose elements
        overlap the scatter has no right answer, and the scatter for ``unfold`` puts zeros between windows that
        do not touch (most of these have been replaced by other views before). Both would be recorded without a word,
        so the two operators are looked at first.

        torch's core decomposition of CPU flash attention returns the attention weights in the place of the
        log-sum-exp, which the backward operator then takes for it: wrong gradients of all three inputs.
    """
    guarded = {**recorded_with_known_shapes(), **without_bits_first(), **table}
    attention = aten._scaled_dot_product_flash_attention_for_cpu
    if aten._scaled_dot_product_flash_attention_for_cpu_backward.default not in table:
        guarded.pop(attention.default, None)

    def otherwise(op: Any, *args: Any, **kwargs: Any) -> Any:
        return table[op](*args, **kwargs) if op in table else NotImplemented

    def as_strided_scatter(base: Any, source: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
        if in_forward() and _overlaps(size, stride):
            raise OverlappingWrite(f"a view made by as_strided({tuple(size)}, {tuple(stride)}, {storage_offset})")
        if in_forward() and not _lies_within(base, size, stride, storage_offset):
            raise Unsupported(
                f"a view of sizes {tuple(size)}, strides {tuple(stride)} and offset {storage_offset} is written to, "
                "which reaches beyond the elements of the tensor it is taken of",
                "what lies there belongs to no argument",
                "Pass the tensor that holds all of it",
            )
        return otherwise(aten.as_strided_scatter.default, base, source, size, stride, storage_offset)

    def unfold_backward(grad: Any, input_sizes: Any, dim: int, size: int, step: int) -> Any:
        written = in_forward() and not sums_windows()
        if written and size > step and len(input_sizes) > 0 and input_sizes[dim] > size:
            raise OverlappingWrite(f"a view made by unfold({dim}, {size}, {step})")
        if written and not _windows_cover(input_sizes, dim, size, step):
            raise Unsupported(
                f"the windows of unfold(dimension={dim}, size={size}, step={step}) are written to",
                "they leave gaps, which functionalization does not restore",
                "Write to slices instead",
            )
        return otherwise(aten.unfold_backward.default, grad, input_sizes, dim, size, step)

    def power(base: Any, exponent: Any) -> Any:
        if base.dtype is torch.bool and isinstance(exponent, bool):  # the fake kernel says int64
            return base.clone() if exponent else torch.ones_like(base)
        return otherwise(aten.pow.Tensor_Scalar, base, exponent)

    def dropout(x: Any, p: float, train: bool | None) -> Any:
        if p != 0 or train is False or guard_or_false(x.numel() == 0):
            return otherwise(aten.native_dropout.default, x, p, train)
        if not x.is_floating_point() and not x.is_complex():
            raise Unsupported(
                f"dropout of a tensor of {x.dtype}",
                "its result, which is scaled, is no integer; eager mode refuses it, too",
                "Convert the tensor to a floating-point type",
            )
        # The fake kernel says that the result is the argument itself. Eager draws a mask all the same.
        kept = aten.bernoulli.p(torch.empty_like(x, dtype=torch.bool), 1.0)
        return x * kept, kept

    guarded[aten.native_dropout.default] = dropout
    guarded[aten.pow.Tensor_Scalar] = power
    guarded[aten.as_strided_scatter.default] = as_strided_scatter
    guarded[aten.unfold_backward.default] = unfold_backward
    laid_out = with_eager_layouts(with_eager_strides(with_eager_spectra(guarded)))
    return with_eager_pads(with_eager_norms(with_eager_indices(laid_out)))


def _overlaps(sizes: Sequence[Any], strides: Sequence[Any]) -> bool:
    """Whether two index tuples may lead to one element."""
    if any(size == 0 for size in sizes):
        return False
    reach: Any = 0
    for stride, size in sorted((t, s) for s, t in zip(sizes, strides, strict=True) if s != 1):
        if stride <= reach:
            return True
        reach = reach + (size - 1) * stride
    return False


_ENUMERATED = 1 << 14  # elements of a tensor with gaps that are looked at one by one


def _lies_within(base: Any, sizes: Sequence[Any], strides: Sequence[Any], offset: Any) -> bool:
    """Whether the view touches no memory but that of elements of ``base``. ``False`` where that is not known."""
    if any(size == 0 for size in sizes):
        return True
    first = base.storage_offset()
    start = first if offset is None else offset
    last = first + sum((n - 1) * t for n, t in zip(base.shape, base.stride(), strict=True))
    reach = start + sum((n - 1) * t for n, t in zip(sizes, strides, strict=True))
    if base.numel() == 0 or not (start >= first and reach <= last):
        return False
    if compat.is_dense(base):
        return True
    numbers = (*base.shape, *base.stride(), first, *sizes, *strides, start)
    if not all(isinstance(n, int) for n in numbers) or base.numel() > _ENUMERATED:
        return False
    return _offsets(sizes, strides, start) <= _offsets(base.shape, base.stride(), first)


def _offsets(sizes: Sequence[int], strides: Sequence[int], start: int) -> set[int]:
    found = {start}
    for size, stride in zip(sizes, strides, strict=True):
        found = {offset + i * stride for offset in found for i in range(size)}
    return found


def _windows_cover(sizes: Sequence[Any], dim: int, size: int, step: int) -> bool:
    """Whether the windows hold each element exactly once."""
    return bool(len(sizes) == 0 or (size == step and sizes[dim] % size == 0))
