"""What is left of a row after the last whole vector: eager's values on every target."""

from __future__ import annotations

import math

import pytest
import torch
from torch._dynamo.source import ConstantSource
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.utils._sympy.value_ranges import ValueRanges

from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions, lower_graph, schedule_program
from aotkit_inductor_lower.ir import Load
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine
from aotkit_inductor_lower.targets.cpu.generate import generate

F = torch.nn.functional
BITS = {"x86-64": 128, "x86-64-v3": 256, "x86-64-v4": 512}
PROCESSORS = ["host", *(name for name, bits in BITS.items() if bits <= host_machine().vector_bits)]


def rows(x):
    scaled = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1)
    return scaled, torch.softmax(x, -1), x.amax(-1), x.argmin(-1), x.prod(-1), (x > 1).any(-1), (x < 3).all(-1)


def whole(x):
    return x.sum(-1), x.amax(-1), x.argmax(-1), (x > 3).any(-1), (x == x[:, :1]).all(-1), x.amin(-1)


def compiled(f, args, processor="host"):
    graph = make_fx(lambda *given: f(*given), decompositions(), tracing_mode="fake")(*args)
    return compile_graph(graph, options=LowerOptions(verify=True, redzones=True, processor=processor))


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("n", [19, 31, 77])
def test_rows_that_are_no_whole_vectors_equal_eager(n, processor):
    wide = torch.full((40, n + 5), float("nan"), dtype=torch.float64)  # whatever is read beside a row shows
    x = wide[:, 2 : n + 2]
    x.copy_(torch.randn(40, n, generator=torch.Generator().manual_seed(n)))
    for got, want in zip(compiled(rows, [x], processor)([x]), rows(x), strict=True):
        torch.testing.assert_close(got, want)
    x[3, n - 1], x[4, 0] = float("nan"), float("-inf")
    x[5] = float("inf")
    f = whole
    for got, want in zip(compiled(f, [x], processor)([x]), f(x), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.int16, torch.uint8, torch.bfloat16, torch.float32])
def test_tails_of_every_width_equal_eager(dtype):
    x = torch.randint(-4, 5, (50, 75), generator=torch.Generator().manual_seed(1)).abs().to(dtype)
    for got, want in zip(compiled(whole, [x])([x]), whole(x), strict=True):
        torch.testing.assert_close(got, want)  # small integers: sums are exact


