"""Losses whose whole numbers are dynamic sizes, as compiled autograd gives them."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph

aten = torch.ops.aten


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dynamic", ["ignored", "reduction", "both"])
@pytest.mark.parametrize("reduction", [0, 1, 2])
def test_gradients_of_the_negative_log_likelihood(reduction: int, dynamic: str) -> None:
    targets = torch.tensor([0, 4, 2, 4, 1])

    def loss(x, targets, grad, first, second):  # type: ignore[no-untyped-def]
        reduce = reduction if dynamic == "ignored" else first.shape[0] - 17
        ignored = 4 if dynamic == "reduction" else second.shape[0] - 27
        value, weight = aten.nll_loss_forward(x, targets, None, reduce, ignored)
        return [value, aten.nll_loss_backward(grad, x, targets, None, reduce, ignored, weight)]

    x = torch.randn(5, 6, dtype=torch.float64)
    grad = torch.randn(5 if reduction == 0 else (), dtype=torch.float64)
    args = [x, targets, grad, torch.zeros(reduction + 17), torch.zeros(31)]
    graph = make_fx(loss, tracing_mode="symbolic")(*args)
    for got, want in zip(compile_graph(graph)(list(args)), loss(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
