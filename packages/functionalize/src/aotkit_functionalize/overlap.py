"""Tensors that share memory, with others or within themselves."""

from __future__ import annotations

from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["covers", "definitely_disjoint", "in_disjoint_windows", "repeats_memory"]


def definitely_disjoint(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage certainly have no element in common. ``False`` when it is not known."""
    sizes = (*a.shape, *a.stride(), a.storage_offset(), *b.shape, *b.stride(), b.storage_offset())
    if not all(isinstance(size, int) for size in sizes):
        return False
    if a.numel() == 0 or b.numel() == 0:
        return True
    first_a, end_a = _bytes(a)
    first_b, end_b = _bytes(b)
    if end_a <= first_b or end_b <= first_a:
        return True
    return _disjoint_columns(a, b)


def _bytes(tensor: torch.Tensor) -> tuple[int, int]:
    offset = int(tensor.storage_offset())
    reach = sum((int(s) - 1) * int(t) for s, t in zip(tensor.shape, tensor.stride(), strict=True))
    return offset * tensor.element_size(), (offset + reach + 1) * tensor.element_size()


def _disjoint_columns(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Two blocks of columns of one row-major matrix, as the slices ``m[:, :k]`` and ``m[:, k:]`` are."""
    if a.dtype != b.dtype or a.dim() != 2 or b.dim() != 2 or a.stride() != b.stride():
        return False
    row, column = (int(s) for s in a.stride())
    if column != 1 or row <= 0:
        return False
    start_a, start_b = int(a.storage_offset()) % row, int(b.storage_offset()) % row
    end_a, end_b = start_a + int(a.shape[1]), start_b + int(b.shape[1])
    return end_a <= row and end_b <= row and (end_a <= start_b or end_b <= start_a)


def in_disjoint_windows(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors of one storage lie one behind the other, or in different columns of any number of rows.

    So do the parts of a projection to queries, keys and values, for a batch of unknown size, and every second column of
    a matrix beside the others. A row is as long as one of the known strides; sizes and strides may be symbols else.
    """
    if _ends_before(a, b) or _ends_before(b, a):
        return True
    if a.dtype != b.dtype:
        return False
    steps = {int(s) for s in (*a.stride(), *b.stride()) if isinstance(s, int) and s > 1}
    return any(_in_other_columns(a, b, row) for row in sorted(steps, reverse=True))


def _in_other_columns(a: torch.Tensor, b: torch.Tensor, row: int) -> bool:
    """Whether no element of one is a multiple of ``row`` away from one of the other."""
    columns, others = _columns(a, row), _columns(b, row)
    if columns is None or others is None:
        return False
    (start, end), (other_start, other_end) = columns, others
    return end <= row and other_end <= row and (end <= other_start or other_end <= start)


def _ends_before(a: torch.Tensor, b: torch.Tensor) -> bool:
    return compat.is_known(_byte(a, _last(a) + 1) <= _byte(b, b.storage_offset()))


def _columns(plain: torch.Tensor, row: int) -> tuple[int, int] | None:
    """First column and end of the columns of ``plain`` in rows of known length; ``None`` if they are not known."""
    offset, reach = plain.storage_offset(), 1
    if not isinstance(offset, int):
        return None
    for size, stride in zip(plain.shape, plain.stride(), strict=True):
        if not compat.is_known(stride % row == 0):
            if not isinstance(size, int) or not isinstance(stride, int):
                return None
            reach += (size - 1) * stride
    return offset % row, offset % row + reach


def repeats_memory(plain: torch.Tensor) -> bool:
    """Whether several elements may be the same memory, as those of an expanded tensor are.

    A dimension whose stride is no larger than all that the dimensions of smaller strides reach over may come back to
    an element of theirs. Where sizes depend on data only a stride of zero tells.
    """
    pairs = [(stride, n) for stride, n in zip(plain.stride(), plain.shape, strict=True) if not _is_number(n, 1)]
    if compat.depends_on_data(plain):
        return any(_is_number(stride, 0) for stride, _ in pairs)
    if any(_is_number(size, 0) for _, size in pairs):
        return False
    reach: int | torch.SymInt = 0
    for stride, size in sorted(pairs, key=lambda pair: compat.size_at_capture(pair[0])):
        if stride <= reach:
            return True
        reach = reach + stride * (size - 1)
    return False


def _is_number(size: int | torch.SymInt, number: int) -> bool:
    return isinstance(size, int) and size == number


def covers(base: torch.Tensor, member: torch.Tensor) -> bool:
    """Whether every element of ``member`` lies within the dense tensor ``base``. Symbolic sizes must prove it."""
    known = compat.is_known
    if known(member.numel() == 0):
        return True
    same_range = base.dtype == member.dtype and known(base.numel() == member.numel())
    if same_range and base.storage_offset() == member.storage_offset() and compat.is_dense(member):
        return True
    first, last = _byte(member, member.storage_offset()), _byte(member, _last(member) + 1)
    return known(first >= _byte(base, base.storage_offset())) and known(last <= _byte(base, _end(base)))


def _last(plain: torch.Tensor) -> Any:
    reach: Any = plain.storage_offset()
    for size, stride in zip(plain.shape, plain.stride(), strict=True):
        reach = reach + (size - 1) * stride
    return reach


def _end(dense: torch.Tensor) -> Any:
    return dense.storage_offset() + dense.numel()


def _byte(plain: torch.Tensor, element: Any) -> Any:
    return element * plain.element_size()
