"""Biases of convolutions as operators of their own: on a device, with the same values and layouts."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import decompositions
from aotkit_inductor_lower.graph_passes.convolution_biases import PASS, convolution_biases
from aotkit_inductor_lower.graph_passes.rewriting import copy_graph
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.targets.triton.target import TRITON_INTERPRETER

aten = torch.ops.aten
LAYOUTS = (torch.contiguous_format, torch.channels_last)


def passed(f: Callable[..., Any], *args: torch.Tensor, fuel: int = 100) -> tuple[GraphModule, int]:
    graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
    copied = copy_graph(graph)
    found = convolution_biases(copied, fuel)
    copied.eliminate_dead_code()
    return GraphModule(graph, copied), found


def step(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x, w, b = (t.detach().requires_grad_() for t in (x, w, b))
    y = F.conv2d(x, w, b, padding=1)
    return y, *torch.autograd.grad(y.relu(), (x, w, b), g)


def operands(dtype: torch.dtype, layout: torch.memory_format) -> list[torch.Tensor]:
    torch.manual_seed(0)
    x, g = torch.randn(2, 3, 6, 6), torch.randn(2, 4, 6, 6)
    images = [t.to(dtype).to(memory_format=layout) for t in (x, torch.randn(4, 3, 3, 3), g)]
    return [*images[:2], torch.randn(4).to(dtype), images[2]]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_forward_and_gradients_are_the_same(dtype: torch.dtype, layout: torch.memory_format) -> None:
    args = operands(dtype, layout)
    graph, found = passed(step, *args)
    assert found == 2
    (forward,) = graph.graph.find_nodes(op="call_function", target=aten.convolution.default)
    (backward,) = graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    assert forward.args[2] is None and list(backward.args[-1]) == [True, True, False]
    loose = {"rtol": 3e-2, "atol": 3e-2} if dtype is torch.bfloat16 else {}
    for got, want in zip(graph(*args), step(*args), strict=True):
        assert got.stride() == want.stride()
        torch.testing.assert_close(got, want, **loose)


def only_the_bias(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    b = b.detach().requires_grad_()
    return torch.autograd.grad(F.conv2d(x, w, b, padding=1), (b,), g)


def without(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.detach().requires_grad_()
    y = F.conv2d(x, w, None, padding=1)
    return y + b.sum(), *torch.autograd.grad(y, (x,), g)


def test_a_gradient_of_the_bias_alone_needs_no_call() -> None:
    args = operands(torch.float32, torch.contiguous_format)
    graph, found = passed(only_the_bias, *args)
    assert found >= 1 and not graph.graph.find_nodes(op="call_function", target=aten.convolution_backward.default)
    torch.testing.assert_close(graph(*args), only_the_bias(*args))


def test_what_has_no_bias_stays() -> None:
    assert passed(without, *operands(torch.float32, torch.contiguous_format))[1] == 0
    assert passed(step, *operands(torch.float32, torch.contiguous_format), fuel=0)[1] == 0


def test_only_a_device_wants_it() -> None:
    assert PASS.when(PassContext.of(target=TRITON_INTERPRETER)) and not PASS.when(PassContext.of())
