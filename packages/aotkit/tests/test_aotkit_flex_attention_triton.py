"""Attention with functions of the scores, with the kernels of a CUDA device in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as of_torch

import aotkit
from aotkit.attention import flex_attention

pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")

OPTIONS: dict[str, Any] = {"processor": "triton-interpreter", "fallback": "error"}
SLOPES, TABLE = torch.linspace(-1, 1, 4), torch.linspace(-2, 2, 127)
DOCUMENTS = torch.tensor([0] * 20 + [1] * 20 + [2] * 24)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def turned_round(b: Any, h: Any, q: Any, k: Any) -> Any:
    return k <= q


def window(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q - k < 7)


def documents(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (DOCUMENTS[q] == DOCUMENTS[k]) & causal(b, h, q, k)


def with_empty_row(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q != 5)


def strictly_earlier(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q > k


def by_batch(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k < 7 + 3 * b) & (k != h)


def distance(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s - SLOPES.to(s)[h] * (q - k).abs()


def relative(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + TABLE.to(s)[q - k + 63]


def softcap(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 20 * torch.tanh(s / 20)


FORMS = [
    (None, causal),
    (None, turned_round),
    (None, window),
    (distance, documents),
    (relative, None),
    (None, with_empty_row),
    (relative, strictly_earlier),
    (distance, by_batch),
    (None, None),
]


def operands(dtype: torch.dtype, heads: int = 4, rows: int = 40, keys: int = 64) -> list[Tensor]:
    g = torch.Generator().manual_seed(1)
    return [torch.randn(2, h, n, 16, generator=g).to(dtype) for h, n in ((4, rows), (heads, keys), (heads, keys))]


def calling(score_mod: Any, mask_mod: Any, rows: int = 40, keys: int = 64) -> Callable[..., Any]:
    mask = None if mask_mod is None else create_block_mask(mask_mod, 2, 4, rows, keys, device="cpu")

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return flex_attention(q, k, v, score_mod, mask, scale=0.3, enable_gqa=True)

    return call


def computed(run: Callable[..., Any], args: list[Tensor]) -> list[Tensor]:
    """The result and all gradients."""
    leaves = [each.clone().requires_grad_() for each in args]
    result = run(*leaves)
    gradient = torch.linspace(-1, 1, result.numel(), dtype=torch.float64).sin().reshape(result.shape)
    result.backward(gradient.to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def graphs_of(run: Callable[..., Any], args: list[Tensor], **given: Any) -> tuple[list[Tensor], list[str], str]:
    """The result and all gradients, which calls there are, and what the decisions say."""
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    compiled = torch.compile(run, backend="aotkit", options={**OPTIONS, "observer": recorder}, **given)
    found = computed(compiled, args)
    reports = [graph.report for graph in recorder.graphs]
    return found, [call.target for report in reports for call in report.externs], "\n".join(map(str, reports))


def check(got: list[Tensor], run: Callable[..., Any], args: list[Tensor], dtype: torch.dtype) -> None:
    want = computed(run, [each.double() for each in args])
    assert len(got) == len(want)
    for own, right in zip(got, want, strict=True):
        assert own.dtype == dtype and own.shape == right.shape
        assert (own.double() - right).norm() <= 3 * torch.finfo(dtype).eps * right.norm()


@pytest.mark.parametrize(("score_mod", "mask_mod"), FORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_scores_are_never_in_memory(score_mod: Any, mask_mod: Any, dtype: torch.dtype) -> None:
    run, args = calling(score_mod, mask_mod), operands(dtype, heads=2)
    got, calls, said = graphs_of(run, args)
    assert calls == [] 
    print(said)
    check(got, run, args, dtype)
