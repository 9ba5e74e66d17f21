"""Passes of all levels: each can be left out, and fuel counts over all of them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph
from aotkit_inductor_lower.driver import (
    COLLECTIVE_PASSES,
    GRAPH_PASSES,
    JOINT_PASSES,
    KERNEL_PASSES,
    LOOP_PASSES,
    WRITE_PASSES,
    pass_names,
)
from aotkit_inductor_lower.errors import UnknownPassError
from aotkit_inductor_lower.passes import Fuel, PassContext, check_disabled


def work(x: Tensor, w: Tensor, p: Tensor) -> tuple[Tensor, ...]:
    """Something to do for most passes."""
    shifted = (x - x.mean(1, keepdim=True)).clone() * w
    joined = torch.cat([shifted.exp(), x.view(-1).view(x.shape) + 1])
    p.copy_(p - shifted.sum(0) * 0.1)
    return joined * 2, torch.softmax(x.reshape(8, 2, -1).flatten(1), 1), (x * w).sum(), x.amax(1), x.amax((0, 1))


def arguments() -> list[Tensor]:
    g = torch.Generator().manual_seed(3)
    return [torch.randn(*sizes, generator=g) for sizes in ((8, 64), (64,), (64,))]


def expected() -> list[Tensor]:
    args = arguments()
    return [*work(*args), args[2]]


def results(options: LowerOptions) -> list[Tensor]:
    graph = make_fx(work, tracing_mode="fake")(*arguments())
    args = arguments()
    return [*compile_graph(graph, options=options)(list(args)), args[2]]


@pytest.mark.parametrize("name", [*pass_names(), "all"])
def test_without_a_pass_results_are_the_same(name: str) -> None:
    disable = pass_names() if name == "all" else (name,)
    for got, want in zip(results(LowerOptions(disable=disable, verify=True)), expected(), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("fuel", [0, 1, 2, 3, 5, 8, 13, 21, 34])
def test_with_any_fuel_results_are_the_same(fuel: int) -> None:
    for got, want in zip(results(LowerOptions(fuel=fuel, verify=True)), expected(), strict=True):
        torch.testing.assert_close(got, want)


def test_names_are_those_of_all_optional_passes() -> None:
    every = [*WRITE_PASSES, *COLLECTIVE_PASSES, *JOINT_PASSES, *GRAPH_PASSES, *LOOP_PASSES, *KERNEL_PASSES]
    optional = list(dict.fromkeys(each.name for each in every if not each.required))  # type: ignore[attr-defined]
    assert list(pass_names()) == optional  # some run on joint graphs and again on each part
    assert set(pass_names("graph")) | set(pass_names("loop")) | set(pass_names("kernel")) == set(optional)
    assert all(each.why for each in every)  # type: ignore[attr-defined]
    check_disabled(pass_names(), pass_names())
    with pytest.raises(UnknownPassError, match="drop-dead-steps"):
        check_disabled(("drop-dead-steps",), pass_names())


def test_fuel_is_one_counter() -> None:
    fuel = Fuel(2)
    fuel.spend(1)
    assert fuel.take() and not fuel.take() and (fuel.left, fuel.used) == (0, 2)
    assert PassContext.of().fuel.take()
