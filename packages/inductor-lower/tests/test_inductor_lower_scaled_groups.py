"""Weights of 8 bits with a scale for each group of numbers, and 8-bit floats, times few rows: one kernel that widens
them in registers, as close to float64 as eager."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import host_machine

pytestmark = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def compiled(f: Callable[..., torch.Tensor], *args: torch.Tensor, **options: object) -> CompiledGraph:
    graph = make_fx(f, tracing_mode="fake")(*args)
    made = compile_graph(graph, options=LowerOptions(**{"contractions": "generated", **options}))  # type: ignore[arg-type]
    assert isinstance(made, CompiledGraph)
    return made


def is_one_kernel(made: CompiledGraph) -> bool:
    report = made.report()
    return report.kernel_count == 1 and not report.externs


def run(made: CompiledGraph, *args: torch.Tensor) -> torch.Tensor:
    """Its result; nothing is touched beside the tensors."""
    (got,) = bind_program(made.compiled, made.constants, redzones=True)(list(args))
    assert torch.equal(made(list(args))[0].nan_to_num(7.0), got.nan_to_num(7.0))
    return got


def check_near(got: torch.Tensor, want: torch.Tensor, true: torch.Tensor) -> None:
    """At most 1.5 times as far from float64 as eager."""
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    largest = true.abs().max().item()
    off, eager = ((x.double() - true).abs().max().item() / largest for x in (got, want))
    assert off <= 1.5 * (eager + 2e-7)


# -- weights as models write them: a function of the narrow weight, its scales and zeros -------------------


def plain(dtype: torch.dtype, w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    groups = w.view(w.shape[0], scale.shape[1], -1).to(dtype)
    return (groups * scale.to(dtype)[..., None]).view(w.shape)


def with_zeros(dtype: torch.dtype, w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    groups = w.view(w.shape[0], scale.shape[1], -1).to(dtype)
    return ((groups - zero.to(dtype)[..., None]) * scale.to(dtype)[..., None]).view(w.shape)


def in_float32(dtype: torch.dtype, w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """As torchao writes it: the scale is one of float32, and rounding comes behind the last view."""
    groups = w.view(w.shape[0], scale.shape[1], -1).to(dtype) - zero.view(*zero.shape, 1).to(dtype)
    return (groups * scale.view(*scale.shape, 1)).view(w.shape).to(dtype)


def groups_as_rows(dtype: torch.dtype, w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
    """As ``quantized_decomposed.dequantize_per_channel_group`` does."""
    rows = w.reshape(-1, w.shape[1] // scale.shape[1])
    return rows.sub(zero.reshape(-1, 1)).mul(scale.reshape(-1, 1)).reshape_as(w).to(dtype)


FORMS = {f.__name__: f for f in (plain, with_zeros, in_float32, groups_as_rows)}


def operands(rows: int, columns: int, summed: int, group: int, dtype: torch.dtype) -> Tensors:
    """Activations, bytes, scales, zeros."""
    w = torch.randint(-128, 128, (columns, summed), dtype=torch.int8)
    scale = torch.rand(columns, summed // group) / 100
    return torch.randn(rows, summed).to(dtype), w, scale, torch.randint(-9, 9, scale.shape, dtype=torch.int8)


def layer(form: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda x, w, scale, zero: F.linear(x, form(x.dtype, w, scale, zero))


def exact(form: Callable[..., torch.Tensor], x: torch.Tensor, *weight: torch.Tensor) -> torch.Tensor:
    """The product of the same weight as eager has."""
    return x.double() @ form(x.dtype, *weight).double().t()


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_groups_are_scaled_where_the_product_reads_them(form: str, dtype: torch.dtype, rows: int) -> None:
    f = layer(FORMS[form])
    for columns, summed, group in ((16, 64, 32), (70, 256, 64), (96, 384, 128), (33, 120, 24), (40, 64, 64)):
        args = operands(rows, columns, summed, group, dtype)
        made = compiled(f, *args)
        assert is_one_kernel(made), (columns, summed, group)
        check_near(run(made, *args), f(*args), exact(FORMS[form], *args))


def test_processors_of_other_levels_scale_groups_too() -> None:
    f = layer(with_zeros)
    for dtype in TYPES:
        args = operands(3, 48, 192, 32, dtype)
        level = {"processor": "x86-64-v3"} if host_machine().triple.startswith("x86") else {}
        made = compiled(f, *args, **level)
        check_near(run(made, *args), f(*args), exact(with_zeros, *args))


def test_what_comes_before_and_after_is_in_the_same_kernel() -> None:
    def f(x: torch.Tensor, w: torch.Tensor, s: torch.Tensor, z: torch.Tensor, r: torch.Tensor) -> torch.Tensor:
        return F.silu(layer(plain)(x, w, s, z)) * 2 + r

    args, residual = operands(1, 128, 256, 64, torch.bfloat16), torch.randn(1, 128).bfloat16()
    made = compiled(f, *args, residual)
    assert is_one_kernel(made)
    true = F.silu(exact(plain, *args)) * 2 + residual.double()
    check_near(run(made, *args, residual), f(*args, residual), true)


def test_a_factor_that_is_one_computed_number_is_right() -> None:
    def f(x: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return x @ number.sin().expand(4, 3)

    x, number = torch.randn(5, 4), torch.randn(())
    check_near(run(compiled(f, x, number), x, number), f(x, number), f(x.double(), number.double()))


@pytest.mark.parametrize("rows", [1, 6])
def test_scaled_groups_are_the_same_on_one_thread_and_on_two(rows: int, threads: Callable[[int], None]) -> None:
    args = operands(rows, 512, 1024, 64, torch.bfloat16)
    made = compiled(layer(in_float32), *args)
    threads(1)
    one = made(list(args))[0]
    threads(2)
    assert torch.equal(made(list(args))[0], one)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38])
def test_scales_that_are_not_finite_give_what_eager_gives(value: float) -> None:
    x, w, scale, zero = operands(2, 32, 128, 32, torch.float32)
    scale[5, 1], x[1, 37] = value, value
    want, got = layer(plain)(x, w, scale, zero), run(compiled(layer(plain), x, w, scale, zero), x, w, scale, zero)
    assert torch.equal(want.isnan(), got.isnan()) and torch.equal(want.isinf(), got.isinf())
    torch.testing.assert_close(got[want.isfinite()], want[want.isfinite()])


def test_many_rows_and_a_weight_that_is_asked_for_are_right_as_well() -> None:
    """Whoever computes the product: the weight is in memory then, once."""

    def both(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor) -> torch.Tensor:
        weight = plain(x.dtype, w, scale, zero)
        return F.linear(x, weight) + weight.sum()

    for f, rows in ((layer(plain), 40), (both, 2)):
        args = operands(rows, 48, 128, 32, torch.float32)
        got = run(compiled(f, *args), *args)
        torch.testing.assert_close(got, f(*args), rtol=1e-4, atol=1e-4)


def test_rows_whose_number_is_not_known_are_right() -> None:
    """With as many rows as there happen to be, few of them or many."""
    x, w, scale, zero = operands(5, 48, 128, 32, torch.bfloat16)
    for rows in (1, 3, 20):
        x = torch.randn(rows, 128).bfloat16()
        graph = make_fx(layer(plain), tracing_mode="symbolic")(x, w, scale, zero)
        got = compile_graph(graph, options=LowerOptions(contractions="generated"))([x, w, scale, zero])[0]
        assert isinstance(got, torch.Tensor)
        torch.testing.assert_close(got, layer(plain)(x, w, scale, zero), rtol=2e-2, atol=2e-2)


# -- 8-bit floats ------------------------------------------------------------------------------------------

FLOATS = [torch.float8_e4m3fn, torch.float8_e5m2]


def by_row(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x @ (w.to(x.dtype) * scale.to(x.dtype)).t()


def transposed_first(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """As torchao writes it."""
    return torch.mm(x, (w.t().to(torch.float32) * scale.t()).to(x.dtype))


def scaled_after(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w.to(x.dtype)) * scale.flatten().to(x.dtype)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 13])
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("stored", FLOATS, ids=str)
@pytest.mark.parametrize("f", [by_row, transposed_first, scaled_after], ids=lambda f: f.__name__)
def test_floats_of_eight_bits_are_widened_where_the_product_reads_them(
    f: Callable[..., torch.Tensor], stored: torch.dtype, dtype: torch.dtype, rows: int
) -> None:
    for columns, summed in ((16, 64), (70, 130), (96, 1024)):
        x, w = torch.randn(rows, summed).to(dtype), torch.randn(columns, summed).to(stored)
        scale = torch.rand(columns, 1) / 10
        made = compiled(f, x, w, scale)
        assert is_one_kernel(made), (columns, summed)
        narrow = (x.new_ones(()).to(dtype) * scale.to(dtype)).double() if f is not transposed_first else scale.double()
        check_near(run(made, x, w, scale), f(x, w, scale), x.double() @ (w.double() * narrow).t())


@pytest.mark.parametrize("stored", FLOATS, ids=str)
def test_every_float_of_eight_bits_is_itself_in_a_product(stored: torch.dtype) -> None:
    """Nans and infinities as well: each is multiplied by 1, and the others of its column by nothing."""
    w = torch.zeros(256, 16, dtype=torch.uint8)
    w[:, 3] = torch.arange(256)
    weight, x = w.view(stored), torch.zeros(1, 16)
    x[0, 3] = 1
    scale = torch.ones(256, 1)
    want, got = by_row(x, weight, scale), run(compiled(by_row, x, weight, scale), x, weight, scale)
    assert torch.equal(want.isnan(), got.isnan()) and torch.equal(want.nan_to_num(7.0), got.nan_to_num(7.0))
