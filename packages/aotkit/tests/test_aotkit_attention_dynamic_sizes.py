"""Attention that is written out, compiled once for many sizes: kernels compute it, as eager does, in one graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import aotkit
from aotkit_inductor_lower import LowerOptions
from aotkit_inductor_lower.targets.cpu.target import cpu_target

is_ours = cpu_target().computes_attention((None, None), 32, "float32", LowerOptions())
OWN = "our own 1x aotkit_lower.attention"
HEADS, SHARED, WIDTH = 4, 2, 32
SIZES = ((4, 12, 12), (3, 17, 40), (2, 5, 9))  # as many in a batch as heads, as many queries as keys
Mask = Callable[[Tensor, Tensor, Tensor], Tensor]


def copies(heads: Tensor) -> Tensor:
    """Heads of keys for each of queries, as language models write it."""
    batch, count, length, width = heads.shape
    whole = heads[:, :, None].expand(batch, count, HEADS // SHARED, length, width)
    return whole.reshape(batch, HEADS, length, width)


def added(scores: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return scores + bias


def hidden(scores: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    return scores.masked_fill(~seen, torch.finfo(scores.dtype).min)


def causal(scores: Tensor, bias: Tensor, seen: Tensor) -> Tensor:
    queries, keys = scores.shape[-2:]
    later = torch.arange(keys)[None] > torch.arange(queries)[:, None]
    return scores.masked_fill(later, float("-inf"))


def attention(mask: Mask, x: Tensor, y: Tensor, bias: Tensor, seen: Tensor, *weights: Tensor) -> Tensor:
    """As models have it: projections, rows of queries and of keys, heads that are shared."""
    of_query, of_key, of_value = (
        F.linear(rows, weight).view(*rows.shape[:2], -1, WIDTH).transpose(1, 2)
        for rows, weight in zip((x, y, y), weights, strict=True)
    )
    scores = mask(of_query @ copies(of_key).transpose(2, 3) * WIDTH**-0.5, bias, seen)
    made = F.softmax(scores, dim=-1, dtype=torch.float32).to(x.dtype) @ copies(of_value)
    return made.transpose(1, 2).contiguous().view(x.shape[0], x.shape[1], -1)


def arguments(batch: int, queries: int, keys: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(queries)
    rows = [torch.randn(batch, length, 24, generator=g).to(dtype) for length in (queries, keys)]
    seen = torch.rand(batch, 1, queries, keys, generator=g) < 0.6
    seen[..., 0] = True
    weights = [torch.randn(n * WIDTH, 24, generator=g).to(dtype) / 5 for n in (HEADS, SHARED, SHARED)]
    return [*rows, torch.randn(batch, 1, queries, keys, generator=g).to(dtype), seen, *weights]


def results(function: Callable[..., Tensor], given: list[Tensor], trains: bool) -> list[Tensor]:
    needed = [t.clone().requires_grad_(trains and k not in (2, 3)) for k, t in enumerate(given)]
    out = function(*needed)
    if trains:
        out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape))
    return [out.detach(), *(t.grad for t in needed if t.grad is not None)]


def graphs(backend: str, function: Callable[..., Tensor], trains: bool, **options: Any) -> int:
    """How many graphs all sizes take, whose results must be eager's."""
    torch._dynamo.reset()
    counter = CompileCounterWithBackend(backend)
    if options:
        counter.backend = functools.partial(torch._dynamo.lookup_backend(backend), options=options)
    compiled = torch.compile(function, backend=counter, dynamic=True)
    for sizes in SIZES:
        given = arguments(*sizes)
        found = results(compiled, given, trains)
        for got, want in zip(found, results(function, given, trains), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    return int(counter.frame_count)


CASES = [
    pytest.param(mask, trains, id=f"{mask.__name__}, {'training' if trains else 'inference'}")
    for mask in (added, causal, hidden)
    for trains in (False, True)
]


@pytest.mark.nightly("tests of inductor-lower's passes see for each mask that no guard is added, and other sizes")
@pytest.mark.parametrize(("mask", "trains"), CASES)
def test_no_size_takes_a_graph_more_than_without_the_pass(mask: Mask, trains: bool) -> None:
    function = functools.partial(attention, mask)
    assert graphs("aotkit", function, trains) == graphs("eager", function, trains)


@pytest.mark.nightly("Triton's interpreter is slow")
def test_kernels_of_a_device_compute_it_too() -> None:
    pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")
    function = functools.partial(attention, hidden)
    options = {"processor": "triton-interpreter", "contractions": "generated"}
    assert graphs("aotkit", function, True, **options) == graphs("eager", function, True)


@pytest.mark.parametrize("processor", ["cpu", "triton-interpreter"])
def test_explain_says_that_kernels_are_ours(processor: str) -> None:
    if processor != "cpu":
        pytest.importorskip("triton", reason="Triton is the optional extra `cuda`")
    given = arguments(4, 20, 20)
    for number, dims in enumerate(((0, 1), (0, 1), (0, 2, 3))):
        for dim in dims:
            torch._dynamo.mark_dynamic(given[number], dim)
    options = {} if processor == "cpu" else {"processor": processor, "contractions": "generated"}
    torch._dynamo.reset()
    chosen = aotkit.Options(cache=False, **options)
    said = str(aotkit.explain(functools.partial(attention, added), *given, options=chosen))
    assert (OWN in said) is (is_ours or processor != "cpu")
