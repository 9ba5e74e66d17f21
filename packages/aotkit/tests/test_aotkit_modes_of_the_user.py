"""Modes of the user's (``TorchDispatchMode``, ``TorchFunctionMode``, ``torch.device``) around calls and backwards: they see
nothing of a compile, change nothing of what it makes for other calls, and an ``aot_function`` runs under them as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import aotkit

Tensor = torch.Tensor
aten = torch.ops.aten
_INSTEAD = {aten.sin.default: aten.cos.default, aten.mul.Tensor: aten.add.Tensor}


class Sees(TorchDispatchMode):
    """Notes the names of operators."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return func(*args, **(kwargs or {}))


class Changes(Sees):
    """Computes something else."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.add(str(func))
        return _INSTEAD.get(func, func)(*args, **(kwargs or {}))


class ChangesFunctions(TorchFunctionMode):
    """The same one level above."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.cos if func is torch.sin else func)(*args, **(kwargs or {}))


MODES: dict[str, Callable[[], Any]] = {
    "sees": Sees,
    "changes": Changes,
    "changes functions": ChangesFunctions,
    "default device": lambda: torch.device("meta"),
}


def program(x: Tensor, w: Tensor) -> Tensor:
    """With a product, which ATen computes, and temporaries."""
    return ((torch.sin(x * 3) @ w).sigmoid().cumsum(0).sum(1) * x[:, 0]).sum()


def inputs() -> list[Tensor]:
    """The same ones each time."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(6, n, generator=generator, device="cpu", requires_grad=True) for n in (6, 4)]


def gradients(loss: Tensor, args: list[Tensor]) -> list[Tensor]:
    """By the engine itself, which no function mode sees."""
    torch.autograd.backward([loss])
    return [a.grad for a in args]  # type: ignore[misc]


def second(loss: Tensor, args: list[Tensor]) -> list[Tensor]:
    """Of the gradients' squares."""
    first = torch.autograd.grad(loss, args, create_graph=True)
    return list(torch.autograd.grad(sum((g * g).sum() for g in first), args))  # type: ignore[arg-type]


@pytest.mark.parametrize("derivative", [gradients, second])
@pytest.mark.parametrize("mode", MODES)
def test_what_a_backward_compiles_under_a_mode_serves_other_calls(mode: str, derivative: Callable[..., Any]) -> None:
    run = torch.compile(program, backend="aotkit", options={"cache": False, "fallback": "error"})
    args, theirs = inputs(), inputs()
    loss = run(*args)
    with MODES[mode]() as active:
        derivative(loss, args)
    args = inputs()
    torch.testing.assert_close(derivative(run(*args), args), derivative(program(*theirs), theirs))
    if mode == "sees":  # the operators that eager calls and those around them, but none of a compile
        assert not active.seen & {"prim.device.default", "aten.promote_types.default", "aten.empty.memory_format"}


@pytest.mark.parametrize("mode", MODES)
def test_a_first_call_under_a_mode_is_right_and_so_are_later_ones(mode: str) -> None:
    run = torch.compile(program, backend="aotkit", options={"cache": False, "fallback": "error"})
    for active in (MODES[mode], torch.enable_grad):
        with active():
            got = run(*(args := inputs()))
        with active():
            want = program(*(theirs := inputs()))
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(gradients(got, args), gradients(want, theirs))


@pytest.mark.parametrize("mode", MODES)
def test_an_aot_function_is_called_as_it_is_under_a_mode(mode: str) -> None:
    compiles = []

    def keep(graph: torch.fx.GraphModule, _: Any) -> torch.fx.GraphModule:
        compiles.append(graph)
        return graph

    run = aotkit.aot_function(program, keep)
    with MODES[mode]() as ours:
        got = run(*(args := inputs()))
    with MODES[mode]() as eager:
        want = program(*(theirs := inputs()))
    assert getattr(ours, "seen", None) == getattr(eager, "seen", None)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got, args), gradients(want, theirs))
    assert bool(compiles) is (mode == "default device")  # which a specialization is for
    got, want = run(*(args := inputs())), program(*(theirs := inputs()))
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got, args), gradients(want, theirs))
    assert compiles
