"""Attention written out becomes one fused call, with the numbers, NaN and infinities that it had."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions
from aotkit_inductor_lower.driver import run_graph_passes

aten = torch.ops.aten
F = torch.nn.functional
FLASH = aten._scaled_dot_product_flash_attention_for_cpu.default
B, H, S, D = 2, 2, 256, 16
FAST = LowerOptions(numerics="fast")


def heads(seed: int, *, keys: int = S, width: int = D, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, ...]:
    """Query, key and value as a projection leaves them: heads and places transposed."""
    g = torch.Generator().manual_seed(seed)
    sizes = (S, keys, keys)
    return tuple(torch.randn(B, size, H, width, generator=g, dtype=dtype).transpose(1, 2) for size in sizes)


def additive(*shape: int, seed: int = 9) -> torch.Tensor:
    hidden = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.3
    hidden[..., 0] = False
    return torch.zeros(shape).masked_fill(hidden, -math.inf)


def trace(f, *args):
    with torch.no_grad():
        return make_fx(lambda *given: f(*given), decompositions(), tracing_mode="fake")(*args)


def is_fused(f, *args, options: LowerOptions | None = None) -> bool:
    passed = run_graph_passes(trace(f, *args), options or LowerOptions())
    return bool(passed.graph.find_nodes(op="call_function", target=FLASH))


def agree(f, *args, options: LowerOptions | None = None) -> None:
    """Fused; NaN where eager has it; elsewhere off from float64 by no more than a little over what eager is off."""
    assert is_fused(f, *args, options=options)
    with torch.no_grad():
        eager = f(*args)
        wide = f(*(a.double() if a.is_floating_point() else a for a in args))
    got = compile_graph(trace(f, *args), options=options)(list(args))[0]
    assert (got.shape, got.stride(), got.dtype) == (eager.shape, eager.stride(), eager.dtype)
    assert torch.equal(got.isnan(), eager.isnan())
    known = eager.isfinite()
    assert torch.equal(got[~known & ~eager.isnan()], eager[~known & ~eager.isnan()])
    bound = 1.5 * (eager - wide)[known].abs().max() + 2e-6
    assert (got - wide)[known].abs().max() <= bound


def plain(q, k, v):
    return (q @ k.transpose(-2, -1)).softmax(-1) @ v


def scaled(q, k, v):
    return F.softmax(torch.matmul(q, k.transpose(2, 3)) * D**-0.5, dim=-1) @ v


def divided(q, k, v):
    return torch.softmax(q @ k.mT / math.sqrt(D), dim=3) @ v


def divided_by_tensor(q, k, v):
    return torch.softmax(q @ k.mT / torch.full([], 4.0, dtype=q.dtype), dim=3) @ v


def permuted(q, k, v):
    return torch.softmax(torch.matmul(q, k.permute(0, 1, 3, 2)).mul(0.25), -1).matmul(v).permute(0, 2, 1, 3) * 1.5


def dropped(q, k, v):
    return F.dropout(F.softmax(q @ k.mT * 0.25, -1), 0.0, training=True) @ v


def evaluated(q, k, v):
    return nn.Dropout(0.5).eval()(F.softmax(q @ k.mT * 0.25, -1)) @ v


def flattened(q, k, v):
    weights = torch.bmm(q.reshape(B * H, S, D), k.reshape(B * H, S, D).transpose(1, 2)) * 0.25
    return torch.bmm(weights.view(B, H, S, S).softmax(-1).view(B * H, S, S), v.reshape(B * H, S, D))


SPELLINGS = [plain, scaled, divided, divided_by_tensor, permuted, dropped, evaluated, flattened]


@pytest.mark.covers("F5b.5", "F5f.23")
@pytest.mark.parametrize("f", SPELLINGS)
def test_attention_in_each_spelling_is_one_call(f):
    agree(f, *heads(0))


@pytest.mark.covers("F5b.5", "F5f.23")
@pytest.mark.parametrize("shape", [(S, S), (B, 1, 1, S), (1, 1, S, S), (B, H, S, S)], ids=str)
@pytest.mark.parametrize("order", [lambda s, m: s + m, lambda s, m: m + s], ids=["scores + mask", "mask + scores"])
def test_a_mask_that_is_added_goes_along(shape, order):
    agree(lambda q, k, v, m: order(q @ k.mT * 0.25, m).softmax(-1) @ v, *heads(1), additive(*shape))


@pytest.mark.covers("F5b.5", "F5f.23")
def test_a_causal_mask_made_in_the_graph_goes_along():
    def f(q, k, v):
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
        return (q @ k.mT / 4 + torch.zeros(S, S, dtype=q.dtype).masked_fill(hidden, -math.inf)).softmax(-1) @ v

    agree(f, *heads(2))


@pytest.mark.covers("F5b.5", "F5f.23")
def test_keys_repeated_for_groups_of_queries_and_as_many_keys_as_one_likes():
    def f(q, k, v):
        k, v = (t[:, :1, None].expand(B, 1, H, t.shape[2], D).reshape(B, H, t.shape[2], D) for t in (k, v))
        return (q @ k.mT * 0.25).softmax(-1) @ v

    agree(f, *heads(3, keys=300))


@pytest.mark.covers("F5b.5", "F5f.23")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_odd_numbers_come_out_where_they_do_in_eager(where, odd):
    q, k, v = (t.contiguous() for t in heads(4))
    {"query": q, "key": k, "value": v}[where][0, 1, 5] = odd
    mask = additive(S, S)
    mask[7] = -math.inf  # a row that hides every key
    agree(lambda q, k, v, m: (q @ k.mT * 0.25 + m).softmax(-1) @ v, q, k, v, mask)


def test_scores_that_all_overflow_are_none():
    q, k, v = (t.contiguous() for t in heads(5))
    q[1, 0, 9], k[1, 0] = -1e30, 1e30
    with torch.no_grad():
        assert scaled(q, k, v)[1, 0, 9].isnan().all()
    assert compile_graph(trace(scaled, q, k, v))([q, k, v])[0][1, 0, 9].isnan().all()


def test_rows_whose_sum_is_one_are_not_taken_for_lost():
    q, k, v = (torch.zeros(1, 1, 65536, 4), torch.ones(1, 1, 1, 4), torch.zeros(1, 1, 1, 4))
    assert is_fused(plain, q, k, v)
    assert torch.equal(compile_graph(trace(plain, q, k, v))([q, k, v])[0], torch.zeros_like(q))


def masked_fill(q, k, v, hidden):
    return (q @ k.mT * 0.25).masked_fill(hidden, -math.inf).softmax(-1) @ v


def chosen(q, k, v, hidden):
    return torch.where(~hidden, q @ k.mT * 0.25, torch.finfo(torch.float32).min).softmax(-1) @ v


@pytest.mark.covers("F5f.23")
@pytest.mark.parametrize("f", [masked_fill, chosen])
def test_masks_that_replace_scores_go_along_under_fast_numerics_only(f):
    args = (*heads(6), torch.ones(S, S, dtype=torch.bool).triu(1))
    assert not is_fused(f, *args)
    agree(f, *args, options=FAST)


def test_masks_that_replace_scores_of_float64_are_of_float64():
    """ATen's call reads those of float32 as if they had its operands' type."""
    args = (*heads(6, dtype=torch.float64), torch.ones(S, S, dtype=torch.bool).triu(1))
    assert is_fused(masked_fill, *args, options=FAST)
    got = compile_graph(trace(masked_fill, *args), options=FAST)(list(args))[0]
    torch.testing.assert_close(got, masked_fill(*args), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dims", [1, 3])
def test_masks_that_the_call_does_not_take_stay(dims):
    hidden = torch.ones(1, S, S, dtype=torch.bool).triu(1)
    args = (*heads(6, dtype=torch.float64), hidden if dims == 3 else hidden[0, 3])
    got = compile_graph(trace(masked_fill, *args), options=FAST)(list(args))[0]
    torch.testing.assert_close(got, masked_fill(*args), rtol=1e-12, atol=1e-12)


DIFFERENT = {
    "scores returned": lambda q, k, v: ((s := q @ k.mT).softmax(-1) @ v, s),
    "weights returned": lambda q, k, v: ((w := (q @ k.mT).softmax(-1)) @ v, w),
    "over columns": lambda q, k, v: (q @ k.mT).softmax(-2) @ v,
    "mask before scale": lambda q, k, v: ((q @ k.mT + 1.5 * v[..., :1].mT) * 0.25).softmax(-1) @ v,
    "two masks": lambda q, k, v: (q @ k.mT + k[..., :1].mT + v[..., :1].mT).softmax(-1) @ v,
    "weights changed": lambda q, k, v: ((q @ k.mT).softmax(-1) * 2) @ v,
    "other width": lambda q, k, v: (q @ k.mT).softmax(-1) @ v[..., :8],
    "scaled by nothing": lambda q, k, v: ((q @ k.mT) / 0.0).softmax(-1) @ v,
    "alpha": lambda q, k, v: torch.add(q @ k.mT, k[..., :1].mT, alpha=2).softmax(-1) @ v,
    "swapped": lambda q, k, v: ((q @ k.mT).softmax(-1).mT) @ v,
}


@pytest.mark.parametrize("f", DIFFERENT.values(), ids=DIFFERENT)
def test_what_is_not_attention_stays_as_it_is(f):
    args = heads(7)
    assert not is_fused(f, *args)
    with torch.no_grad():
        want = f(*args)
    for a, b in zip(
        compile_graph(trace(f, *args))(list(args)), want if isinstance(want, tuple) else (want,), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, equal_nan=True)


def test_half_types_and_small_scores_stay_as_they_are():
    assert not is_fused(scaled, *heads(8, dtype=torch.bfloat16))
    assert not is_fused(scaled, *(t[:, :, :64] for t in heads(8)))
