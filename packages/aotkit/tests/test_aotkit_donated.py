"""Backward compilers that use the memory of saved tensors."""

from __future__ import annotations

import pytest
import torch

import aotkit


def spoiling(graph, examples):
    """Uses the memory of donated inputs up: afterwards there is nothing but NaN in it."""
    inputs = graph.graph.find_nodes(op="placeholder")
    donated = [i for i, node in enumerate(inputs) if node.meta.get("donated")]
    counts.append((len(donated), sum("tangent" not in node.name for node in inputs)))

    def run(*args):
        results = graph(*args)
        for position in donated:
            args[position].fill_(float("nan"))
        return results

    return run


spoiling.reuses_donated = True
counts: list[tuple[int, int]] = []


def own_only(x, w):
    return (x.matmul(w).sigmoid().sigmoid(),)


def saves_an_input_and_an_output(x, w):
    return (x * w).exp(), (w * w).sigmoid()


def saves_views(x, w):
    y = x.matmul(w).tanh()
    return y.view(-1), y.t().exp().sum()


def writes_its_input(x, w):
    x.mul_(2)
    return (x.matmul(w).sigmoid().sigmoid() * x,)


@pytest.mark.covers("F4.34")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("function", [own_only, saves_an_input_and_an_output, saves_views, writes_its_input])
@pytest.mark.parametrize("again", [False, True])
def test_only_memory_of_the_backward_alone_is_used_up(function, again: bool):
    counts.clear()
    torch.manual_seed(0)
    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    x_eager, w_eager = x.clone(), w.detach().clone().requires_grad_()
    compiled = aotkit.aot_function(function, aotkit.nop, spoiling)
    for _ in range(2):
        outputs, expected = compiled(x, w), function(x_eager, w_eager)
        torch.testing.assert_close(outputs, expected)
        loss, loss_eager = sum(o.sum() for o in outputs), sum(o.sum() for o in expected)
        for keep in (True, False) if again else (False,):
            loss.backward(retain_graph=keep)
            loss_eager.backward(retain_graph=keep)
        torch.testing.assert_close(w.grad, w_eager.grad)
        torch.testing.assert_close((x, w, outputs), (x_eager, w_eager, expected))
    assert len(counts) == 1
    if function is own_only:
        assert counts[0][0] >= 1


@pytest.mark.covers("F4.34")
def test_a_graph_of_the_gradient_and_a_compiler_that_does_not_ask_get_what_is_right():
    counts.clear()
    x, w = torch.randn(3, 3), torch.randn(3, 3, requires_grad=True)
    (y,) = aotkit.aot_function(own_only, aotkit.nop, spoiling)(x, w)
    (gradient,) = torch.autograd.grad(y.sum(), w, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), w)
    (expected,) = torch.autograd.grad(own_only(x, w)[0].sum(), w, create_graph=True)
    torch.testing.assert_close(gradient, expected)
    torch.testing.assert_close(second, torch.autograd.grad(expected.square().sum(), w)[0])
    marked = []

    def look(graph, examples):
        marked.extend(n for n in graph.graph.nodes if n.meta.get("donated"))
        return graph

    (y,) = aotkit.aot_function(own_only, aotkit.nop, look)(x, w)
    y.sum().backward()
    torch.testing.assert_close(w.grad, torch.autograd.grad(own_only(x, w)[0].sum(), w)[0])
    assert not marked
