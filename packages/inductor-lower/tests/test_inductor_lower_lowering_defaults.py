"""Arguments that are left out."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.kthvalue(x, 2),
        lambda x: torch.diagonal_scatter(x, x[:4, 1]),
        lambda x: x[:1].repeat(3, 2),
    ],
)
def test_defaults_mean_what_they_mean_in_eager(check, f):
    check(f, torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)))
