"""Strides of ``x[i, j]``: torch's fake kernel looks at ``x`` only, eager at the indices as well, so that ``x[i.t()]``
lies as ``i.t()`` does.

Note [How eager lays out what is read by indices]
    It is an elementwise result, see Note [How eager lays out an elementwise result]. The first operand is ``x``, which
    repeats itself along the dimensions that come from indices; where the indices aren't neighbours, their dimensions
    come first. The other operands are the indices, broadcast to one shape, which repeat themselves along the dimensions
    that ``x`` gives; those of 32 bits are converted first. Where two indices lie differently, other devices than the
    CPU make all of them contiguous.
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
_Layout = tuple[tuple[Any, ...], tuple[Any, ...]]  # sizes and strides


def with_eager_indices(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table`` with the operators that read by tensors of indices."""
    reads = (aten.index.Tensor, aten._unsafe_index.Tensor)
    return {**table, **{op: functools.partial(_read, op, table.get(op)) for op in reads}}


def _read(op: Any, decompose: Callable[..., Any] | None, x: Any, indices: Sequence[Any]) -> Any:
    given = [index for index in indices if index is not None]
    if decompose is not None or not given or not all(map(_gives_places, given)) or _is_told([x, *given]):
        return NotImplemented if decompose is None else decompose(x, indices)

    def fake() -> Any:
        wide = _broadcast(indices)
        value = op(x, wide)
        wanted = _strides(value, x, wide)
        same = str(value.stride()) == str(wanted)  # comparing symbols would add guards
        return value if same else value.new_empty_strided(value.shape, wanted)

    return compat.record_operator(op, (x, indices), fake)


def _broadcast(indices: Sequence[Any]) -> list[Any]:
    """As torch's fake kernel needs them, which does not broadcast one without dimensions."""
    wide = iter(torch.broadcast_tensors(*(index for index in indices if index is not None)))
    return [None if index is None else next(wide) for index in indices]


def _gives_places(index: torch.Tensor) -> bool:
    """Not of a mask, of which only the number of places is known when the graph runs."""
    return index.dtype in (torch.int64, torch.int32)


def _is_told(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether sizes are symbols and torch's fake kernel is right, which adds fewer guards."""
    known = all(_are_known(tensor.shape, tensor.stride()) for tensor in tensors)
    return not known and all(map(torch._prims_common.is_contiguous_or_false, tensors))


def _are_known(*numbers: Sequence[Any]) -> bool:
    return all(type(number) is int for each in numbers for number in each)


def _strides(value: torch.Tensor, x: torch.Tensor, indices: Sequence[Any]) -> Sequence[Any]:
    places = [place for place, index in enumerate(indices) if index is not None]
    others = [dim for dim in range(x.dim()) if dim not in places]
    neighbours = places[-1] - places[0] == len(places) - 1
    before = places[0] if neighbours else 0
    given = [_as_read(indices[place]) for place in places]
    own = [x.stride(dim) for dim in others]
    after = len(others) - before
    layouts = [(tuple(value.shape), (*own[:before], *(0,) * given[0].dim(), *own[before:]))]
    layouts += [_beside(index, before, after) for index in given]
    if x.device.type != "cpu" and len({str(layout) for layout in layouts[1:]}) > 1:
        contiguous = torch._prims_common.make_contiguous_strides_for
        layouts[1:] = [(sizes, tuple(contiguous(sizes))) for sizes, _ in layouts[1:]]
    return _elementwise(value, layouts)


def _as_read(index: torch.Tensor) -> torch.Tensor:
    """Broadcast indices of 32 bits are converted; the copy is dense where the indices repeat themselves."""
    if index.dtype is not torch.int32 or compat.is_dense(index):
        return index
    wanted = _elementwise(index, [(tuple(index.shape), tuple(index.stride()))])
    return index.new_empty_strided(index.shape, wanted)


def _elementwise(like: torch.Tensor, layouts: Sequence[_Layout]) -> Sequence[Any]:
    """The strides of an elementwise result of operands with these sizes and strides."""
    if all(_are_known(sizes, strides) for sizes, strides in layouts):
        return elementwise_strides(layouts)
    shape = torch.broadcast_shapes(*(sizes for sizes, _ in layouts))
    operands = (like.new_empty_strided(sizes, strides).expand(shape) for sizes, strides in layouts)
    return torch._prims_common.compute_elementwise_output_strides(*operands)


def _beside(index: torch.Tensor, before: int, after: int) -> _Layout:
    """An index with dimensions of size one for those of ``x``, with the strides that a reshape gives all these."""
    sizes = (*(1,) * before, *index.shape, *(1,) * after)
    step = index.stride(-1) if index.dim() else 1
    strides: list[Any] = []
    for size, own in zip(sizes[::-1], (*(1,) * after, *index.stride()[::-1], *(1,) * before), strict=True):
        strides.append(step if type(size) is int and size == 1 else own)
        step = size * strides[-1]
    return sizes, tuple(strides[::-1])
