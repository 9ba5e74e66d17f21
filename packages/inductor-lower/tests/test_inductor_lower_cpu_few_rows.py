"""Products of a few rows with a matrix: right for all sizes, layouts, types, numbers and threads, and what is computed
of the matrix on the way is never in memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph, interpret_program, ir, lower_graph
from aotkit_inductor_lower.driver import compile_to_program, schedule_program
from aotkit_inductor_lower.graph_partition import CompiledParts
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.random_programs import RandomOptions, difference, random_inputs, random_program
from aotkit_inductor_lower.ir.walk import buffers_of, contractions
from aotkit_inductor_lower.kernel_ir.matmul_site import FewRowsSite
from aotkit_inductor_lower.kernel_ir.nodes import Kernel
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.symbolic import product
from aotkit_inductor_lower.targets.cpu import generic_machine, host_machine, products
from aotkit_inductor_lower.targets.cpu import ways as ways_module
from aotkit_inductor_lower.targets.cpu.choose import choose_form
from aotkit_inductor_lower.targets.cpu.choose_few_rows import FEW_ROWS, LEAST
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.machine import Machine, processor_machine
from aotkit_inductor_lower.targets.cpu.render import columns_apart, few_rows_along_sums
from aotkit_inductor_lower.targets.cpu.render.emitter import Ssa
from aotkit_inductor_lower.targets.cpu.render.few_rows import blocks_of
from aotkit_inductor_lower.targets.cpu.target import cpu_target

pytestmark = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")

LEVELS = ["x86-64-v3", *(["x86-64-v4"] if host_machine().vector_bits == 512 else [])]
OF_BYTES = """\
aotkit-ir 2
program p
input x
input w
buffer x : float32[3, 40] strides [40, 1] input on cpu
buffer w : int8[70, 40] strides [40, 1] input on cpu
buffer y : float32[3, 70] strides [70, 1] output on cpu
contraction y batch() rows(i < 3) columns(j < 70) reduced(k < 40) in f32 highest:
  left %x:
    %x = load x[i, k] : f32
  right %wide:
    %w = load w[j, k] : i8
    %wide = cast %w : f32
  sum %t:
    store y[i, j] = %t