def test_what_is_written_in_place_keeps_its_neighbours():
    base = torch.randn(30, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    want = base.clone()

    def f(x):
        view = x[:, 3:34]
        return x.slice_scatter(view - view.mean(-1, keepdim=True), 1, 3, 34)

    torch.testing.assert_close(compiled(f, [base])([base])[0], f(want))
    assert torch.equal(base, want)


def test_lanes_that_do_not_exist_divide_nothing():
    x = torch.full((20, 27), 7, dtype=torch.int64)
    d = torch.arange(1, 28, dtype=torch.int64).expand(20, 27).contiguous()
    f = lambda x, d: ((x // d).sum(-1), (x % d).amax(-1))
    for got, want in zip(compiled(f, [x, d])([x, d]), f(x, d), strict=True):
        assert torch.equal(got, want)


def test_tails_are_masked_for_processors_that_can():
    x = torch.randn(64, 31, generator=torch.Generator().manual_seed(0))
    graph = make_fx(lambda x: torch.softmax(x, -1), decompositions(), tracing_mode="fake")(x)
    program, _ = schedule_program(lower_graph(graph))
    texts = {bits: generate(program, generic_machine(bits), keep_text=True).text for bits in BITS.values()}
    masked = {
        bits: f"llvm.masked.load.v{bits // 32}f32" in text and "llvm.masked.store" in text
        for bits, text in texts.items()
    }
    assert masked == {128: False, 256: True, 512: True}


@pytest.mark.parametrize(
    ("f", "sizes", "dtype", "is_masked"),
    [
        (torch.erf, (2, 30, 15), torch.float32, True),
        (torch.erf, (2, 30, 15), torch.float64, False),  # of 32 bits only
        (torch.neg, (2, 30, 15), torch.float32, False),  # a store under a mask takes as long as a few elements
    ],
    ids=["long", "wide", "short"],
)
def test_outer_tails_are_masked_with_avx2_where_that_pays(f, sizes, dtype, is_masked):
    x = torch.randn((*sizes[:2], 20), generator=torch.Generator().manual_seed(0), dtype=dtype)[..., :15]  # no one loop
    graph = make_fx(lambda x: f(x), decompositions(), tracing_mode="fake")(x)
    program, _ = schedule_program(lower_graph(graph))
    assert ("llvm.masked" in generate(program, generic_machine(256), keep_text=True).text) == is_masked
    torch.testing.assert_close(compiled(f, [x], "x86-64-v3")([x])[0], f(x))


def narrow(x, bias):
    moved = x * bias - x.flip(1)
    return (
        *(moved, moved.t().contiguous() + 1, F.pad(x, (2, 1)) * 2, x[:, 1:] - x[:, :-1], x.relu().cumsum(0)),
        *(x.sum(0), x.amax(0), x.argmin(0), torch.where(x > 0, x, bias), torch.softmax(x, 0)),
    )


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("processor", PROCESSORS)
@pytest.mark.parametrize("n", [5, 8, 13, 29])
def test_loops_that_are_no_whole_vectors_equal_eager(n, processor):
    wide = torch.full((41, n + 5), float("nan"), dtype=torch.float64)  # whatever is read beside a row shows
    x, bias = wide[:, 2 : n + 2], torch.linspace(-1, 1, n, dtype=torch.float64)
    x.copy_(torch.randn(41, n, generator=torch.Generator().manual_seed(n), dtype=torch.float64))
    for got, want in zip(compiled(narrow, [x, bias], processor)([x, bias]), narrow(x, bias), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int16, torch.uint8, torch.bool, torch.bfloat16, torch.float32])
def test_outer_tails_of_every_width_equal_eager(dtype):
    x = torch.randint(-4, 5, (33, 7), generator=torch.Generator().manual_seed(3)).abs().to(dtype)
    f = lambda x, y: (
        x | y if dtype is torch.bool else x * y,
        x.flip(0, 1).clone(),
        x.t().contiguous(),
        x.sum(0),
        x.amax(0),
    )
    y = x[:1].clone()
    for got, want in zip(compiled(f, [x, y])([x, y]), f(x, y), strict=True):
        torch.testing.assert_close(got, want)


def test_lanes_beyond_a_loop_report_nothing():
    x, d = torch.arange(1, 71).view(10, 7), torch.arange(1, 8)
    table, at = torch.arange(7.0), torch.arange(70).view(10, 7) % 7
    f = lambda x, d, table, at: (x // d, x % d, table[at] + 1)
    for got, want in zip(compiled(f, [x, d, table, at])([x, d, table, at]), f(x, d, table, at), strict=True):
        assert torch.equal(got, want)


def windows(x):
    y = F.gelu(x + 1)
    return F.avg_pool2d(y, 2), F.max_pool2d(x, 3, 2, 1), F.avg_pool2d(x, 3, 2, ceil_mode=True, padding=1), y.mean(1)


@pytest.mark.parametrize("processor", PROCESSORS)
def test_windows_over_images_of_any_size_equal_eager(processor):
    def image(*sizes):
        return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)), dtype=torch.float64)

    graph = make_fx(windows, decompositions(), tracing_mode="symbolic")(image(6, 32, 20, 22))
    compiled = compile_graph(graph, options=LowerOptions(verify=True, redzones=True, processor=processor))
    for sizes in ((6, 32, 20, 22), (2, 3, 4, 4), (1, 32, 2, 35), (3, 17, 9, 3), (2, 64, 33, 17)):
        x = image(*sizes)
        for got, want in zip(compiled([x]), windows(x), strict=True):
            torch.testing.assert_close(got, want)


