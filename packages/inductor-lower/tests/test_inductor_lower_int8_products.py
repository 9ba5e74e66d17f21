"""Products of bytes: exact, for a few rows by kernels, with what comes after in them; elsewhere ATen's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, compile_graph, interpret_program
from aotkit_inductor_lower.driver import schedule_program
from aotkit_inductor_lower.errors import IRError
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.ir.verify import verify_program
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import host_machine
from aotkit_inductor_lower.targets.cpu import ways as ways_module
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.products import multiplies_bytes, multiplies_few_bytes
from aotkit_inductor_lower.targets.cpu.render.few_rows_of_bytes import FewRowsOfBytes
from aotkit_inductor_lower.targets.cpu.render.few_rows_of_words import FewRowsOfWords
from aotkit_inductor_lower.targets.cpu.target import cpu_target

RELEASE = tuple(int(part) for part in torch.__version__.split(".")[:2])
needs_unsigned = pytest.mark.skipif(
    RELEASE < (2, 12), reason="before torch 2.12 torch multiplies no unsigned bytes, see the last test"
)
needs_few_bytes = pytest.mark.skipif(  # an emulated processor is asked here as well
    not multiplies_few_bytes(cpu_target().machine), reason="vectors of less than 256 bits"
)
needs_bytes = pytest.mark.skipif(
    not multiplies_bytes(cpu_target().machine), reason="no instructions for products of bytes"
)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[FewRowsOfBytes]:
    """The products of bytes that are written while a test runs."""
    found: list[FewRowsOfBytes] = []

    def noted(kind: type[FewRowsOfBytes]) -> Callable[..., FewRowsOfBytes]:
        def write(*args: object) -> FewRowsOfBytes:
            found.append(kind(*args))  # type: ignore[arg-type]
            return found[-1]

        return write

    for kind in (FewRowsOfBytes, FewRowsOfWords):
        monkeypatch.setattr(ways_module, kind.__name__, noted(kind))
    return found


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def some_bytes(*sizes: int) -> torch.Tensor:
    found = torch.randint(-128, 128, sizes, dtype=torch.int8)
    found[0] = -128  # the largest products there are
    return found


def scaled(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    return (torch._int_mm(x, w.t()) * rows * columns).to(torch.bfloat16)


def compiled(f: Callable[..., torch.Tensor], *args: torch.Tensor) -> CompiledGraph:
    graph = make_fx(f, tracing_mode="fake")(*args)
    made = compile_graph(graph, options=LowerOptions(contractions="generated"))
    assert isinstance(made, CompiledGraph)
    return made


def equals_eager(f: Callable[..., torch.Tensor], *args: torch.Tensor) -> CompiledGraph:
    """Bit by bit; nothing is touched beside the tensors."""
    made, want = compiled(f, *args), f(*args)
    for got in (made(list(args))[0], bind_program(made.compiled, made.constants, redzones=True)(list(args))[0]):
        assert torch.equal(got, want) and got.dtype is want.dtype and got.stride() == want.stride()
    return made


@needs_few_bytes
@pytest.mark.covers("F5f.31")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 16])
def test_sums_are_exact_and_scaled_in_the_kernel(rows: int, written: list[FewRowsOfBytes]) -> None:
    sizes = [(16, 16), (70, 130), (65, 64), (128, 1000), (33, 2049)]
    for columns, summed in sizes:
        x, w = some_bytes(rows, summed), some_bytes(columns, summed)
        made = equals_eager(scaled, x, w, torch.rand(rows, 1), torch.rand(columns))
        assert made.report().kernel_count == 1 and not made.report().externs
    assert len(written) == len(sizes)


@needs_few_bytes
@pytest.mark.parametrize("rows", [1, 2, 3])
@pytest.mark.parametrize("cpu", ["znver3", "znver4", "x86-64-v4"])
def test_columns_in_order_or_several_at_once(cpu: str, rows: int, written: list[FewRowsOfBytes]) -> None:
    """As processors prefetch them: both give what the definition does."""
    program = parse_program(TEXT.replace("int8[3", f"int8[{rows}").replace("i < 3", f"i < {rows}"))
    program = parse_program(print_program(program).replace("int32[3", f"int32[{rows}"))
    scheduled, _ = schedule_program(program, LowerOptions(contractions="generated"))
    machine = replace(host_machine(), cpu=cpu)
    x, w = some_bytes(rows, 40), some_bytes(70, 40)
    (got,) = bind_program(generate(scheduled, machine), redzones=True)([x, w])
    assert torch.equal(got, x.int() @ w.int().t())
    assert (written[-1].group == 1) == (cpu != "x86-64-v4" and rows <= 2)


@needs_few_bytes
@pytest.mark.parametrize("rows", [1, 16])
def test_few_rows_are_ours_without_being_asked_for(rows: int, written: list[FewRowsOfBytes]) -> None:
    """Also where words are multiplied in the place of bytes."""
    x, w = some_bytes(rows, 256), some_bytes(128, 256)
    made = compile_graph(make_fx(lambda x, w: torch._int_mm(x, w.t()), tracing_mode="fake")(x, w))
    assert isinstance(made, CompiledGraph) and not made.report().externs
    assert torch.equal(made([x, w])[0], torch._int_mm(x, w.t()))
    (one,) = written
    assert isinstance(one, FewRowsOfWords) != multiplies_bytes(cpu_target().machine)


@needs_few_bytes
def test_the_left_bytes_may_be_far_apart(written: list[FewRowsOfBytes]) -> None:
    x, w = some_bytes(100, 3), some_bytes(40, 100)
    equals_eager(lambda x, w: torch._int_mm(x.t(), w.t()), x, w)
    assert len(written) == 1


@needs_few_bytes
def test_activations_may_be_quantized_in_the_same_graph(written: list[FewRowsOfBytes]) -> None:
    """As torchao's dynamic configuration leaves it."""

    def f(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        rows = (torch.maximum(-x.amin(1, keepdim=True), x.amax(1, keepdim=True)).float() / 127.5).clamp(min=1e-5)
        return scaled((x / rows).round().clamp(-128, 127).to(torch.int8), w, rows, scale)

    x, w = torch.randn(1, 300).bfloat16(), some_bytes(90, 300)
    equals_eager(f, x, w, torch.rand(90))
    assert len(written) == 1


def shifted(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """The product of signed bytes as torchao writes it for processors with VNNI."""
    unsigned = (x.to(torch.int32) + 128).to(torch.uint8)
    return torch._int_mm(unsigned, w.t()) - w.t().sum(dim=0, keepdim=True, dtype=torch.int32) * 128


@needs_unsigned
@needs_few_bytes
@pytest.mark.parametrize("rows", [1, 2, 8])
def test_bytes_that_were_shifted_for_the_processor_are_multiplied_as_they_were(
    rows: int, written: list[FewRowsOfBytes]
) -> None:
    """Nothing is left of the shift, nor of the sum of all weights that takes it away."""

    def f(x: torch.Tensor, w: torch.Tensor, rows: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return (shifted(x, w).float() * rows).bfloat16() * scale

    for columns, summed in ((16, 16), (70, 130), (128, 1000)):
        x, w = some_bytes(rows, summed), some_bytes(columns, summed)
        made = equals_eager(f, x, w, torch.rand(rows, 1), torch.rand(columns))
        assert made.report().kernel_count == 1 and not made.report().externs
    assert len(written) == 3


@needs_unsigned
def test_shifted_bytes_of_many_rows_are_one_call_or_kernel() -> None:
    """A call of floats, with kernels around it, where the processor has no instructions for bytes."""
    ours, floats = multiplies_bytes(cpu_target().machine), cpu_target().capabilities.float_bytes
    made = equals_eager(shifted, some_bytes(40, 64), some_bytes(48, 64))
    if floats:
        assert "aten._int_mm.default" not in [call.target for call in made.report().externs]
        return
    assert [call.target for call in made.report().externs] == ["aten._int_mm.default"] * (not ours)
    assert made.report().kernel_count == ours


@needs_unsigned
@pytest.mark.parametrize("given", ["another weight", "another shift", "another factor", "not shifted", "shifted twice"])
def test_what_only_looks_like_shifted_bytes_stays_as_it_is(given: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        wide = x.to(torch.int32) + (127 if given == "another shift" else 128)
        unsigned = (wide + 128 if given == "shifted twice" else wide).to(torch.uint8)
        unsigned = x.to(torch.uint8) if given == "not shifted" else unsigned
        weights = (other if given == "another weight" else w).t().sum(dim=0, keepdim=True, dtype=torch.int32)
        return torch._int_mm(unsigned, w.t()) - weights * (64 if given == "another factor" else 128)

    equals_eager(f, some_bytes(3, 40), some_bytes(70, 40), some_bytes(70, 40))


@needs_unsigned
@needs_few_bytes
def test_products_that_share_shifted_bytes_read_them_as_they_were(written: list[FewRowsOfBytes]) -> None:
    """As queries, keys and values do. The shift is computed for who else asks for it."""

    def f(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u = (x.to(torch.int32) + 128).to(torch.uint8)
        both = (torch._int_mm(u, m.t()) - m.t().sum(dim=0, keepdim=True, dtype=torch.int32) * 128 for m in (w, v))
        return (*both, u)

    x, w, v = some_bytes(1, 96), some_bytes(64, 96), some_bytes(32, 96)
    made = compile_graph(make_fx(f, tracing_mode="fake")(x, w, v), options=LowerOptions(contractions="generated"))
    assert not made.report().externs and len(written) == 2
    for got, want in zip(made([x, w, v]), f(x, w, v), strict=True):
        assert isinstance(got, torch.Tensor) and torch.equal(got, want)


@needs_few_bytes
def test_a_product_is_the_same_on_one_thread_and_on_two(threads: Callable[[int], None]) -> None:
    for rows in (3, 14):
        x, w = some_bytes(rows, 1000), some_bytes(3000, 1000)
        made = compiled(lambda x, w: torch._int_mm(x, w.t()), x, w)
        for count in (1, 2):
            threads(count)
            assert torch.equal(made([x, w])[0], torch._int_mm(x, w.t()))


@pytest.mark.parametrize(("rows", "columns", "transposed"), [(20, 7, True), (2, 48, False)])
def test_other_products_of_bytes_stay_with_aten(rows: int, columns: int, transposed: bool) -> None:
    x, w = some_bytes(rows, 64), some_bytes(*((columns, 64) if transposed else (64, columns)))
    made = equals_eager(lambda x, w: torch._int_mm(x, w.t() if transposed else w), x, w)
    called = "aten._int_mm.default" in [call.target for call in made.report().externs]
    assert called == (not cpu_target().capabilities.float_bytes)  # see Note [Products of bytes as floats]


TEXT = """\
aotkit-ir 2
program p
input x
input w
buffer x : int8[3, 40] strides [40, 1] input on cpu
buffer w : int8[70, 40] strides [40, 1] input on cpu
buffer y : int32[3, 70] strides [70, 1] output on cpu
contraction y batch() rows(i < 3) columns(j < 70) reduced(k < 40) in i32 highest:
  left %x:
    %x = load x[i, k] : i8
  right %w:
    %w = load w[j, k] : i8
  sum %t:
    store y[i, j] = %t
return y
"""


def test_a_product_of_bytes_prints_reads_back_and_means_the_same_everywhere() -> None:
    program = parse_program(TEXT)
    assert parse_program(print_program(program)) == program
    x, w = some_bytes(3, 40), some_bytes(70, 40)
    want = x.int() @ w.int().t()
    (interpreted,) = interpret_program(program, [x, w])
    assert isinstance(interpreted, torch.Tensor) and torch.equal(interpreted, want)
    scheduled, _ = schedule_program(program, LowerOptions(contractions="generated"))
    without = replace(host_machine(), features=host_machine().features.replace("+avx512vnni", "-avx512vnni"))
    for machine in (host_machine(), without):
        assert torch.equal(bind_program(generate(scheduled, machine), redzones=True)([x, w])[0], want)


@needs_bytes
@pytest.mark.parametrize("size", [(17, 32, 48), (70, 100, 90), (40, 5000, 64), (1100, 68, 130)], ids=str)
def test_many_rows(size: tuple[int, int, int], threads: Callable[[int], None]) -> None:
    m, k, n = size
    x, w, rows, columns = some_bytes(m, k), some_bytes(n, k), torch.rand(m, 1), torch.rand(n)
    x[-1] = w[-1] = 127
    made = equals_eager(scaled, x, w, rows, columns)
    assert not made.report().externs and made.report().kernel_count == 1
    threads(1)
    (one,) = made([x, w, rows, columns])
    threads(2)
    assert torch.equal(made([x, w, rows, columns])[0], one)
    turned = w.t().contiguous()  # whose neighbors are columns: vectors have no form for that
    assert torch.equal(compiled(torch._int_mm, x, turned)([x, turned])[0], torch._int_mm(x, turned))


@needs_bytes
def test_many_rows_are_left_to_onednn_without_being_asked_for() -> None:
    x, w = some_bytes(512, 512), some_bytes(512, 512)
    made = compile_graph(make_fx(lambda x, w: torch._int_mm(x, w.t()), tracing_mode="fake")(x, w))
    assert isinstance(made, CompiledGraph)
    assert [call.target for call in made.report().externs] == ["aten._int_mm.default"]


def test_bytes_are_summed_in_i32_only() -> None:
    program = parse_program(TEXT.replace("int32", "float32").replace("in i32", "in f32"))
    with pytest.raises(IRError, match="products of i8 are not summed in f32"):
        verify_program(program)


@pytest.mark.skipif(not host_machine().has("amx-bf16"), reason="no tile registers")
@pytest.mark.parametrize("stored", [torch.int8, torch.uint8], ids=str)
def test_weights_of_bytes_are_bfloat16_in_tile_registers(stored: torch.dtype) -> None:
    """Which has all their values, so that one product of tiles is enough."""
    x, scale = torch.randn(70, 320).bfloat16(), torch.rand(96).bfloat16() / 100
    w = torch.randint(*((-128, 128) if stored is torch.int8 else (0, 256)), (96, 320), dtype=stored)

    def f(x: torch.Tensor, w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.mm(x, w.t().to(x.dtype)) * scale

    made = compiled(f, x, w, scale)
    assert not made.report().externs
    (got,), want = made([x, w, scale]), f(x, w, scale)
    true = x.double() @ w.double().t() * scale.double()
    off, eager = ((y.double() - true).abs().max().item() for y in (got, want))
    assert off <= 1.5 * eager


def test_bytes_become_bfloat16_as_eager_makes_them() -> None:
    every = {torch.int8: torch.arange(-128, 128), torch.uint8: torch.arange(256), torch.bool: torch.arange(2)}
    for dtype, values in every.items():
        x = values.to(dtype)
        assert torch.equal(compiled(lambda x: x.to(torch.bfloat16), x)([x])[0], x.to(torch.bfloat16))


def test_unsigned_bytes_are_refused_before_torch_2_12() -> None:
    x, w = torch.zeros(2, 8, dtype=torch.uint8), some_bytes(16, 8)
    with pytest.raises(RuntimeError, match="dtype to be of type int8") if RELEASE < (2, 12) else nullcontext():
        assert torch._int_mm(x, w.t()).dtype is torch.int32
