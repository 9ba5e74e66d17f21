"""Products of one row of bfloat16 with a matrix of bytes, in whole numbers: those of float64, for all numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import host_machine
from aotkit_inductor_lower.targets.cpu import ways as ways_module
from aotkit_inductor_lower.targets.cpu.products import multiplies_bytes
from aotkit_inductor_lower.targets.cpu.render import few_rows_of_bytes_in_digits as in_digits

needs_instruction = pytest.mark.skipif(not multiplies_bytes(host_machine()), reason="there is no AVX-512 VNNI")
LEVELS = ["x86-64", "x86-64-v3", *(["x86-64-v4"] if host_machine().vector_bits == 512 else [])]


def gated(k: int) -> torch.Tensor:
    return torch.nn.functional.silu(torch.randn(1, k)) * torch.randn(1, k)


def spread(k: int) -> torch.Tensor:
    return torch.randn(1, k) * torch.exp2(torch.randint(-20, 20, (1, k)))


def with_one(number: float) -> Callable[[int], torch.Tensor]:
    """Other numbers beside it, so that it is the largest or the smallest."""

    def make(k: int) -> torch.Tensor:
        x = torch.randn(1, k)
        x[0, k // 3] = number
        return x

    return make


ROWS: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": lambda k: torch.randn(1, k),
    "gated": gated,
    "spread": spread,
    "zeros": lambda k: torch.zeros(1, k),
    "largest significands": lambda k: torch.full((1, k), 255 / 256 * 8),
    "negative": lambda k: torch.full((1, k), -255 / 256 * 8),
    "tiny": lambda k: torch.randn(1, k) * 1e-36,
    "subnormal": lambda k: torch.randn(1, k) * 1e-39,
    "huge": lambda k: torch.randn(1, k) * 1e30,
    "one large": with_one(3e6),
    "one small": with_one(1e-9),
}


def compiled(k: int, columns: int) -> CompiledGraph:
    x, w = torch.randn(1, k).bfloat16(), torch.zeros(columns, k, dtype=torch.int8)
    graph = make_fx(lambda x, w: x @ w.to(x.dtype).t(), tracing_mode="fake")(x, w)
    made = compile_graph(graph, options=LowerOptions(contractions="generated"))
    assert isinstance(made, CompiledGraph)
    return made


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is written in this way while a test runs."""
    found: list[str] = []
    name = "few rows of bytes in digits"
    suits, original = ways_module.WAYS[name]

    def way(*args: object) -> object:
        write = original(*args)  # type: ignore[arg-type]
        found.extend([name] if write is not None else [])
        return write

    monkeypatch.setattr(ways_module, "WAYS", {**ways_module.WAYS, name: (suits, way)})
    return found


@needs_instruction
@pytest.mark.parametrize("chunk", [64, 256, in_digits.CHUNK])
@pytest.mark.parametrize(("k", "columns"), [(64, 67), (320, 130), (1024, 17), (4160, 19)])
def test_sums_are_those_of_float64(
    k: int, columns: int, chunk: int, ways: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(in_digits, "CHUNK", chunk)
    made = compiled(k, columns)
    assert ways
    call = bind_program(made.compiled, made.constants, redzones=True)
    w = torch.randint(-128, 128, (columns, k), dtype=torch.int8)
    w[0], w[1] = 127, -128
    for name, row in ROWS.items():
        x = row(k).bfloat16()
        true = x.double() @ w.double().t()
        bound = x.double().abs() @ w.double().abs().t() * 2**-21 + true.abs() * 2**-8 + 2**-133
        assert ((call([x, w])[0].double() - true).abs() <= bound).all(), name


@needs_instruction
@pytest.mark.parametrize("number", [float("inf"), -float("inf"), float("nan")])
def test_infinities_and_nans_are_those_of_floats(number: float, ways: list[str]) -> None:
    made = compiled(4160, 40)
    assert ways
    w = torch.randint(-3, 4, (40, 4160), dtype=torch.int8)
    for place in (0, 77, 4095, 4096, 4159):
        x = torch.randn(1, 4160).bfloat16()
        x[0, place] = number
        got, want = made([x, w])[0], x @ w.to(x.dtype).t()
        torch.testing.assert_close(got.isnan(), want.isnan())
        torch.testing.assert_close(got.isinf() * got.sign(), want.isinf() * want.sign())


@pytest.mark.parametrize(("k", "dtype"), [(96, torch.bfloat16), (128, torch.float32)], ids=str)
def test_other_lengths_and_types_are_floats(k: int, dtype: torch.dtype, ways: list[str]) -> None:
    x, w = torch.randn(1, k, dtype=dtype), torch.randint(-128, 128, (40, k), dtype=torch.int8)
    graph = make_fx(lambda x, w: x @ w.to(x.dtype).t(), tracing_mode="fake")(x, w)
    got = compile_graph(graph, options=LowerOptions(contractions="generated"))([x, w])[0]
    torch.testing.assert_close(got, (x.double() @ w.double().t()).to(dtype), rtol=1.6e-2, atol=1e-2)
    assert not ways


@pytest.mark.parametrize("processor", LEVELS)
def test_levels_without_the_instruction_take_floats(processor: str, ways: list[str]) -> None:
    x, w = torch.randn(1, 128).bfloat16(), torch.randint(-128, 128, (40, 128), dtype=torch.int8)
    graph = make_fx(lambda x, w: x @ w.to(x.dtype).t(), tracing_mode="fake")(x, w)
    got = compile_graph(graph, options=LowerOptions(contractions="generated", processor=processor))([x, w])[0]
    torch.testing.assert_close(got, (x.double() @ w.double().t()).bfloat16(), rtol=1.6e-2, atol=1e-2)
    assert not ways


@pytest.mark.parametrize("threads", [2, 3])
def test_results_do_not_depend_on_the_number_of_threads(threads: int) -> None:
    made, before = compiled(1024, 2115), torch.get_num_threads()
    x, w = torch.randn(1, 1024).bfloat16(), torch.randint(-128, 128, (2115, 1024), dtype=torch.int8)
    try:
        torch.set_num_threads(1)
        one = made([x, w])[0]
        torch.set_num_threads(threads)
        assert torch.equal(made([x, w])[0], one)
    finally:
        torch.set_num_threads(before)
