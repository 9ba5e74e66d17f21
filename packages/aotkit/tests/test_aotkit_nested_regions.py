"""Nested regions (``torch.compiler.nested_compile_region``) whose backward must not run them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

import aotkit
from aotkit_aot_trace import Unsupported

region_of = torch.compiler.nested_compile_region


def dropped(x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x, 0.4).cos()


@region_of
def drop(x: torch.Tensor) -> torch.Tensor:
    return dropped(x)


@region_of
def drop_in_checkpoint(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(dropped, x, use_reentrant=False)


@region_of
def drop_within(x: torch.Tensor) -> torch.Tensor:
    return drop(x) * drop(x + 1)


@region_of
def two_results(x: torch.Tensor, factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    return x * torch.rand_like(x), x.sin() * factor


def drop_twice(x: torch.Tensor) -> torch.Tensor:
    return drop(x) + drop(x)


def checkpointed(x: torch.Tensor) -> torch.Tensor:
    return checkpoint(drop, x, use_reentrant=False) + checkpoint(drop, x, use_reentrant=False)


def several_results(x: torch.Tensor) -> torch.Tensor:
    (a, b), (c, d) = two_results(x, 2), two_results(x.exp(), 2)
    return a * d + b * c


PROGRAMS: dict[str, Callable[..., Any]] = {
    "twice": drop_twice,
    "checkpoint-inside": lambda x: drop_in_checkpoint(drop_in_checkpoint(x)),
    "checkpoint-outside": checkpointed,
    "regions-in-a-region": lambda x: drop_within(x) + drop_within(x.sin()),
    "several-results": several_results,
}


def compiled(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    return torch.compile(fn, backend="aotkit", fullgraph=True, options={"fallback": "error", "rng": "eager", **options})


def result_and_gradient(fn: Callable[..., Any], x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    torch.manual_seed(0)
    y = fn(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), x)]


@pytest.mark.covers("F2.41", "F2.42")
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_of_the_numbers_that_the_forward_drew(name: str) -> None:
    x = torch.randn(9)
    run = compiled(PROGRAMS[name])
    expected = result_and_gradient(PROGRAMS[name], x)
    for _ in range(2):
        torch.testing.assert_close(result_and_gradient(run, x), expected)


def test_an_operator_of_the_users_runs_once_in_forward_and_backward() -> None:
    calls = []

    with torch.library._scoped_library("nested_regions", "DEF"):

        @torch.library.custom_op("nested_regions::noted", mutates_args=())
        def noted(x: torch.Tensor) -> torch.Tensor:
            calls.append(x.shape)
            return x.sin()

        noted.register_fake(torch.empty_like)
        noted.register_autograd(lambda _, grad: grad * 2)
        region = region_of(lambda x: noted(x).exp())
        x = torch.randn(5)
        expected = result_and_gradient(lambda x: region(x) * region(x), x)
        run = compiled(lambda x: region(x) * region(x))
        calls.clear()
        torch.testing.assert_close(result_and_gradient(run, x), expected)
        assert len(calls) == 2


class Counting(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(3))

    @region_of
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)
        return x.sin() + self.calls


def test_regions_that_write_to_a_buffer_are_trained() -> None:
    mine, other = Counting(), Counting()
    run = compiled(lambda x: mine(x) + mine(x.cos()))
    x = torch.randn(3)
    got = result_and_gradient(run, x)
    torch.testing.assert_close(got, result_and_gradient(lambda x: other(x) + other(x.cos()), x))
    torch.testing.assert_close(mine.calls, other.calls)


def test_regions_of_known_operators_stay_regions_in_training() -> None:
    recorder = aotkit.Recorder()
    region = region_of(lambda x: x.sin().exp())
    result_and_gradient(compiled(lambda x: region(region(x)), observer=recorder), torch.randn(3))
    calls = [{extern.target: extern.count for extern in record.report.externs} for record in recorder.graphs]
    assert calls == [{"invoke_subgraph": 2}] * 2  # forward and backward


@pytest.mark.parametrize("error", [Unsupported("a", "b", "c"), KeyError("a bug")], ids=["refused", "bug"])
def test_a_graph_with_regions_that_runs_eagerly_has_gradients(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise error

    monkeypatch.setattr("aotkit.driver.graph_compiler.capture_function", fail)
    region = region_of(lambda x, k: (x.sin() * k, k))

    def several(x: torch.Tensor) -> torch.Tensor:
        (a, k), (b, n) = region(x, 3), region(x.exp(), 3)
        return a * b * (k + n)

    x = torch.randn(3)
    with pytest.warns(aotkit.EagerFallback):
        got = result_and_gradient(compiled(several, fallback="eager"), x)
    torch.testing.assert_close(got, result_and_gradient(lambda x: x.sin() * x.exp().sin() * 54, x))
