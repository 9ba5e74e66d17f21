"""Attention of few queries: as exact as flash attention, with every mask, type and sharing of heads."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.symbolic import product
from aotkit_inductor_lower.targets.cpu import host_machine

pytestmark = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
Program = Callable[..., torch.Tensor]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor | None = None, **how: Any) -> Any:
    return FLASH(q, k, v, 0.0, False, attn_mask=mask, **how)[0]


def repeated(x: torch.Tensor, times: int) -> torch.Tensor:
    """As transformers repeats the heads of keys and values."""
    batch, heads, length, width = x.shape
    return x[:, :, None].expand(batch, heads, times, length, width).reshape(batch, heads * times, length, width)


def compiled(f: Program, *args: torch.Tensor, **options: Any) -> CompiledGraph:
    made = compile_graph(make_fx(lambda *given: f(*given), tracing_mode="fake")(*args), options=LowerOptions(**options))
    assert isinstance(made, CompiledGraph)
    return made


def externs(made: CompiledGraph) -> list[str]:
    return [call.target for call in made.report().externs]


def check(f: Program, *args: torch.Tensor) -> CompiledGraph:
    """Without ATen's attention, and at most three times as far from float64 as eager."""
    made = compiled(f, *args, contractions="generated")
    assert externs(made) == []
    (got,) = bind_program(made.compiled, made.constants, redzones=True)(list(args))
    want = f(*args)
    true = f(*(x.double() if x.is_floating_point() else x for x in args))
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    assert torch.equal(got.isnan(), want.isnan())
    off, eager = ((x.double() - true).nan_to_num().abs().max().item() for x in (got, want))
    assert off <= 3 * (eager + 2e-6)
    return made


def operands(
    rows: int, heads: int = 4, groups: int = 4, length: int = 37, dtype: torch.dtype = torch.float32, batch: int = 2
) -> list[torch.Tensor]:
    sizes = (batch, heads, rows, 32), (batch, groups, length, 32), (batch, groups, length, 32)
    return [torch.randn(size, dtype=dtype) for size in sizes]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8])
def test_it_is_as_exact_as_flash_attention(rows: int, dtype: torch.dtype) -> None:
    check(attention, *operands(rows, dtype=dtype))
    check(lambda q, k, v: attention(q, k, v, scale=0.3), *operands(rows, length=300, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_queries_lie_as_a_layer_writes_them(dtype: torch.dtype) -> None:
    q, k, v = (torch.randn(2, length, 4, 32, dtype=dtype).transpose(1, 2) for length in (2, 40, 40))
    check(attention, q, k, v)


def hidden_from(length: int, size: tuple[int, ...]) -> torch.Tensor:
    return torch.zeros(size).masked_fill(torch.arange(size[-1]) >= length, -torch.inf)


@pytest.mark.parametrize("size", [(37,), (1, 37), (2, 1, 1, 37), (2, 4, 3, 37)], ids=str)
def test_masks_are_added(size: tuple[int, ...]) -> None:
    mask = hidden_from(20, size)
    if mask.dim() < 2:
        mask = mask.unsqueeze(0)
    check(attention, *operands(3), mask)
    check(attention, *operands(3, dtype=torch.bfloat16), mask.bfloat16())


def test_a_row_that_sees_nothing_is_zero_as_in_flash_attention() -> None:
    mask = torch.zeros(2, 1, 3, 37)
    mask[1, 0, 2] = -torch.inf
    q, k, v = operands(3)
    (got,) = compiled(attention, q, k, v, mask, contractions="generated")([q, k, v, mask])
    want = attention(q, k, v, mask)
    torch.testing.assert_close(got, want)
    assert got[1, :, 2].eq(0).all()


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38])
def test_special_numbers_become_what_flash_attention_makes_of_them(value: float) -> None:
    for position in range(3):
        args = operands(1, batch=1)
        args[position][0, 0, 0, 0] = value
        (got,) = compiled(attention, *args, contractions="generated")(list(args))
        assert torch.equal(got.isnan(), attention(*args).isnan()), position


