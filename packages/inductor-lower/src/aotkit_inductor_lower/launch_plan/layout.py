"""How a tensor must lie in memory for code that was compiled for its fake value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..errors import FakeKernelError

__all__ = ["Layout"]


@dataclass(frozen=True, slots=True)
class Layout:
    """Type, and constant sizes and strides; no strides for a contiguous tensor whose sizes vary, which are ``None``."""

    dtype: torch.dtype
    sizes: tuple[int | None, ...]
    strides: tuple[int, ...] | None

    @staticmethod
    def of(fake: torch.Tensor) -> Layout | None:
        """The layout of a fake tensor, or ``None`` if it is neither constant nor contiguous."""
        if fake.layout is not torch.strided:
            return None
        numbers = (*fake.shape, *fake.stride())
        if all(isinstance(n, int) for n in numbers):
            return Layout(fake.dtype, tuple(fake.shape), fake.stride())
        known = tuple(size if isinstance(size, int) else None for size in fake.shape)
        return Layout(fake.dtype, known, None) if _is_contiguous(fake) else None

    def fits(self, value: Any) -> bool:
        """Whether compiled code may be given ``value``."""
        if not isinstance(value, torch.Tensor) or value.dtype is not self.dtype or not self._has_sizes_of(value):
            return False
        if self.strides is None:
            return value.is_contiguous()
        return value.stride() == self.strides or value.numel() == 0 or _same_where_seen(value, self.strides)

    def _has_sizes_of(self, value: torch.Tensor) -> bool:
        """Whether the sizes that are known are those of ``value``."""
        return value.shape == self.sizes or (
            value.dim() == len(self.sizes)
            and all(want in (None, size) for size, want in zip(value.shape, self.sizes, strict=True))
        )

    def conform(self, value: torch.Tensor) -> torch.Tensor:
        """``value``, or a copy of it in this layout. Raises :class:`FakeKernelError` for another shape or
        type."""
        if self.fits(value):
            return value
        if value.dtype is not self.dtype or not self._has_sizes_of(value):
            sizes = str(self.sizes).replace("None", "any")
            raise FakeKernelError(
                f"a call gave a {value.dtype} tensor of shape {tuple(value.shape)} where its fake kernel said "
                f"{self.dtype} and {sizes}"
            )
        if self.strides is None:
            return value.contiguous()
        return torch.empty_strided(value.shape, self.strides, dtype=self.dtype, device=value.device).copy_(value)


def _same_where_seen(value: torch.Tensor, strides: tuple[int, ...]) -> bool:
    return all(size < 2 or a == b for size, a, b in zip(value.shape, value.stride(), strides, strict=True))


def _is_contiguous(fake: torch.Tensor) -> bool:
    """Whether strides are products of sizes, as expressions (a size may be taken as at least 1)."""
    expected: Any = 1
    clamped: Any = 1
    for size, stride in reversed(list(zip(fake.shape, fake.stride(), strict=True))):
        if str(stride) not in (str(expected), str(clamped)):
            return False
        expected = expected * size
        clamped = clamped * torch.sym_max(1, size)
    return True
