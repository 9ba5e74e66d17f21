"""Operations that sum windows by ``unfold_backward`` themselves, in which no write to an ``unfold`` is written back.

Note [Who sums windows]
    A write through ``unfold`` is written back by ``unfold_backward``, which is wrong where windows overlap or leave
    gaps, so that the tracer refuses it in a forward. ``istft``, the operator itself and the gradients of ``unfold``
    (``torch.func.grad``) call it for what it is. While one of them runs, :attr:`.StorageEvents.sums_windows` says so;
    what was written to its arguments before is written back first, and looked at as ever.
"""

from __future__ import annotations

from collections.abc import Callable
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
        return _istft(*args, **kwargs) if name == "istft" else func(*args, **kwargs)
    finally:
        events.sums_windows = before


def _istft(
    input: torch.Tensor,
    n_fft: int,
    hop_length: int | None = None,
    win_length: int | None = None,
    window: torch.Tensor | None = None,
    center: bool = True,
    normalized: bool = False,
    onesided: bool | None = None,
    length: int | None = None,
    return_complex: bool = False,
) -> torch.Tensor:
    """``torch.istft``, which reads whether the windows leave a sample at zero: that becomes an assertion of the graph.

    Arguments that it refuses are left to it.
    """
    width = n_fft if win_length is None else win_length
    step = n_fft // 4 if hop_length is None else hop_length
    if input.dim() < 2 or not _accepted(input, n_fft, step, width, window, onesided, return_complex):
        return torch.istft(input, n_fft, step, width, window, center, normalized, onesided, length, return_complex)
    frames, norm = input.transpose(-1, -2), "ortho" if normalized else None
    if return_complex:
        pieces = torch.fft.ifft(frames, norm=norm)
    else:
        pieces = torch.fft.irfft(frames[..., : n_fft // 2 + 1], n=n_fft, norm=norm)
    weights = torch.ones(width, dtype=pieces.real.dtype, device=input.device) if window is None else window
    if width != n_fft:
        left = (n_fft - width) // 2
        weights = torch.nn.functional.pad(weights, (left, n_fft - width - left))
    count, start = frames.shape[-2], n_fft // 2 if center else 0
    reach = n_fft + step * (count - 1)
    end = reach - start if length is None else start + length
    sizes = [*frames.shape[:-2], reach]
    signal = torch.ops.aten.unfold_backward(pieces * weights, sizes, len(sizes) - 1, n_fft, step)
    squares = torch.ops.aten.unfold_backward(weights.square().expand(count, n_fft), [reach], 0, n_fft, step)
    signal, squares = signal[..., start:end], squares[start:end]
    zero = squares.detach().abs().min() < 1e-11
    torch.ops.aten._assert_async.msg(zero.logical_not(), "istft: window overlap add min: 1: a sample lies in no window")
    signal = signal / squares
    return signal if end <= reach else torch.nn.functional.pad(signal, (0, end - reach))


def _accepted(
    input: torch.Tensor,
    n_fft: int,
    step: int,
    width: int,
    window: torch.Tensor | None,
    onesided: bool | None,
    return_complex: bool,
) -> bool:
    half = input.shape[-2] != n_fft if onesided is None else onesided
    return (
        input.is_complex()
        and input.dim() <= 3
        and input.numel() > 0
        and input.shape[-2] == (n_fft // 2 + 1 if half else n_fft)
        and 0 < step <= width <= n_fft
        and (window is None or (window.shape == (width,) and window.device == input.device))
        and not (half if return_complex else window is not None and window.is_complex())
    )
