"""Facts about a saved function's arguments hold in every call, whatever they lie in; those about the inside of a module
that is an argument itself are looked at in the first call with it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aotkit
from aotkit import GuardError


class Inner(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class Outer(nn.Module):
    def __init__(self, factor: int) -> None:
        super().__init__()
        self.inner = Inner(factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x)  # type: ignore[no-any-return]


class Holder:
    def __init__(self, net: Any = None, config: Any = None) -> None:
        self.net, self.config = net, config


def by_item(options: dict[str, int], x: torch.Tensor) -> torch.Tensor:
    return x * options["config"]


def by_attribute(holder: Holder, x: torch.Tensor) -> torch.Tensor:
    return x * holder.config


def by_held_module(holder: Holder, x: torch.Tensor) -> torch.Tensor:
    return holder.net(x)  # type: ignore[no-any-return]


def by_listed_module(nets: list[Outer], x: torch.Tensor) -> torch.Tensor:
    return nets[0](x)  # type: ignore[no-any-return]


def by_some(*given: Any) -> torch.Tensor:
    return given[0](given[1])  # type: ignore[no-any-return]


def beside_a_module(net: Outer, options: dict[str, int], x: torch.Tensor) -> torch.Tensor:
    return net(x) * options["config"]


def of_two(one: Outer, other: Outer, x: torch.Tensor) -> torch.Tensor:
    return one(x) - other(x)


NET, TWO, FIVE = Outer(2), Outer(2), Outer(5)
#: Of each function an argument that it is saved for, and another.
CASES: dict[Callable[..., torch.Tensor], tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    by_item: (({"config": 2},), ({"config": 5},)),
    by_attribute: ((Holder(config=2),), (Holder(config=5),)),
    by_held_module: ((Holder(TWO),), (Holder(FIVE),)),
    by_listed_module: (([TWO],), ([FIVE],)),
    by_some: ((TWO,), (FIVE,)),
    beside_a_module: ((NET, {"config": 2}), (NET, {"config": 5})),
    of_two: ((TWO, FIVE), (FIVE, TWO)),
}


@pytest.mark.parametrize("calls", [1, 4])
@pytest.mark.parametrize("function", CASES, ids=lambda function: function.__name__)
def test_another_number_is_refused(function: Callable[..., torch.Tensor], calls: int, tmp_path: Path) -> None:
    given, others = CASES[function]
    x = torch.ones(3)
    aotkit.saved.save_compiled_function(aotkit.saved.compile_to_save(function, (*given, x)), tmp_path / "saved")
    loaded = aotkit.saved.load_compiled_function(tmp_path / "saved")
    for _ in range(calls):
        torch.testing.assert_close(loaded(*given, x), function(*given, x))
    with pytest.raises(GuardError, match="was compiled for"):
        loaded(*others, x)
    torch.testing.assert_close(loaded(*given, x), function(*given, x))


def of_as_many(x: torch.Tensor, n: int, m: int) -> torch.Tensor:
    return torch.arange(n) + torch.arange(m) + x.sum()


def of_twice_as_many(x: torch.Tensor, n: int, m: int) -> torch.Tensor:
    return torch.arange(n).repeat(2) + torch.arange(m) + x.sum()


def pooled(x: torch.Tensor, n: int, m: int) -> torch.Tensor:
    return torch.nn.functional.avg_pool1d(x, n) * m


def normalized(x: torch.Tensor, eps: float, by: float) -> torch.Tensor:
    return torch.nn.functional.layer_norm(x, (12,), eps=eps) * by


#: What a compile finds out about numbers: one is the other, twice the other, a constant; then others that are refused.
FOUND: dict[Callable[..., torch.Tensor], tuple[tuple[Any, ...], tuple[Any, ...]]] = {
    of_as_many: ((5, 5), (5, 6)),
    of_twice_as_many: ((5, 10), (5, 12)),
    pooled: ((2, 3), (3, 3)),
    normalized: ((0.5, 1.5), (0.25, 1.5)),
}


@pytest.mark.parametrize("function", FOUND, ids=lambda function: function.__name__)
def test_numbers_that_the_compile_settled_are_compared(function: Callable[..., torch.Tensor], tmp_path: Path) -> None:
    given, others = FOUND[function]
    x = torch.arange(72.0).view(6, 12).sin()
    saved = aotkit.saved.compile_to_save(function, (x, *given), dynamic=True)
    aotkit.saved.save_compiled_function(saved, tmp_path / "saved")
    loaded = aotkit.saved.load_compiled_function(tmp_path / "saved")
    torch.testing.assert_close(loaded(x, *given), function(x, *given))
    with pytest.raises(GuardError, match="was compiled for"):
        loaded(x, *others)
