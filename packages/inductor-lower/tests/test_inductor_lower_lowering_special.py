"""Rarer elementwise functions: every type, eager's rounding points, no ATen call."""

from __future__ import annotations

import pytest
import torch

from aotkit_inductor_lower import decompositions

FLOATS = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
INTS = [torch.int64, torch.int32, torch.int8, torch.uint8]


def numbers(*shape, dtype=torch.float32, scale=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def generated(check, f, *args, **options):
    result = check(f, *args, table=decompositions(), **options)
    assert not result.externs
    return result


@pytest.mark.covers("F5g.1")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=str)
def test_cross_products_round_their_halves_as_eager(check, dtype):
    a, b = numbers(5, 3, 7, dtype=dtype), numbers(5, 3, 7, dtype=dtype, seed=1)
    result = generated(check, lambda a, b: torch.linalg.cross(a, b, dim=1), a, b)
    assert result.kernels == 1
    generated(check, lambda a, b: torch.cross(a, b, dim=-1), a.transpose(1, 2), b[:1].transpose(1, 2))
