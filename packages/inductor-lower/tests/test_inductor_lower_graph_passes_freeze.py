"""Frozen graphs: what becomes of norms, constants and convolutions, and that results stay eager's to rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, decompositions
from aotkit_inductor_lower.graph_passes.freeze import freeze

aten = torch.ops.aten
F = torch.nn.functional


def randomized(model: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    for name, buffer in model.named_buffers():
        if "running" in name:
            buffer.uniform_(0.5, 1.5)
    return model.eval()


def frozen(model: nn.Module, *args: torch.Tensor):
    """The frozen graph, all inputs, and the graph before."""
    state = dict(model.named_parameters()) | dict(model.named_buffers())

    def run(state, *given):
        with torch.no_grad():
            return torch.func.functional_call(model, state, given)

    graph = make_fx(run, decompositions(), tracing_mode="fake")(state, *args)
    values = list(state.values())
    return freeze(graph, dict(enumerate(values))), [*values, *args], graph


def targets(graph: torch.fx.GraphModule) -> list[object]:
    return [node.target for node in graph.graph.nodes if node.op == "call_function"]


def agree(model: nn.Module, *args: torch.Tensor) -> torch.fx.GraphModule:
    """The frozen graph; its compiled result differs from float64's by no more than 1e-5."""
    after, inputs, _ = frozen(model, *args)
    with torch.no_grad():
        want = model.double()(*(a.double() for a in args))
        model.float()
    got = compile_graph(after)(inputs)[0]
    assert got.stride() == want.stride()
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    return after


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(8)
        self.second = nn.Conv2d(8, 8, 3, padding=1)
        self.second_norm = nn.BatchNorm2d(8, affine=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(y)) + y).mean((2, 3))


@pytest.mark.covers("F5b.3", "F5f.9")
def test_norms_become_part_of_convolutions_and_a_nan_passes_relus():
    model = randomized(Residual())
    after = agree(model, torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0)))
    layers = [aten.convolution.default, aten.relu.default, aten.convolution.default, aten.add.Tensor, aten.relu.default]
    assert [t for t in targets(after) if t is not aten.clone.default] == [*layers, aten.mean.dim]
    image = torch.randn(2, 3, 8, 8)
    image[0, 1, 2, 3] = torch.nan
    after, inputs, _ = frozen(model, image)
    with torch.no_grad():
        want = model(image)
    assert want[0].isnan().all() and not want[1].isnan().any()
    torch.testing.assert_close(compile_graph(after)(inputs)[0], want, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.covers("F5f.9")
def test_an_identity_leaves_nothing():
    model = randomized(nn.Sequential(nn.Identity(), nn.Conv2d(3, 4, 3), nn.Identity(), nn.BatchNorm2d(4)))
    assert targets(agree(model, torch.randn(2, 3, 8, 8))) == [aten.convolution.default]


class Scaled(nn.Module):
    def __init__(self, change) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.register_buffer("c", torch.tensor([0.5, 2.0, -3.0, 1.5]).view(1, 4, 1, 1))
        self.change = change

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.change(self.conv(x), self.c)


CHANGES = {
    "mul": lambda y, c: y * c,
    "div": lambda y, c: y / c,
    "add": lambda y, c: y + c,
    "sub": lambda y, c: y - c,
    "number": lambda y, c: y * 0.5 + 2,
    "chain": lambda y, c: (y * c - 1) / 3,
}


@pytest.mark.covers("F5b.11")
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_arithmetic_with_constants_goes_into_the_weights(change):
    assert targets(agree(randomized(Scaled(change)), torch.randn(2, 3, 8, 8))) == [aten.convolution.default]


@pytest.mark.covers("F5b.11")
@pytest.mark.parametrize(
    "change, kept",
    [
        (lambda y, c: torch.sub(y, c, alpha=2), aten.sub.Tensor),
        (lambda y, c: y * c.double(), aten.mul.Tensor),
        (lambda y, c: y * c.view(4, 1), aten.mul.Tensor),
        (lambda y, c: y * math.inf, aten.mul.Tensor),
        (lambda y, c: y / 0.0, aten.div.Tensor),
    ],
    ids=["alpha", "another type", "another dimension", "infinite", "by zero"],
)
def test_what_is_no_finite_number_per_channel_stays(change, kept):
    model, x = randomized(Scaled(change)), torch.randn(2, 3, 6, 6)
    after, inputs, _ = frozen(model, x)
    assert kept in targets(after)
    got, want = compile_graph(after)(list(inputs))[0], model(x)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_convolution_that_others_read_keeps_its_weights():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.norm = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)

        def forward(self, x):
            y = self.conv(x)
            return self.norm(y) + y.sin()

    assert aten.native_batch_norm.default in targets(agree(randomized(Twice()), torch.randn(2, 3, 8, 8)))


@pytest.mark.covers("F5h.17")
def test_what_depends_on_constants_alone_is_computed_once():
    class Derived(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(6, 4))

        def forward(self, x):
            scale = self.weight.exp().sum(0)
            return x * scale + F.softmax(self.weight, 1)[0] + torch.arange(4)

    after = agree(randomized(Derived()), torch.randn(5, 4))
    assert aten.exp.default not in targets(after) and aten._softmax.default not in targets(after)


def test_constants_that_grow_leave_the_graph_or_are_random_are_computed_at_each_call():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x):
            wide = self.weight[:, None].expand(4, 1000) * 2
            return x + wide.t(), self.weight * 3, torch.bernoulli(self.weight * 0.5)

    model = Odd().eval()
    after, inputs, _ = frozen(model, torch.ones(4))
    assert aten.bernoulli.default in targets(after) and aten.expand.default in targets(after)
    run = compile_graph(after)
    first, second = run(list(inputs))[1], run(list(inputs))[1]
    assert first.data_ptr() != second.data_ptr() and first.tolist() == [3.0] * 4


def test_inputs_that_are_written_to_or_returned_stay_inputs():
    def f(buffer, weight, x):
        total = buffer + x * weight
        buffer.copy_(total)
        return total * 2, weight

    x = torch.ones(3)
    graph = make_fx(f, tracing_mode="fake")(torch.zeros(3), torch.full((3,), 2.0), x)
    after = freeze(graph, {0: torch.zeros(3), 1: torch.full((3,), 2.0)})
    assert all(node.users for node in after.graph.find_nodes(op="placeholder"))
    buffer = torch.zeros(3)
    run = compile_graph(after)
    assert [run([buffer, torch.full((3,), 2.0), x])[0].tolist() for _ in range(2)] == [[4.0] * 3, [8.0] * 3]


def test_an_input_that_a_view_writes_to_stays_an_input():
    def f(x, weight):
        before = x @ weight
        weight.view(-1).mul_(2)
        return (before,)

    x, weight = torch.ones(2, 2), torch.full((2, 2), 3.0)
    after = freeze(make_fx(f, tracing_mode="fake")(x, weight), {1: weight.clone()})
    run = compile_graph(after)
    assert [run([x, weight])[0].tolist() for _ in range(2)] == [[[6.0, 6.0]] * 2, [[12.0, 12.0]] * 2]
    assert weight.tolist() == [[12.0, 12.0]] * 2


def test_freezing_leaves_the_graph_given_as_it_is():
    model = randomized(Residual())
    after, _, graph = frozen(model, torch.randn(2, 3, 8, 8))
    assert aten.native_batch_norm.default in targets(graph) and after is not graph
