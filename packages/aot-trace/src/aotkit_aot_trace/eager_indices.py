"""Strides of ``x[i, j]``: torch's fake kernel looks at ``x`` only, eager at the indices as well, so that ``x[i.t()]``
lies as ``i.t()`` does.

Note [How eager lays out what is read by indices]
    It is an elementwise result, see Note [How eager lays out an elementwise result]. The first operand is ``x``, which
    repeats itself along the dimensions that come from indices; where the indices aren't neighbours, their dimensions
    come first. The other operands are the indices, broadcast to one shape, which repeat themselves along the dimensions
    that ``x`` gives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import _torch_compat as compat
from .eager_strides import elementwise_strides

__all__ = ["with_eager_indices"]

aten = torch.ops.aten


def with_eager_indices(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table`` with the operators that read by tensors of indices."""
    reads = (aten.index.Tensor, aten._unsafe_index.Tensor)
    return {**table, **{op: functools.partial(_read, op, table.get(op)) for op in reads}}


def _read(op: Any, decompose: Callable[..., Any] | None, x: Any, indices: Sequence[Any]) -> Any:
    given = [index for index in indices if index is not None]
    plain = all(map(torch._prims_common.is_contiguous_or_false, given))
    if decompose is not None or plain or not all(map(_gives_places, given)):
        return NotImplemented if decompose is None else decompose(x, indices)

    def fake() -> Any:
        value = op(x, indices)
        wanted = _strides(value, x, indices)
        same = str(value.stride()) == str(wanted)  # comparing symbols would add guards
        return value if same else value.new_empty_strided(value.shape, wanted)

    return compat.record_operator(op, (x, indices), fake)


def _gives_places(index: torch.Tensor) -> bool:
    """Not of a mask, of which only the number of places is known when the graph runs."""
    return index.dtype in (torch.int64, torch.int32)


def _strides(value: torch.Tensor, x: torch.Tensor, indices: Sequence[Any]) -> Sequence[Any]:
    places = [place for place, index in enumerate(indices) if index is not None]
    others = [dim for dim in range(x.dim()) if dim not in places]
    neighbours = places[-1] - places[0] == len(places) - 1
    before = places[0] if neighbours else 0
    given = torch.broadcast_tensors(*(indices[place] for place in places))
    own = [x.stride(dim) for dim in others]
    after = len(others) - before
    layouts = [(tuple(value.shape), (*own[:before], *(0,) * given[0].dim(), *own[before:]))]
    layouts += [_beside(index, before, after) for index in given]
    if x.device.type != "cpu" and len(places) > 1:
        layouts[2:] = [same if same == layouts[1] else _row_major(same) for same in layouts[2:]]
    numbers = (number for sizes, strides in layouts for number in (*sizes, *strides))
    if all(type(number) is int for number in numbers):
        return elementwise_strides(layouts)
    operands = (value.new_empty_strided(sizes, strides).expand(value.shape) for sizes, strides in layouts)
    return torch._prims_common.compute_elementwise_output_strides(*operands)


def _beside(index: torch.Tensor, before: int, after: int) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """An index with dimensions of size one for those of ``x``, with the strides that a reshape gives these."""
    first = index.shape[0] * index.stride(0) if index.dim() else 1
    last = index.stride(-1) if index.dim() else 1
    return (*(1,) * before, *index.shape, *(1,) * after), (*(first,) * before, *index.stride(), *(last,) * after)


def _row_major(layout: tuple[tuple[Any, ...], tuple[Any, ...]]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    sizes, _ = layout
    return sizes, tuple(torch._prims_common.make_contiguous_strides_for(sizes))
