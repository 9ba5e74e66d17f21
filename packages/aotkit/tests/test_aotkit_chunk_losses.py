"""The option ``chunk_loss_bytes``: training steps and evaluations whose logits are never whole, against eager."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import aotkit

ROWS, WORDS, WIDTH = 640, 1500, 48


class Model(nn.Module):
    """The end of a language model."""

    def __init__(self, *, tied: bool = False, autocast: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.inner = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS, bias=not tied)
        if tied:
            self.head.weight = self.words.weight
        self.autocast = autocast

    def forward(self, tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.head(F.gelu(self.inner(self.words(tokens))))
            return F.cross_entropy(logits.view(-1, WORDS), target.view(-1))


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(1)
    tokens, target = torch.randint(0, WORDS, (2, 4, ROWS // 4)).unbind()
    target[:, -1] = -100
    return tokens, target


def compiled(model: nn.Module, **options: Any) -> Any:
    given = {"fallback": "error", "cache": False, "chunk_loss_bytes": 1, **options}
    return torch.compile(model, backend="aotkit", options=given)


def gradients(loss: torch.Tensor, model: nn.Module) -> list[torch.Tensor]:
    return [loss, *torch.autograd.grad(loss * 0.5, list(model.parameters()))]


@pytest.mark.covers("F5f.24")
@pytest.mark.parametrize("dynamic", [False, None], ids=["static", "as found"])
@pytest.mark.parametrize("tied", [False, True], ids=["bias", "tied"])
def test_a_training_step_equals_eager(tied: bool, dynamic: bool | None) -> None:
    model, (tokens, target) = Model(tied=tied).double(), batch()
    want = gradients(model(tokens, target), model)
    step = torch.compile(
        model, backend="aotkit", dynamic=dynamic, options={"fallback": "error", "cache": False, "chunk_loss_bytes": 1}
    )
    torch.testing.assert_close(gradients(step(tokens, target), model), want)
    shorter = tokens[:, 3:].clone(), target[:, 3:].clone()  # other sizes: symbolic, if they may be
    torch.testing.assert_close(gradients(step(*shorter), model), gradients(model(*shorter), model))


def test_under_autocast_the_error_is_eagers() -> None:
    model, given = Model(autocast=True), batch()
    exact = copy.deepcopy(model).double()
    exact.autocast = False
    want = gradients(exact(*given), exact)
    for a, b, c in zip(gradients(compiled(model)(*given), model), gradients(model(*given), model), want, strict=True):
        eager, ours = ((x.double() - c).norm() for x in (b, a))
        assert ours <= 3 * (eager + 2e-6 * c.norm())


@pytest.mark.covers("F5f.24")
def test_the_peak_of_memory_is_half() -> None:
    model, given = Model(), batch()
    peaks = []
    for least in (0, 1):
        captured = aotkit.stages(model, options=aotkit.Options(chunk_loss_bytes=least)).capture(*given)
        peaks.append(captured.partition().memory().peak or 0)
    assert 0 < peaks[1] * 2 < peaks[0]


def test_a_loss_without_gradients_is_in_chunks_too() -> None:
    model, given = Model().double(), batch()
    with torch.no_grad():
        torch.testing.assert_close(compiled(model)(*given), model(*given))
        captured = aotkit.stages(model, options=aotkit.Options(chunk_loss_bytes=1)).capture(*given)
    parts = captured.partition()
    (graph,) = parts.graphs.values()
    products = [n.meta["val"] for n in graph.graph.nodes if n.target is torch.ops.aten.addmm.default]
    assert len(products) > 4 and all(value.numel() < ROWS * WORDS // 2 for value in products)


def test_second_derivatives_are_right_or_refused() -> None:
    class Penalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.head = nn.Linear(WIDTH, WORDS).double()

        def forward(self, h: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(h), target)

    def penalised(model: Any, h: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(model(h, target), h, create_graph=True)
        (second,) = torch.autograd.grad(slope.square().sum(), h)
        return second

    model = Penalty()
    h = torch.randn(ROWS, WIDTH, dtype=torch.float64, requires_grad=True)
    target = torch.randint(0, WORDS, (ROWS,))
    torch.testing.assert_close(penalised(compiled(model), h, target), penalised(model, h, target))


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(aotkit.UnknownOption, match="chunk_loss_bytes"):
        aotkit.Options(chunk_loss_bytes=-1)
