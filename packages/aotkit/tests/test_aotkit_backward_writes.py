"""Backwards of the user's own that write in place to what the caller holds."""

from __future__ import annotations

import pytest
import torch

import aotkit
from aotkit_aot_trace import Unsupported
from aotkit_runtime_wrappers import DoubleBackwardError

# Dynamo does
pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")


class ScalesTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        grad.mul_(2)
        return grad, None


class WritesToItsOwn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        scaled = grad.clone()
        scaled.mul_(2)
        return scaled, None


def run(fn):
    x, count, tangent = torch.arange(3.0, requires_grad=True), torch.ones(3), torch.ones(3)
    out = fn(x, count)
    (grad,) = torch.autograd.grad(out, x, tangent)
    return out.detach(), grad, count, tangent


@pytest.mark.covers("F1.25")
def test_a_backward_that_writes_to_the_gradient_it_gets_runs_in_eager_mode():
    def fn(x, count):
        return ScalesTheGradient.apply(x * 1, count)

    torch._dynamo.reset()
    expected = run(fn)
    with pytest.raises(Unsupported, match="the backward writes to the gradient of differentiable output"):
        run(aotkit.aot_function(fn, lambda graph, inputs: graph))
    with pytest.warns(aotkit.EagerFallback, match="the backward writes to"):
        got = run(torch.compile(fn, backend="aotkit"))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


class Backward(torch.autograd.Function):
    """``sin`` whose backward calls ``write`` with what the forward kept of the buffer and the gradient."""

    @staticmethod
    def forward(ctx, x, buffer, write, keep):
        ctx.kept, ctx.write = keep(buffer), write
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        scale = ctx.write(ctx.kept, grad)
        return grad * (2 if scale is None else scale), None, None, None


def increase(buffer, grad):
    buffer.add_(1)


def store_largest(buffer, grad):
    buffer.copy_(grad.abs().max())


def history(buffer, grad):
    """As a history of largest absolute values is kept: what it gives depends on what was there."""
    scale = buffer.max()
    buffer.copy_(buffer.roll(1, 0))
    buffer[0].copy_(grad.abs().max())
    return scale


def without_trace(buffer, grad):
    buffer.data.mul_(3)


WRITES = {
    "increase": (increase, lambda b: b),
    "store the largest": (store_largest, lambda b: b),
    "history": (history, lambda b: b),
    "through a view of the forward": (increase, lambda b: b[1]),
    "through a view of a detached one": (history, lambda b: b.detach().t()),
    "through a view of the backward": (lambda b, g: b[:, 0].mul_(g.sum()).sum(), lambda b: b),
    "hidden": (without_trace, lambda b: b),
    "read only": (lambda b, g: b.sum(), lambda b: b[0]),
}
BUFFERS = {
    "dense": lambda: torch.arange(12.0).view(3, 4),
    "transposed": lambda: torch.arange(12.0).view(4, 3).t(),
    "with gaps": lambda: torch.arange(24.0).view(3, 8)[:, ::2],
}


def steps(fn, buffer, between):
    """Two training steps, the second backward twice; everything that a caller sees."""
    seen = []
    x = torch.arange(3.0, requires_grad=True)
    for number in range(2):
        out = fn(x, buffer)
        seen += [buffer.clone(), buffer._version]
        between(buffer)
        for again in range(1 + number):
            (grad,) = torch.autograd.grad(out, x, torch.arange(3.0) + number, retain_graph=not again)
            seen += [out.detach(), grad, buffer.clone(), buffer._version]
    return seen


def assert_same(got, expected):
    for a, b in zip(got, expected, strict=True):
        if isinstance(b, int):
            assert a == b
        else:
            torch.testing.assert_close(a, b)


COMPILED = {
    "by hand": lambda fn: aotkit.aot_function(fn, lambda graph, inputs: graph),
    "frontend": lambda fn: torch.compile(fn, backend="aotkit", options={"fallback": "error", "verify": True}),
    "dynamo, dynamic": lambda fn: torch.compile(fn, backend="aotkit", dynamic=True, options={"fallback": "error"}),
}


CASES = [(name, layout, "by hand") for name in WRITES for layout in BUFFERS]
CASES += [(name, "dense", "frontend") for name in WRITES]
CASES += [("history", "transposed", "frontend"), ("history", "dense", "dynamo, dynamic")]


