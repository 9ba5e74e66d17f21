"""Products of matrices that the CPU computes by kernels of its own: right for all sizes, layouts, numbers, threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph, lower_graph
from aotkit_inductor_lower.driver import compile_to_program, schedule_program
from aotkit_inductor_lower.graph_partition import CompiledParts
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.walk import buffers_of, contractions
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.choose import choose_form
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.render import blocked_product

pytestmark = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")

SIZES = [(6, 16, 16), (7, 17, 19), (29, 300, 70), (64, 64, 64), (65, 129, 200), (300, 40, 65), (18, 16, 129)]
LEVELS = ["x86-64-v3", *(["x86-64-v4"] if host_machine().vector_bits == 512 else [])]
Program = Callable[..., torch.Tensor]


def generated(f: Program, *args: torch.Tensor, mode: str = "fake", **options: Any) -> CompiledGraph:
    """The program with all its products generated, which the report has to confirm."""
    graph = make_fx(f, tracing_mode=mode)(*args)
    compiled = compile_graph(graph, options=LowerOptions(contractions="generated", **options))
    assert isinstance(compiled, CompiledGraph)
    assert not compiled.report().externs
    return compiled


def assert_as_exact_as_eager(f: Program, *args: torch.Tensor, got: torch.Tensor) -> None:
    """Against float64: at most three times as far off as eager, and two millionths."""
    want, true = f(*args), f(*(x.double() for x in args))
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    largest = true.abs().max().item() or 1.0
    off, eager = ((x.double() - true).abs().max().item() / largest for x in (got, want))
    assert off <= 3 * (eager + (1e-14 if want.dtype is torch.float64 else 2e-6))


def run(f: Program, *args: torch.Tensor, **options: Any) -> torch.Tensor:
    compiled = generated(f, *args, **options)
    (got,) = compiled(list(args))
    assert_as_exact_as_eager(f, *args, got=got)
    watched = bind_program(compiled.compiled, compiled.constants, redzones=True)
    assert torch.equal(watched(list(args))[0], got)
    return got


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_products_of_all_orientations(size: tuple[int, int, int], dtype: torch.dtype) -> None:
    m, k, n = size
    x, y = torch.randn(m, k, dtype=dtype), torch.randn(k, n, dtype=dtype)
    run(lambda a, b: a @ b, x, y)
    run(lambda a, b: a @ b.t(), x, torch.randn(n, k, dtype=dtype))
    run(lambda a, b: a.t() @ b, torch.randn(k, m, dtype=dtype), y)
    run(lambda a, b: a.t() @ b.t(), torch.randn(k, m, dtype=dtype), torch.randn(n, k, dtype=dtype))


@pytest.mark.parametrize("size", SIZES[:5], ids=str)
def test_what_becomes_of_a_product_is_in_its_kernel(size: tuple[int, int, int]) -> None:
    m, k, n = size

    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor, rest: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.addmm(b, x, w.relu())) + rest

    args = torch.randn(m, k), torch.randn(k, n), torch.randn(n), torch.randn(m, n)
    run(layer, *args)
    assert generated(layer, *args).report().kernel_count == 1  # relu of the weights is computed there, too


@pytest.mark.parametrize("size", [(3, 7, 17, 19), (2, 64, 32, 64), (5, 6, 16, 130)], ids=str)
def test_products_of_a_batch(size: tuple[int, int, int, int]) -> None:
    b, m, k, n = size
    x, y = torch.randn(b, m, k), torch.randn(b, k, n)
    run(lambda a, b: torch.bmm(a, b), x, y)
    run(lambda a, b: torch.bmm(a, b.transpose(1, 2)), x, torch.randn(b, n, k))
    run(lambda c, a, b: torch.baddbmm(c, a, b, beta=0.5, alpha=2.0), torch.randn(b, 1, n), x, y)


def test_factors_lie_anywhere_in_memory() -> None:
    base = torch.randn(70, 90)
    run(lambda a, b: a @ b, base[3:40:2, 1:60:3], base[5:25, 7:87:2])
    run(lambda a, b: a @ b, base[:9, :1].expand(9, 20), base[:20, :40])
    run(lambda a, b: a.permute(1, 0) @ b.flip(0), base[:20, :9], base[:20, :40])


def test_a_factor_of_equal_rows_is_left_to_aten() -> None:
    x, y = torch.randn(1, 20).expand(9, 20), torch.randn(20, 1).expand(20, 40)
    graph = make_fx(lambda a, b: a @ b, tracing_mode="fake")(x, y)
    compiled = compile_graph(graph, options=LowerOptions(contractions="generated"))
    assert [call.target for call in compiled.report().externs] == ["aten.mm.default"]
    assert_as_exact_as_eager(lambda a, b: a @ b, x, y, got=compiled([x, y])[0])


def test_products_that_are_added_up_or_normalized_stay_products() -> None:
    def block(x: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(F.silu(x @ q) * (x @ k) + x @ v, (96,))

    args = torch.randn(50, 64), *(torch.randn(64, 96) for _ in range(3))
    run(block, *args)
    groups = generated(block, *args).report().groups
    counts = [sum(node.startswith("mm") for node in group.nodes) for group in groups]
    assert sorted(counts)[-3:] == [1, 1, 1] and sum(counts) == 3


def test_a_result_in_another_order_of_dimensions_is_stored_by_its_product_or_behind_it() -> None:
    def heads(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return (F.linear(x, w, b).view(2, 30, 4, 24).transpose(1, 2) * 0.5).contiguous()

    run(heads, torch.randn(2, 30, 64), torch.randn(96, 64), torch.randn(96))


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0, 1e-42, 3e38])
def test_special_numbers_are_multiplied_as_eager_does(value: float) -> None:
    x, y = torch.ones(9, 20), torch.ones(20, 70)
    x[2, 3] = value
    y[5, 66] = value
    for f in (lambda a, b: a @ b, lambda a, b: a @ b.t().contiguous().t()):
        assert torch.equal(generated(f, x, y)([x, y])[0].nan_to_num(7.0), f(x, y).nan_to_num(7.0))


@pytest.mark.parametrize("level", LEVELS)
def test_levels_of_x86_have_products_too(level: str) -> None:
    run(lambda a, b, c: F.silu(torch.addmm(c, a, b)), torch.randn(45, 33), torch.randn(33, 77), torch.randn(77),
        processor=level)  # fmt: skip
    run(lambda a, b: a @ b.t(), torch.randn(45, 33), torch.randn(77, 33), processor=level)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("level", LEVELS)
def test_short_floats_are_widened_on_the_way(level: str, dtype: torch.dtype) -> None:
    """In a batch, with gaps, with what becomes of them; the result is rounded once."""
    q, k = (torch.randn(3, 29, 2, 40, dtype=dtype).transpose(1, 2) for _ in range(2))
    run(lambda q, k: (q.reshape(6, 29, 40) @ k.reshape(6, 29, 40).transpose(1, 2)) * 0.5, q, k, processor=level)
    x, w, b = torch.randn(45, 33, dtype=dtype), torch.randn(77, 33, dtype=dtype), torch.randn(77, dtype=dtype)
    run(lambda x, w, b: F.silu(F.linear(x, w, b)), x, w, b, processor=level)
    run(lambda x, w: x[::2].t() @ w[::2, 1:], x, torch.randn(45, 60, dtype=dtype), processor=level)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0, 6e-8, 65504.0])
def test_special_numbers_of_float16_are_multiplied_as_eager_does(value: float) -> None:
    x, y = torch.ones(9, 20, dtype=torch.float16), torch.ones(20, 70, dtype=torch.float16)
    x[2, 3] = value
    y[5, 66] = value
    for f in (lambda a, b: a @ b, lambda a, b: a @ b.t().contiguous().t(), lambda a, b: a.t().contiguous().t() @ b):
        assert torch.equal(generated(f, x, y)([x, y])[0].nan_to_num(7.0), f(x, y).nan_to_num(7.0))


def test_sizes_may_be_known_at_run_time_only() -> None:
    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.relu(x @ w + b)

    compiled = generated(layer, torch.randn(9, 20), torch.randn(20, 70), torch.randn(70), mode="symbolic")
    for m, k, n in (*SIZES, (2, 3, 5), (1100, 20, 70)):
        args = torch.randn(m, k), torch.randn(k, n), torch.randn(n)
        assert_as_exact_as_eager(layer, *args, got=compiled(list(args))[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_product_is_the_same_on_one_thread_and_on_two(dtype: torch.dtype) -> None:
    x, w = torch.randn(600, 300, dtype=dtype), torch.randn(700, 300, dtype=dtype)
    compiled = generated(lambda a, b: F.gelu(F.linear(a, b)), x, w)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        one = compiled([x, w])[0]
        torch.set_num_threads(2)
        assert torch.equal(compiled([x, w])[0], one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_the_interpreter_of_kernels_agrees(dtype: torch.dtype) -> None:
    x, w, b = torch.randn(13, 40, dtype=dtype), torch.randn(33, 40, dtype=dtype), torch.randn(33, dtype=dtype)

    def layer(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.linear(x, w, b))

    graph = make_fx(layer, tracing_mode="fake")(x, w, b)
    options = LowerOptions(contractions="generated", processor="interpreter")
    interpreted = compile_graph(graph, options=options)([x, w, b])[0]
    tol = 1e-5 if dtype is torch.float32 else 1e-3
    torch.testing.assert_close(generated(layer, x, w, b)([x, w, b])[0], interpreted, rtol=tol, atol=tol)


COMPUTED = """\
aotkit-ir 2
program p
input x
input w
buffer x : float32[21, 40] strides [40, 1] input on cpu
buffer w : float32[70, 40] strides [40, 1] input on cpu
buffer y : float32[21, 70] strides [70, 1] output on cpu
contraction y batch() rows(i < 21) columns(j < 70) reduced(k < 40) in f32 highest:
  left %x:
    %x = load x[i, k] : f32
  right %scaled:
    %w = load w[j, k] : f32
    %three = const 3.0 : f32
    %scaled = mul %w, %three : f32
  sum %t:
    store y[i, j] = %t
