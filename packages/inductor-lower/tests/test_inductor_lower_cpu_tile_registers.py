"""Products in the tile registers of AMX: right for all sizes, layouts, numbers and threads."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.driver import compile_to_program
from aotkit_inductor_lower.errors import BindError, CodegenError
from aotkit_inductor_lower.graph_partition import CompiledParts
from aotkit_inductor_lower.ir.interpret import interpret_program
from aotkit_inductor_lower.native import compile_for, machine_for
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu import load as load_module
from aotkit_inductor_lower.targets.cpu import machine as machine_module
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.machine import processor_machine
from aotkit_inductor_lower.targets.cpu.tile_forms import FORMS

_spec = importlib.util.spec_from_file_location("tile_kernels", Path(__file__).with_name("tile_kernels.py"))
tile_kernels = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tile_kernels)
needs_tiles = tile_kernels.needs_tiles
Program = Callable[..., torch.Tensor]
SIZES = [(16, 16, 16), (33, 17, 47), (70, 100, 65), (64, 64, 64), (300, 40, 130), (130, 800, 96), (600, 64, 33)]
PRECISION_ERRORS = {"highest": 3e-7, "high": 1e-5, "medium": 5e-3}
INFINITY, NAN = float("inf"), float("nan")


@pytest.fixture
def precision() -> Iterator[Callable[[str], None]]:
    before = torch.get_float32_matmul_precision()
    yield torch.set_float32_matmul_precision
    torch.set_float32_matmul_precision(before)


def generated(f: Program, *args: torch.Tensor, **options: Any) -> CompiledGraph:
    """The program with all its products generated, in tile registers."""
    graph = make_fx(f, tracing_mode="fake")(*args)
    compiled = compile_graph(graph, options=LowerOptions(contractions="generated", **options))
    assert isinstance(compiled, CompiledGraph) and not compiled.report().externs
    assert compiled.compiled.binary.facts.get("tiles")
    return compiled


def run(f: Program, *args: torch.Tensor, **options: Any) -> torch.Tensor:
    """As exact as eager, with nothing read or written beside the tensors; and the same on one thread."""
    compiled = generated(f, *args, **options)
    (got,) = compiled(list(args))
    want, true = f(*args), f(*(x.double() for x in args))
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    largest = true.abs().max().item() or 1.0
    off, eager = ((x.double() - true).abs().max().item() / largest for x in (got, want))
    assert off <= 3 * (eager + 2e-6)
    watched = bind_program(compiled.compiled, compiled.constants, redzones=True)
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        assert torch.equal(watched(list(args))[0], got)
    finally:
        torch.set_num_threads(threads)
    return got


@needs_tiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_all_orientations(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = size
    x, y = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    run(lambda a, b: a @ b, x, y)
    run(lambda a, b: a @ b.t(), x, torch.randn(n, k, dtype=dtype))
    run(lambda a, b: a.t() @ b, torch.randn(k, m, dtype=dtype), y)
    run(lambda a, b: (b.t() @ a.t()).t(), x, y)


@needs_tiles
@pytest.mark.parametrize("told", sorted(FORMS.keys() - {"bf16", "int8"}))
def test_a_product_is_as_exact_as_torch_is_told(told: str, precision: Callable[[str], None]) -> None:
    x, y = torch.randn(100, 333), torch.randn(333, 70)
    precision(told)
    (got,) = generated(torch.mm, x, y)([x, y])
    true = x.double() @ y.double()
    error = ((got.double() - true).norm() / true.norm()).item()
    assert PRECISION_ERRORS[told] / 50 < error < PRECISION_ERRORS[told]


@needs_tiles
def test_long_sums_go_to_memory_and_back() -> None:
    x, y = torch.randn(40, 5000), torch.randn(5000, 40)
    run(torch.mm, x, y)
    run(torch.mm, x.bfloat16(), y.bfloat16())


@needs_tiles
def test_what_comes_before_and_after_is_in_the_kernel() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.addmm(b, x, w.relu())) + rest

    args = torch.randn(70, 45), torch.randn(45, 51), torch.randn(51), torch.randn(70, 51)
    run(layer, *args)
    assert generated(layer, *args).report().kernel_count == 1
    scaled = torch.randn(70, 45), torch.randint(-128, 127, (96, 45), dtype=torch.int8).float() / 16, torch.rand(96)
    run(lambda x, w, s: F.silu(x @ (w * s[:, None]).t()), *scaled)


@needs_tiles
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batches(dtype: torch.dtype) -> None:
    q, k = torch.randn(2, 3, 49, 32, dtype=dtype), torch.randn(2, 3, 49, 32, dtype=dtype)
    run(lambda q, k: torch.bmm(q.reshape(6, 49, 32), k.reshape(6, 49, 32).transpose(1, 2)) * 0.25, q, k)
    run(lambda q, k: torch.bmm(q.reshape(6, 49, 32).transpose(1, 2), k.reshape(6, 49, 32)), q, k)


@needs_tiles
def test_sums_over_several_dimensions() -> None:
    x, y = torch.randn(40, 3, 50), torch.randn(33, 3, 50)
    run(lambda x, y: torch.einsum("isk,jsk->ij", x.transpose(0, 1).contiguous().transpose(0, 1), y), x, y)


# -- numbers that pieces of bfloat16 have no place for -------------------------------------------------------------


@pytest.mark.sample(ways=1)
@needs_tiles
@pytest.mark.parametrize("told", ["highest", "high"])
@pytest.mark.parametrize("number", [INFINITY, -INFINITY, NAN, 3.4e38, -3.402e38])
@pytest.mark.parametrize("side", [0, 1])
def test_numbers_that_are_not_finite(number: float, side: int, told: str, precision: Callable[[str], None]) -> None:
    args = [torch.randn(70, 90) * 1e-3, torch.randn(90, 50) * 1e-3]
    args[side][33, 17] = number
    want = args[0] @ args[1]
    precision(told)
    (got,) = generated(torch.mm, *args)(list(args))
    torch.testing.assert_close(got, want, rtol=2e-5 if told == "highest" else 1e-3, atol=1e-9, equal_nan=True)


@pytest.mark.sample(ways=1)
@needs_tiles
@pytest.mark.parametrize("scale", [1e-20, 1e-30, 1e-38, 1e-42, 1e-45])
@pytest.mark.parametrize("other", [1e-3, 1.0, 1e15, 1e30])
def test_numbers_that_tiles_take_for_zero(scale: float, other: float) -> None:
    x, y = torch.randn(40, 64) * scale, torch.randn(64, 40) * other
    x[:, 7], y[5] = 0.0, 0.0
    (got,) = generated(torch.mm, x, y)([x, y])
    true = x.double() @ y.double()
    bound = 1e-6 * (x.double().abs() @ y.double().abs()) + 64 * 2.0**-149
    assert ((got.double() - true).abs() <= bound).all()
    (turned,) = generated(torch.mm, y, x)([y, x])
    assert (
        (turned.double() - y.double() @ x.double()).abs()
        <= 1e-6 * (y.abs().double() @ x.abs().double()) + 64 * 2.0**-149
    ).all()


@needs_tiles
def test_zeros_among_tiny_numbers_stay_zero() -> None:
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    x[:40] = 0.0
    x[50] *= 1e-41
    (got,) = generated(torch.mm, x, y)([x, y])
    assert (got[:40] == 0).all()
    assert (got[50].double() - x[50].double() @ y.double()).abs().max() <= 64 * 2.0**-149
    (got,) = generated(torch.mm, x, torch.zeros(64, 64))([x, torch.zeros(64, 64)])
    assert (got == 0).all()


@needs_tiles
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 10**6), spread=st.integers(1, 140), center=st.integers(-100, 60))
def test_factors_of_any_exponents(seed: int, spread: int, center: int) -> None:
    """Against float64, relative to the sum of absolute products: where nothing overflows, nothing is lost."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(48, 70, generator=generator), torch.randn(70, 33, generator=generator)
    x = torch.ldexp(x, torch.randint(center - spread, center + spread, x.shape, generator=generator))
    y = torch.ldexp(y, torch.randint(-spread - center, spread - center, y.shape, generator=generator))
    (got,) = EXPONENTS([x, y])
    true, whole = x.double() @ y.double(), x.double().abs() @ y.double().abs()
    fits = whole < 1e38
    assert torch.isfinite(got[fits]).all()
    assert ((got.double() - true).abs()[fits] <= 1e-6 * whole[fits] + 70 * 2.0**-149).all()
    over = true.abs() > 1e39
    assert not torch.isfinite(got[over]).any()


