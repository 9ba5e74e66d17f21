"""One function makes callables, whatever it makes them of."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
import torch

import aotkit
from aotkit.driver import bind as binding

SOURCES = Path(aotkit.__file__).parent


def modules() -> dict[str, Path]:
    names = {path: ["aotkit", *path.relative_to(SOURCES).with_suffix("").parts] for path in SOURCES.rglob("*.py")}
    return {".".join(n[:-1] if n[-1] == "__init__" else n): path for path, n in names.items()}


def calls_of(name: str) -> list[str]:
    """The functions of aotkit that call what runtime-wrappers has under this name."""
    found = []
    for module, path in modules().items():
        tree = ast.parse(path.read_text())
        known = {
            alias.asname or alias.name
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module == "aotkit_runtime_wrappers"
            for alias in node.names
            if alias.name == name
        }
        for function in ast.walk(tree):
            if isinstance(function, ast.FunctionDef):
                called = [n.func for n in ast.walk(function) if isinstance(n, ast.Call)]
                found += [f"{module}.{function.name}" for n in called if isinstance(n, ast.Name) and n.id in known]
    return found


def test_one_function_binds() -> None:
    assert calls_of("bind") == ["aotkit.driver.bind.bind"]


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kind of each artifact that goes through the one function."""
    seen: list[str] = []
    original = binding.bind_plan

    def spy(plan: object, *args: object, **kwargs: object) -> object:
        seen.append("training" if plan.call.training else "inference")  # type: ignore[attr-defined]
        return original(plan, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(binding, "bind_plan", spy)
    return seen


@pytest.mark.parametrize("verify", ["0", "1"])
def test_what_is_compiled_loaded_packaged_and_verified_is_bound_by_the_same_function(
    verify: str, bound: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AOTKIT_VERIFY", verify)
    x = torch.ones(3)

    def f(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    loads = []
    for needs_gradient in (False, True):
        for _ in range(2):
            torch._dynamo.reset()
            recorder = aotkit.Recorder()
            backend = aotkit.make_backend(aotkit.Options(fallback="error", verify=verify == "1"), recorder)
            y = torch.compile(f, backend=backend)(x.clone().requires_grad_(needs_gradient))
            torch.testing.assert_close(y.detach(), f(x))
            if needs_gradient:
                y.sum().backward()
            loads.append("cache.loaded" in [name for name, _ in recorder.events])
    assert loads == [False, verify == "0"] * 2  # the verify mode keeps nothing
    assert bound == ["inference"] * 2 + ["training"] * 2
    aotkit.aot_function(f, aotkit.nop)(x)
    assert len(bound) == 5

    class Module(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return f(x)

    path = aotkit.aot_compile(Module(), (x,), tmp_path / "model.aotkit")
    assert len(bound) == 5  # a package is data
    torch.testing.assert_close(aotkit.load(path)(x), f(x))
    assert len(bound) == 6


def test_second_derivatives_are_bound_by_it_too(bound: list[str]) -> None:
    torch._dynamo.reset()
    x = torch.ones(3, requires_grad=True)
    (gradient,) = torch.autograd.grad(
        torch.compile(torch.sin, backend=aotkit.make_backend(aotkit.Options(fallback="error")))(x).sum(),
        x,
        create_graph=True,
    )
    (second,) = torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(second, -x.sin())
    assert bound == ["training"] * 2