return y
"""


SCALED = """\
    %one = load x[i, k] : f32
    %half = const 0.5 : f32
    %x = mul %one, %half : f32
"""


@pytest.mark.parametrize("left", ["", SCALED, SCALED.replace("x[i, k]", "x[k, i]")], ids=["plain", "scaled", "turned"])
def test_factors_that_are_computed_are_turned_over_as_well(left: str) -> None:
    text = COMPUTED.replace("    %x = load x[i, k] : f32\n", left) if left else COMPUTED
    if "x[k, i]" in text:
        text = text.replace("x : float32[21, 40] strides [40, 1]", "x : float32[40, 21] strides [21, 1]")
    program, _ = schedule_program(parse_program(text), LowerOptions(contractions="generated"))
    made = generate(program, generic_machine(host_machine().vector_bits), keep_text=True)  # without tile registers
    assert "define internal void @tile_" in made.text and "@turn_" not in made.text, "squares, computed on the way"
    x, w = torch.randn(21, 40), torch.randn(70, 40)
    (got,) = bind_program(made, redzones=True)([x.t().contiguous() if "x[k, i]" in text else x, w])
    torch.testing.assert_close(got, (0.5 if left else 1) * x @ (3 * w).t(), rtol=1e-5, atol=1e-5)


def test_equal_products_share_a_function_and_all_share_the_tiles() -> None:
    def layers(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ((x @ w) @ v) @ w

    args = torch.randn(36, 64), torch.randn(64, 64), torch.randn(64, 64)
    graph = make_fx(layers, tracing_mode="fake")(*args)
    compiled = compile_to_program(graph, options=LowerOptions(contractions="generated"))
    assert not isinstance(compiled, CompiledParts)
    text = generate(compiled.scheduled, generic_machine(host_machine().vector_bits), keep_text=True).text
    assert text.count("define internal void @tile_") == 1
    assert text.count("define internal i32 @kernel_") == 1


@pytest.mark.parametrize("contractions", ["auto", "generated", "aten"])
def test_a_sum_of_products_that_is_written_out_rounds_each_product(contractions: str) -> None:
    def written_out(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (x.unsqueeze(2) * y.unsqueeze(0)).sum(1)

    x, y = torch.full((8, 20), 1e20), torch.full((20, 24), 1e20)
    x[:, 0], y[0] = -torch.inf, 1.0  # a product is infinite only once it is rounded
    graph = make_fx(written_out, tracing_mode="fake")(x, y)
    compiled = compile_graph(graph, options=LowerOptions(contractions=contractions))  # type: ignore[arg-type]
    assert torch.equal(compiled([x, y])[0].isnan(), written_out(x, y).isnan())


@pytest.mark.parametrize(
    ("dtype", "bits", "feature", "form"),
    [
        (torch.float16, 512, "", "fma"),
        (torch.float16, 256, "", "fma"),
        (torch.float16, 128, "", "aten"),
        (torch.float16, 512, "avx512fp16", "aten"),
        (torch.bfloat16, 512, "", "aten"),
        (torch.float32, 256, "", "aten"),
    ],
    ids=str,
)
def test_float16_is_ours_where_the_processor_cannot_compute_with_it(
    dtype: torch.dtype, bits: int, feature: str, form: str
) -> None:
    x, w = torch.randn(128, 256, dtype=dtype), torch.randn(512, 256, dtype=dtype)
    program = lower_graph(make_fx(lambda x, w: x @ w.t(), tracing_mode="fake")(x, w))
    (found,) = contractions(program)
    machine = generic_machine(bits)
    machine = replace(machine, features=f"{machine.features},+{feature}" if feature else machine.features)
    options = LowerOptions()
    assert choose_form(found, buffers_of(program), options, machine, "some-processor").form == form
    asked = choose_form(found, buffers_of(program), replace(options, contractions="generated"), machine, "any")
    assert asked.form == "fma", "whoever asks for it gets it"


@pytest.mark.parametrize(
    ("size", "processor", "bits", "form"),
    [
        ((24, 48, 32), "znver3", 256, "fma"),
        ((None, 48, 64), "znver3", 256, "fma"),
        ((24, 32, 32), "znver3", 256, "aten"),
        ((128, 512, 8), "znver3", 256, "aten"),
        ((128, 512, 256), "znver3", 128, "aten"),
        ((128, 512, 256), "znver4", 256, "aten"),
        ((128, 512, 256), "haswell", 256, "aten"),
    ],
    ids=str,
)
def test_bfloat16_is_ours_where_aten_has_no_vectors_for_it(
    size: tuple[int | None, int, int], processor: str, bits: int, form: str
) -> None:
    """However it lies, also in a batch: on AMD's processors without vectors of 512 bits."""
    rows, columns, summed = size
    mode = "fake" if rows else "symbolic"
    x, w = (torch.randn(n, summed, dtype=torch.bfloat16) for n in (rows or 100, columns))
    for program in (lambda x, w: x @ w.t(), lambda x, w: x.unsqueeze(0) @ w.t().contiguous().unsqueeze(0)):
        lowered = lower_graph(make_fx(program, tracing_mode=mode)(x, w))
        (found,) = contractions(lowered)
        machine = generic_machine(bits)
        assert choose_form(found, buffers_of(lowered), LowerOptions(), machine, processor).form == form


