"""Backwards of the user's own that write in place to what the caller holds: eager, with a notice, and never lost."""

from __future__ import annotations

import pytest
import torch

import aotkit
from aotkit_aot_trace import Unsupported


class CountsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        ctx.count.add_(1)
        return grad * 2, None


class ScalesTheGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        grad.mul_(2)
        return grad, None


class CountsBoth(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        count.mul_(3)
        ctx.count = count
        return x.sin()

    @staticmethod
    def backward(ctx, grad):
        ctx.count.add_(1)
        return grad * 2, None


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
@pytest.mark.parametrize(
    ("function", "what"),
    [
        (CountsBackwards, "input 1"),
        (CountsBoth, "input 1"),
        (ScalesTheGradient, "the gradient of differentiable output"),
    ],
)
def test_a_backward_that_writes_to_what_the_caller_holds(function, what):
    def fn(x, count):
        return function.apply(x * 1, count)

    torch._dynamo.reset()
    expected = run(fn)
    with pytest.raises(Unsupported, match=f"the backward writes to {what}"):
        run(aotkit.aot_function(fn, lambda graph, inputs: graph))
    with pytest.warns(aotkit.EagerFallback, match="the backward writes to"):
        got = run(torch.compile(fn, backend="aotkit"))
    for a, b in zip(got, expected, strict=True):
        assert torch.equal(a, b)


def test_a_backward_that_writes_to_a_tensor_of_its_own_is_compiled():
    def fn(x, count):
        return WritesToItsOwn.apply(x * 1, count)

    got = run(aotkit.aot_function(fn, lambda graph, inputs: graph))
    for a, b in zip(got, run(fn), strict=True):
        torch.testing.assert_close(a, b)
