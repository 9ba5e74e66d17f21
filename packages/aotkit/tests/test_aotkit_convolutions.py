"""Convolutions through torch.compile: values, gradients and layouts of networks, whoever computes the convolutions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn


class Residual(nn.Module):
    """A pointwise and a depthwise convolution with norms and activations between them, and a pad on two sides."""

    def __init__(self, channels: int, taps: int, stride: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(channels, 2 * channels, 1)
        self.norm = nn.BatchNorm2d(2 * channels)
        self.pad = nn.ZeroPad2d((0, 1, 0, 1))
        self.depthwise = nn.Conv2d(2 * channels, 2 * channels, taps, stride, groups=2 * channels)
        self.narrow = nn.Conv2d(2 * channels, channels, 3, padding=1, groups=2)
        self.up = nn.ConvTranspose2d(channels, channels, 3, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Images to images."""
        y = nn.functional.silu(self.norm(self.wide(x)))
        return self.up(nn.functional.relu6(self.narrow(self.depthwise(self.pad(y)))))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (3, 2), (5, 1)])
@pytest.mark.parametrize("contractions", ["auto", "generated"])
def test_a_network_of_convolutions_has_eagers_values_and_gradients(
    contractions: str, taps: int, stride: int, last: bool
) -> None:
    torch.manual_seed(0)
    eager, x = Residual(8, taps, stride), torch.randn(2, 8, 11, 12)
    if last:
        eager, x = eager.to(memory_format=torch.channels_last), x.contiguous(memory_format=torch.channels_last)
    ours, true = copy.deepcopy(eager), copy.deepcopy(eager).double()
    options: dict[str, Any] = {"contractions": contractions, "fallback": "error"}
    compiled = torch.compile(ours, backend="aotkit", options=options)
    results = [run(module, x.to(dtype)) for module, dtype in _runs(eager, compiled, true)]
    parameters = [[p.grad for p in module.parameters()] for module in (eager, ours, true)]
    for want, got, exact in zip(*(own + grads for own, grads in zip(results, parameters, strict=True)), strict=True):
        assert want is not None and got is not None and exact is not None
        assert got.stride() == want.stride()
        scale = float(exact.abs().max()) + 1e-3
        error, allowed = (float((each.double() - exact).abs().max()) for each in (got, want))
        assert error <= 3 * (allowed + 2e-6 * scale)


def _runs(eager: Any, compiled: Any, true: Any) -> list[tuple[Any, torch.dtype]]:
    return [(eager, torch.float32), (compiled, torch.float32), (true, torch.float64)]


def run(module: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The result, and the gradient by the image; gradients of parameters stay with these."""
    x = x.clone().requires_grad_()
    y = module(x)
    y.square().mean().backward()
    assert x.grad is not None
    return [y.detach(), x.grad]


def test_convolutions_left_to_aten_are_the_same_calls() -> None:
    torch.manual_seed(0)
    module, x = Residual(8, 3, 1), torch.randn(2, 8, 11, 12)
    compiled = torch.compile(module, backend="aotkit", options={"contractions": "aten", "fallback": "error"})
    with torch.no_grad():
        torch.testing.assert_close(compiled.eval()(x), module.eval()(x), rtol=1e-5, atol=1e-5)