@pytest.mark.parametrize(
    ("size", "along", "dtype", "processor", "form"),
    [
        ((None, 64, 64), True, torch.bfloat16, "znver4", "fma"),
        ((None, 64, 64), False, torch.bfloat16, "znver4", "aten"),
        ((None, 40, 64), True, torch.bfloat16, "znver4", "aten"),
        ((None, 64, 64), True, torch.bfloat16, "sapphirerapids", "aten"),
        ((None, 512, 512), True, torch.float32, "znver4", "aten"),
        ((64, 64, 64), True, torch.bfloat16, "znver4", "aten"),
        ((64, 256, 256), True, torch.bfloat16, "znver4", "fma"),
    ],
    ids=str,
)
def test_a_varying_number_of_rows_of_bfloat16_is_ours_where_the_library_writes_code_for_each(
    size: tuple[int | None, int, int], along: bool, dtype: torch.dtype, processor: str, form: str
) -> None:
    rows, columns, summed = size
    kinds = [DimDynamic.STATIC if rows else DimDynamic.DYNAMIC, DimDynamic.STATIC]
    mode = FakeTensorMode(shape_env=ShapeEnv())
    x = mode.from_tensor(
        torch.randn(rows or 100, summed, dtype=dtype), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)
    )
    w = mode.from_tensor(torch.randn(columns, summed, dtype=dtype), static_shapes=True)
    product = (lambda x, w: x @ w.t()) if along else (lambda x, w: x @ w.view(w.shape[1], w.shape[0]))
    program = lower_graph(make_fx(product)(x, w))
    (found,) = contractions(program)
    machine = generic_machine(512)
    machine = replace(machine, features=f"{machine.features},+avx512bf16")
    assert choose_form(found, buffers_of(program), LowerOptions(), machine, processor).form == form


