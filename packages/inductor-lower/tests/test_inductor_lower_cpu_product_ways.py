"""Each way to write a product against the interpreter: drawn sizes and layouts, and numbers that need care."""

import math
import random
import typing
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph, decompositions, interpret_program
from aotkit_inductor_lower.driver import lower_graph
from aotkit_inductor_lower.targets.cpu import Machine, processor_machine
from aotkit_inductor_lower.targets.cpu import generate as generator
from aotkit_inductor_lower.targets.cpu.ways import WAYS, ways_of

Drawn = tuple[Callable[..., torch.Tensor], list[torch.Tensor]]
Draw = Callable[[random.Random], Drawn]

NUMBERS = (math.nan, math.inf, -math.inf, -0.0, 1e-40, 6e-8, 3e38, 6e4)
CAREFUL = 2  # draws of each way in which one number needs care; as many as have none


def number(rng: random.Random, least: int, most: int, step: int = 1) -> int:
    return step * rng.randint(-(-least // step), most // step)


def strided(rng: random.Random, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    """A matrix by rows, by columns, or with a margin."""
    form = rng.choice(["rows", "columns", "margin"])
    made = torch.randn(columns, rows).t() if form == "columns" else torch.randn(rows, columns + 3 * (form == "margin"))
    return made.to(dtype)[:, :columns]


def drawn_product(dtype: torch.dtype) -> Draw:
    def draw(rng: random.Random) -> Drawn:
        rows, summed, columns = number(rng, 17, 70), number(rng, 17, 90), number(rng, 33, 130)
        args = [strided(rng, rows, summed, dtype), strided(rng, summed, columns, dtype), torch.randn(columns).to(dtype)]
        return rng.choice([lambda x, w, b: x @ w, lambda x, w, b: F.gelu(x @ w + b)]), args

    return draw


def drawn_pairs(rng: random.Random) -> Drawn:
    """Neighbors of both factors are neighbors in the sum."""
    rows, summed, columns = number(rng, 17, 70), number(rng, 64, 128, 2), number(rng, 33, 130)
    x, w, b = (torch.randn(*sizes).bfloat16() for sizes in ((rows, summed), (columns, summed), (columns,)))
    return rng.choice([lambda x, w, b: F.linear(x, w), lambda x, w, b: F.gelu(F.linear(x, w, b))]), [x, w, b]


def drawn_few_rows(dtype: torch.dtype, along: str) -> Draw:
    def draw(rng: random.Random) -> Drawn:
        rows, summed, columns = number(rng, 1, 15), number(rng, 64, 200, 4), number(rng, 64, 200, 4)
        x, b = torch.randn(rows, summed).to(dtype), torch.randn(columns).to(dtype)
        if along == "sums":
            w = torch.randn(columns, summed).to(dtype)
            return rng.choice([lambda x, w, b: F.linear(x, w), lambda x, w, b: F.silu(F.linear(x, w, b))]), [x, w, b]
        return (lambda x, w, b: x @ w + b), [x, torch.randn(summed, columns).to(dtype), b]

    return draw


def drawn_four_bits(dtype: torch.dtype, least: int, most: int) -> Draw:
    def draw(rng: random.Random) -> Drawn:
        group = rng.choice([32, 64])
        rows, columns, summed = number(rng, least, most), number(rng, 64, 128, 64), group * rng.randint(2, 3)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(torch.randint(0, 16, (columns, summed)).int(), 2)
        scales = torch.rand(summed // group, columns, 2).to(dtype)
        args = [torch.randn(rows, summed).to(dtype), packed, scales]
        return (lambda x, p, s: torch.ops.aten._weight_int4pack_mm_for_cpu(x, p, group, s)), args

    return draw


def drawn_bytes(least: int, most: int) -> Draw:
    def draw(rng: random.Random) -> Drawn:
        rows, summed, columns = number(rng, least, most), number(rng, 64, 200, 4), number(rng, 64, 200, 4)
        x, w = (torch.randint(-128, 128, sizes, dtype=torch.int8) for sizes in ((rows, summed), (columns, summed)))
        return (lambda x, w, s: torch._int_mm(x, w.t()) * s), [x, w, torch.rand(columns)]

    return draw


def drawn_row_and_bytes(rng: random.Random) -> Drawn:
    """Weights of 8 bits that are widened on the way."""
    summed, columns = number(rng, 64, 320, 64), number(rng, 64, 200)
    x, w = torch.randn(1, summed).bfloat16(), torch.randint(-128, 128, (columns, summed), dtype=torch.int8)
    return (lambda x, w, s: (x @ w.to(x.dtype).t()) * s), [x, w, torch.rand(columns).bfloat16()]


DRAWN: dict[str, list[Draw]] = {
    "product": [drawn_product(torch.float32), drawn_product(torch.float64), drawn_product(torch.float16)],
    "product in pairs": [drawn_pairs, drawn_product(torch.bfloat16)],
    "product in tile registers": [drawn_pairs],
    "product of bytes": [drawn_bytes(17, 50)],
    "few rows of bytes": [drawn_bytes(1, 16)],
    "few rows of bytes in digits": [drawn_row_and_bytes],
    "few rows in digits": [drawn_four_bits(torch.bfloat16, 1, 1)],
    "few rows in short digits": [drawn_four_bits(torch.bfloat16, 1, 1)],
    "few rows in pairs": [drawn_four_bits(torch.bfloat16, 2, 15)],
    "few rows in panels": [drawn_four_bits(torch.float32, 1, 15)],
    "few rows of halves": [drawn_few_rows(torch.bfloat16, "sums")],
    "few rows along columns": [drawn_few_rows(torch.float32, "columns")],
    "few rows along sums": [drawn_few_rows(torch.float32, "sums")],
}
OTHERS = {way for way in WAYS if way.startswith("attention")} | {"loops", "sort in digits"}
HOST = processor_machine("host")


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Machine]]:
    """The ways of the kernels that were written, and the machines for which."""
    seen: list[tuple[str, Machine]] = []
    plain = generator.way_of

    def way_of(kernel: typing.Any, machine: Machine, *more: typing.Any) -> typing.Any:
        found = plain(kernel, machine, *more)
        seen.append((found[0], machine))
        return found

    monkeypatch.setattr(generator, "way_of", way_of)
    return seen


def with_care(rng: random.Random, args: list[torch.Tensor]) -> None:
    """Put a number that needs care somewhere into a factor of floats."""
    factor = rng.choice([x for x in args[:2] if x.is_floating_point()])
    factor[rng.randrange(factor.shape[0]), rng.randrange(factor.shape[1])] = rng.choice(NUMBERS)


def check_alike(got: torch.Tensor, want: torch.Tensor, summed: int) -> None:
    """Equal where it is not finite, else as near as two orders of a sum are."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    assert torch.equal(got.isnan(), want.isnan())
    infinite = want.isinf() | got.isinf()
    assert torch.equal(got[infinite], want[infinite])
    near = ~(want.isnan() | infinite)
    largest = want[near].double().abs().max().item() if near.any() else 0.0
    apart = (got[near].double() - want[near].double()).abs().max().item() if near.any() else 0.0
    accuracy = torch.finfo(want.dtype).eps if want.dtype in (torch.bfloat16, torch.float16) else 0.0
    exact = torch.finfo(torch.float64 if want.dtype is torch.float64 else torch.float32).eps
    assert apart <= largest * (2 * accuracy + 2 * math.sqrt(summed) * exact)


def test_there_is_a_draw_for_each_way() -> None:
    assert ways_of(HOST) <= DRAWN.keys() | OTHERS


@pytest.mark.covers("F5d.6")
@pytest.mark.parametrize("way", sorted(ways_of(HOST) & DRAWN.keys()))
def test_products_are_what_the_interpreter_computes(way: str, written: list[tuple[str, Machine]]) -> None:
    calls = 0
    for kind, draw in enumerate(DRAWN[way]):
        for seed in range(2 * CAREFUL):
            rng = random.Random(100 * kind + seed)
            torch.manual_seed(100 * kind + seed)
            f, args = draw(rng)
            if seed >= CAREFUL and "bytes" not in way:
                with_care(rng, args)
            graph = make_fx(f, decompositions(), tracing_mode="fake")(*args)
            options = LowerOptions(contractions="generated")
            made = compile_graph(graph, options=options)
            assert isinstance(made, CompiledGraph)
            calls += len(made.report().externs)
            (want,) = interpret_program(lower_graph(graph, options=options), args)
            assert isinstance(want, torch.Tensor)
            check_alike(made(list(args))[0], want, args[0].shape[1])
    ((_, machine), *_) = written  # not this one where another is emulated
    here = ways_of(machine)
    taken = way == "product in pairs" and "product in tile registers" in here  # which come first
    assert way not in here or taken or (not calls and sum(name == way for name, _ in written) >= CAREFUL)
