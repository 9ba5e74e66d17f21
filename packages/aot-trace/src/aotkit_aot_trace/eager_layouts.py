"""Results that eager lays out by a rule of the operator's own, where torch's fake kernels or decompositions give them
other strides: rolls and ``max_unpool2d`` of images with channels last, losses by class and gradients of losses,
``isin``, ``index_fill``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["with_eager_layouts"]

aten = torch.ops.aten
Layout = Callable[..., torch.Tensor]
_format = torch._prims_common.suggest_memory_format

_CONTIGUOUS = (
    aten.mse_loss_backward.default,
    aten.smooth_l1_loss_backward.default,
    aten.huber_loss_backward.default,
    aten.isin.Tensor_Tensor,
    aten.isin.Tensor_Scalar,
)
_LOSSES_BY_CLASS = aten.nll_loss2d_forward.default


def with_eager_layouts(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table`` with these operators."""
    layouts: dict[Any, Layout] = dict.fromkeys(_CONTIGUOUS, _row_major)
    layouts[aten.glu_backward.default] = _row_major_on_the_cpu
    layouts[aten.binary_cross_entropy_backward.default] = _like_the_prediction
    layouts[aten.soft_margin_loss_backward.default] = _like_the_prediction
    layouts[aten.roll.default] = _rolled
    layouts[aten.index_fill.int_Scalar] = layouts[aten.index_fill.int_Tensor] = _cloned
    mine = {op: functools.partial(_run, op, layout, table.get(op)) for op, layout in layouts.items()}
    mine[aten.max_unpool2d.default] = functools.partial(_unpool, table.get(aten.max_unpool2d.default))
    mine[_LOSSES_BY_CLASS] = functools.partial(_losses_by_class, table.get(_LOSSES_BY_CLASS))
    return {**table, **mine}


def _run(op: Any, layout: Layout, decompose: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> Any:
    """``layout`` gives, for the result and the arguments, a tensor with the result's strides."""
    result = NotImplemented if decompose is None else decompose(*args, **kwargs)
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
    if not all(map(_is_known, tensors)) or all(tensor.is_contiguous() for tensor in tensors):
        return result
    if result is not NotImplemented:
        with compat.untraced():
            wanted = layout(result, *args, **kwargs).stride()
        if result.stride() == wanted:
            return result
        memory = aten.empty_strided.default(result.shape, wanted, dtype=result.dtype, device=result.device)
        return aten.copy.default(memory, result)

    def fake() -> Any:
        value = op(*args, **kwargs)
        wanted = layout(value, *args, **kwargs).stride()
        return value if value.stride() == wanted else value.new_empty_strided(value.shape, wanted)

    return compat.record_operator(op, args, fake, kwargs)


def _unpool(decompose: Callable[..., Any] | None, x: Any, indices: Any, size: Any) -> Any:
    """Of images with channels last, on the CPU, such images."""
    result = NotImplemented if decompose is None else decompose(x, indices, size)
    if x.device.type != "cpu" or x.layout is not torch.strided or _format(x) is not torch.channels_last:
        return result
    if result is not NotImplemented:
        return result.contiguous(memory_format=torch.channels_last)

    def fake() -> Any:
        return aten.max_unpool2d.default(x, indices, size).contiguous(memory_format=torch.channels_last)

    return compat.record_operator(aten.max_unpool2d.default, (x, indices, size), fake)


def _losses_by_class(
    decompose: Callable[..., Any] | None, x: Any, target: Any, weight: Any, reduction: int, ignored: int
) -> Any:
    """Losses for each place are contiguous, however the classes lie."""
    args = (x, target, weight, reduction, ignored)
    result = NotImplemented if decompose is None else decompose(*args)
    if reduction != 0 or torch._prims_common.is_contiguous_or_false(target):
        return result
    if result is not NotImplemented:
        return result[0].contiguous(), result[1]

    def fake() -> Any:
        losses, total = _LOSSES_BY_CLASS(*args)
        return losses.new_empty(losses.shape), total

    return compat.record_operator(_LOSSES_BY_CLASS, args, fake)


def _is_known(value: torch.Tensor) -> bool:
    """Whether it has strides, and all of them are known."""
    plain = value.layout is torch.strided and not value.is_neg() and not value.is_conj()
    return plain and all(type(number) is int for number in (*value.shape, *value.stride()))


def _row_major(result: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return result.contiguous()


def _row_major_on_the_cpu(result: torch.Tensor, *_: Any) -> torch.Tensor:
    return result.contiguous() if result.device.type == "cpu" else result


def _like_the_prediction(_: torch.Tensor, __: torch.Tensor, x: torch.Tensor, *___: Any) -> torch.Tensor:
    return torch.empty_like(x)


def _cloned(_: torch.Tensor, x: torch.Tensor, *__: Any) -> torch.Tensor:
    return x.clone()


def _rolled(result: torch.Tensor, x: torch.Tensor, shifts: Any, dims: Any = ()) -> torch.Tensor:
    """On the CPU, both parts of each dimension are put together in the other order."""
    if x.device.type != "cpu" or not dims or x.numel() == 0:
        return result
    for shift, dim in zip(shifts, dims):
        start = -shift % x.shape[dim]
        x = torch.cat([x.narrow(dim, start, x.shape[dim] - start), x.narrow(dim, 0, start)], dim)
    return x