@pytest.mark.parametrize(
    ("size", "along", "processor", "bits", "form"),
    [
        ((96, 8192, 128), True, "znver3", 256, "fma"),
        ((1024, 8192, 768), True, "znver3", 256, "fma"),
        ((96, 8192, 128), False, "znver3", 256, "aten"),
        ((95, 8192, 128), True, "znver3", 256, "aten"),
        ((1025, 8192, 128), True, "znver3", 256, "aten"),
        ((96, 8191, 128), True, "znver3", 256, "aten"),
        ((96, 8192, 769), True, "znver3", 256, "aten"),
        ((96, 8192, 128), True, "znver3", 128, "aten"),
        ((96, 8192, 128), True, "haswell", 256, "aten"),
    ],
    ids=str,
)
def test_wide_products_of_float32_are_ours_on_amd_without_wide_vectors(
    size: tuple[int, int, int], along: bool, processor: str, bits: int, form: str
) -> None:
    rows, columns, summed = size
    x, w = torch.empty(rows, summed), torch.empty(*((columns, summed) if along else (summed, columns)))
    lowered = lower_graph(make_fx(lambda x, w: x @ (w.t() if along else w), tracing_mode="fake")(x, w))
    (found,) = contractions(lowered)
    assert choose_form(found, buffers_of(lowered), LowerOptions(), generic_machine(bits), processor).form == form


