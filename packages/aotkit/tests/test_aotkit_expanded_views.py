"""Outputs that repeat an input: taken by ``expand``, so that their gradient is eager's."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(6, 5, 7), (2, 6, 5, 7), (6, 5, 1)], ids=str)
def test_the_gradient_of_an_expanded_output_has_eagers_bits(dtype, sizes):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 5, 1, generator=generator).to(dtype).requires_grad_()
    given = torch.randn(sizes, generator=generator).to(dtype)
    out = torch.compile(lambda x: x.expand(sizes), backend="aotkit")(x)
    eager = x.expand(sizes)
    assert out.shape == eager.shape and out.stride() == eager.stride() and out._base is x
    (found,) = torch.autograd.grad(out, x, given)
    (wanted,) = torch.autograd.grad(eager, x, given)
    assert torch.equal(found, wanted)
