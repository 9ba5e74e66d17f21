"""Compiled autograd around graphs compiled by aotkit, with aotkit and others as compiler of the backward pass."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn
from torch._dynamo import compiled_autograd

import aotkit
from aotkit_runtime_wrappers import compiled_autograd as runtime
from aotkit_runtime_wrappers._torch_compat import backward_can_be_pasted

needs_pasting = pytest.mark.skipif(not backward_can_be_pasted(), reason="refused before torch 2.13, see below")

counters = torch._dynamo.utils.counters


@pytest.fixture(autouse=True)
def fresh_counters():
    counters.clear()
    # Dynamo's own event log notices that a graph is compiled while another is being recorded.
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*non-leaf Tensor.*|.*not a leaf Tensor.*")
        # So does Dynamo before torch 2.13 of its own stand-in for a function of autograd.
        warnings.filterwarnings("ignore", message=".*should not be instantiated.*", category=DeprecationWarning)
        yield
    counters.clear()


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(0.2), nn.LayerNorm(8), nn.Linear(8, 2))


def train(net, backward_pass, steps=4, keep_gradients=False):
    """Losses and parameters; ``backward_pass(net, x)`` gives the loss after ``backward()``."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        torch.manual_seed(step)
        x = torch.randn(3, 4)
        if not keep_gradients:
            optimizer.zero_grad()
        losses.append(backward_pass(net, x).detach())
        optimizer.step()
    return [torch.stack(losses), *(p.detach() for p in net.parameters())]


def plainly(net, x):
    loss = net(x).pow(2).mean()
    loss.backward()
    return loss


def under_compiled_autograd(run, compiler):
    def backward_pass(net, x):
        with compiled_autograd._enable(compiler):
            loss = run(x).pow(2).mean()
            loss.backward()
        return loss

    return backward_pass


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


OPTIONS = {"fallback": "error"}


@needs_pasting
@pytest.mark.covers("F2.48", "F4.26")
@pytest.mark.parametrize(("backend", "keep_gradients"), [("eager", False), ("aotkit", True)])
def test_a_compiled_backward_is_part_of_the_whole_backward_graph(backend, keep_gradients):
    net = model()
    expected = train(copy.deepcopy(net), plainly, keep_gradients=keep_gradients)
    run = torch.compile(net, backend="aotkit", options=OPTIONS)
    options = {"options": OPTIONS} if backend == "aotkit" else {}
    compiler = torch.compile(backend=backend, fullgraph=True, **options)
    got = train(net, under_compiled_autograd(run, compiler), keep_gradients=keep_gradients)
    assert_same(got, expected)
    assert counters["compiled_autograd"]["captures"] >= 1
    assert not counters["graph_break"]


@pytest.mark.sample(ways=1)
@needs_pasting
@pytest.mark.parametrize("keep_gradients", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_hooks_behind_an_accumulation_read_and_write_the_gradient_in_the_graph(keep_gradients, dtype):
    """As DDP does, which sums gradients over all ranks there."""

    def change(parameter):
        parameter.grad.copy_(parameter.grad.sin() / 3)

    def hooked():
        net = model().to(dtype)
        net[3].weight.data = net[3].weight.data.as_strided((8,), (1,))
        net[0].weight.data = torch.randn(4, 8, dtype=dtype, generator=torch.Generator().manual_seed(1)).t()
        for parameter in net.parameters():
            parameter.register_post_accumulate_grad_hook(change)
        return net

    def steps(net, backward_pass):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        found = []
        for step in range(3):
            torch.manual_seed(step)
            if not keep_gradients:
                optimizer.zero_grad()
            backward_pass(net, torch.randn(3, 4, dtype=dtype))
            optimizer.step()
            found += [(p.grad.clone(), p.grad.stride()) for p in net.parameters()]
        return found

    expected = steps(hooked(), plainly)
    net = hooked()
    run = torch.compile(net, backend="aotkit", options=OPTIONS)
    got = steps(net, under_compiled_autograd(run, torch.compile(backend="aotkit", fullgraph=True, options=OPTIONS)))
    for (mine, strides), (its, its_strides) in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)
        assert strides == its_strides
    assert counters["compiled_autograd"]["captures"] >= 1 and not counters["graph_break"]


