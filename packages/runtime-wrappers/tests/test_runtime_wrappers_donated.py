"""Backwards that overwrite saved tensors: allowed where nobody sees it, given copies where somebody would."""

from __future__ import annotations

import pytest
import torch

from aotkit_functionalize import analyze
from aotkit_runtime_wrappers import WrapperError, WrapperPlan, bind, build_plan, unboxed
from aotkit_runtime_wrappers.refinements import plan_donated


def f(x, w):
    return ((x * w).sin(),)


class Compiled:
    """Saves the product and (by ``shares``) something that is no memory of its own; its backward writes into both."""

    def __init__(self, how, shares: str = "") -> None:
        self.addresses, self.written = [], []
        x, w = torch.ones(4), torch.ones(4, requires_grad=True)
        plan = plan_donated(build_plan(analyze(f, [x, w]), num_saved_tensors=3), [0, 1])
        again = WrapperPlan.from_json(plan.to_json())
        assert again == plan and "may overwrite saved tensors (0, 1)" in str(plan)
        self.shares = shares
        forward, backward = self.forward, self.backward
        self.run = unboxed(how(again, lambda *args: forward(*args), boxed(backward)))

    def forward(self, x, w):
        product = x * w
        y = product.sin()
        other = {"input": w.detach().view(2, 2), "output": y.view(2, 2), "saved": x.view(2, 2)}.get(self.shares)
        other = product.new_zeros(2, 2) if other is None else other
        self.addresses.append((product.data_ptr(), other.data_ptr()))
        return [y, product, other, x]

    def backward(self, args):
        product, other, x, tangent = args
        args.clear()
        self.written.append((product.data_ptr(), other.data_ptr()))
        gradient = product.cos_().mul_(tangent).mul_(x)
        other.fill_(float("nan"))
        return [None, gradient]


def boxed(function):
    def run(args):
        return function(args)

    run._boxed_call = True
    return run


@pytest.fixture
def arguments():
    return torch.randn(4), torch.randn(4, requires_grad=True)


def expected_gradient(x, w):
    return torch.autograd.grad(f(x, w)[0].sum(), w)[0]


@pytest.mark.covers("F4.34")
def test_a_backward_works_in_the_memory_of_saved_tensors(how, arguments):
    compiled = Compiled(how)
    (y,) = compiled.run(*arguments)
    y.sum().backward()
    torch.testing.assert_close(arguments[1].grad, expected_gradient(*arguments))
    assert compiled.written == compiled.addresses
    assert arguments[1].grad.data_ptr() == compiled.addresses[0][0]


@pytest.mark.covers("F4.34")
def test_a_retained_graph_gives_the_same_gradient_again(how, arguments):
    compiled = Compiled(how)
    (y,) = compiled.run(*arguments)
    expected = expected_gradient(*arguments)
    for _ in range(2):
        (gradient,) = torch.autograd.grad(y.sum(), arguments[1], retain_graph=True)
        torch.testing.assert_close(gradient, expected)
        assert not set(compiled.written[-1]) & set(compiled.addresses[0])
    (gradient,) = torch.autograd.grad(y.sum(), arguments[1])
    torch.testing.assert_close(gradient, expected)
    assert compiled.written[-1] == compiled.addresses[0]


@pytest.mark.covers("F4.34")
def test_a_graph_of_the_gradient_leaves_the_saved_tensors(how, arguments):
    compiled = Compiled(how)
    (y,) = compiled.run(*arguments)
    expected = expected_gradient(*arguments)
    for create_graph in (True, False):
        (gradient,) = torch.autograd.grad(y.sum(), arguments[1], create_graph=create_graph)
        torch.testing.assert_close(gradient.detach(), expected)


@pytest.mark.covers("F4.34")
@pytest.mark.parametrize("shares", ["input", "output", "saved"])
def test_memory_that_is_shared_after_all_is_not_overwritten(how, arguments, shares: str):
    compiled = Compiled(how, shares)
    x, w = arguments
    (y,) = compiled.run(x, w)
    before = [v.detach().clone() for v in (x, w, y)]
    expected = expected_gradient(x, w)
    y.sum().backward()
    torch.testing.assert_close(w.grad, expected)
    torch.testing.assert_close([x, w.detach(), y.detach()], before)
    assert compiled.written[0][0] == compiled.addresses[0][0] and compiled.written[0][1] != compiled.addresses[0][1]


@pytest.mark.covers("F4.34")
def test_memory_that_a_hook_for_saved_tensors_gives_out_is_not_overwritten(how, arguments):
    compiled = Compiled(how)
    packed = []

    def pack(tensor):
        packed.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        (y,) = compiled.run(*arguments)
    before = [p.clone() for p in packed]
    y.sum().backward()
    torch.testing.assert_close(arguments[1].grad, expected_gradient(*arguments))
    torch.testing.assert_close(packed, before)


def test_donations_that_fit_no_plan_are_refused_and_plans_without_any_look_at_nothing():
    plan = build_plan(analyze(f, [torch.ones(2), torch.ones(2, requires_grad=True)]), num_saved_tensors=1)
    with pytest.raises(WrapperError, match="there are 1 of them"):
        plan_donated(plan, [1])
    source = bind(plan, f, boxed(lambda args: args)).source
    assert "_storages" not in source and "_keep_donated" not in source