return y
"""
MATRICES = [(16, 16), (33, 70), (64, 1030), (300, 129), (4097, 17)]  # summed, columns
Program = Callable[..., torch.Tensor]


@pytest.fixture
def sites(monkeypatch: pytest.MonkeyPatch) -> list[FewRowsSite]:
    """The products of few rows that are written while a test runs."""
    found: list[FewRowsSite] = []

    def product_form(kernel: Kernel, target: Machine) -> object:
        site = products.product_form(kernel, target)
        found.extend([site] if isinstance(site, FewRowsSite) else [])
        return site

    monkeypatch.setattr(ways_module, "product_form", product_form)
    return found


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def compiled(f: Program, *args: torch.Tensor, mode: str = "fake", **options: object) -> CompiledGraph:
    graph = make_fx(f, tracing_mode=mode)(*args)
    made = compile_graph(graph, options=LowerOptions(**{"contractions": "generated", **options}))  # type: ignore[arg-type]
    assert isinstance(made, CompiledGraph) and not made.report().externs
    return made


def check(f: Program, *args: torch.Tensor, **options: object) -> CompiledGraph:
    """At most one and a half times as far from float64 as eager, and its last bits, or three times with short vectors,
    whose sums have fewer parts; nothing is touched beside the tensors."""
    made = compiled(f, *args, **options)
    (got,) = bind_program(made.compiled, made.constants, redzones=True)(list(args))
    assert torch.equal(made(list(args))[0], got)
    want, true = f(*args), f(*(x.double() if x.is_floating_point() else x for x in args))
    assert (got.shape, got.dtype, got.stride()) == (want.shape, want.dtype, want.stride())
    largest = true.abs().max().item() or 1.0
    off, eager = ((x.double() - true).abs().max().item() / largest for x in (got, want))
    times = 1.5 if cpu_target().machine.vector_bits >= 256 else 3.0
    assert off <= times * (eager + (1e-14 if want.dtype is torch.float64 else 2e-7))
    return made


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 13, 16])
@pytest.mark.parametrize(("k", "n"), MATRICES)
def test_all_orientations_and_types(k: int, n: int, rows: int, dtype: torch.dtype, sites: list[FewRowsSite]) -> None:
    x = torch.randn(rows, k, dtype=dtype)
    check(lambda a, b: a @ b, x, torch.randn(k, n, dtype=dtype))
    check(lambda a, b: a @ b.t(), x, torch.randn(n, k, dtype=dtype))
    check(lambda a, b: a.t() @ b.t(), torch.randn(k, rows, dtype=dtype), torch.randn(n, k, dtype=dtype))
    if rows < 16:  # of which tile registers are full
        assert len(sites) == 3 and {site.count for site in sites} == {rows}


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("rows", [1, 4, 7, 11])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_levels_of_x86_have_them_too(dtype: torch.dtype, rows: int, level: str) -> None:
    x, w, b = (torch.randn(*size, dtype=dtype) for size in ((rows, 333), (77, 333), (77,)))
    check(lambda x, w, b: F.silu(F.linear(x, w, b)), x, w, b, processor=level)
    check(lambda x, w: x @ w, x, torch.randn(333, 77, dtype=dtype), processor=level)


def test_the_matrix_may_be_one_of_a_batch_and_the_rows_of_several(sites: list[FewRowsSite]) -> None:
    q, k = torch.randn(6, 1, 64), torch.randn(6, 70, 64)
    check(lambda q, k: torch.bmm(q, k.transpose(1, 2)) * 0.125, q, k)
    check(lambda p, v: torch.bmm(p, v), torch.randn(6, 3, 70), torch.randn(6, 70, 64))
    grouped = torch.randn(2, 4, 1, 64), torch.randn(2, 1, 64, 70)
    check(lambda q, k: torch.bmm(q.view(2, 4, 64), k.view(2, 64, 70)), *grouped)
    assert len(sites) == 3


def test_a_left_factor_that_no_unit_needs_is_not_read() -> None:
    """Of a batch without elements: the factor of all of them has no memory."""
    x, w = torch.empty(0, 1, 20), torch.randn(0, 20, 40)
    assert compiled(lambda x, w: torch.bmm(x, w), x, w)([x, w])[0].shape == (0, 1, 40)


def dequantized(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w.to(x.dtype) * scale.unsqueeze(1))


def scaled_after(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.mm(x, w.t().to(x.dtype)) * scale


def with_zeros(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return x @ ((w.to(x.dtype) - 3) * scale.unsqueeze(1)).t()


@pytest.mark.sample(ways=2)
@pytest.mark.parametrize("f", [dequantized, scaled_after, with_zeros], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 9, 16, 20])
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=str)
def test_a_weight_of_bytes_is_dequantized_in_registers(
    stored: torch.dtype, f: Program, dtype: torch.dtype, rows: int
) -> None:
    x, scale = torch.randn(rows, 300, dtype=dtype), torch.rand(130, dtype=dtype) / 100
    w = torch.randint(0 if stored is torch.uint8 else -128, 127, (130, 300), dtype=stored)
    made = check(f, x, w, scale)
    assert made.report().kernel_count == 1


def test_weights_kept_wide_are_rounded_on_the_way(sites: list[FewRowsSite]) -> None:
    """As under autocast."""
    x, w = torch.randn(2, 200, dtype=torch.bfloat16), torch.randn(90, 200)
    made = compiled(lambda x, w: F.linear(x, w.to(torch.bfloat16)), x, w)
    assert made.report().kernel_count == 1 and len(sites) == 1
    torch.testing.assert_close(made([x, w])[0], F.linear(x, w.to(torch.bfloat16)))


def test_a_factor_that_something_else_reads_is_written() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scaled = w * 3
        return x @ scaled.t(), scaled

    x, w = torch.randn(2, 40), torch.randn(30, 40)
    graph = make_fx(f, tracing_mode="fake")(x, w)
    got = compile_graph(graph, options=LowerOptions(contractions="generated"))([x, w])
    for a, b in zip(got, f(x, w), strict=True):
        torch.testing.assert_close(a, b)


def test_a_weight_that_is_overwritten_is_read_before() -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        half = w.to(torch.bfloat16)
        w.add_(1)
        return x @ half.t()

    x, w = torch.randn(2, 40, dtype=torch.bfloat16), torch.randn(30, 40)
    graph = make_fx(f, tracing_mode="fake")(x, w.clone())
    mine, theirs = w.clone(), w.clone()
    got = compile_graph(graph, options=LowerOptions(contractions="generated"))([x, mine])[0]
    assert torch.equal(got, f(x, theirs)) and torch.equal(mine, theirs)


@pytest.mark.parametrize("value", [float("inf"), float("nan"), -0.0, 1e-42, 3e38])
def test_special_numbers_are_multiplied_as_eager_does(value: float) -> None:
    for rows in (1, 3, 10):
        x, y = torch.ones(rows, 21), torch.ones(21, 70)
        x[0, 3] = value
        y[5, 66] = value
        for f in (lambda a, b: a @ b, lambda a, b: a @ b.t().contiguous().t()):
            assert torch.equal(compiled(f, x, y)([x, y])[0].nan_to_num(7.0), f(x, y).nan_to_num(7.0))


def test_sizes_may_be_known_at_run_time_only() -> None:
    """As those of a cache of keys and values."""

    def scores(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.bmm(q, k.transpose(1, 2))

    graph = make_fx(scores, tracing_mode="symbolic")(torch.randn(3, 1, 64), torch.randn(3, 70, 64))
    made = compile_graph(graph, options=LowerOptions(contractions="generated"))
    for length in (2, 16, 70, 1025):
        q, k = torch.randn(3, 1, 64), torch.randn(3, length, 64)
        torch.testing.assert_close(made([q, k])[0], scores(q, k))


@pytest.mark.parametrize("rows", [1, 6, 15])
def test_a_product_is_the_same_on_one_thread_and_on_two(rows: int, threads: Callable[[int], None]) -> None:
    for f, size in ((lambda a, b: a @ b, (700, 3000)), (lambda a, b: a @ b.t(), (3000, 700))):
        args = [torch.randn(rows, 700), torch.randn(*size)]
        made = compiled(f, *args)
        threads(1)
        one = made(list(args))[0]
        threads(2)
        assert torch.equal(made(list(args))[0], one)


def test_the_interpreter_of_kernels_agrees() -> None:
    x, w, scale = torch.randn(3, 40), torch.randint(-127, 127, (33, 40), dtype=torch.int8), torch.rand(33)
    graph = make_fx(dequantized, tracing_mode="fake")(x, w, scale)
    options = LowerOptions(contractions="generated", processor="interpreter")
    interpreted = compile_graph(graph, options=options)([x, w, scale])[0]
    torch.testing.assert_close(compiled(dequantized, x, w, scale)([x, w, scale])[0], interpreted, rtol=1e-5, atol=1e-4)


def drawn_with_few_rows(count: int, options: RandomOptions) -> Iterator[tuple[int, ir.Program]]:
    """The first random programs whose product has few rows."""
    for seed in itertools.count():
        drawn = random_program(seed, options)
        (found,) = contractions(drawn)
        rows, columns, summed = (
            product(loop.size for loop in loops).constant for loops in (found.rows, found.columns, found.reduced)
        )
        if 1 <= (rows or 0) <= FEW_ROWS and (columns or 99) >= LEAST[1] and (summed or 99) >= LEAST[2]:
            yield seed, drawn
            count -= 1
        if not count:
            return


@pytest.mark.parametrize("machine", ["host", *LEVELS])
def test_random_contractions_of_few_rows(machine: str, sites: list[FewRowsSite]) -> None:
    """With several summed loops, masks, factors in any order, and anything behind them."""
    options, target = RandomOptions(nests=1, contractions=True), processor_machine(machine)
    for seed, drawn in drawn_with_few_rows(12, options):
        scheduled, _ = schedule_program(drawn, LowerOptions())
        inputs = random_inputs(drawn, seed, options)
        made = bind_program(generate(scheduled, target), redzones=True)
        for want, got in zip(interpret_program(drawn, inputs), made(list(inputs)), strict=True):
            assert isinstance(want, torch.Tensor)
            assert difference(want, got) is None
    assert len(sites) > 3


def test_the_text_names_what_it_computes() -> None:
    x, w = torch.randn(3, 64), torch.randn(70, 64)
    graph = make_fx(lambda x, w: F.linear(x, w), tracing_mode="fake")(x, w)
    made = compile_to_program(graph, options=LowerOptions(contractions="generated"))
    assert not isinstance(made, CompiledParts)
    text = generate(made.scheduled, keep_text=True).text
    assert "; sums" in text and ", as it is needed" in text


@pytest.mark.parametrize(
    ("rows", "dtype", "transposed", "processor", "form"),
    [
        (1, torch.float32, True, "any", "fma"),
        (1, torch.float32, False, "any", "aten"),
        (4, torch.float32, False, "any", "fma"),
        (1, torch.bfloat16, True, "znver4", "fma"),
        (8, torch.bfloat16, True, "znver4", "fma"),
        (9, torch.bfloat16, True, "znver4", "aten"),
        (12, torch.bfloat16, False, "znver4", "fma"),
        (13, torch.bfloat16, False, "znver4", "aten"),
        (8, torch.bfloat16, True, "sapphirerapids", "fma"),
        (9, torch.bfloat16, True, "sapphirerapids", "aten"),
        (16, torch.float32, True, "znver4", "fma"),
        (16, torch.float32, False, "znver5", "fma"),
        (9, torch.float32, True, "sapphirerapids", "aten"),
        (16, torch.float16, True, "any", "fma"),
        (17, torch.float16, True, "any", "aten"),
        (1, torch.float16, True, "any", "aten"),
        (1, torch.float16, False, "any", "fma"),
    ],
    ids=str,
)
def test_who_computes_them(rows: int, dtype: torch.dtype, transposed: bool, processor: str, form: str) -> None:
    x, w = torch.randn(rows, 256, dtype=dtype), torch.randn(512, 256, dtype=dtype)
    f = (lambda x, w: x @ w.t()) if transposed else (lambda x, w: x @ w)
    w = w if transposed else w.t().contiguous()
    program = lower_graph(make_fx(f, tracing_mode="fake")(x, w))
    (found,) = contractions(program)
    machine = generic_machine(512)
    machine = replace(machine, features=f"{machine.features},+avx512bf16")
    assert choose_form(found, buffers_of(program), LowerOptions(), machine, processor).form == form
    small = generic_machine(128)
    assert choose_form(found, buffers_of(program), LowerOptions(), small, "any").form == "aten"


@pytest.mark.parametrize("processor", ["znver4", "sapphirerapids", "any"])
@pytest.mark.parametrize(("rows", "ours"), [(9, True), (16, True), (17, False)])
def test_a_matrix_that_is_computed_on_the_way_is_ours_up_to_sixteen_rows(rows: int, ours: bool, processor: str) -> None:
    """Whatever ATen takes for the product, it needs the matrix in memory."""
    program = parse_program(OF_BYTES.replace("[3,", f"[{rows},").replace("i < 3", f"i < {rows}").replace("40", "400"))
    (found,) = contractions(program)
    choice = choose_form(found, buffers_of(program), LowerOptions(), generic_machine(512), processor)
    assert (choice.form == "fma") == ours
    assert choose_form(found, buffers_of(program), LowerOptions(), generic_machine(128), "any").form == "aten"


def test_more_than_eight_rows_of_a_matrix_that_never_changes_are_multiplied_in_panels(
    sites: list[FewRowsSite],
) -> None:
    """And as few rows, where something else reads the matrix as it is."""
    w = torch.randn(130, 300)
    for f, packed in ((lambda x: x @ w.t(), True), (lambda x: (x @ w.t(), w + 1)[0], True), (in_two_ways(w), False)):
        x = torch.randn(9, 300)
        graph = make_fx(f, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
        sites.clear()
        made = compile_graph(graph, options=LowerOptions(contractions="generated", pack_constants=True))
        assert isinstance(made, CompiledGraph)
        assert any(name.endswith("_packed") for name in made.constants) == packed
        assert bool(sites) != packed
        exact = x.double() @ w.double().t()
        errors = [(got.double() - exact).abs().max() for got in (made([x])[0], x @ w.t())]
        assert errors[0] <= 1.5 * errors[1] + 2e-7 * exact.abs().max()


def in_two_ways(w: torch.Tensor) -> Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
    return lambda x: (x @ w.t(), w.sum(0) * x)


def test_blocks_have_all_rows_once() -> None:
    for count, most in itertools.product(range(1, 17), (4, 6, 8)):
        blocks = blocks_of(count, most)
        assert [row for block in blocks for row in block] == list(range(count))
        sizes = [len(block) for block in blocks]
        assert max(sizes) == sizes[0] <= most and max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("along_columns", [True, False])
@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, (16, 8)), (torch.bfloat16, (8, 3))], ids=str)
def test_small_products_of_a_batch_are_ours_for_fewer_rows(
    along_columns: bool, dtype: torch.dtype, most: tuple[int, int]
) -> None:
    machine = generic_machine(512)
    machine = replace(machine, features=f"{machine.features},+avx512bf16")
    for rows in (3, 4, 8, 9, 16, 17):
        x, w = torch.randn(4, rows, 64, dtype=dtype), torch.randn(4, 64, 128, dtype=dtype)
        w = w if along_columns else w.transpose(1, 2).contiguous().transpose(1, 2)
        program = lower_graph(make_fx(torch.bmm, tracing_mode="fake")(x, w))
        (found,) = contractions(program)
        choice = choose_form(found, buffers_of(program), LowerOptions(), machine, "znver4")
        assert choice.form == ("fma" if rows <= most[not along_columns] else "aten"), rows


def test_a_product_whose_factor_is_computed_prints_and_reads_back() -> None:
    """What is computed is part of the contraction, until it is a nest."""
    scheduled, _ = schedule_program(parse_program(OF_BYTES), LowerOptions(contractions="generated"))
    x, w = torch.randn(3, 40), torch.randint(-127, 127, (70, 40), dtype=torch.int8)
    (got,) = bind_program(generate(scheduled), redzones=True)([x, w])
    torch.testing.assert_close(got, x @ w.float().t(), rtol=1e-5, atol=1e-3)


def of_seen(transposed: bool) -> Program:
    def f(x: torch.Tensor, w: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        return x @ torch.where(seen[:, None], w, 0.0).t() if transposed else x @ torch.where(seen[:, None], w, 0.0)

    return f


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 8, 14])
def test_what_a_condition_hides_is_not_read(rows: int, transposed: bool, sites: list[FewRowsSite]) -> None:
    """Any condition, at any place; a nan times what is hidden is a nan, as it is times 0."""
    f = of_seen(transposed)
    x, w = torch.randn(rows, 300), torch.randn(*((70, 300) if transposed else (300, 70)))
    for hidden in (slice(0, 0), slice(13, None), slice(0, 61), slice(None), slice(3, 50, 2)):
        seen = torch.ones(len(w), dtype=torch.bool)
        seen[hidden] = False
        check(lambda x, w, seen: f(x, w, seen), x, w, seen)
        made, garbage = compiled(f, x, w, seen), w.clone()
        garbage[hidden] = torch.nan
        assert torch.equal(made([x, garbage, seen])[0], made([x, w, seen])[0])
        for special in (torch.nan, torch.inf):
            some = x.clone()
            some[rows - 1, 20] = special
            got, want = made([some, w, seen])[0], f(some, w, seen)
            assert torch.equal(got.isnan() | got.isinf(), want.isnan() | want.isinf())
    assert len(sites) >= 5


class AnyProcessor:
    """Has all processors in it, also one that is emulated."""

    def __contains__(self, cpu: object) -> bool:
        return True


COLUMNS_AND_SUMS = [
    [(16, 200), (17, 200), (18, 200), (67, 1100)],
    [(19, 200), (63, 200), (16, 1100)],
    [(64, 200), (65, 200), (67, 200), (130, 200), (130, 1100)],
    [(1024, 40), (1027, 40), (2100, 40)],
]


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("rows", [1, 2, 3, 8, 15])
@pytest.mark.parametrize("columns_and_sums", COLUMNS_AND_SUMS, ids=str)
def test_columns_that_lie_apart_are_each_summed_once(
    columns_and_sums: list[tuple[int, int]], rows: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on AMD's processors: for all numbers of columns that a strip may end with, and of places in them."""
    written: list[bool] = []
    wide = torch.float32 if dtype is torch.int8 else dtype
    original = few_rows_along_sums.FewRowsAlongSums.sum_strip

    def sum_strip(self: few_rows_along_sums.FewRowsAlongSums, first: Ssa, end: Ssa) -> None:
        written.append(self.spread)
        original(self, first, end)

    monkeypatch.setattr(few_rows_along_sums, "IN_PAGES", AnyProcessor())
    monkeypatch.setattr(few_rows_along_sums, "AMD", AnyProcessor())
    monkeypatch.setattr(few_rows_along_sums.FewRowsAlongSums, "sum_strip", sum_strip)
    for columns, summed in columns_and_sums:
        x, w = torch.randn(rows, summed).to(wide), (torch.randn(columns, summed) * 9).to(dtype)
        true, bound = x.double() @ w.double().t(), x.double().abs() @ w.double().abs().t() * 2**-20
        graph = make_fx(lambda x, w: x @ w.t().to(x.dtype), tracing_mode="fake")(x, w)
        made = compile_graph(graph, options=LowerOptions(contractions="generated"))
        assert isinstance(made, CompiledGraph)
        (got,) = bind_program(made.compiled, made.constants, redzones=True)([x, w])
        rounding = 0 if wide is torch.float32 else true.abs() * 2**-8
        assert ((got.double() - true).abs() <= bound + rounding).all(), columns
    assert written and all(spread == (dtype is not torch.int8 or rows <= 2) for spread in written)


