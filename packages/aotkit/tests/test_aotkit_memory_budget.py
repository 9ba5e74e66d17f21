"""The partitioner's strategies and budgets as options of the backend."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import aotkit


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16)) for _ in range(3)))


def saved_bytes(model: nn.Module, x: torch.Tensor, options: dict[str, object]) -> int:
    """Bytes that autograd holds for the backward beyond parameters and input."""
    torch._dynamo.reset()
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    compiled = torch.compile(model, backend="aotkit", options={"fallback": "error", "cache": False, **options})
    compiled(x)  # tracing would meet the hooks
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = compiled(x).sin().sum()
    given = {t.untyped_storage().data_ptr() for t in (*model.parameters(), x)}
    loss.backward()
    return sum(size for address, size in kept.items() if address not in given)


@pytest.mark.covers("F3.38")
@pytest.mark.parametrize(
    "options",
    [{"memory_budget": 0.0}, {"memory_budget": 0.5}, {"partitioner": "min-peak"}],
    ids=["nothing saved", "half saved", "lowest peak"],
)
def test_gradients_within_a_budget_equal_eager_and_less_is_saved(options: dict[str, object]) -> None:
    model = network().double()  # sums of 64 rows: in float32 another order of additions is seen
    reference = copy.deepcopy(model)
    x = torch.randn(64, 16, dtype=torch.float64)
    used = saved_bytes(model, x, options)
    reference(x).sin().sum().backward()
    for got, want in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(got.grad, want.grad)
    model.zero_grad()
    assert used < saved_bytes(model, x, {})


@pytest.mark.parametrize("value", [-0.1, 1.5, "half"])
def test_a_budget_that_is_no_share_is_refused(value: object) -> None:
    with pytest.raises(aotkit.UnknownOption, match="memory_budget"):
        aotkit.Options(memory_budget=value)  # type: ignore[arg-type]
