"""Inputs that kernels can't read: they run eagerly, after a notice."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import aotkit


def rows(x: torch.Tensor) -> torch.Tensor:
    return x.sin().softmax(-1) @ x.mT


@pytest.mark.parametrize("dim", [DimDynamic.STATIC, DimDynamic.DYNAMIC])
def test_a_call_with_fake_tensors_gives_fake_ones(dim: DimDynamic) -> None:
    compiled = torch.compile(rows, backend="aotkit", fullgraph=True)
    real = torch.randn(3, 4)
    torch.testing.assert_close(compiled(real), rows(real))
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x = mode.from_tensor(real, symbolic_context=StatelessSymbolicContext([dim, dim]))
        with pytest.warns(aotkit.EagerFallback, match="a fake tensor"):
            result = compiled(x)
        assert result.fake_mode is mode and result.shape == (3, 3)
    torch.testing.assert_close(compiled(real), rows(real))


def test_the_trace_itself_may_be_of_fake_tensors() -> None:
    with FakeTensorMode() as mode:
        fake = mode.from_tensor(torch.empty(3, 4))
    x = torch.randn(3, 4)
    graph = torch.fx.symbolic_trace(rows)
    torch.testing.assert_close(aotkit.compile_fx(graph, [fake])(x), rows(x))


def test_a_function_that_is_functionalized_from_outside_is_right() -> None:
    def write(x: torch.Tensor) -> torch.Tensor:
        return x.add_(1).sin()

    compiled = torch.compile(write, backend="aotkit")
    x = torch.randn(3)
    twin = x.clone()
    with pytest.warns(aotkit.EagerFallback, match="functionalized from outside"):
        found = torch.func.functionalize(compiled)(x)
    torch.testing.assert_close(found, write(twin))
    torch.testing.assert_close(x, twin)


def test_a_value_that_leaks_from_a_transform_is_right() -> None:
    leaked = []

    def loss(x: torch.Tensor) -> torch.Tensor:
        leaked.append(x * 2)
        torch._dynamo.graph_break()  # so the transform runs outside of the graph
        return x.sin().sum()

    def both(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.func.grad(loss)(x), leaked[-1].exp() + 1

    x = torch.randn(3)
    with pytest.warns(aotkit.EagerFallback, match="that a transform of torch.func has left"):
        found = torch.compile(both, backend="aotkit")(x)
    torch.testing.assert_close(found, (x.cos(), (2 * x).exp() + 1))
