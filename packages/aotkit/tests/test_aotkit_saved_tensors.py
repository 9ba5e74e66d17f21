"""What a compiled graph saves for its backward: hooks, memory, versions, threads."""

from __future__ import annotations

import gc
import threading
import weakref

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

NON_LEAF = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")


def fn(x, w):
    return torch.softmax(torch.tanh(x @ w), -1)


def compiled(function):
    return torch.compile(function, backend="aotkit", fullgraph=True, options={"fallback": "error"})


def inputs():
    return torch.randn(3, 4, requires_grad=True), torch.randn(4, 5, requires_grad=True)


@pytest.mark.covers("F2.44", "F4.37")
def test_hooks_are_called_for_what_is_saved_and_not_while_tracing():
    packed, unpacked = [], []

    def pack(tensor):
        packed.append(type(tensor))
        return tensor.double()

    def unpack(tensor):
        unpacked.append(tensor.dtype)
        return tensor.float()

    run, (x, w) = compiled(fn), inputs()
    with saved_tensors_hooks(pack, unpack):
        out = run(x, w)
    assert packed and set(packed) == {torch.Tensor}
    assert len(packed) == len(out.grad_fn._raw_saved_tensors)
    got = torch.autograd.grad(out.pow(2).sum(), (x, w))
    assert unpacked == [torch.float64] * len(packed)
    packed.clear()
    again = torch.autograd.grad(run(x, w).pow(2).sum(), (x, w))
    assert not packed
    expected = torch.autograd.grad(fn(x, w).pow(2).sum(), (x, w))
    for a, b, c in zip(got, again, expected, strict=True):
        torch.testing.assert_close(a, c)
        torch.testing.assert_close(b, c)


@pytest.mark.covers("F2.44")
def test_a_hook_that_changes_what_is_saved_changes_the_gradient_as_in_eager():
    def square(x):
        return (x * x).sum()

    run = compiled(square)
    for function in (square, run):
        x = torch.arange(3.0, requires_grad=True)
        with saved_tensors_hooks(lambda t: t, lambda t: t * 10):
            out = function(x)
        torch.testing.assert_close(torch.autograd.grad(out, x)[0], 20 * x.detach())


@pytest.mark.covers("F2.44")
def test_a_hook_may_give_saved_tensors_back_with_other_strides():
    """As offloading to pinned memory does to a transposed tensor. Kernels read memory as they were compiled to."""

    def product(x, w):
        return (x * w).sin() * x

    run, (x, w) = compiled(product), (torch.randn(3, 4, requires_grad=True) for _ in range(2))
    for transposed in (lambda t: t.t().contiguous().t(), lambda t: t.flatten().view(t.shape)):
        grads = []
        for function in (product, run):
            with saved_tensors_hooks(torch.clone, transposed):
                out = function(x, w)
            grads.append(torch.autograd.grad(out.sum(), (x, w)))
        for expected, got in zip(*grads, strict=True):
            torch.testing.assert_close(got, expected)


def test_saved_tensors_on_the_cpu_and_disabled_hooks():
    run, (x, w) = compiled(fn), inputs()
    expected = torch.autograd.grad(fn(x, w).pow(2).sum(), (x, w))
    with torch.autograd.graph.save_on_cpu():
        out = run(x, w)
    for a, b in zip(torch.autograd.grad(out.pow(2).sum(), (x, w)), expected, strict=True):
        torch.testing.assert_close(a, b)
    with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
        out = run(x, w)
    for a, b in zip(torch.autograd.grad(out.pow(2).sum(), (x, w)), expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.covers("F4.28")
@pytest.mark.parametrize("which", ["input", "output"])
def test_writing_to_what_is_saved_is_noticed_by_the_backward(which):
    def exponential(x, w):
        return torch.exp(x @ w)

    for function in (exponential, compiled(exponential)):
        x, w = inputs()
        out = function(x, w)
        with torch.no_grad():
            (w if which == "input" else out).mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.covers("F4.28")
def test_saved_tensors_are_freed_by_the_backward_and_kept_by_retain_graph():
    run, (x, w) = compiled(fn), inputs()
    out = run(x, w)
    node = out.grad_fn
    first = torch.autograd.grad(out.pow(2).sum(), (x, w), retain_graph=True)
    assert node.saved_tensors
    second = torch.autograd.grad(out.pow(2).sum(), (x, w))
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(RuntimeError, match="second time"):
        _ = node.saved_tensors
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(out.pow(2).sum(), (x, w))


@NON_LEAF
@pytest.mark.covers("F4.2")
@pytest.mark.parametrize("training", [True, False])
def test_an_input_that_is_not_needed_dies_with_the_call(training):
    """The sum of two numbers needs neither in its backward."""

    def add(x, y):
        return (x + y) * 2

    gc.freeze()  # what was there before need not be looked through
    run = compiled(add)
    leaf = torch.randn(5, requires_grad=training)
    for _ in range(2):
        hidden = leaf * 3
        reference = weakref.ref(hidden)
        out = run(hidden, torch.ones(5))
        del hidden
        gc.collect()
        assert reference() is None
    if training:
        torch.testing.assert_close(torch.autograd.grad(out.sum(), leaf)[0], torch.full((5,), 6.0))


@pytest.mark.covers("F4.33")
def test_a_first_backward_on_another_thread():
    run, (x, w) = compiled(fn), inputs()
    out, found = run(x, w), []

    def backward():
        found.append(torch.autograd.grad(out.pow(2).sum(), (x, w)))

    thread = threading.Thread(target=backward)
    thread.start()
    thread.join()
    for a, b in zip(found[0], torch.autograd.grad(fn(x, w).pow(2).sum(), (x, w)), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.covers("F4.33", "F2.51")
@pytest.mark.parametrize("create_graph", [False, True], ids=["first", "second"])
def test_first_backwards_on_eight_threads_at_once(create_graph):
    run, (x, w) = compiled(fn), inputs()
    outs = [run(x, w) for _ in range(8)]
    found, barrier = [None] * 8, threading.Barrier(8)

    def backward(number):
        barrier.wait()
        (grad,) = torch.autograd.grad(outs[number].pow(2).sum(), x, create_graph=create_graph)
        found[number] = torch.autograd.grad(grad.sum(), w)[0] if create_graph else grad

    threads = [threading.Thread(target=backward, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (expected,) = torch.autograd.grad(fn(x, w).pow(2).sum(), x, create_graph=create_graph)
    if create_graph:
        (expected,) = torch.autograd.grad(expected.sum(), w)
    for grad in found:
        torch.testing.assert_close(grad, expected, rtol=1e-4, atol=1e-5)


def test_activation_memory_is_no_more_than_eagers():
    net = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.LayerNorm(64), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4))
    parameters = {p.data_ptr() for p in net.parameters()}

    def saved_bytes(function):
        sizes = {}

        def pack(tensor):
            if tensor.data_ptr() not in parameters:
                sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        x = torch.randn(32, 16)
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            out = function(x)
        return sum(sizes.values()), out

    run = compiled(net)
    run(torch.randn(32, 16)).sum().backward()
    eager, _kept = saved_bytes(net)
    ours, _also_kept = saved_bytes(run)
    assert ours <= eager
