"""Outputs that the loss does not depend on: their tangents are neither made nor computed with."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import aotkit

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def model(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A loss, and the scores that it was made of."""
    scores = (x @ w).view(2, 4, 8)
    return -F.log_softmax(scores.view(8, 8), -1)[:, 1].mean(), scores


LOSSES: dict[str, Loss] = {
    "loss": lambda loss, scores: loss,
    "both": lambda loss, scores: loss + scores.square().sum(),
    "scores": lambda loss, scores: scores.square().sum(),
}


def inputs() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((8, 16), (16, 8))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def gradients(call: Callable[..., Any], which: str) -> list[torch.Tensor]:
    leaves = inputs()
    return list(torch.autograd.grad(LOSSES[which](*call(*leaves)), leaves))


def compiled(**options: Any) -> tuple[Callable[..., Any], aotkit.Recorder]:
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    chosen = aotkit.Options(fallback="error").patch(**options)
    return torch.compile(model, backend=aotkit.make_backend(chosen, recorder)), recorder


@pytest.fixture
def zeros_made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The sizes of tangents of zeros that compiled graphs were given."""
    runtime: dict[str, Any] = importlib.import_module("aotkit_runtime_wrappers.bind")._RUNTIME
    made: list[tuple[int, ...]] = []
    original = runtime["_zero_tangent"]

    def zero_tangent(sizes: Any, *rest: Any) -> torch.Tensor:
        made.append(tuple(sizes))
        result: torch.Tensor = original(sizes, *rest)
        return result

    monkeypatch.setitem(runtime, "_zero_tangent", zero_tangent)
    return made


@pytest.mark.covers("F4.29", "F4.33")
@pytest.mark.parametrize("lowering", ["kernels", "none"])
@pytest.mark.parametrize("order", [("loss", "both", "scores", "loss"), ("both", "loss"), ("scores", "loss")])
def test_gradients_are_those_of_eager_whichever_tangents_come(order: tuple[str, ...], lowering: str) -> None:
    call, _ = compiled(lowering=lowering)
    for which in order:
        torch.testing.assert_close(gradients(call, which), gradients(model, which))


@pytest.mark.covers("F4.29")
def test_a_training_step_on_the_loss_alone_makes_no_zeros(zeros_made: list[tuple[int, ...]]) -> None:
    call, _ = compiled()
    for _ in range(2):
        gradients(call, "loss")
    assert zeros_made == []
    gradients(call, "both")
    gradients(call, "scores")
    assert zeros_made == [()]
    gradients(call, "loss")
    assert zeros_made == [()]


@pytest.mark.covers("F4.29", "F7.1")
def test_a_loaded_backward_without_a_tangent_serves_the_same_calls_and_others_get_a_whole_one(
    monkeypatch: pytest.MonkeyPatch, zeros_made: list[tuple[int, ...]]
) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", "0")
    call, _ = compiled()
    expected = {which: gradients(model, which) for which in LOSSES}
    torch.testing.assert_close(gradients(call, "loss"), expected["loss"])
    call, recorder = compiled()
    for which in ("loss", "both", "scores", "loss"):
        torch.testing.assert_close(gradients(call, which), expected[which])
    assert [name for name, _ in recorder.events].count("cache.loaded") == 1
    assert zeros_made == [()]
