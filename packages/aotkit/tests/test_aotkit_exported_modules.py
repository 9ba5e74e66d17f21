"""Modules as ``torch.export`` gives them back, which call operators by their overloads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

OPTIONS = {"cache": False, "fallback": "error"}


class Called(nn.Module):
    def __init__(self, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.function = function
        self.norm, self.instances = nn.BatchNorm1d(5), nn.InstanceNorm1d(1, track_running_stats=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


CALLED: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "batch norm": lambda m, x: m.norm(x).sin() * m.norm.running_mean,
    "instance norm": lambda m, x: m.instances(x[:, None])[:, 0].cos(),
    "one hot": lambda m, x: F.one_hot((x * 0).long(), 3)[..., 0] * x,
}


@pytest.mark.parametrize("name", CALLED)
def test_exported_modules_are_compiled(name: str) -> None:
    torch._dynamo.reset()
    x = torch.linspace(-2, 3, 20, dtype=torch.float64).reshape(4, 5)
    exported = torch.export.export(Called(CALLED[name]).double(), (x,)).module()
    results = []
    for module, options in ((exported, None), (copy.deepcopy(exported), OPTIONS)):
        run = module if options is None else torch.compile(module, backend="aotkit", options=options, fullgraph=True)
        leaf = x.clone().requires_grad_()
        for _ in range(2):
            result = run(leaf)
            result.sum().backward()
        parameters = [p.grad for p in module.parameters() if p.grad is not None]
        results.append([result.detach(), leaf.grad, *parameters, *module.buffers()])
    torch.testing.assert_close(results[1], results[0])


def test_a_checkpointed_region_that_calls_a_batch_norm_by_its_overload_writes_twice() -> None:
    """As in eager mode, where the backward computes the region again."""
    torch._dynamo.reset()

    def region(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return torch.ops.aten.batch_norm.default(x.sin(), None, None, mean, var, True, 0.1, 1e-5, False).cos()

    def f(x: Tensor, mean: Tensor, var: Tensor) -> Tensor:
        return checkpoint(region, x, mean, var, use_reentrant=False)

    results = []
    for run in (f, torch.compile(f, backend="aotkit", options=OPTIONS, fullgraph=True)):
        x = torch.linspace(-2, 3, 20, dtype=torch.float64).reshape(4, 5).requires_grad_()
        mean, var = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
        run(x, mean, var).sum().backward()
        results.append([x.grad, mean, var])
    torch.testing.assert_close(results[1], results[0])


@pytest.mark.filterwarnings("ignore:The tensor attributes.*were assigned during export")
def test_an_lstm_has_gradients_of_its_weights_where_its_input_needs_none() -> None:
    torch._dynamo.reset()
    x = torch.linspace(-2, 3, 24).reshape(3, 2, 4)
    exported = torch.export.export(nn.LSTM(4, 5, bidirectional=True), (x,)).module()
    results = []
    for run in (exported, torch.compile(exported, backend="aotkit", options=OPTIONS, fullgraph=True)):
        result, (hidden, cell) = run(x)
        loss = result.sin().sum() + cell.sum()
        results.append([result, hidden, cell, *torch.autograd.grad(loss, list(exported.parameters()))])
    torch.testing.assert_close(results[1], results[0])