#: What is computed, and the sizes of its arguments for so many rows, columns, and numbers that are summed.
BLOCKED: dict[str, tuple[Program, Callable[[int, int, int], tuple[tuple[int, ...], ...]]]] = {
    "x @ w.t()": (lambda x, w: x @ w.t(), lambda m, n, k: ((m, k), (n, k))),
    "x @ w": (lambda x, w: x @ w, lambda m, n, k: ((m, k), (k, n))),
    "g.t() @ x": (lambda g, x: g.t() @ x, lambda m, n, k: ((k, m), (k, n))),
    "computed": (lambda x, w: F.gelu(x.relu() @ (w * 2).t()) + 1, lambda m, n, k: ((m, k), (n, k))),
    "batches": (lambda x, w: torch.bmm(x, w.relu()), lambda m, n, k: ((2, m, k), (2, k, n))),
}
CUTS = (
    {"MOST_STEPS": 1024, "ROWS_OF_BLOCK": 120, "BLOCK_OF_LEFT": 1 << 16, "STRIP": 1 << 19, "UNITS": 2},
    {"MOST_STEPS": 128, "ROWS_OF_BLOCK": 12, "BLOCK_OF_LEFT": 1, "STRIP": 1, "UNITS": 1},
    {"MOST_STEPS": 128, "ROWS_OF_BLOCK": 18, "STEPS_OF_UNKNOWN": 128, "STRIP": 1 << 14, "LEAST_PANELS": 1},
)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16], ids=str)
@pytest.mark.parametrize("size", [(49, 33, 257), (131, 70, 300)], ids=str)
@pytest.mark.parametrize("way", BLOCKED)
def test_how_work_is_cut_into_blocks_changes_no_bit(
    way: str, size: tuple[int, int, int], dtype: torch.dtype, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    f, sizes = BLOCKED[way]
    args = [torch.randn(*each, dtype=dtype) for each in sizes(*size)]
    graph = make_fx(f, tracing_mode=mode)(*args)
    options = LowerOptions(contractions="generated", processor="x86-64-v3")
    made = []
    for cut in CUTS:
        for name, value in cut.items():
            monkeypatch.setattr(blocked_product, name, value)
        compiled = compile_to_program(graph, options=options)
        assert not isinstance(compiled, CompiledParts)
        made.append(generate(compiled.scheduled, generic_machine(256), keep_text=True))
    assert len({each.text for each in made}) == 3
    got = [bind_program(each, redzones=True)(list(args))[0] for each in made]
    assert torch.equal(got[0], got[1]) and torch.equal(got[0], got[2])
    assert_as_exact_as_eager(f, *args, got=got[0])
