"""Bits of tensors: read, set, taken off."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from aotkit_functionalize import fake_arguments
from aotkit_functionalize.lazy_bits import (
    has_lazy_bits,
    lazy_bits,
    same_with_bits,
    with_lazy_bits,
    without_lazy_bits,
)

BITS = list(itertools.product([False, True], repeat=2))


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("wanted", BITS)
def test_bits_are_set_on_the_same_memory_and_values_keep_their_elements(
    bits: tuple[bool, bool], wanted: tuple[bool, bool]
) -> None:
    base = torch.randn(3, dtype=torch.complex64, requires_grad=True)
    value = with_lazy_bits(base, *bits)
    assert lazy_bits(value) == bits and has_lazy_bits(value) == any(bits)
    other = with_lazy_bits(value, *wanted)
    assert lazy_bits(other) == wanted and other.data_ptr() == base.data_ptr()
    assert (other is value) == (wanted == bits)
    assert lazy_bits(without_lazy_bits(value)) == (False, False)
    assert torch.equal(without_lazy_bits(value).detach(), base.detach())
    assert other is base or other.requires_grad
    with torch.no_grad():
        same = same_with_bits(value, *wanted)
    assert lazy_bits(same) == wanted
    assert torch.equal(same.resolve_conj().resolve_neg(), value.resolve_conj().resolve_neg())


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_fake_arguments_are_the_memory_unless_asked_for_as_they_are(bits: tuple[bool, bool], dynamic: bool) -> None:
    value = with_lazy_bits(torch.randn(3, 4, dtype=torch.complex64).t(), *bits)
    _, (memory,) = fake_arguments([value], dynamic=dynamic)
    _, (kept,) = fake_arguments([value], dynamic=dynamic, keep_bits=True)
    assert lazy_bits(memory) == (False, False) and lazy_bits(kept) == bits
    if not dynamic:
        assert memory.stride() == kept.stride() == value.stride()
    with torch.inference_mode():
        inference = with_lazy_bits(torch.randn(3, dtype=torch.complex64), *bits)
    _, (kept,) = fake_arguments([inference], keep_bits=True)
    assert lazy_bits(kept) == bits and not kept.is_inference()


def test_a_view_with_a_lazy_bit_loses_all_dimensions_of_size_one_in_place(same_as_eager: Any) -> None:
    """Without a dimension, which eager mode leaves where it is: only ``squeeze_(dim)`` writes the elements anew."""

    def fn(x: torch.Tensor) -> list[torch.Tensor]:
        y = x.sin().transpose(1, 2).conj()
        y.squeeze_()
        return [y, y * 1]

    same_as_eager(fn, lambda: [torch.randn(1, 2, 3, dtype=torch.complex64)])