@pytest.fixture
def not_pasted(monkeypatch):
    """Compiled autograd before torch 2.13, which takes no backward apart but AOTAutograd's."""
    monkeypatch.setattr(runtime, "backward_can_be_pasted", lambda: False)


@pytest.mark.parametrize("backend", ["eager", "aotkit"])
def test_before_torch_2_13_the_backward_graph_breaks_around_ours(not_pasted, backend):
    net = model()
    expected = train(copy.deepcopy(net), plainly)
    run = torch.compile(net, backend="aotkit", options=OPTIONS)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = train(net, under_compiled_autograd(run, torch.compile(backend=backend)))
    assert_same(got, expected)
    assert counters["compiled_autograd"]["captures"] >= 1
    assert counters["graph_break"]
    notices = [w for w in caught if issubclass(w.category, aotkit.EagerFallback)]
    assert all("accumulate_grad" in str(notice.message) for notice in notices)  # the leaves' gradients are eager's
    assert len(notices) <= (backend == "aotkit")


def test_before_torch_2_13_a_whole_backward_graph_is_refused(not_pasted):
    net = model()
    run = torch.compile(net, backend="aotkit", options=OPTIONS)
    compiler = torch.compile(backend="eager", fullgraph=True)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="disable"):
        train(net, under_compiled_autograd(run, compiler), steps=1)


@needs_pasting
@pytest.mark.covers("F2.48", "F8.9")
def test_the_setting_of_dynamo():
    net = model()
    expected = train(copy.deepcopy(net), plainly)

    def step(net, x):
        loss = net(x).pow(2).mean()
        loss.backward()
        return loss

    with torch._dynamo.config.patch(compiled_autograd=True):
        got = train(net, torch.compile(step, backend="aotkit", options=OPTIONS))
    assert_same(got, expected)
    assert counters["compiled_autograd"]["captures"] >= 1


@pytest.mark.covers("F2.48")
def test_symbolic_sizes_break_the_graph_of_the_backward_and_are_right():
    def fn(x, w):
        return torch.softmax(torch.tanh(x @ w), -1).view(-1) ** 2

    run = torch.compile(fn, backend="aotkit", dynamic=True, options=OPTIONS)
    for rows in (3, 5):
        x, w = torch.randn(rows, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)
        expected = torch.autograd.grad(fn(x, w).sum(), (x, w))
        with compiled_autograd._enable(torch.compile(backend="eager")):
            run(x, w).sum().backward()
        assert_same((x.grad, w.grad), expected)


@needs_pasting
@pytest.mark.covers("F2.48")
def test_an_output_without_a_gradient():
    def fn(x, w):
        return x.sin() * w, w.exp()

    run = torch.compile(fn, backend="aotkit", options=OPTIONS)
    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    expected = torch.autograd.grad(fn(x, w)[0].sum(), (x, w))
    with compiled_autograd._enable(torch.compile(backend="eager", fullgraph=True)):
        run(x, w)[0].sum().backward()
    assert_same((x.grad, w.grad), expected)


@pytest.mark.parametrize("verify", [True, False])
def test_a_hook_on_a_value_inside_runs(verify):
    def fn(x, w):
        y = x * w
        y.register_hook(lambda grad: grad * 2)
        return y.sin()

    x, w = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    expected = torch.autograd.grad(fn(x, w).sum(), (x, w))
    run = torch.compile(fn, backend="aotkit", options={"verify": verify})
    assert_same(torch.autograd.grad(run(x, w).sum(), (x, w)), expected)
    torch._dynamo.reset()
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.warns(aotkit.EagerFallback, match="BackwardState"),
    ):
        run(x, w).sum().backward()
    assert_same((x.grad, w.grad), expected)


@pytest.mark.covers("F4.26")
def test_dynamo_does_not_look_into_a_backward_that_a_compiled_function_calls():
    graphs = []

    def backend(gm, inputs):
        graphs.append(gm)
        return aotkit.make_backend()(gm, inputs)

    net = model().eval()

    @torch.compile(backend=backend)
    def step(x):
        loss = net(x).pow(2).mean()
        loss.backward()
        return loss

    x = torch.randn(3, 4)
    step(x)
    got = [p.grad.clone() for p in net.parameters()]
    assert len(graphs) == 1
    net.zero_grad()
    net(x).pow(2).mean().backward()
    assert_same(got, [p.grad for p in net.parameters()])
