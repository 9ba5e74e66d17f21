"""Training through attention that is written out, with the kernels of a CUDA device in Triton's interpreter."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import aotkit

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

OPTIONS = {"processor": "triton-interpreter"}


def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    weights = torch.softmax(q @ k.transpose(2, 3) * 0.125 + bias, -1)
    return F.dropout(weights, 0.2) @ v


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_dropout_and_a_trained_mask_give_eagers_gradients(dtype: torch.dtype) -> None:
    """With the same random numbers, and no scores in memory but the gradient of the mask."""
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(2, 3, 40, 64, generator=g).to(dtype) for _ in range(4)]
    bias = torch.randn(1, 3, 40, 40, generator=g).to(dtype)
    found = []
    torch._dynamo.reset()
    for run in (attention, torch.compile(attention, backend="aotkit", options=OPTIONS)):
        args = [x.clone().requires_grad_() for x in (*given[:3], bias)]
        torch.manual_seed(3)
        result = run(*args)
        result.backward(given[3])
        found.append([result.detach(), *(x.grad for x in args)])
    for want, got in zip(*found, strict=True):
        assert got.dtype == dtype
        assert (got.double() - want.double()).norm() <= 2 * torch.finfo(dtype).eps * want.double().norm()


def test_explain_says_that_kernels_are_ours() -> None:
    args = [*(torch.randn(2, 3, 40, 64).bfloat16() for _ in range(3)), torch.randn(1, 3, 40, 40).bfloat16()]
    torch._dynamo.reset()
    said = str(aotkit.explain(attention, *args, options=aotkit.Options(cache=False, **OPTIONS)))
    assert "aotkit_lower.attention.default" in said and "scores are never in memory" in said