@pytest.mark.covers("F1.23", "F1.24")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("name", "layout", "compiled"), CASES)
def test_a_backward_that_writes_to_an_input(name, layout, compiled):
    write, keep = WRITES[name]

    def fn(x, buffer):
        return Backward.apply(x * 1, buffer, write, keep) * 2

    def between(buffer):  # what the caller writes before the backward, the backward sees
        if name != "read only":
            buffer[0, 0] += 5

    torch._dynamo.reset()
    expected = steps(fn, BUFFERS[layout](), between)
    assert_same(steps(COMPILED[compiled](fn), BUFFERS[layout](), between), expected)


@pytest.mark.covers("F1.23")
@pytest.mark.parametrize("compiled", COMPILED)
def test_forward_and_backward_write_to_the_same_input(compiled):
    def fn(x, buffer):
        buffer.mul_(3)
        out = Backward.apply(x * buffer[:, 0].clone(), buffer, history, lambda b: b)
        return out

    torch._dynamo.reset()
    expected = steps(fn, BUFFERS["dense"](), lambda b: b.data.add_(2))
    assert_same(steps(COMPILED[compiled](fn), BUFFERS["dense"](), lambda b: b.data.add_(2)), expected)


@pytest.mark.covers("F1.23")
def test_two_inputs_are_written_to_and_one_overlaps_another():
    def fn(x, one, two, row):
        out = Backward.apply(x * 1, one, increase, lambda b: b)
        return Backward.apply(out, two, history, lambda b: b) + row[:3]

    results = []
    for f in (fn, aotkit.aot_function(fn, lambda graph, inputs: graph)):
        one, two = torch.ones(2), BUFFERS["dense"]()
        x = torch.arange(3.0, requires_grad=True)
        f(x, one, two, two[0]).backward(torch.arange(3.0))
        results.append((x.grad, one, two, one._version, two._version))
    assert_same(results[1], results[0])


@pytest.mark.covers("F1.24", "F1.26")
@pytest.mark.parametrize(
    ("write", "needs_gradient", "what"),
    [
        (lambda b, g: b.detach().add_(1).sum(), True, "the backward writes to input 1"),
        (lambda b, g: b.t_().sum(), False, "the backward changes the sizes or strides of input 1"),
    ],
    ids=["requires grad", "sizes"],
)
def test_other_writes_in_a_backward_are_refused(write, needs_gradient, what):
    def fn(x, buffer):
        return Backward.apply(x * 1, buffer, write, lambda b: b) * 2

    def call(f):
        x, buffer = torch.arange(3.0, requires_grad=True), BUFFERS["dense"]().requires_grad_(needs_gradient)
        f(x, buffer).backward(torch.arange(3.0))
        return x.grad, buffer.detach(), buffer._version

    torch._dynamo.reset()
    with pytest.raises(Unsupported, match=what):
        call(aotkit.aot_function(fn, lambda graph, inputs: graph))
    if needs_gradient:
        with pytest.warns(aotkit.EagerFallback, match=what):
            got = call(torch.compile(fn, backend="aotkit"))
        assert_same(got, call(fn))


@pytest.mark.covers("F1.26")
def test_a_second_derivative_is_refused_and_the_first_one_writes():
    def fn(x, buffer):
        return Backward.apply(x * x, buffer, increase, lambda b: b)

    x, buffer = torch.arange(3.0, requires_grad=True), torch.zeros(2)
    out = aotkit.aot_function(fn, lambda graph, inputs: graph)(x, buffer)
    (grad,) = torch.autograd.grad(out, x, torch.ones(3), create_graph=True)
    torch.testing.assert_close(grad.detach(), 4 * torch.arange(3.0))
    assert buffer.tolist() == [1.0, 1.0]
    with pytest.raises(DoubleBackwardError, match="backward writes to inputs"):
        grad.sum().backward()


def test_a_backward_that_writes_to_a_tensor_of_its_own_is_compiled():
    def fn(x, count):
        return WritesToItsOwn.apply(x * 1, count)

    got = run(aotkit.aot_function(fn, lambda graph, inputs: graph))
    for a, b in zip(got, run(fn), strict=True):
        torch.testing.assert_close(a, b)
