"""The bench of accuracy: the same layer in float64, and where tokens part."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tools.bench import decode
from tools.bench.decode_accuracy import Linear64, compare, in_float64


@pytest.mark.parametrize("layer", [decode.Int8Linear, decode.Int4Linear, decode.Int8DynamicLinear, lambda x: x])
def test_a_layer_in_float64_is_what_the_layer_rounds(layer: type[nn.Module]) -> None:
    torch.manual_seed(0)
    small = layer(nn.Linear(128, 64, bias=False).bfloat16())
    x = torch.randn(3, 128).bfloat16()
    with torch.no_grad():
        got, true = small(x).double(), in_float64(nn.Sequential(small))(x.double())
    assert isinstance(in_float64(nn.Sequential(small))[0], Linear64)
    assert true.dtype is torch.float64 and (got - true).abs().max() < 0.02 * true.abs().max()


def test_the_first_token_that_differs_is_looked_at() -> None:
    true = torch.tensor([[0.0, 1.0], [1.0, 0.5], [3.0, 2.0]], dtype=torch.float64)
    eager = [true[0] + 0.25, torch.tensor([1.0, 0.75]), true[2]]
    ours = [true[0] + 0.125, torch.tensor([0.5, 0.75]), true[2] + 9]
    found = compare(([1, 1, 1, 0], ours), ([1, 1, 0, 0], eager), true)
    assert (found.first, found.eager, found.ours) == (2, 0.25, 0.5)
    assert (found.gap_in_eager, found.gap_in_float64, found.eager_there) == (0.25, 0.5, 0.25)
    same = compare(([1, 1, 0, 0], ours), ([1, 1, 0, 0], eager), true)
    assert same.first is None and same.ours == 9
