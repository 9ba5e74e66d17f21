"""A loss over many classes: nothing of the logits' size is written beside them and their gradient."""

from __future__ import annotations

import pytest
import torch

import aotkit  # noqa: F401  (registers the backend)

F = torch.nn.functional


def loss_and_logits(x, weight, target):
    logits = F.linear(x, weight)
    return F.cross_entropy(logits, target), logits


def arguments(rows=64, width=16, classes=2048):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, width, generator=generator).requires_grad_()
    weight = torch.randn(classes, width, generator=generator).requires_grad_()
    return x, weight, torch.randint(classes, (rows,), generator=generator)


@pytest.mark.covers("F5h.3")
def test_a_training_loss_saves_the_logits_that_are_there_anyhow():
    x, weight, target = arguments()
    large = []

    def pack(tensor):
        if tensor.numel() == 64 * 2048:
            large.append(tensor.data_ptr())
        return tensor

    compiled = torch.compile(loss_and_logits, backend="aotkit", fullgraph=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss, logits = compiled(x, weight, target)
    assert large == [logits.data_ptr()]
    grads = torch.autograd.grad(loss, (x, weight))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(loss_and_logits(*wide, target)[0], wide)
    for got, want in zip(grads, expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_log_softmax_in_parts_is_right_with_infinities_and_nans(dtype, dim):
    x = torch.randn(5, 7, generator=torch.Generator().manual_seed(1)) * 10
    x[0, 1], x[1, 2], x[2, 3] = float("inf"), float("nan"), float("-inf")
    x = x.to(dtype)
    compiled = torch.compile(lambda x: F.log_softmax(x, dim), backend="aotkit", fullgraph=True)
    result = compiled(x)
    assert result.dtype is dtype  # eager itself rounds on the way, so the exact result is the measure
    torch.testing.assert_close(result, F.log_softmax(x.double(), dim).to(dtype), equal_nan=True)
    for empty in (torch.empty(0, 3, dtype=dtype), torch.empty(3, 0, dtype=dtype), torch.tensor(2.0, dtype=dtype)):
        if empty.dim() or dim != 1:
            torch.testing.assert_close(compiled(empty), F.log_softmax(empty, dim))