def test_windows_of_unknown_sizes_are_whole_and_have_a_kernel_for_small_images():
    def f(x):
        return F.avg_pool2d(F.gelu(x), 2)

    def image(*sizes):
        return torch.randn(*sizes, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    dims = [DimDynamic.DYNAMIC, DimDynamic.STATIC, DimDynamic.DYNAMIC, DimDynamic.DYNAMIC]
    fake = FakeTensorMode(shape_env=ShapeEnv()).from_tensor(
        image(3, 64, 20, 22), symbolic_context=StatelessSymbolicContext(dynamic_sizes=dims)
    )
    graph = make_fx(f, decompositions())(fake)
    program, _ = schedule_program(lower_graph(graph))
    loads = [i for nest in program.steps for stage in nest.stages for i in stage.body if isinstance(i, Load)]
    assert loads and all(load.mask is None for load in loads)
    text = generate(program, generic_machine(512), keep_text=True).text
    assert "_short(" in text and "llvm.masked.store" in text
    compiled = compile_graph(graph, options=LowerOptions(verify=True, redzones=True))
    for sizes in ((3, 64, 20, 22), (1, 64, 4, 4), (2, 64, 17, 9), (2, 64, 9, 35)):
        torch.testing.assert_close(compiled([image(*sizes)])[0], f(image(*sizes)))


@pytest.mark.parametrize("channels", [64, 128, 256])
def test_sizes_that_estimates_take_for_zero_are_no_error(channels):
    def f(x):
        y = x.view(-1, channels, *x.shape[1:])
        return F.avg_pool2d(F.gelu(y), 2), torch.softmax(y, 1)

    x = torch.randn(3 * channels, 6, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    graph = compile_graph(make_fx(f, decompositions(), tracing_mode="symbolic")(x))
    for given in (x, torch.cat([x, x])):
        for got, want in zip(graph([given]), f(given), strict=True):
            torch.testing.assert_close(got, want)


QUOTIENTS = {
    "rounded up": lambda x: (x.new_ones(math.ceil(x.shape[0] / 3)).sum() * x,),
    "rounded up, twice": lambda x: (x.new_ones(-(-x.shape[0] // 3), 4).cumsum(0),),
    "rest to sevens": lambda x: (F.pad(x, (0, 0, 0, -x.shape[0] % 7)).view(-1, 7, x.shape[1]).sum(1),),
    "below zero": lambda x: (x.new_ones((x.shape[0] - 30) // 4 + 12).sum() * x,),
}


@pytest.mark.parametrize("name", QUOTIENTS)
def test_sizes_from_quotients_of_negative_numbers_are_rounded_down(name):
    f = QUOTIENTS[name]
    x = torch.linspace(-1, 1, 69, dtype=torch.float64).view(23, 3)
    graph = make_fx(f, decompositions(), tracing_mode="symbolic")(x)
    compiled = compile_graph(graph, options=LowerOptions(verify=True, redzones=True))
    for rows in (23, 21, 16, 7, 8, 2):
        torch.testing.assert_close(compiled([x[:rows].clone()])[0], f(x[:rows])[0])


SIGNED = {
    "start and step": lambda n, x: (torch.arange(5) * n + x.shape[0] // n,),
    "remainder": lambda n, x: (x * (17 % n) + x.shape[0] % n,),
    "size": lambda n, x: (x.new_ones((40 - n) // 3).cumsum(0) + n,),
    "extremes": lambda n, x: (x + torch.sym_max(n, 2) - torch.sym_min(n, -2),),
}


@pytest.mark.parametrize("name", SIGNED)
def test_an_integer_input_may_be_of_either_sign(name):
    f = SIGNED[name]
    x = torch.linspace(-1, 1, 23, dtype=torch.float64)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    symbol = mode.shape_env.create_symbol(5, ConstantSource("n"), DimDynamic.DYNAMIC, positive=None)
    n = mode.shape_env.create_symintnode(symbol, hint=5, source=ConstantSource("n"))
    mode.shape_env.var_to_range[symbol] = ValueRanges(-100, 100)
    graph = make_fx(f, decompositions())(n, mode.from_tensor(x))
    compiled = compile_graph(graph, options=LowerOptions(verify=True, redzones=True))
    for number in (5, -5, 1, -1, 3, -17):
        torch.testing.assert_close(compiled([number, x])[0], f(number, x)[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("processor", ["host", "x86-64"])
def test_one_element_is_loaded_into_the_lanes_of_a_mask(dtype: torch.dtype, processor: str) -> None:
    def f(one: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [x.slice_scatter(one.expand(9), 0, 20, 29).logical_not(), x.select_scatter(one, 0, 999)]

    one, x = torch.ones((), dtype=dtype), torch.arange(1000).remainder(3).to(dtype)
    graph = make_fx(f, tracing_mode="fake")(one, x)
    made = compile_graph(graph, options=LowerOptions(processor=processor))  # type: ignore[arg-type]
    for got, want in zip(made([one, x]), f(one, x), strict=True):
        assert torch.equal(got, want)
