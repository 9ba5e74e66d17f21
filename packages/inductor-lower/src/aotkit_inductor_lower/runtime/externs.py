"""Tensors as their users expect them: results of ATen calls, and inputs of kernels."""

from __future__ import annotations

import torch

from ..errors import FakeKernelError

__all__ = ["aligned_copy", "conform"]


def conform(value: torch.Tensor, sizes: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A result that is not laid out or typed as its op's fake kernel said, or is conjugated or negated lazily: copied
    into what was said, unless the difference is in strides that no element sees. Raises
    :class:`FakeKernelError` for another shape, and for a type of which the one that was said loses more than precision.
    """
    if value.layout is not torch.strided:
        return value
    value = value.resolve_conj().resolve_neg()
    if tuple(value.shape) != sizes:
        raise FakeKernelError(
            f"an ATen op gave a result of shape {tuple(value.shape)} where its fake kernel said {sizes}: what follows "
            "was compiled for the latter"
        )
    if _rank(value.dtype) > _rank(dtype):
        raise FakeKernelError(
            f"an ATen op gave a result of {value.dtype} where its fake kernel said {dtype}: what follows was compiled "
            "for the latter"
        )
    seen = (got == want for size, got, want in zip(sizes, value.stride(), strides, strict=True) if size > 1)
    if value.dtype is dtype and (value.numel() == 0 or all(seen)):
        return value
    return torch.empty_strided(sizes, strides, dtype=dtype, device=value.device).copy_(value)


def _rank(dtype: torch.dtype) -> int:
    """Integers have no fractions, and real numbers no imaginary parts."""
    return 2 if dtype.is_complex else int(dtype.is_floating_point)


def aligned_copy(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in new memory, with its strides. Elements that share memory do so there too."""
    if torch._debug_has_internal_overlap(tensor) != 1:
        copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return copy.copy_(tensor)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((extent,), (1,)).clone().as_strided(tensor.shape, tensor.stride(), 0)
