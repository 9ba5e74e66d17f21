"""Gradients that torch writes to in place, before the next backward function reads them.

Note [Pending gradients]
    The gradient of a half spectrum (``irfft``) is doubled in place, in a part of it. Functionalization carries out
    such a write when the tensor, or a view of it, is used next. Where that is the backward of ``rfft``, which keeps a
    reference to the gradient's sizes meanwhile, torch reads memory that is no longer the sizes' (up to 2.13: "The size
    of tensor a must match the size of tensor b"). So a hook on the spectrum puts a tensor in the gradient's place that
    was never written to.
"""

from __future__ import annotations

from typing import Any

import torch

from . import _torch_compat as compat

__all__ = ["HALF_SPECTRA", "settle_gradient"]

HALF_SPECTRA = frozenset(
    ("istft", "_fft_c2r", "fft_irfft", "fft_irfft2", "fft_irfftn", "fft_hfft", "fft_hfft2", "fft_hfftn")
)


def settle_gradient(args: Any, kwargs: Any) -> None:
    """Let the gradient of a spectrum, the first argument, be one that was not written to."""
    spectrum = args[0] if args else kwargs.get("input", kwargs.get("self"))
    if isinstance(spectrum, torch.Tensor) and spectrum.requires_grad:
        spectrum.register_hook(_settle)


def _settle(gradient: torch.Tensor) -> torch.Tensor | None:
    if not compat.is_inner_wrapper(gradient):
        return None
    if torch.is_grad_enabled():
        return gradient.clone()  # which can be differentiated
    compat.sync(gradient)
    return compat.wrap_inner(compat.unwrap_inner(gradient))