@pytest.mark.parametrize("columns", [64, 576, 1000, 2115])
def test_joined_strips_have_the_same_bits_on_any_number_of_threads(
    columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(few_rows_along_sums, "IN_PAGES", AnyProcessor())
    monkeypatch.setattr(few_rows_along_sums, "AMD", AnyProcessor())
    x, w, bias = torch.randn(1, 300).bfloat16(), torch.randn(columns, 300).bfloat16(), torch.randn(columns)
    graph = make_fx(lambda x, w, b: (x @ w.t()).float().tanh() + b, tracing_mode="fake")(x, w, bias)
    made = compile_graph(graph, options=LowerOptions(contractions="generated"))
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2, 3, 7):
            torch.set_num_threads(number)
            found.append(made([x, w, bias])[0])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(found[0], other) for other in found)
    true = (x.double() @ w.double().t()).tanh() + bias
    torch.testing.assert_close(found[0].double(), true, atol=2e-2, rtol=1e-2)


def test_short_columns_are_asked_for_in_a_later_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last ones of a quarter in the next strip, where a place further on in the same quarter would be in the next
    one, which is read already; those of one row and of float32 in themselves."""
    asked: list[tuple[int, int]] = []
    original = columns_apart.ColumnsApart.ask_ahead

    def ask_ahead(self: columns_apart.ColumnsApart, ahead: int, column: Ssa, copies: int) -> None:
        asked.append((self.later, self.joined))
        original(self, ahead, column, copies)

    monkeypatch.setattr(few_rows_along_sums, "IN_PAGES", AnyProcessor())
    monkeypatch.setattr(few_rows_along_sums, "AMD", AnyProcessor())
    monkeypatch.setattr(columns_apart.ColumnsApart, "ask_ahead", ask_ahead)
    for dtype, rows, summed, later, joined in (
        (torch.int8, 2, 512, 4, 1),
        (torch.int8, 2, 1024, 2, 1),
        (torch.bfloat16, 2, 1024, 1, 1),
        (torch.bfloat16, 1, 1024, 0, 16),
        (torch.bfloat16, 1, 6000, 1, 1),
        (torch.float32, 1, 1024, 0, 1),
    ):
        asked.clear()
        x, w = torch.randn(rows, summed), torch.randn(128, summed).to(dtype)
        graph = make_fx(lambda x, w: x @ w.t().to(x.dtype), tracing_mode="fake")(x, w)
        made = compile_to_program(graph, options=LowerOptions(contractions="generated"))
        assert not isinstance(made, CompiledParts)
        text = generate(made.scheduled, keep_text=True).text
        assert set(asked) == {(later, joined)}, summed
        assert "llvm.prefetch" in text


@pytest.mark.parametrize("rows", [3, 4, 6])
def test_levels_of_x86_keep_sums_of_bytes_in_sixteen_registers(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a vector of each row, and one of the matrix."""
    found: list[few_rows_along_sums.FewRowsAlongSums] = []
    original = few_rows_along_sums.FewRowsAlongSums.sum_strip

    def sum_strip(self: few_rows_along_sums.FewRowsAlongSums, first: Ssa, end: Ssa) -> None:
        found.append(self)
        original(self, first, end)

    monkeypatch.setattr(few_rows_along_sums.FewRowsAlongSums, "sum_strip", sum_strip)
    x, w = torch.randn(rows, 128), torch.randint(-128, 128, (160, 128), dtype=torch.int8)
    made = compiled(lambda x, w: x @ w.t().to(x.dtype), x, w, processor="x86-64-v3", contractions="generated")
    (emitter,) = found
    assert emitter.registers == 16 and rows * emitter.group + rows + 1 <= 16
    torch.testing.assert_close(made([x, w])[0], x @ w.t().float(), rtol=1e-4, atol=1e-2)
