"""Spectra as eager mode lays them out, where torch's fake kernels tell others (:func:`.spectra_are_laid_out`).

Note [How eager lays out a spectrum]
    The CPU's kernel (MKL's) takes the dimensions that are not transformed first, and within these and the transformed
    ones those with larger strides first; ``rfft`` and its relatives leave the last of those that they are given the
    last. On other devices a transform of several dimensions is declared to be contiguous, and copied where it is not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["spectrum_strides", "with_eager_spectra"]

aten = torch.ops.aten
_C2C, _R2C = aten._fft_c2c.default, aten._fft_r2c.default


def with_eager_spectra(table: Mapping[Any, Callable[..., Any]]) -> dict[Any, Callable[..., Any]]:
    """``table`` with transforms into spectra, if torch's fake kernels are wrong; those that it has stay."""
    if compat.spectra_are_laid_out():
        return dict(table)
    return {**{op: functools.partial(_transform, op) for op in (_C2C, _R2C)}, **table}


def _transform(op: Any, x: torch.Tensor, dims: Sequence[int], norm: int, flag: bool) -> Any:
    """``flag``: for real numbers, whether half of the last dimension's results are left out."""
    dims = [dim % x.dim() for dim in dims]
    if not dims or (x.device.type != "cpu" and len(dims) == 1):
        return NotImplemented

    def fake() -> Any:
        sizes = list(x.shape)
        if op is _R2C and flag:
            sizes[dims[-1]] = sizes[dims[-1]] // 2 + 1
        strides = spectrum_strides(x, dims, sizes, last_stays=op is _R2C)
        return x.new_empty_strided(sizes, strides, dtype=x.dtype.to_complex())

    return compat.record_operator(op, (x, dims, norm, flag), fake)


def spectrum_strides(x: torch.Tensor, dims: Sequence[int], sizes: Sequence[Any], *, last_stays: bool) -> list[Any]:
    """The strides of a spectrum of ``x`` of these sizes, see Note [How eager lays out a spectrum]."""
    order = list(range(x.dim()))
    if x.device.type == "cpu" and torch.backends.mkl.is_available():
        kept = len(dims) - 1 if last_stays else len(dims)
        batch = sorted((dim for dim in order if dim not in dims), key=x.stride, reverse=True)
        order = [*batch, *sorted(dims[:kept], key=x.stride, reverse=True), *dims[kept:]]
    strides: list[Any] = [1] * len(order)
    for dim, after in zip(order[-2::-1], order[:0:-1], strict=True):
        strides[dim] = strides[after] * sizes[after]
    return strides