@pytest.mark.parametrize("times", [2, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_heads_that_share_keys_read_them_once(times: int, dtype: torch.dtype) -> None:
    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return attention(q, repeated(k, times), repeated(v, times))

    made = check(f, *operands(2, heads=8, groups=8 // times, dtype=dtype, batch=1))
    widened = dtype is not torch.float32  # the queries, by a kernel of their own
    assert made.report().kernel_count == 3 + widened, "two products and a softmax; no copies of keys and values"


def test_a_cache_that_is_written_to_is_read_afterwards() -> None:
    """One step of a language model with a cache of fixed length."""

    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, at: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        keys = cache.index_copy(2, at, k)
        result = attention(q, keys, v)
        cache.copy_(keys)
        return result

    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = operands(1, length=37, dtype=dtype, batch=1)
        k, cache, at = k[:, :, :1].clone(), torch.randn(1, 4, 37, 32, dtype=dtype), torch.tensor([5])
        mine, theirs = cache.clone(), cache.clone()
        made = compiled(step, q, k, v, at, cache.clone(), contractions="generated")
        assert not any("attention" in call for call in externs(made))
        (got,) = made([q, k, v, at, mine])
        tolerance = 1e-5 if dtype is torch.float32 else 2e-2  # flash attention rounds the weights
        torch.testing.assert_close(got, step(q, k, v, at, theirs), rtol=tolerance, atol=tolerance)
        assert torch.equal(mine, theirs)


def test_keys_that_are_overwritten_behind_their_copies_are_read_as_they_were() -> None:
    def step(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        keys, values = repeated(k, 2), repeated(v, 2)
        k.copy_(k * 2)
        return attention(q, keys, values)

    q, k, v = operands(1, heads=4, groups=2, length=300, batch=1)
    mine, theirs = k.clone(), k.clone()
    (got,) = compiled(step, q, k.clone(), v, contractions="generated")([q, mine, v])
    torch.testing.assert_close(got, step(q, theirs, v))
    assert torch.equal(mine, theirs)


def test_what_flash_attention_is_better_at_stays() -> None:
    flash = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    blocks = {"disable": ("generate-attention",)}  # whose kernels may take the call's place then
    assert externs(compiled(attention, *operands(9), **blocks)) == [flash]
    assert externs(compiled(attention, *operands(1, length=16))) == [flash], "few keys"
    assert externs(compiled(attention, *operands(1), contractions="aten")) == [flash]
    causal = compiled(lambda q, k, v: FLASH(q, k, v, 0.0, True)[0], *operands(8, length=8), **blocks)
    assert externs(causal) == [flash]

    def with_sums(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out, sums = FLASH(q, k, v)[:2]
        return out + sums.mean()

    assert externs(compiled(with_sums, *operands(2))) == [flash]


def test_scaled_dot_product_attention_of_one_query_takes_this_way() -> None:
    q, k, v = operands(1, length=300)
    f = F.scaled_dot_product_attention
    made = compiled(lambda q, k, v: f(q, k, v), q, k, v)
    assert externs(made) == []
    torch.testing.assert_close(made([q, k, v])[0], f(q, k, v))


def steps_seen(mode: str) -> Program:
    """A mask as transformers writes it for a static cache: the keys up to each query's place."""

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        seen = torch.arange(k.shape[2])[None, None, None] <= (torch.arange(q.shape[2]) + place)[None, None, :, None]
        seen = seen.expand(q.shape[0], 1, q.shape[2], k.shape[2])
        hidden, other = (torch.scalar_tensor(x, dtype=q.dtype) for x in (-torch.inf, 0.5 if mode == "added" else 0.0))
        return attention(q, k, v, torch.where(seen, other, hidden))

    return f


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("mode", ["float", "added"])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_that_no_query_sees_are_not_read(mode: str, rows: int, dtype: torch.dtype) -> None:
    """They may be anything: nans there are in no result, and 1e30 in no sum."""
    q, k, v = operands(rows, length=300, dtype=dtype, batch=1)
    f = steps_seen(mode)
    for place in (0, 5, 140, 299 - rows):
        check(f, q, k, v, torch.tensor([place]))
        made = compiled(f, q, k, v, torch.tensor([place]), contractions="generated")
        (want,) = made([q, k, v, torch.tensor([place])])
        for garbage in (torch.nan, torch.inf, 1e30):
            keys, values = k.clone(), v.clone()
            keys[:, :, place + rows :] = values[:, :, place + rows :] = garbage
            assert torch.equal(made([q, keys, values, torch.tensor([place])])[0], want)


def in_window(width: int) -> Program:
    """A mask as transformers writes it for layers with a sliding window: of the keys up to each query's place the last
    ones."""

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        keys = torch.arange(k.shape[2])[None, None, None]
        queries = (torch.arange(q.shape[2]) + place)[None, None, :, None]
        seen = ((keys <= queries) & (keys > queries - width)).expand(q.shape[0], 1, q.shape[2], k.shape[2])
        hidden, other = (torch.scalar_tensor(x, dtype=q.dtype) for x in (-torch.inf, 0.0))
        return attention(q, k, v, torch.where(seen, other, hidden))

    return f


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("width", [1, 16, 100])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_keys_outside_of_a_sliding_window_are_not_read(width: int, rows: int, dtype: torch.dtype) -> None:
    q, k, v = operands(rows, length=300, dtype=dtype, batch=1)
    f = in_window(width)
    for place in (5, 140, 299 - rows):
        made, where = check(f, q, k, v, torch.tensor([place])), torch.tensor([place])
        (want,) = made([q, k, v, where])
        for garbage in (torch.nan, torch.inf, 1e30):
            keys, values = k.clone(), v.clone()
            for behind in (slice(place + rows, None), slice(0, max(0, place - width + 1))):
                keys[:, :, behind] = values[:, :, behind] = garbage
            assert torch.equal(made([q, keys, values, where])[0], want)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("groups", [4, 2])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cache_of_bytes_is_widened_where_it_is_read(dtype: torch.dtype, rows: int, groups: int) -> None:
    """Keys and values of int8 with a scale for each: neither is in memory as anything else, and hidden ones are not
    read."""

    def f(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor, place: torch.Tensor) -> torch.Tensor:
        keys, values = (repeated(x.to(q.dtype) * s.to(q.dtype), 4 // groups) for x in (k, v))
        return steps_seen("float")(q, keys, values, place)

    q, _, _ = operands(rows, dtype=dtype, batch=1)
    k, v = (torch.randint(-128, 128, (1, groups, 300, 32), dtype=torch.int8) for _ in "kv")
    scales, place = torch.rand(1, groups, 300, 1) / 100, torch.tensor([140])
    made = check(f, q, k, v, scales, place)
    plan = made.compiled.plan
    assert sum(product(plan.buffer(held.buffer).sizes).constant or 0 for held in plan.arena) < k.numel()
    scales[:, :, 140 + rows :] = torch.nan
    assert torch.equal(made([q, k, v, scales, place])[0], made([q, k, v, scales.nan_to_num(1e30), place])[0])
    assert not made([q, k, v, scales, place])[0].isnan().any()


def test_other_masks_read_all_keys() -> None:
    """A bias that is -inf somewhere tells nothing before it is there."""
    q, k, v = operands(1, length=300, batch=1)
    mask = hidden_from(20, (1, 1, 1, 300))
    made = check(attention, q, k, v, mask)
    assert made.report().kernel_count == 3
