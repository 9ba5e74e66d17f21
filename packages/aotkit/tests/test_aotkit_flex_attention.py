"""Attention with functions of the scores on the CPU: torch's call compiled, and ours, which has gradients."""

from __future__ import annotations

import copy
import importlib
import itertools
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as of_torch
from torch.utils.checkpoint import checkpoint

import aotkit
from aotkit.attention import flex_attention

ERROR: dict[str, Any] = {"fallback": "error"}
BIAS, TABLE = torch.linspace(-1, 1, 4), torch.linspace(-2, 2, 127)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def with_empty_row(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q >= k) & (q != 5)


def by_batch(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k < 7 + 3 * b) & (k != h)


def distance(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return s + BIAS[h] * (q - k).abs()


def softcap(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return 20 * torch.tanh(s / 20)


def relative(s: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    return torch.where(b > 0, s + TABLE[q - k + 63], s * torch.tensor(0.5))


def operands(dtype: torch.dtype = torch.float32, heads: int = 4, rows: int = 24, keys: int = 64) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randn(2, h, n, 16).to(dtype) for h, n in ((4, rows), (heads, keys), (heads, keys))]


def block_mask(function: Any, rows: int = 24, keys: int = 64) -> Any:
    return None if function is None else create_block_mask(function, 2, 4, rows, keys, device="cpu")


def eager(*args: Any, **kwargs: Any) -> Any:
    with warnings.catch_warnings():  # that it is slow
        warnings.simplefilter("ignore")
        return of_torch(*args, **kwargs)


CASES = [(None, causal), (distance, None), (softcap, with_empty_row), (relative, by_batch), (None, None)]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("score_mod", "mask_mod"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_results_are_torchs(score_mod: Any, mask_mod: Any, dtype: torch.dtype) -> None:
    q, k, v = operands(dtype, heads=2)
    mask, given = block_mask(mask_mod), {"enable_gqa": True, "return_lse": True, "scale": 0.3}
    want, got = (each(q, k, v, score_mod, mask, **given) for each in (eager, flex_attention))
    near = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 1e-2}[dtype]
    torch.testing.assert_close(got, want, rtol=0, atol=near)  # types too; bits differ with the processor's products


@pytest.mark.covers("F5g.21")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize(("score_mod", "mask_mod"), CASES)
@pytest.mark.parametrize("dynamic", [False, True])
def test_torchs_call_is_compiled(score_mod: Any, mask_mod: Any, dynamic: bool) -> None:
    q, k, v = operands()
    mask, recorder = block_mask(mask_mod), aotkit.Recorder()
    given: Any = {} if mask is not None else {"return_lse": True}

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return of_torch(q, k, v, score_mod, mask, **given)

    run = torch.compile(f, backend="aotkit", options={**ERROR, "observer": recorder}, dynamic=dynamic)
    torch.testing.assert_close(run(q, k, v), eager(q, k, v, score_mod, mask, **given), rtol=1e-5, atol=1e-5)
    calls = [call.target for graph in recorder.graphs for call in graph.report.externs]
    assert recorder.graphs and not any("flex" in name for name in calls), calls


def test_torchs_call_follows_autocast() -> None:
    q, k, v = operands()

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            return of_torch(q * 2, k, v, distance)

    got = torch.compile(f, backend="aotkit", options=ERROR)(q, k, v)
    with torch.autocast("cpu", torch.bfloat16):
        want = eager(q * 2, k, v, distance)
        ours = flex_attention(q * 2, k, v, distance)
    assert got.dtype == want.dtype == ours.dtype == torch.bfloat16
    exact = flex_attention(q.double() * 2, k.double(), v.double(), distance)
    assert isinstance(want, torch.Tensor) and isinstance(exact, torch.Tensor)
    for each in (got, ours):  # weights are rounded before or after they are divided by their sum
        assert (each - exact).norm() <= 1.5 * (want - exact).norm()


class Layer(nn.Module):
    """Attention whose scores depend on parameters, by an index and by a product."""

    def __init__(self, mask: Any, again: bool = False) -> None:
        super().__init__()
        self.bias, self.table = nn.Parameter(BIAS.clone()), nn.Parameter(TABLE.clone())
        self.mask, self.again = mask, again

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        def change(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            return torch.tanh(s / 5) * 5 + self.bias[h] * (i - j).abs() + self.table[i - j + 63].sin()

        def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
            return flex_attention(q, k, v, change, self.mask, enable_gqa=True)

        first = checkpoint(attend, q, k, v, use_reentrant=False) if self.again else attend(q, k, v)
        return attend(first, k, v)


def written_out(layer: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
    """The same without functions of a place."""
    k, v = (each.repeat_interleave(4 // each.shape[1], 1) for each in (k, v))
    i, j = torch.arange(q.shape[2])[:, None], torch.arange(k.shape[2])
    for _ in range(2):
        s = torch.tanh(q @ k.transpose(-1, -2) / 4 / 5) * 5
        s = s + layer.bias[:, None, None] * (i - j).abs() + layer.table[i - j + 63].sin()
        weights = s.masked_fill(~allowed, -1e30).softmax(-1) * allowed
        q = weights @ v
    return q


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("mask_mod", [causal, with_empty_row])
def test_gradients_are_those_of_attention_written_out(mask_mod: Any, again: bool) -> None:
    layer, args = Layer(block_mask(mask_mod), again), operands(heads=2)
    places = (torch.zeros((), dtype=torch.int64),) * 2
    allowed = mask_mod(*places, torch.arange(24)[:, None], torch.arange(64))
    exact = copy.deepcopy(layer).double()
    want = gradients(lambda *given: written_out(exact, *given, allowed), exact, [a.double() for a in args])
    for run in (layer, torch.compile(layer, backend="aotkit", fullgraph=not again, options=ERROR)):
        for name, value in gradients(run, layer, args).items():
            assert value.isfinite().all(), name
            torch.testing.assert_close(value.double(), want[name], rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)


def gradients(run: Callable[..., torch.Tensor], module: nn.Module, args: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The result and all gradients."""
    module.zero_grad(set_to_none=True)
    leaves = [each.clone().requires_grad_() for each in args]
    result = run(*leaves)
    result.sin().sum().backward()
    named = {name: p.grad for name, p in module.named_parameters()}
    found = {"result": result.detach(), **{f"input {n}": leaf.grad for n, leaf in enumerate(leaves)}, **named}
    return {name: value for name, value in found.items() if value is not None}


def test_lengths_that_are_known_at_run_time_only_have_gradients() -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Any:
        return flex_attention(q, k, v, distance, enable_gqa=True)

    run = torch.compile(f, backend="aotkit", fullgraph=True, dynamic=True, options=ERROR)
    for rows, keys in ((24, 64), (7, 33)):
        args = operands(heads=2, rows=rows, keys=keys)
        want = gradients(f, nn.Module(), [each.double() for each in args])
        for name, value in gradients(run, nn.Module(), args).items():
            torch.testing.assert_close(value.double(), want[name], rtol=1e-4, atol=1e-5)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("call", [of_torch, flex_attention])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_result_lies_in_memory_as_the_query_does(call: Any, dynamic: bool) -> None:
    """So that a model may look at the heads of one query as one line, without a copy."""

    def f(call: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in (q, k, v))
        found: torch.Tensor = call(q, k, v)
        return found.transpose(1, 2).view(*q.shape[::2], -1)

    args = [torch.randn(2, rows, 32) for rows in (24, 40, 40)]
    run = torch.compile(f, backend="aotkit", fullgraph=True, dynamic=dynamic, options=ERROR)
    torch.testing.assert_close(run(call, *args), f(flex_attention, *args), rtol=1e-5, atol=1e-5)


def test_strides_are_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("torch.nn.attention.flex_attention")
    monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True, raising=False)  # no compile each time
    for order in [*itertools.permutations(range(4))][::3]:
        for sizes in ((2, 3, 4, 4), (2, 1, 1, 2)):
            q = torch.randn([sizes[dim] for dim in order]).permute([order.index(dim) for dim in range(4)])
            for query in (q, q[:1].expand(2, -1, -1, -1)[..., ::2]):
                k = torch.randn(2, sizes[1], 6, query.shape[3])
                want = eager(query, k, k)
                assert flex_attention(query, k, k).stride() == want.stride(), (order, sizes)  # type: ignore[union-attr]


def test_what_does_not_fit_is_refused() -> None:
    q, k, v = operands(heads=2)
    for args, named, match in (
        ((q, k, v), {}, "enable_gqa"),
        ((q, k[:, :, :, :8], v), {"enable_gqa": True}, "do not fit"),
        ((q[0], k, v), {}, "four dimensions"),
        ((q, k.double(), v), {"enable_gqa": True}, "one type"),
        ((q, k, v[:, :, :32]), {"enable_gqa": True}, "do not fit"),
        ((q, k, v), {"enable_gqa": True, "block_mask": block_mask(causal, 24, 32)}, "block mask is for"),
    ):
        with pytest.raises(ValueError, match=match):
            flex_attention(*args, **named)
