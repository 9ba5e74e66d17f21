"""Calls whose results nobody uses, and that are made for something else: numbers drawn, effects."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.node import _side_effectful_functions

OPTIONS = {"fallback": "error", "cache": False}


def drawn_for_nothing(x: Tensor) -> Tensor:
    torch.rand(3)
    F.dropout(x, 0.3)
    torch.randperm(6)
    x.clone().uniform_()
    return x + torch.rand(4)


def in_a_branch_for_nothing(x: Tensor) -> Tensor:
    def some(x: Tensor) -> Tensor:
        torch.rand(3)
        return x * 2

    torch.cond(x.sum() > 0, some, lambda x: x * 3, (x,))
    return torch.cond(x.sum() > 0, some, lambda x: x * 3, (x,)) + torch.rand(4)


@pytest.mark.covers("F5c.3")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("fn", [drawn_for_nothing, in_a_branch_for_nothing])
def test_random_numbers_that_nobody_uses_are_drawn_as_in_eager_mode(fn: Callable[..., Any], train: bool) -> None:
    results = []
    for run in (fn, torch.compile(fn, backend="aotkit", fullgraph=True, options=OPTIONS)):
        x = torch.ones(4, requires_grad=train)
        torch.manual_seed(0)
        y = run(x)
        (grad,) = torch.autograd.grad(y.sum(), x) if train else (torch.zeros(()),)
        results.append((y.detach(), grad, torch.get_rng_state()))
    for eager, ours in zip(*results, strict=True):
        assert torch.equal(eager, ours)


@pytest.fixture
def noted() -> Iterator[list[str]]:
    """What three operators were called with: two of which torch was told that they count, one that returns nothing."""
    calls: list[str] = []

    def told(text: str, x: Tensor) -> Tensor:
        calls.append(text)
        return torch.zeros(1)

    with torch.library._scoped_library("aotkit_test_effects", "FRAGMENT") as library:
        library.define("told(str text, Tensor x) -> Tensor")
        library.define("silent(str text, Tensor x) -> ()")
        library.impl("told", told, "CPU")
        library.impl("told", lambda text, x: torch.zeros(1, device="meta"), "Meta")
        library.impl("silent", lambda text, x: calls.append(text), "CPU")
        library.impl("silent", lambda text, x: None, "Meta")
        library.define("writes(str text, Tensor(a!) x) -> ()")
        library.impl("writes", lambda text, x: calls.append(text), "CPU")
        library.impl("writes", lambda text, x: None, "Meta")
        ops = torch.ops.aotkit_test_effects
        for operator in (ops.told.default, ops.writes.default):
            torch.fx.has_side_effect(operator)
        yield calls
        _side_effectful_functions.difference_update((ops.told.default, ops.writes.default))


@pytest.mark.covers("F5c.3")
@pytest.mark.parametrize("train", [False, True])
def test_operators_that_are_called_for_an_effect_run_as_often_and_in_the_order_of_the_program(
    noted: list[str], train: bool
) -> None:
    def fn(x: Tensor) -> Tensor:
        ops = torch.ops.aotkit_test_effects
        y = x.sin()
        ops.told("a", y)
        ops.told("a", y)
        ops.silent("b", x)
        ops.told("c", y * 2)
        ops.silent("d", y.detach())
        ops.writes("e", torch.zeros(3))
        ops.writes("e", torch.zeros(3))
        return x + y

    x = torch.randn(4, requires_grad=train)
    run = torch.compile(fn, backend="aotkit", fullgraph=True, options=OPTIONS)
    for _ in range(2):
        noted.clear()
        y = run(x)
        if train:
            y.sum().backward()
        assert noted == ["a", "a", "b", "c", "d", "e", "e"]
