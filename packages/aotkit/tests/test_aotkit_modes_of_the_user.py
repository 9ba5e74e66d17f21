"""Modes of the user's (``TorchDispatchMode``, ``TorchFunctionMode``, ``torch.device``) around calls and backwards: they
see nothing of a compile, change nothing of what it makes for other calls, and an ``aot_function`` runs as it is."""

from __future__ import annotations

import contextlib
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


class Served(torch.nn.Module):
    """With a weight that is not contiguous, of which a package makes a tensor when it is loaded."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.linspace(-1, 1, 20).view(4, 5).t())

    def forward(self, x: Tensor) -> Tensor:
        """A kernel around a product."""
        return (x.sin() @ self.w).cumsum(0).softmax(1)


class ChangesMemory(TorchFunctionMode):
    """Gives other types than were asked for."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.double() if func in (torch.empty_strided, torch.as_strided, torch.Tensor.view) else result


AROUND: dict[str, Callable[[], Any]] = {
    **MODES,
    "changes memory": ChangesMemory,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
}


@pytest.fixture(scope="module")
def exported() -> torch.export.ExportedProgram:
    """Of :class:`Served`."""
    return torch.export.export(Served(), (torch.randn(6, 5),))


@pytest.mark.parametrize("when", ["compiled", "loaded", "called"])
@pytest.mark.parametrize("mode", AROUND)
def test_packages_that_are_compiled_loaded_or_called_under_a_mode(
    mode: str, when: str, exported: torch.export.ExportedProgram, tmp_path: Any
) -> None:
    x, path = torch.randn(6, 5), tmp_path / "served"
    with AROUND[mode]() if when == "compiled" else contextlib.nullcontext():
        aotkit.aot_compile(exported, None, path)
    with AROUND[mode]() if when == "loaded" else contextlib.nullcontext():
        package = aotkit.load(path)
    with AROUND[mode]() if when == "called" else contextlib.nullcontext():
        first = package(x)
    for result in (first, package(x)):
        torch.testing.assert_close(result, Served()(x))


class Trained(torch.nn.Module):
    """With a parameter and a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.linspace(-1, 1, 20).view(5, 4))

    def forward(self, x: Tensor) -> Tensor:
        """The constant is in the file."""
        return ((x @ self.w).sin() * torch.tensor([0.5, 2.0, -1.0, 3.0])).square().mean()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: Any) -> Any:
    """The file of a function, of :class:`Trained`."""
    path = tmp_path_factory.mktemp("saved") / "function"
    aotkit.saved.save_compiled_function(aotkit.saved.compile_to_save(Trained(), (torch.randn(6, 5),)), path)
    return path


@pytest.fixture(scope="module")
def saved_step(tmp_path_factory: Any) -> Any:
    """The file of a training step, of the same."""
    path, model = tmp_path_factory.mktemp("saved") / "step", Trained()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    aotkit.saved.compile_step(model, optimizer, lambda model, x: model(x), (torch.randn(6, 5),)).save(path)
    return path


@pytest.mark.parametrize("mode", AROUND)
def test_functions_that_are_loaded_under_a_mode(mode: str, saved: Any) -> None:
    with AROUND[mode]():
        loaded = aotkit.saved.load_compiled_function(saved)
    x, module = torch.randn(6, 5), Trained()
    for _ in range(2):
        torch.testing.assert_close(loaded(module, x), module(x))


@pytest.mark.parametrize("mode", ["sees", "changes memory"])
def test_a_saved_function_under_a_mode(mode: str, saved: Any) -> None:
    x, loaded, module = torch.randn(6, 5), aotkit.saved.load_compiled_function(saved), Trained()
    for _ in range(4):  # the later ones are quick calls
        with AROUND[mode]():
            torch.testing.assert_close(loaded(module, x), module(x))


@pytest.mark.parametrize("mode", AROUND)
def test_steps_that_are_loaded_under_a_mode(mode: str, saved_step: Any) -> None:
    with AROUND[mode]():
        loaded = aotkit.saved.load_step(saved_step)
    ours, theirs = Trained(), Trained()
    step, optimizer, x = loaded.bind(ours), torch.optim.SGD(theirs.parameters(), lr=0.5), torch.randn(6, 5)
    for _ in range(2):
        loss = theirs(x)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.testing.assert_close(step(x), loss.detach())
    torch.testing.assert_close(ours.state_dict(), theirs.state_dict())


def test_a_function_of_parameters_that_have_a_gradient_is_saved_or_refused_by_name(tmp_path: Any) -> None:
    """torch 2.15 reads back what it writes of them; 2.13 does not, which was its own ``TypeError``."""
    model, x = torch.nn.Linear(3, 2), torch.randn(4, 3)
    model(x).sum().backward()
    compiled = aotkit.saved.compile_to_save(model, (x,))
    try:
        aotkit.saved.save_compiled_function(compiled, tmp_path / "saved")
    except aotkit.PackageError as error:
        assert "has a gradient" in str(error)
    else:
        loaded = aotkit.saved.load_compiled_function(tmp_path / "saved")
        torch.testing.assert_close(loaded(model, x), model(x))
