"""Random operators draw eager mode's numbers, into eager mode's strides, however their arguments lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import aotkit
from aotkit_inductor_lower import compile_graph

LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "transposed": lambda: torch.rand(6, 4).t(),
    "permuted": lambda: torch.rand(3, 4, 5).permute(2, 0, 1),
    "channels last": lambda: torch.rand(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
    "gaps": lambda: torch.rand(8, 12)[::2, 1:7],
    "transposed with gaps": lambda: torch.rand(12, 20)[::3, ::2].t(),
    "repeated": lambda: torch.rand(4, 1).expand(4, 6),
    "sizes of one": lambda: torch.rand(6, 1, 5, 1).permute(3, 2, 1, 0),
}


def _reversed(x: Tensor) -> Tensor:
    return x.permute(*range(x.dim() - 1, -1, -1))


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout_": lambda x: F.dropout(x * 1, 0.4, inplace=True),
    "dropout of a view": lambda x: F.dropout(_reversed(x.mul(2)), 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "feature_dropout": lambda x: torch.feature_dropout(x, 0.4, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, training=True),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.4, training=True),
    "rrelu": lambda x: F.rrelu(x - 0.5, training=True),
    "rrelu_": lambda x: F.rrelu((x - 0.5) * 1, training=True, inplace=True),
    "uniform": lambda x: torch.ops.aten.uniform.default(x, 0.0, 1.0),
    "bernoulli of probabilities": lambda x: torch.ops.aten.bernoulli.Tensor(x, x.contiguous()),
    "rand_like": lambda x: x * torch.rand_like(x),
    "randn_like": lambda x: x + torch.randn_like(x),
    "randint_like": lambda x: x + torch.randint_like(x, 10),
    "bernoulli": lambda x: torch.bernoulli(x),
    "bernoulli(p)": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli_(p)": lambda x: (x * 1).bernoulli_(0.3),
    "bernoulli_(tensor)": lambda x: torch.empty_like(x).bernoulli_(x),
    "bernoulli_(tensor) into another layout": lambda x: _reversed(torch.zeros(x.shape[::-1])).bernoulli_(x),
    "bernoulli_(tensor) from another layout": lambda x: torch.zeros(x.shape).bernoulli_(x),
    "normal(tensor)": lambda x: torch.normal(x, 1.0),
    "normal(tensors)": lambda x: torch.normal(x, x + 1),
    "normal(number, tensor)": lambda x: torch.normal(0.0, x + 1),
    "poisson": lambda x: torch.poisson(x * 3),
    "binomial": lambda x: torch.binomial(torch.full_like(x, 7.0), x),
    "multinomial": lambda x: torch.multinomial(x.flatten(1), 2),
    "uniform_": lambda x: (x * 1).uniform_(),
    "normal_": lambda x: (x * 1).normal_(),
    "exponential_": lambda x: (x * 1).exponential_(),
    "cauchy_": lambda x: (x * 1).cauchy_(),
    "log_normal_": lambda x: (x * 1).log_normal_(),
    "geometric_": lambda x: (x * 1).geometric_(0.3),
    "random_": lambda x: (x * 1).random_(10),
    "random_(from)": lambda x: (x * 1).random_(3, 10),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x),
    "gamma": lambda x: torch._standard_gamma(x + 1),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.3),
}
INTO_INPUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform_": lambda x: x.uniform_(),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_(tensor)": lambda x: x.bernoulli_(torch.arange(1.0, x.numel() + 1).view(x.shape) / x.numel()),
    "exponential_": lambda x: x.exponential_(),
    "random_": lambda x: x.random_(7),
    "random_(from)": lambda x: x.random_(-2, 7),
    "dropout": lambda x: F.dropout(x, 0.4, inplace=True),
    "part": lambda x: x[..., 1:].uniform_(),
}


def _strides(value: Tensor) -> list[int]:
    return [stride for size, stride in zip(value.shape, value.stride(), strict=True) if size != 1]


def _run(call: Callable[..., Any], make: Callable[[], Tensor], grad: bool) -> list[Tensor]:
    torch.manual_seed(0)
    x = make().requires_grad_(grad)
    torch.manual_seed(5)
    result = call(x)
    found = [result.detach(), x.detach(), torch.rand(2)]  # the last: as many numbers were drawn
    if grad and result.requires_grad:
        weights = torch.arange(1.0, result.numel() + 1).view(result.shape)
        (gradient,) = torch.autograd.grad((result * weights).sum(), x)
        found.append(gradient)
    return found


def _check(fn: Callable[..., Any], compiled: Callable[..., Any], make: Callable[[], Tensor], grad: bool) -> None:
    want, got = _run(fn, make, grad), _run(compiled, make, grad)
    torch.testing.assert_close(got, want, equal_nan=True)
    assert [_strides(value) for value in got[:2]] == [_strides(value) for value in want[:2]]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("grad", [False, True])
def test_random_numbers_follow_memory_as_in_eager_mode(name: str, layout: str, grad: bool) -> None:
    fn = DRAWS[name]
    differentiable = name not in ("bernoulli(p)", "binomial")
    _check(fn, aotkit.aot_function(fn, lambda graph, _: graph), LAYOUTS[layout], grad and differentiable)


@pytest.mark.parametrize("name", INTO_INPUTS)
def test_random_numbers_are_drawn_into_an_input_as_in_eager_mode(name: str) -> None:
    fn = INTO_INPUTS[name]
    for layout, make in LAYOUTS.items():
        if layout != "repeated":  # a write to it has no defined result
            _check(fn, aotkit.aot_function(fn, lambda graph, _: graph), make, grad=False)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("name", ["dropout", "bernoulli_(tensor)", "poisson", "normal(tensors)", "rrelu"])
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_random_numbers_follow_memory_as_in_eager_mode(name: str, dynamic: bool) -> None:
    fn = DRAWS[name]
    for layout in ("transposed", "channels last"):
        compiled = torch.compile(fn, backend="aotkit", dynamic=dynamic, options={"fallback": "error"})
        _check(fn, compiled, LAYOUTS[layout], grad=True)


@pytest.mark.parametrize("batch_first", [False, True])
def test_a_transformer_layer_trains_with_eager_modes_masks(batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.3, batch_first=batch_first).train()

    def step(call: Callable[..., Any]) -> list[Tensor]:
        torch.manual_seed(0)
        x = torch.randn(3, 5, 8)
        layer.zero_grad()
        torch.manual_seed(1)
        loss = call(x).square().sum()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in layer.parameters() if p.grad is not None)]

    compiled = torch.compile(layer, backend="aotkit", options={"fallback": "error"})
    torch.testing.assert_close(step(compiled), step(layer), rtol=1e-4, atol=1e-4)


OVERLAPPING = [((2, 1, 2, 2), (1, 12, 3, 1)), ((3, 2), (1, 1)), ((2, 3), (0, 1)), ((2, 3, 4), (1, 0, 7))]
FUNCTIONAL: dict[str, Callable[[Tensor], Tensor]] = {
    "uniform": lambda x: torch.ops.aten.uniform.default(x, 0.0, 3.5),
    "normal": lambda x: torch.ops.aten.normal_functional.default(x, 0.0, 1.0),
    "exponential": lambda x: torch.ops.aten.exponential.default(x),
    "rand_like": torch.rand_like,
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("sizes", "strides"), OVERLAPPING)
@pytest.mark.parametrize("draw", FUNCTIONAL)
def test_numbers_drawn_like_a_tensor_that_overlaps_itself(draw: str, sizes: Any, strides: Any) -> None:
    def program(x: Tensor) -> tuple[Tensor, Tensor]:
        drawn = FUNCTIONAL[draw](x)
        return drawn, drawn.cumsum(-1)  # reads what was drawn by strides

    x = torch.ones(40).as_strided(sizes, strides)
    wanted, found, direct = (
        _seeded(call, x)
        for call in (
            program,
            torch.compile(program, backend="aotkit", dynamic=False, options={"rng": "eager", "fallback": "error"}),
            lambda x: compile_graph(make_fx(program, tracing_mode="fake")(x))([x]),
        )
    )
    assert torch.equal(found[0], wanted[0]) and found[0].stride() == wanted[0].stride()
    for got in (found, direct):
        torch.testing.assert_close(got[1], wanted[1])


def _seeded(call: Callable[[Tensor], Any], x: Tensor) -> Any:
    torch.manual_seed(0)
    return call(x)
