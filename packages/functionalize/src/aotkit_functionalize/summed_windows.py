"""Operations that sum windows by ``unfold_backward`` themselves, in which no write to an ``unfold`` is written back.

Note [Who sums windows]
    A write through ``unfold`` is written back by ``unfold_backward``, which is wrong where windows overlap or leave
    gaps, so that the tracer refuses it in a forward. ``istft``, the operator itself and the gradients of ``unfold``
    (``torch.func.grad``) call it for what it is. While one of them runs, :attr:`.StorageEvents.sums_windows` says so;
    what was written to its arguments before is written back first, and looked at as ever. Arguments that ``istft``
    refuses are left to it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from . import _torch_compat as compat
from .events import StorageEvents

__all__ = ["SUMS_WINDOWS", "with_summed_windows"]

SUMS_WINDOWS = frozenset(("istft", "unfold_backward", "grad", "backward"))


def with_summed_windows(events: StorageEvents, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """What ``func`` returns, the operation of one of the names above; see Note [Who sums windows]."""
    for value in tree_leaves((args, kwargs)):
        if isinstance(value, torch.Tensor) and compat.is_inner_wrapper(compat.inner_wrapper(value)):
            compat.sync(value)
    before, events.sums_windows = events.sums_windows, True
    try:
        if name == "istft" and (call := _Istft(*args, **kwargs)).are_accepted():
            return _istft(call)
        return func(*args, **kwargs)
    finally:
        events.sums_windows = before


@dataclass(frozen=True, eq=False)
class _Istft:
    """The arguments of ``torch.istft``, in its order."""

    input: torch.Tensor
    n_fft: int
    hop_length: int | None = None
    win_length: int | None = None
    window: torch.Tensor | None = None
    center: bool = True
    normalized: bool = False
    onesided: bool | None = None
    length: int | None = None
    return_complex: bool = False

    @property
    def step(self) -> int:
        return self.n_fft // 4 if self.hop_length is None else self.hop_length

    @property
    def width(self) -> int:
        return self.n_fft if self.win_length is None else self.win_length

    def are_accepted(self) -> bool:
        x, window = self.input, self.window
        if not x.is_complex() or x.dim() not in (2, 3) or x.numel() == 0:
            return False
        half = x.shape[-2] != self.n_fft if self.onesided is None else self.onesided
        return (
            x.shape[-2] == (self.n_fft // 2 + 1 if half else self.n_fft)
            and 0 < self.step <= self.width <= self.n_fft
            and (window is None or (window.shape == (self.width,) and window.device == x.device))
            and not (half if self.return_complex else window is not None and window.is_complex())
        )

    def frames(self) -> torch.Tensor:
        """What each frame adds to the signal, before it is weighed by the window."""
        frames, norm = self.input.transpose(-1, -2), "ortho" if self.normalized else None
        if self.return_complex:
            return torch.fft.ifft(frames, norm=norm)
        return torch.fft.irfft(frames[..., : self.n_fft // 2 + 1], n=self.n_fft, norm=norm)

    def weights(self, like: torch.Tensor) -> torch.Tensor:
        window = (
            torch.ones(self.width, dtype=like.real.dtype, device=like.device) if self.window is None else self.window
        )
        left = (self.n_fft - self.width) // 2
        if self.width == self.n_fft:
            return window
        return torch.nn.functional.pad(window, (left, self.n_fft - self.width - left))


def _istft(call: _Istft) -> torch.Tensor:
    """The result of ``torch.istft``, which reads whether the windows leave a sample at zero: that becomes an assertion
    of the graph."""
    n_fft, step, frames = call.n_fft, call.step, call.frames()
    weights, count, start = call.weights(frames), frames.shape[-2], n_fft // 2 if call.center else 0
    reach = n_fft + step * (count - 1)
    end = reach - start if call.length is None else start + call.length
    sizes = [*frames.shape[:-2], reach]
    signal = torch.ops.aten.unfold_backward(frames * weights, sizes, len(sizes) - 1, n_fft, step)
    squares = torch.ops.aten.unfold_backward(weights.square().expand(count, n_fft), [reach], 0, n_fft, step)
    signal, squares = signal[..., start:end], squares[start:end]
    zero = squares.detach().abs().min() < 1e-11
    torch.ops.aten._assert_async.msg(zero.logical_not(), "istft: window overlap add min: 1: a sample lies in no window")
    signal = signal / squares
    return signal if end <= reach else torch.nn.functional.pad(signal, (0, end - reach))
