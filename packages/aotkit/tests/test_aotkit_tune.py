"""The option ``tune`` on the CPU, from a model to a package: what is measured once is measured nowhere again."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import aotkit
from aotkit_inductor_lower.targets.cpu import host_machine, measured

pytestmark = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")

TUNE = aotkit.Options(tune=True, cache=False)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One entry for each comparison that is measured, which ours win."""
    found: list[int] = []

    def times(library: Callable[[], object], generated: Callable[[], object]) -> tuple[float, float]:
        found.append(len(found))
        return 2e-6, 1e-6

    monkeypatch.setattr(measured, "MeasuredRace", partial(measured.MeasuredRace, times=times))
    return found


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 48))


def assert_trains_as_eager(compiled: Callable[..., torch.Tensor], ours: nn.Module, x: torch.Tensor) -> None:
    eager = model()
    want, got = eager(x), compiled(x)
    want.square().sum().backward()
    got.square().sum().backward()
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    for mine, theirs in zip(ours.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-3)


def test_a_model_trains_with_what_was_measured_and_another_process_would_measure_nothing(asked: list[int]) -> None:
    x = torch.randn(64, 64)
    ours = model()
    assert_trains_as_eager(torch.compile(ours, backend="aotkit", options={"tune": True}), ours, x)
    first = len(asked)
    assert first >= 4  # two products, and gradients of weights and of what is between
    for options in ({"tune": True}, {"tune": True, "repeated_layers": "apart"}):
        torch._dynamo.reset()
        ours = model()
        assert_trains_as_eager(torch.compile(ours, backend="aotkit", options=options), ours, x)
        assert len(asked) == first


@pytest.mark.covers("F7.20")
def test_explain_has_both_times_and_a_package_measures_nothing(asked: list[int], tmp_path: Path) -> None:
    x = torch.randn(64, 64)
    with torch.no_grad():
        said = str(aotkit.explain(model(), x, options=TUNE))
    assert said.count("generated, ATen 2.0 us, generated 1.0 us") == 2
    aotkit.aot_compile(model().eval(), (x,), tmp_path / "file", options=TUNE)
    before = len(asked)
    loaded = aotkit.load(tmp_path / "file")
    with torch.no_grad():
        torch.testing.assert_close(loaded(x), model()(x), rtol=1e-4, atol=1e-4)
    assert len(asked) == before >= 4


def test_the_mode_that_tunes_is_this_option(asked: list[int]) -> None:
    x = torch.randn(64, 64)
    ours = model()
    options = {"mode": "max-autotune-no-cudagraphs"}
    assert_trains_as_eager(torch.compile(ours, backend="aotkit", options=options), ours, x)
    assert asked