EXPONENTS = generated(torch.mm, torch.empty(48, 70), torch.empty(70, 33)) if host_machine().has("amx-bf16") else None


# -- bytes ---------------------------------------------------------------------------------------------------------

needs_tiles_of_bytes = pytest.mark.skipif(
    not (host_machine().has("amx-bf16") and host_machine().has("amx-int8")),
    reason="products of bytes in tile registers run where the processor and the system have AMX-INT8",
)


@needs_tiles_of_bytes
@pytest.mark.parametrize("size", [(96, 64, 64), (70, 100, 90), (33, 300, 200), (17, 65, 129), (40, 5000, 64)], ids=str)
def test_products_of_bytes_are_exact(size: tuple[int, int, int]) -> None:
    m, k, n = size
    x, rows, columns = (torch.randint(-128, 128, s, dtype=torch.int8) for s in ((m, k), (n, k), (k, n)))
    x[:, : k // 2], rows[:, : k // 2] = -128, -128  # the largest sums
    scale, own = torch.rand(n), torch.rand(m, 1)
    for f, args in (
        (lambda x, w, s, o: torch._int_mm(x, w.t()) * o * s, (x, rows, scale, own)),
        (torch._int_mm, (x, columns)),
    ):
        made = generated(f, *args)
        (got,) = made(list(args))
        assert torch.equal(got, f(*args)) and made.report().kernel_count == 1
        watched = bind_program(made.compiled, made.constants, redzones=True)
        assert torch.equal(watched(list(args))[0], got)
    packed = constant(lambda x: torch._int_mm(x, rows.t()) * scale, x)
    assert any(name.endswith("_packed") for name in packed.constants)
    assert torch.equal(packed([x])[0], torch._int_mm(x, rows.t()) * scale)


@needs_tiles_of_bytes
def test_bytes_are_left_to_onednn_without_being_asked_for() -> None:
    x, w = (torch.randint(-128, 128, (512, 512), dtype=torch.int8) for _ in range(2))
    made = compile_graph(make_fx(lambda x, w: torch._int_mm(x, w.t()), tracing_mode="fake")(x, w))
    assert isinstance(made, CompiledGraph)
    assert [call.target for call in made.report().externs] == ["aten._int_mm.default"]


# -- matrices that never change ----------------------------------------------------------------------------------


def constant(f: Program, *args: torch.Tensor, packed: bool = True) -> CompiledGraph:
    """The program whose other tensors never change, packed or not."""
    graph = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(*args)
    options = LowerOptions(contractions="generated", pack_constants=packed, verify=True)
    compiled = compile_graph(graph, options=options)
    assert isinstance(compiled, CompiledGraph) and compiled.compiled.binary.facts.get("tiles")
    return compiled


def are_packed(compiled: CompiledGraph) -> bool:
    """Whether all constants are in panels."""
    return all(name.endswith("_packed") for name in compiled.constants)


@needs_tiles
@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", [(96, 64, 64), (70, 100, 90), (33, 300, 200), (200, 65, 129), (40, 2500, 96)], ids=str)
def test_packed_matrices_give_the_same_bits(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = size
    x, rows, columns, bias = (torch.randn(shape).to(dtype) for shape in ((m, k), (n, k), (k, n), (n,)))
    for f in (lambda a: F.gelu(F.linear(a, rows, bias)), lambda a: a @ columns):
        packed, plain = constant(f, x), constant(f, x, packed=False)
        assert not are_packed(plain) and any(name.endswith("_packed") for name in packed.constants)
        (got,) = packed([x])
        assert torch.equal(got, plain([x])[0])
        watched = bind_program(packed.compiled, packed.constants, redzones=True)
        assert torch.equal(watched([x])[0], got)


@needs_tiles
def test_the_interpreter_adds_the_pieces_of_a_packed_matrix() -> None:
    w, x = torch.randn(70, 50), torch.randn(40, 50)
    graph = make_fx(lambda a: a @ w.t(), tracing_mode="fake", _allow_non_fake_inputs=True)(x)
    made = compile_to_program(graph, options=LowerOptions(contractions="generated", pack_constants=True))
    assert not isinstance(made, CompiledParts)
    ((name, pieces),) = made.constants.items()
    assert name.endswith("_packed") and pieces.dtype is torch.bfloat16 and pieces.shape == (3, 2, 3, 16, 32, 2)
    (got,) = interpret_program(made.scheduled, [x], made.constants)
    torch.testing.assert_close(got, x @ w.t())


@needs_tiles
@pytest.mark.parametrize("number", [INFINITY, NAN, 3.402e38, 1e-39])
def test_a_matrix_with_numbers_that_pieces_do_not_hold_is_not_packed(number: float) -> None:
    w, x = torch.randn(70, 50), torch.randn(40, 50)
    w[33, 17] = number
    compiled = constant(lambda a: a @ w.t(), x)
    assert not are_packed(compiled)
    assert any("sums of three of bfloat16" in decision.reason for decision in compiled.report().packed)
    torch.testing.assert_close(compiled([x])[0], x @ w.t(), rtol=2e-5, atol=1e-5, equal_nan=True)


@needs_tiles
@pytest.mark.parametrize(("scale", "number"), [(1e-30, 0.0), (1.0, INFINITY), (1.0, NAN), (1e-3, 3.4e38), (1.0, 1e-41)])
def test_sums_over_a_packed_matrix_are_checked_like_others(scale: float, number: float) -> None:
    w, x = torch.randn(64, 50) * scale, torch.randn(40, 50) * (1e-3 if scale == 1.0 else scale**0.3)
    x[31, 7] = number
    packed, plain = (constant(lambda a: a @ w.t(), x, packed=packed) for packed in (True, False))
    assert are_packed(packed)
    got, want = packed([x])[0], plain([x])[0]
    assert torch.equal(got.nan_to_num(7.0), want.nan_to_num(7.0)) and torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got, x @ w.t(), rtol=2e-5, atol=float(want[0].abs().max()) * 1e-6, equal_nan=True)


# -- what is not there -------------------------------------------------------------------------------------------


def test_code_for_tiles_is_made_on_any_processor_and_can_be_read() -> None:
    graph = make_fx(lambda x, w: F.relu(x @ w), tracing_mode="fake")(torch.empty(64, 64), torch.empty(64, 64))
    compiled = compile_graph(graph, options=LowerOptions(contractions="generated", processor="interpreter"))
    assert isinstance(compiled, CompiledGraph)
    machine = generic_machine(512)
    machine = replace(machine, features=machine.features + ",+amx-tile,+amx-bf16,+avx512bf16")
    program = compile_to_program(graph, options=LowerOptions(contractions="generated")).scheduled
    text = generate(program, machine, keep_text=True).text
    assert "tdpbf16ps" in text and "aten.relu" in text
    assert compile_for(machine_for(machine.triple, machine.cpu, machine.features), text)


@needs_tiles
def test_a_process_that_may_not_use_tiles_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = generated(torch.mm, torch.empty(64, 64), torch.empty(64, 64))
    monkeypatch.setattr(load_module, "tiles_allowed", lambda: False)
    with pytest.raises(BindError, match=r"processor with AMX.*compile again"):
        bind_program(compiled.compiled, compiled.constants)


@needs_tiles
@pytest.mark.parametrize("processor", ["x86-64-v4", "x86-64-v3"])
def test_other_levels_have_no_tiles(processor: Any) -> None:
    x, y = torch.randn(64, 64), torch.randn(64, 64)
    graph = make_fx(torch.mm, tracing_mode="fake")(x, y)
    compiled = compile_graph(graph, options=LowerOptions(contractions="generated", processor=processor))
    assert isinstance(compiled, CompiledGraph) and "tiles" not in compiled.compiled.binary.facts


@needs_tiles
def test_the_level_with_tiles_can_be_chosen() -> None:
    x, y = torch.randn(70, 64), torch.randn(64, 90)
    run(torch.mm, x, y, processor="x86-64-amx")
    run(torch.mm, x.bfloat16(), y.bfloat16(), processor="x86-64-amx")


def test_a_processor_without_tiles_refuses_their_level(monkeypatch: pytest.MonkeyPatch) -> None:
    lesser = replace(host_machine(), features=host_machine().features.replace("+amx", "-amx"))
    monkeypatch.setattr(machine_module, "host_machine", lambda: lesser)
    with pytest.raises(CodegenError, match="can't run code for x86-64-amx"):
        processor_machine("x86-64-amx")


# -- which products are tiles --------------------------------------------------------------------------------------

LINEAR = lambda x, w: F.linear(x, w)


@needs_tiles
@pytest.mark.parametrize(
    ("f", "sizes", "dtype", "ours"),
    [
        (LINEAR, [(512, 256), (256, 256)], torch.float32, True),
        (LINEAR, [(48, 256), (256, 256)], torch.float32, False),  # few rows: packing would take most of the time
        (LINEAR, [(128, 128), (128, 128)], torch.float32, False),
        (LINEAR, [(128, 512), (256, 512)], torch.bfloat16, True),
        (LINEAR, [(512, 256), (256, 256)], torch.bfloat16, False),  # oneDNN is as fast
        (torch.mm, [(512, 768), (768, 768)], torch.bfloat16, False),
        (lambda g, x: g.t() @ x, [(512, 768), (512, 768)], torch.bfloat16, True),
    ],
)
def test_products_that_tiles_are_faster_for_are_ours(f: Program, sizes: Any, dtype: torch.dtype, ours: bool) -> None:
    args = [torch.randn(size).to(dtype) for size in sizes]
    graph = make_fx(f, tracing_mode="fake")(*args)
    for contractions, wanted in (("auto", ours), ("aten", False)):
        compiled = compile_graph(graph, options=LowerOptions(contractions=contractions))  # type: ignore[arg-type]
        assert isinstance(compiled, CompiledGraph)
        assert bool(compiled.compiled.binary.facts.get("tiles")) is wanted
