"""LSTMs, of which eager mode computes some with oneDNN: they train on data, and have eager's types under autocast."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

import aotkit


@pytest.fixture(autouse=True)
def allow_rnn() -> Iterator[None]:
    with torch._dynamo.config.patch(allow_rnn=True):  # or Dynamo leaves them to eager mode
        yield


def results(module: nn.LSTM, x: Tensor, packed: bool = False) -> list[Tensor]:
    if packed:
        rows, states = module(pack_padded_sequence(x, torch.tensor([2, 1]), batch_first=True))
        return [rows.data, *states]
    y, states = module(x)
    return [y, *states]


def gradients(values: list[Tensor], module: nn.Module) -> tuple[Tensor, ...]:
    return torch.autograd.grad(sum(value.float().square().sum() for value in values), list(module.parameters()))


def compiled() -> Any:
    return torch.compile(results, backend=aotkit.make_backend(aotkit.Options(fallback="error")))


@pytest.mark.parametrize("autocast", [False, True], ids=["float32", "autocast"])
def test_the_weights_are_trained_on_data_that_needs_no_gradient(autocast: bool) -> None:
    module, x = nn.LSTM(2, 3), torch.randn(2, 2, 2)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        got, expected = compiled()(module, x), results(module, x)
    apart = {"rtol": 0.05, "atol": 0.05} if autocast else {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(got, expected, **apart)
    torch.testing.assert_close(gradients(got, module), gradients(expected, module), **apart)


@pytest.mark.parametrize(
    ("options", "dtype", "packed"),
    [
        ({}, torch.float32, False),
        ({"bidirectional": True}, torch.bfloat16, False),
        ({"proj_size": 1}, torch.float32, False),
        ({}, torch.float32, True),
    ],
    ids=["float32", "both-directions-of-bfloat16", "projected", "packed"],
)
@pytest.mark.filterwarnings("ignore:LSTM with projections")  # eager mode's word that they are not oneDNN's
def test_results_under_autocast_have_eager_types(options: dict[str, Any], dtype: torch.dtype, packed: bool) -> None:
    module = nn.LSTM(2, 3, batch_first=True, **options)
    x = torch.randn(2, 2, 2, dtype=dtype)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled()(module, x, packed), results(module, x, packed), rtol=0.02, atol=0.02)
