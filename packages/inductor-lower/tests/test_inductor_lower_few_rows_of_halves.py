"""Products of few rows with a matrix of bfloat16, two numbers to a word: exact but for the order of the sum, for all
lengths, strides and numbers, on every instruction set."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import host_machine
from aotkit_inductor_lower.targets.cpu import ways as ways_module

pytestmark = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")

LEVELS = ["host", "x86-64-v3", *(["x86-64-v4"] if host_machine().vector_bits == 512 else [])]


def compiled(x: torch.Tensor, w: torch.Tensor, level: str = "host") -> CompiledGraph:
    graph = make_fx(lambda x, w: x @ w.t(), tracing_mode="fake")(x, w)
    made = compile_graph(graph, options=LowerOptions(contractions="generated", processor=level))
    assert isinstance(made, CompiledGraph) and not made.report().externs
    return made


def called(x: torch.Tensor, w: torch.Tensor, level: str = "host") -> torch.Tensor:
    """With watched memory, and the same without."""
    made = compiled(x, w, level)
    (got,) = bind_program(made.compiled, made.constants, redzones=True)([x, w])
    torch.testing.assert_close(made([x, w])[0], got, rtol=0, atol=0, equal_nan=True)
    return got


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ways in which kernels are written while a test runs."""
    found: list[str] = []
    original = ways_module.WAYS["few rows of halves"]

    def way(*args: object) -> object:
        write = original[1](*args)  # type: ignore[arg-type]
        found.extend(["halves"] if write is not None else [])
        return write

    monkeypatch.setattr(ways_module, "WAYS", {**ways_module.WAYS, "few rows of halves": (original[0], way)})
    return found


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 8, 9, 15])
@pytest.mark.parametrize("lengths", [(16, 17, 31, 32), (33, 63, 64, 127), (128, 255, 4099)], ids=str)
def test_sums_of_all_lengths_are_those_of_float64(
    lengths: tuple[int, ...], rows: int, level: str, ways: list[str]
) -> None:
    for k in lengths:
        x, w = torch.randn(rows, k).bfloat16(), torch.randn(67, k).bfloat16()
        true = x.double() @ w.double().t()
        bound = x.double().abs() @ w.double().abs().t() * 2**-20 + true.abs() * 2**-8
        assert ((called(x, w, level).double() - true).abs() <= bound).all(), k
    assert len(ways) == len(lengths)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("stride", [65, 66, 80, 131])
def test_rows_may_begin_anywhere(stride: int, level: str, ways: list[str]) -> None:
    memory, x = torch.randn(50 * stride + 1).bfloat16(), torch.randn(2, 65).bfloat16()
    w = memory[1:].as_strided((50, 65), (stride, 1), 1)
    torch.testing.assert_close(called(x, w, level), (x.double() @ w.double().t()).bfloat16(), rtol=1e-2, atol=1e-2)
    assert ways


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("place", [0, 1, 30, 31, 32, 63, 64, 70])
def test_infinities_and_nans_stay_where_they_are(place: int, level: str) -> None:
    for number in (float("inf"), -float("inf"), float("nan")):
        x, w = torch.ones(2, 71).bfloat16(), torch.ones(40, 71).bfloat16()
        w[3, place] = number
        got = called(x, w, level)
        assert torch.equal(got[:, 3].float().isnan(), torch.full((2,), number != number))
        assert (got[:, [*range(3), *range(4, 40)]] == 71).all()
        x[1, place], w[3, place] = number, 0
        got = called(x, w, level)
        assert (got[0] == torch.where(torch.arange(40) == 3, 70, 71).bfloat16()).all() and got[1, 3].isnan()
        assert torch.equal(got[1, 4].float().isnan(), torch.tensor(number != number))


@pytest.mark.parametrize("level", LEVELS)
def test_subnormal_numbers_count(level: str) -> None:
    tiny = torch.full((20, 64), 2.0**-133).bfloat16()
    x = torch.full((1, 64), 2.0**20).bfloat16()
    assert (called(x, tiny, level) == 2.0**-107).all()
    assert (called(tiny[:1], torch.full((20, 64), 2.0**20).bfloat16(), level) == 2.0**-107).all()


def test_numbers_of_one_thread_are_those_of_two() -> None:
    x, w = torch.randn(1, 1000).bfloat16(), torch.randn(3000, 1000).bfloat16()
    made, before = compiled(x, w), torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        two = made([x, w])[0]
        torch.set_num_threads(1)
        assert torch.equal(two, made([x, w])[0])
    finally:
        torch.set_num_threads(before)


def test_other_types_and_orders_of_memory_are_left_to_other_ways(ways: list[str]) -> None:
    called(torch.randn(1, 64), torch.randn(40, 64))
    called(torch.randn(1, 64).half(), torch.randn(40, 64).half())
    called(torch.randn(1, 64).bfloat16(), torch.randn(64, 40).bfloat16().t())
    assert not ways
