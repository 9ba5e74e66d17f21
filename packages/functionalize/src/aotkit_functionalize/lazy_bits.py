"""Tensors that are conjugated or negated lazily: a bit says that their elements are to be read so.

Note [Lazy bits]
    ``z.conj()`` and ``z.conj().imag`` look at the memory of ``z``; operators see their bit and read accordingly.
    Compiled code reads memory as it is. So a captured graph takes the memory of an input, without bits, and the first
    thing that it does is to set them (``_conj``, ``_neg_view``): what the function is given has the bits of the
    caller's tensor. Whoever calls the graph strips them off, which copies nothing. An output that has a bit leaves the
    graph without it too and is given it behind the call, as a view of what the graph returned. New values of mutated
    inputs are ordinary ones: the write back into the caller's tensor minds its bits.
"""

from __future__ import annotations

import torch

__all__ = ["has_lazy_bits", "lazy_bits", "same_with_bits", "with_lazy_bits", "without_lazy_bits"]


def lazy_bits(value: torch.Tensor) -> tuple[bool, bool]:
    """Whether ``value`` is conjugated, and whether it is negated, lazily."""
    return value.is_conj(), value.is_neg()


def has_lazy_bits(value: torch.Tensor) -> bool:
    """Whether ``value`` is conjugated or negated lazily."""
    return value.is_conj() or value.is_neg()


def with_lazy_bits(value: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """``value``, or the view of its memory that has these bits. Differentiable."""
    if value.is_conj() != conj:
        value = torch._conj(value)
    if value.is_neg() != neg:
        value = torch._neg_view(value)
    return value


def without_lazy_bits(value: torch.Tensor) -> torch.Tensor:
    """``value``, or the view of its memory that has no bits. Differentiable."""
    return with_lazy_bits(value, False, False)


def same_with_bits(value: torch.Tensor, conj: bool, neg: bool) -> torch.Tensor:
    """A tensor with these bits that has the elements of ``value``."""
    memory = value.resolve_conj().resolve_neg()
    memory = memory.conj_physical() if conj else memory
    return with_lazy_bits(memory.neg() if neg else memory, conj, neg)
