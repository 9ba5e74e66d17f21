"""Norms whose results have the strides and types of eager's, where torch's fake kernels say otherwise."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from . import _torch_compat as compat

__all__ = ["with_eager_norms"]

aten = torch.ops.aten

_BATCH_NORMS = (
    aten._native_batch_norm_legit_functional.default,
    aten._native_batch_norm_legit.no_stats,
    aten._native_batch_norm_legit_no_training.default,
)
_OTHERS = (aten.native_layer_norm.default, aten.native_group_norm.default)


def with_eager_norms(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table`` with the norms that are not in it."""
    norms: dict[Any, Callable[..., Any]] = {op: functools.partial(_forward, op) for op in (*_BATCH_NORMS, *_OTHERS)}
    backward = aten.native_batch_norm_backward.default
    norms[backward] = functools.partial(_in_memory_format, backward, 1)
    norms[aten._weight_norm_interface.default] = _weight_norm
    return {**norms, **table}


def _weight_norm(v: Any, g: Any, dim: int = 0) -> Any:
    """The norms of float16 and bfloat16 are float32. Torch's fake kernel says so of bfloat16 only."""
    op = aten._weight_norm_interface.default
    if v.dtype is not torch.float16 or v.device.type != "cpu":
        return NotImplemented

    def fake() -> Any:
        result, norms = op(v, g, dim)
        return result, norms.float()

    return compat.record_operator(op, (v, g, dim), fake)


def _forward(op: Any, *args: Any) -> Any:
    """Statistics of float16 or bfloat16, saved for the backward, are float32 if a parameter or a running statistic is.

    Torch's fake kernels say they are of the input's type. Rounded so, the mean of an input far from 0 moves all that
    is computed with it.
    """
    result = _in_memory_format(op, 0, *args) if op in _BATCH_NORMS else NotImplemented
    x, wide = args[0], torch.float32
    mixed = any(isinstance(a, torch.Tensor) and a.dtype is wide for a in args[1:])
    if result is not NotImplemented or not mixed or x.dtype not in (torch.float16, torch.bfloat16):
        return result

    def fake() -> Any:
        values = op(*args)
        return (values[0], *(v.to(wide) for v in values[1:3]), *values[3:])

    return compat.record_operator(op, args, fake)


def _in_memory_format(op: Any, place: int, *args: Any) -> Any:
    """Of an input, the argument at ``place``, in a memory format, in which eager lays out the result."""
    x = args[place]
    if not isinstance(x, torch.Tensor) or x.layout is not torch.strided:
        return NotImplemented
    if x.is_neg() or free_unbacked_symbols(x):
        return NotImplemented
    order = compat.memory_format_of(x)
    if x.is_contiguous(memory_format=order):
        return NotImplemented
    return op(*args[:place], x.contiguous(memory_format=order), *args[place + 1 :])
