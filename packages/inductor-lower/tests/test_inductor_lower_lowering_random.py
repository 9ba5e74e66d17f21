"""Random numbers that kernels make, ``rng="fast"``: those of the promised generator, and what is left to ATen."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph

aten = torch.ops.aten
ALL = (1 << 64) - 1
DIGITS = {torch.float16: 11, torch.bfloat16: 8, torch.float32: 24, torch.float64: 53}


def compiled(f: Callable[..., Any], *args: Tensor) -> CompiledGraph:
    graph = make_fx(lambda *given: f(*given), tracing_mode="fake")(*args)
    made = compile_graph(graph, options=LowerOptions(rng="fast", verify=True))
    assert isinstance(made, CompiledGraph)
    return made


def calls(made: CompiledGraph) -> list[str]:
    """The ATen calls left but that which draws the seeds."""
    return [call.target for call in made.report().externs if "one draw of seeds" not in call.reason]


def seeds(draws: int) -> list[int]:
    """What a graph with so many random ops draws: two seeds for each."""
    torch.manual_seed(7)
    return torch.randint(-(1 << 63), (1 << 63) - 1, (2 * draws,)).tolist()


def bits(seed: int, count: int) -> list[int]:
    """SplitMix64 from ``seed`` on."""
    found = []
    for number in range(count):
        z = seed + number * 0x9E3779B97F4A7C15 & ALL
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & ALL
        z = (z ^ z >> 27) * 0x94D049BB133111EB & ALL
        found.append(z ^ z >> 31)
    return found


def shares(seed: int, count: int, digits: int, middle: bool = False) -> Tensor:
    """Numbers from 0 to 1 of that many digits; ``middle``: half a digit more."""
    digits -= middle
    values = [((b >> (64 - digits)) + 0.5 * middle) * 2.0**-digits for b in bits(seed, count)]
    return torch.tensor(values, dtype=torch.float64)


def draw(f: Callable[..., Any], *args: Tensor) -> Any:
    made = compiled(f, *args)
    assert not calls(made)
    torch.manual_seed(7)
    results = made(list(args))
    return results[0] if len(results) == 1 else results


@pytest.mark.parametrize("dtype", DIGITS, ids=str)
def test_uniform_numbers_have_the_upper_digits_of_the_generator(dtype: torch.dtype) -> None:
    x = torch.empty(5, 30, dtype=dtype)
    first, *_ = seeds(1)
    want = shares(first, 150, DIGITS[dtype]).view(5, 30)
    assert torch.equal(draw(torch.rand_like, x).double(), want)
    assert torch.equal(draw(lambda x: torch.rand(5, 30, dtype=dtype) + x * 0, x.zero_()).double(), want)
    got = draw(lambda x: aten.uniform(x, -2.0, 5.0), x).double()
    torch.testing.assert_close(got, want * 7 - 2, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DIGITS, ids=str)
def test_normal_and_exponential_numbers_follow_from_uniform_ones(dtype: torch.dtype) -> None:
    x, digits = torch.empty(400, dtype=dtype), max(DIGITS[dtype], 24)
    first, second = seeds(1)
    radius = (shares(first, 400, digits, middle=True).log() * -2).sqrt()
    normal = radius * (shares(second, 400, digits) * math.tau).cos()
    bound = {"rtol": 4 * torch.finfo(dtype).eps, "atol": 4e-6 if dtype is torch.float32 else 4 * torch.finfo(dtype).eps}
    torch.testing.assert_close(draw(torch.randn_like, x).double(), normal, **bound)
    torch.testing.assert_close(draw(lambda x: torch.randn(400, dtype=dtype), x).double(), normal, **bound)
    got = draw(lambda x: aten.normal_functional(x, 3.0, 0.5), x).double()
    torch.testing.assert_close(got, normal * 0.5 + 3, **bound)
    exponential = -shares(first, 400, digits, middle=True).log() / 2.5
    torch.testing.assert_close(draw(lambda x: aten.exponential(x, 2.5), x).double(), exponential, **bound)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("probability", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("dtype", DIGITS, ids=str)
def test_what_dropout_keeps_and_coins_show_is_below_the_probability(dtype: torch.dtype, probability: float) -> None:
    x = torch.arange(1, 301, dtype=dtype)
    first, *_ = seeds(1)
    single = torch.float64 if dtype is torch.float64 else torch.float32
    share = shares(first, 300, max(DIGITS[dtype], 24))
    kept = share < torch.tensor(1 - probability, dtype=single)
    result, mask = draw(lambda x: aten.native_dropout(x, probability, True), x)
    assert torch.equal(mask, kept)
    scale = 1 / (1 - probability) if probability < 1 else 0.0
    torch.testing.assert_close(result, torch.where(kept, x.to(single) * scale, 0.0).to(dtype))
    coins = draw(lambda x: aten.bernoulli(x, probability), x)
    assert torch.equal(coins, (share < torch.tensor(probability, dtype=single)).to(dtype))


@pytest.mark.parametrize(
    ("f", "low", "high", "dtype"),
    [
        (lambda x: torch.randint(10, (90,)), 0, 10, torch.int64),
        (lambda x: torch.randint(-5, 6, (90,), dtype=torch.int8), -5, 6, torch.int8),
        (lambda x: torch.randint(-128, 128, (90,), dtype=torch.int8), -128, 128, torch.int8),
        (lambda x: torch.randint(0, 256, (90,), dtype=torch.uint8), 0, 256, torch.uint8),
        (lambda x: torch.randint(0, 2, (90,), dtype=torch.bool), 0, 2, torch.bool),
        (lambda x: torch.randint(-2048, 2049, (90,), dtype=torch.float16), -2048, 2049, torch.float16),
        (lambda x: torch.randint(3, 3 + (1 << 31), (90,)), 3, 3 + (1 << 31), torch.int64),
        (lambda x: torch.randint_like(x, 7), 0, 7, torch.float32),
        (lambda x: torch.randint_like(x, -7, 7), -7, 7, torch.float32),
        (lambda x: torch.randint(4, 5, (90,)), 4, 5, torch.int64),
    ],
)
def test_integers_are_shares_of_their_range(f: Any, low: int, high: int, dtype: torch.dtype) -> None:
    first, *_ = seeds(1)
    got = draw(f, torch.empty(90))
    want = [low + ((b >> 32) * (high - low) >> 32) for b in bits(first, 90)]
    assert got.dtype == dtype and got.tolist() == want


def test_each_op_has_seeds_of_its_own_and_layouts_change_nothing() -> None:
    x = torch.empty(7, 4).t()
    one, _, two, _, three, _ = seeds(3)
    got = draw(lambda x: (torch.rand_like(x), torch.rand(()), torch.rand_like(x).double()), x)
    assert got[0].stride() == (1, 4)
    state = torch.get_rng_state()
    seeds(3)
    assert torch.equal(torch.get_rng_state(), state)  # no more seeds are drawn than are used
    for result, seed in zip(got, (one, two, three), strict=True):
        assert torch.equal(result.double(), shares(seed, result.numel(), 24).view(result.shape))


def test_integers_of_a_range_that_sizes_tell_are_drawn_by_aten() -> None:
    for f in (lambda x: torch.randint(x.shape[0], 100, (9,)), lambda x: torch.randint(0, x.shape[0], (9,))):
        graph = make_fx(f, tracing_mode="symbolic")(torch.empty(30))
        made = compile_graph(graph, options=LowerOptions(rng="fast"))
        torch.manual_seed(7)
        (got,) = made([torch.empty(20)])
        torch.manual_seed(7)
        assert torch.equal(got, f(torch.empty(20)))


@pytest.mark.parametrize(
    "f",
    [
        lambda x: aten.native_dropout(x, 0.5, False),
        lambda x: aten.native_dropout(x, 1.5, True),
        lambda x: aten.bernoulli(x, -0.1),
        lambda x: aten.bernoulli(x, 1.1),
        lambda x: torch.randint(0, (1 << 31) + 1, (3,)),
        lambda x: torch.randint(0, 257, (3,), dtype=torch.uint8),
        lambda x: torch.randint(-1, 2, (3,), dtype=torch.uint8),
        lambda x: torch.randint(0, 3, (3,), dtype=torch.bool),
        lambda x: torch.randint(-2049, 2049, (3,), dtype=torch.float16),
        lambda x: torch.randint(-2048, 2050, (3,), dtype=torch.float16),
        lambda x: aten.rand_like(x, dtype=torch.complex64),
        lambda x: aten.bernoulli(x.sigmoid()),
    ],
)
def test_what_eager_refuses_or_no_kernel_can_draw_is_left_to_aten(f: Any) -> None:
    assert len(calls(compiled(f, torch.zeros(3)))) == 1


def test_without_the_option_all_random_numbers_are_eagers() -> None:
    def f(x: Tensor) -> tuple[Tensor, ...]:
        return torch.rand_like(x), aten.bernoulli(x, 0.3), torch.randint(9, (4,)), aten.native_dropout(x, 0.5, True)[0]

    x = torch.ones(50)
    made = compile_graph(make_fx(f, tracing_mode="fake")(x))
    torch.manual_seed(3)
    got = made([x])
    torch.manual_seed(3)
    assert all(torch.equal(a, b) for a, b in zip(got, f(x), strict=True))
