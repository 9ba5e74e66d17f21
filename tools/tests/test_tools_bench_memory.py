"""The peak of a compiled training step, beside eager's."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tools.bench.held import held_at_peak, table
from tools.bench.memory import peak_tensor_mb


class Loss(nn.Module):
    """The mean square of what layers make."""

    def __init__(self, layers: list[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        """A number."""
        return self.layers(given).square().mean()


def convolutions() -> tuple[nn.Module, torch.Tensor]:
    """The first layers' temporaries are the largest, and most is held behind the last layer."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for channels, results, stride in ((3, 16, 1), (16, 16, 4), *[(16, 16, 1)] * 8):
        layers += [nn.Conv2d(channels, results, 3, stride, padding=1), nn.BatchNorm2d(results), nn.ReLU()]
    return Loss(layers), torch.randn(4, 3, 160, 160)


def perceptrons() -> tuple[nn.Module, torch.Tensor]:
    """A gradient as large as what was saved for it."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for _ in range(3):
        layers += [nn.LayerNorm(128), nn.Linear(128, 1024), nn.GELU(), nn.Linear(1024, 128)]
    return Loss(layers), torch.randn(512, 128)


@pytest.mark.parametrize("network", [convolutions, perceptrons])
def test_a_compiled_step_holds_no_more_than_an_eager_one(
    network: Callable[[], tuple[nn.Module, torch.Tensor]],
) -> None:
    import aotkit  # noqa: F401  (registers the backend)

    model, given = network()
    compiled = torch.compile(model, backend="aotkit")

    def step_of(call: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            call(given).backward()

        return step

    eager = peak_tensor_mb(step_of(model))
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    own = peak_tensor_mb(step_of(compiled))
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-3, atol=1e-5)
    assert own <= eager


def test_what_is_held_at_the_peak_is_told_by_what_made_it() -> None:
    kept: list[torch.Tensor] = []

    def step() -> None:
        if not kept:
            kept.append(torch.zeros(2**18))
        gone = torch.ones(2**19) + 1
        del gone
        first = torch.full((2**20,), 2.0)
        second = first.exp()
        del first
        second.sin()

    held = [each for each in held_at_peak(step, warmup=1) if each.nbytes > 2**10]  # numbers are tensors, too
    assert [(each.nbytes, each.kept) for each in held] == [(2**22, False), (2**22, False), (2**20, True)]
    assert [each.made_by[0] for each in held] == ["aten::full", "aten::exp", "aten::zeros"]
    lines = table(held, rows=3).splitlines()
    assert lines[0].split()[0] == "9.00" and lines[3].split()[0] == "1.00" and "before the step" in lines[3]


def test_memory_for_a_kernel_is_told_by_its_name() -> None:
    import aotkit  # noqa: F401  (registers the backend)

    weight = torch.randn(512, 512, requires_grad=True)
    compiled = torch.compile(lambda x: (x @ weight).sin().exp().sum(), backend="aotkit")
    given = torch.randn(512, 512)

    def step() -> None:
        weight.grad = None
        compiled(given).backward()

    held = held_at_peak(step)
    names = [name for each in held if each.nbytes >= 2**20 for name in each.made_by if name.startswith("graph")]
    assert any("-forward: " in name for name in names)
