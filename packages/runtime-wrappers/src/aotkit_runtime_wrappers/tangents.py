"""Tangents that autograd leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ._torch_compat import dtype_from_name
from .dims import evaluate_all
from .plan import CallSpec
from .runtime import zero_tangent

__all__ = ["filled"]


def filled(call: CallSpec, tangents: Sequence[Tensor | None], symbols: Mapping[str, int]) -> list[Tensor | None]:
    """Zeros for missing tangents; those that are subclasses are made where they are taken apart."""
    found = list(tangents)
    for number, spec in enumerate(call.tangents):
        if found[number] is None and not spec.nested:
            sizes, strides = (evaluate_all(dims, symbols) for dims in (spec.meta.sizes, spec.meta.strides))
            dtype, device = dtype_from_name(spec.meta.dtype), torch.device(spec.meta.device)
            found[number] = zero_tangent(sizes, strides, dtype, device)
    return found
