"""Products with weights of 4 and 8 bits as ATen packs them: right for all types, groups and rows, computed in
registers; left to ATen or refused where they are something else."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    CompiledGraph,
    LowerOptions,
    compile_graph,
    interpret_program,
    lower_graph,
    schedule_program,
)
from aotkit_inductor_lower.errors import UnsupportedGraphError
from aotkit_inductor_lower.ir.parse import parse_program
from aotkit_inductor_lower.ir.print import print_program
from aotkit_inductor_lower.ir.walk import contractions
from aotkit_inductor_lower.lowering import packed_products
from aotkit_inductor_lower.ops.packed_weights import panel_columns, panels_of_layout
from aotkit_inductor_lower.runtime import bind_program
from aotkit_inductor_lower.targets.cpu import host_machine
from aotkit_inductor_lower.targets.cpu import ways as ways_module
from aotkit_inductor_lower.targets.cpu.choose_few_rows import FULL
from aotkit_inductor_lower.targets.cpu.generate import generate
from aotkit_inductor_lower.targets.cpu.render import panels_apart
from aotkit_inductor_lower.targets.cpu.render.few_rows_in_digits import FewRowsInDigits, multiplies_digits
from aotkit_inductor_lower.targets.cpu.render.few_rows_in_pairs import FewRowsInPairs, multiplies_pairs
from aotkit_inductor_lower.targets.cpu.render.few_rows_in_panels import FewRowsInPanels
from aotkit_inductor_lower.targets.cpu.render.few_rows_in_short_digits import (
    MOST_ROWS,
    FewRowsInShortDigits,
    multiplies_short_digits,
)
from aotkit_inductor_lower.targets.cpu.render.groups_in_digits import GroupsInDigits
from aotkit_inductor_lower.targets.cpu.target import cpu_target

aten = torch.ops.aten
pytestmark = pytest.mark.skipif(not host_machine().has("fma"), reason="without FMA products are ATen's")
needs_panels = pytest.mark.skipif(not panel_columns(), reason="ATen packs in no layout that kernels read")
needs_pairs = pytest.mark.skipif(  # an emulated processor is asked here as well
    not multiplies_pairs(cpu_target().machine), reason="not both of AVX-512's BF16 and VBMI"
)
HAS_DIGITS = multiplies_digits(cpu_target().machine) or multiplies_short_digits(cpu_target().machine)
needs_digits = pytest.mark.skipif(
    not HAS_DIGITS, reason="neither all of AVX-512's BF16, VBMI and VNNI, nor AVX2 without AVX-512"
)
IN_DIGITS = (GroupsInDigits, FewRowsInShortDigits)
TYPES = [torch.float32, torch.bfloat16, torch.float16]
Tensors = tuple[torch.Tensor, ...]


@pytest.fixture
def panels(monkeypatch: pytest.MonkeyPatch) -> list[FewRowsInPanels]:
    """What is written panel by panel while a test runs."""
    found: list[FewRowsInPanels] = []

    def noted(kind: type[FewRowsInPanels]) -> Callable[..., FewRowsInPanels]:
        def write(*args: object) -> FewRowsInPanels:
            found.append(kind(*args))  # type: ignore[arg-type]
            return found[-1]

        return write

    for kind in (FewRowsInPanels, FewRowsInPairs, FewRowsInDigits, FewRowsInShortDigits):
        monkeypatch.setattr(ways_module, kind.__name__, noted(kind))
    return found


@pytest.fixture
def threads() -> Iterator[Callable[[int], None]]:
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def int4(x: torch.Tensor, packed: torch.Tensor, group: int, scales: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = aten._weight_int4pack_mm_for_cpu(x, packed, group, scales)
    return result


def of_group(group: int) -> Callable[..., torch.Tensor]:
    return lambda x, packed, scales: int4(x, packed, group, scales)


def operands(rows: int, columns: int, summed: int, group: int, dtype: torch.dtype) -> tuple[Tensors, torch.Tensor]:
    """(activations, packed weight, scales and zeros), and the weight in float64."""
    numbers = torch.randint(0, 16, (columns, summed))
    scales = (torch.randn(summed // group, columns, 2) / 10).to(dtype)
    scale, zero = (scales[..., k].t().double()[..., None] for k in (0, 1))
    weight = ((numbers.double() - 8).view(columns, -1, group) * scale + zero).view(columns, summed)
    packed = aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 2)
    return (torch.randn(rows, summed).to(dtype), packed, scales), weight


def compiled(f: Callable[..., torch.Tensor], *args: torch.Tensor, **options: object) -> CompiledGraph:
    graph = make_fx(f, tracing_mode="fake")(*args)
    made = compile_graph(graph, options=LowerOptions(**{"contractions": "generated", **options}))  # type: ignore[arg-type]
    assert isinstance(made, CompiledGraph)
    return made


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


@pytest.mark.sample(ways=1)
@needs_panels
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8, 9, 13])
def test_weights_of_four_bits(rows: int, dtype: torch.dtype, panels: list[FewRowsInPanels]) -> None:
    for columns, summed, group in ((64, 64, 32), (128, 384, 64), (192, 384, 128), (64, 512, 256)):
        args, weight = operands(rows, columns, summed, group, dtype)
        made = compiled(of_group(group), *args)
        assert not made.report().externs and made.report().kernel_count == 1
        check_near(run(made, *args), int4(args[0], args[1], group, args[2]), args[0].double() @ weight.t())
    assert len(panels) == 4


def _of_activated(group: int, x: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    return int4(F.silu(x), packed, group, scales)


@needs_panels
@needs_pairs
@pytest.mark.parametrize("rows", [1, 2, 4, 8, 15])
def test_bfloat16_is_multiplied_in_pairs_of_steps(rows: int, panels: list[FewRowsInPanels]) -> None:
    """Also what comes out of a kernel, and of every group size; float16 and float32 one step at a time."""
    for group in (32, 64, 128, 256):
        (x, packed, scales), weight = operands(rows, 128, 512, group, torch.bfloat16)
        f = functools.partial(_of_activated, group)
        made = compiled(f, x, packed, scales)
        assert isinstance(panels[-1], FewRowsInPairs)
        assert isinstance(panels[-1], FewRowsInDigits) == (rows == 1 and multiplies_digits(cpu_target().machine))
        check_near(run(made, x, packed, scales), f(x, packed, scales), F.silu(x).double() @ weight.t())
    for dtype in (torch.float16, torch.float32):
        compiled(of_group(64), *operands(rows, 64, 128, 64, dtype)[0])
        assert not isinstance(panels[-1], FewRowsInPairs)


@needs_panels
@needs_pairs
@pytest.mark.parametrize("tiny", [1e-39, 2.0**-126, 2.0**-110, 2.0**-101])
def test_tiny_numbers_are_not_taken_for_zero(tiny: float, panels: list[FewRowsInPanels]) -> None:
    """As instructions for pairs of bfloat16 do with numbers and sums below 2**-126: here sums are all that is left."""
    (x, packed, scales), _ = operands(2, 64, 128, 64, torch.bfloat16)
    x[:] = torch.tensor([tiny * 1.5, -tiny]).repeat(64)
    scales[:] = torch.tensor([2.0**100, 0.0])
    numbers = torch.full((64, 128), 9)
    packed = aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 2)
    made = compiled(of_group(64), x, packed, scales)
    assert isinstance(panels[-1], FewRowsInPairs)
    true = x.double().sum(1, keepdim=True).expand(2, 64) * 2.0**100
    assert true.abs().min() > 0
    check_near(run(made, x, packed, scales), int4(x, packed, 64, scales), true)


def _with_spread(x: torch.Tensor, spread: int) -> torch.Tensor:
    """Numbers whose sizes lie so many powers of two apart, at most."""
    return (x * 2.0 ** torch.randint(-spread, 1, x.shape)).bfloat16()


@needs_panels
@needs_digits
@pytest.mark.parametrize("spread", [0, 6, 11, 12, 13, 14, 20, 60])
def test_sums_of_a_group_are_exact_but_for_one_rounding(spread: int, panels: list[FewRowsInPanels]) -> None:
    """Whatever the sizes within a group are; eager's are not, so the bound is that of a sum in float32."""
    for group in (32, 64, 256):
        (x, packed, _), _ = operands(1, 64, 512, group, torch.bfloat16)
        x = _with_spread(x.float(), spread)
        x[:, :group] = 0.0  # a group of nothing
        x[:, group : group + 8] = torch.tensor([1.0, -1.0, 255.0, -255.0, 0.0, 2.0**-7, -(2.0**-6), 3.0])
        numbers = torch.randint(0, 16, (64, 512))
        numbers[0], numbers[1], numbers[2] = 0, 15, 8
        packed = aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 2)
        scales = torch.tensor([1.0, 0.0]).bfloat16().expand(512 // group, 64, 2).contiguous()
        made = compiled(of_group(group), x, packed, scales)
        assert isinstance(panels[-1], IN_DIGITS)
        got, weight = run(made, x, packed, scales).double(), numbers.double() - 8
        true, sizes = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
        assert ((got - true).abs() <= true.abs() * 2.0**-8 + sizes * 2.0**-20).all()
        assert (got[0, 2] == 0).all()


@needs_panels
@needs_digits
@pytest.mark.parametrize("size", [2.0**-20, 2.0**-11, 2.0**-13, 2.0**-15, 1.0])
def test_small_numbers_beside_a_large_one_are_not_lost(size: float, panels: list[FewRowsInPanels]) -> None:
    """The weight of the large one is 0, so that the small ones are all that is left."""
    x = (torch.rand(1, 128) + 1).mul(size).bfloat16()
    x[0, ::64] = 1.5
    numbers = torch.randint(9, 16, (64, 128))
    numbers[:, ::64] = 8
    packed = aten._convert_weight_to_int4pack_for_cpu(numbers.int(), 2)
    scales = torch.tensor([0.5, 0.0]).bfloat16().expand(2, 64, 2).contiguous()
    got = run(compiled(of_group(64), x, packed, scales), x, packed, scales).double()
    assert isinstance(panels[-1], IN_DIGITS)
    true = x.double() @ (numbers.double() - 8).t() * 0.5
    assert ((got - true).abs() <= true.abs() * 2.0**-8).all()


@pytest.mark.sample(ways=1)
@needs_panels
@needs_digits
@pytest.mark.parametrize("power", [-99, -40, 0, 60, 115])
@pytest.mark.parametrize("number", [0, 15])
def test_the_largest_digits_do_not_overflow(power: int, number: int) -> None:
    for value in (255.0, 254.0, 138.0, 129.0, 128.0):
        for sign in (1, -1):
            x = torch.full((1, 512), sign * value * 2.0 ** (power - 7)).bfloat16()
            packed = aten._convert_weight_to_int4pack_for_cpu(torch.full((64, 512), number).int(), 2)
            scales = torch.tensor([2.0**-10, 0.0]).bfloat16().expand(2, 64, 2).contiguous()
            got = compiled(of_group(256), x, packed, scales)([x, packed, scales])[0].double()
            true = x.double().sum() * (number - 8) * 2.0**-10
            assert ((got - true).abs() <= true.abs() * 2.0**-8).all()


@needs_panels
@pytest.mark.parametrize("rows", [1, 4, 10])
def test_levels_of_x86_read_them_too(rows: int, panels: list[FewRowsInPanels]) -> None:
    for dtype in TYPES:
        args, weight = operands(rows, 128, 192, 64, dtype)
        made = compiled(of_group(64), *args, processor="x86-64-v3")
        check_near(run(made, *args), int4(args[0], args[1], 64, args[2]), args[0].double() @ weight.t())
    assert len(panels) == len(TYPES) and not any(p.looked_up for p in panels)


@needs_panels
@needs_digits
@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_few_rows_of_bfloat16_are_multiplied_in_digits(group: int, panels: list[FewRowsInPanels]) -> None:
    """And nothing else, whose numbers have more bits or which has more rows."""
    most = MOST_ROWS if multiplies_short_digits(cpu_target().machine) else 1
    for dtype, rows in ((torch.bfloat16, 1), (torch.bfloat16, most), (torch.bfloat16, most + 1), (torch.float16, 1)):
        args, weight = operands(rows, 64, 512, group, dtype)
        check_near(run(compiled(of_group(group), *args), *args), of_group(group)(*args), args[0].double() @ weight.t())
        assert isinstance(panels[-1], IN_DIGITS) == (dtype is torch.bfloat16 and rows <= most)


@needs_panels
@needs_digits
@pytest.mark.parametrize("rows", [2, 3])
def test_each_row_has_digits_of_its_own(rows: int, panels: list[FewRowsInPanels]) -> None:
    """Of other sizes than the others, and other numbers that digits leave a part of."""
    for group in (32, 128):
        (x, packed, scales), weight = operands(rows, 128, 512, group, torch.bfloat16)  # whole panels
        x = torch.cat([_with_spread(x[row : row + 1].float() * 2.0 ** (8 * row), 9 * row) for row in range(rows)])
        x[-1, group : 2 * group] = 254.0  # whose digits do not fit
        got = run(compiled(of_group(group), x, packed, scales), x, packed, scales)
        for row in range(rows):
            alone, true = x[row : row + 1], x[row : row + 1].double() @ weight.t()
            check_near(got[row : row + 1], int4(alone, packed, group, scales), true)
        assert isinstance(panels[-1], IN_DIGITS) == multiplies_short_digits(cpu_target().machine)


@needs_panels
@needs_pairs
@pytest.mark.parametrize("count", [1, 2, 3, 21])
def test_panels_that_lie_apart_have_the_same_sums(
    count: int, threads: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the number of panels is, and of threads, and where not all that is multiplied is finite."""
    (x, packed, scales), weight = operands(2, 64 * count, 1024, 64, torch.bfloat16)
    broken = scales.clone()
    broken[3, -1, 0] = math.inf
    monkeypatch.setattr(panels_apart, "AMD", (cpu_target().machine.cpu,))
    for rows in (1, 2):
        found = []
        for streams in (1, 2, 3):
            monkeypatch.setattr(panels_apart, "STREAMS", streams)
            made = compiled(of_group(64), x[:rows], packed, scales)
            for number in (1, 2):
                threads(number)
                found.append([run(made, x[:rows], packed, given) for given in (scales, broken)])
        check_near(found[0][0], int4(x[:rows], packed, 64, scales), x[:rows].double() @ weight.t())
        assert not found[0][1][:, -1].isfinite().any() and found[0][1][:, :-1].isfinite().all()
        for one, other in itertools.pairwise(found):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


BATCH = """aotkit-ir 2
program graph
input x
input bytes
input pairs
buffer x : bfloat16[3, 256] strides [256, 1] input on cpu
buffer bytes : uint8[3, 3, 256, 32] strides [24576, 8192, 32, 1] input on cpu
buffer pairs : int32[3, 4, 192] strides [768, 192, 1] input on cpu
buffer out : bfloat16[3, 1, 192] strides [192, 192, 1] output on cpu
contraction out batch(e < 3) rows(i < 1) columns(panel < 3, upper < 2, j < 32) reduced(g < 4, k < 64) in f32 highest:
  origin nodes ["a"] ops ["a"] line ""
  left %x_wide:
    %x = load x[e, 64*g + k] : bf16
    %x_wide = cast %x : f32
  right %weight:
    %byte = load bytes[e, panel, 64*g + k, j] : u8
    %wide = cast %byte : i32
    %bit = index 4*upper : i32
    %moved = shr %wide, %bit : i32
    %fifteen = const 15 : i32
    %four_bits = bitwise_and %moved, %fifteen : i32
    %eight = const 8 : i32
    %whole = sub %four_bits, %eight : i32
    %number = cast %whole : f32
    %pair = load pairs[e, g, j + 64*panel + 32*upper] : i32
    %sixteen = const 16 : i32
    %scale_bits = shl %pair, %sixteen : i32
    %scale = bitcast %scale_bits : f32
    %upper_bits = const -65536 : i32
    %zero_bits = bitwise_and %pair, %upper_bits : i32
    %zero = bitcast %zero_bits : f32
    %weight = fma %number, %scale, %zero : f32
  sum %total:
    %narrow = cast %total : bf16
    store out[e, i, j + 64*panel + 32*upper] = %narrow
return out
"""


@needs_pairs
def test_each_product_of_a_batch_has_a_left_factor_of_its_own(
    panels: list[FewRowsInPanels], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So panels of two of them are not computed at once."""
    monkeypatch.setattr(panels_apart, "AMD", (cpu_target().machine.cpu,))
    program = parse_program(BATCH)
    pairs = torch.randn(3, 4, 192, 2).bfloat16().view(torch.int32).squeeze(-1)
    args = [torch.randn(3, 256).bfloat16(), torch.randint(0, 256, (3, 3, 256, 32), dtype=torch.uint8), pairs]
    scheduled, _ = schedule_program(program, options=LowerOptions(contractions="generated"))
    (got,), (want,) = bind_program(generate(scheduled))(list(args)), interpret_program(program, list(args))
    assert isinstance(panels[-1], FewRowsInPairs)
    torch.testing.assert_close(got.float(), want.float(), rtol=2e-2, atol=1e-2 * want.abs().max().item())


@needs_panels
def test_a_single_group_has_no_loop_of_its_own() -> None:
    args, weight = operands(2, 64, 128, 128, torch.float32)
    check_near(run(compiled(of_group(128), *args), *args), of_group(128)(*args), args[0].double() @ weight.t())


@pytest.mark.sample(ways=1)
@needs_panels
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 3e38])
@pytest.mark.parametrize("rows", [1, 3, 12])
def test_numbers_that_are_not_finite_give_what_eager_gives(rows: int, value: float) -> None:
    """An infinity times (number * scale + zero), not times both summands."""
    for dtype in (torch.float32, torch.bfloat16):
        (x, packed, scales), _ = operands(rows, 64, 128, 32, dtype)
        x[rows - 1, 37] = value
        scales[0, 3] = torch.tensor([0.0, 0.5])
        want, got = int4(x, packed, 32, scales), run(compiled(of_group(32), x, packed, scales), x, packed, scales)
        assert torch.equal(want.isnan(), got.isnan()) and torch.equal(want.isinf(), got.isinf())
        torch.testing.assert_close(got[want.isfinite()], want[want.isfinite()])
        assert torch.equal(want[want.isinf()], got[want.isinf()])


@needs_panels
@pytest.mark.parametrize("rows", [1, 9])
def test_scales_and_zeros_that_are_not_finite_give_what_eager_gives(rows: int) -> None:
    """An infinite zero times each number of a row, not times their sum: of numbers of both signs that is nan."""
    (x, packed, scales), _ = operands(rows, 64, 128, 32, torch.bfloat16)
    made = compiled(of_group(32), x, packed, scales)
    for value, part in itertools.product((math.inf, -math.inf, math.nan), (0, 1)):
        given = scales.clone()
        given[2, 37, part] = value
        want, got = int4(x, packed, 32, given), run(made, x, packed, given)
        assert torch.equal(want.isnan(), got.isnan()) and torch.equal(want.isinf(), got.isinf())
        torch.testing.assert_close(got[want.isfinite()], want[want.isfinite()])


@needs_panels
def test_what_comes_before_and_after_is_in_the_same_kernel(panels: list[FewRowsInPanels]) -> None:
    (x, packed, scales), weight = operands(1, 128, 256, 64, torch.bfloat16)
    residual, other = torch.randn(1, 128).bfloat16(), torch.randn(1, 128).bfloat16()

    def f(x: torch.Tensor, p: torch.Tensor, s: torch.Tensor, r: torch.Tensor, o: torch.Tensor) -> torch.Tensor:
        return F.silu(int4(x, p, 64, s)) * o + r

    made = compiled(f, x, packed, scales, residual, other)
    assert made.report().kernel_count == 1 and len(panels) == 1
    true = F.silu(x.double() @ weight.t()) * other.double() + residual.double()
    check_near(run(made, x, packed, scales, residual, other), f(x, packed, scales, residual, other), true)


@needs_panels
@pytest.mark.parametrize("rows", [1, 6, 11])
def test_a_product_is_the_same_on_one_thread_and_on_two(rows: int, threads: Callable[[int], None]) -> None:
    args, _ = operands(rows, 1024, 1024, 64, torch.bfloat16)
    made = compiled(of_group(64), *args)
    threads(1)
    one = made(list(args))[0]
    threads(2)
    assert torch.equal(made(list(args))[0], one)


@needs_panels
def test_the_interpreter_agrees() -> None:
    args, _ = operands(2, 128, 128, 64, torch.float16)
    program = lower_graph(make_fx(of_group(64), tracing_mode="fake")(*args))
    (found,) = contractions(program)
    assert found.library is not None and len(found.columns) == 3
    (got,) = interpret_program(program, list(args))
    assert isinstance(got, torch.Tensor)
    torch.testing.assert_close(got, of_group(64)(*args))
    assert parse_program(print_program(program)) == program


@pytest.mark.parametrize(("rows", "columns"), [(17, 128), (2, 80)])  # bfloat16: of other types 17 are many
def test_more_rows_and_panels_that_are_not_full_stay_with_aten(rows: int, columns: int) -> None:
    args, _ = operands(rows, columns, 128, 64, torch.bfloat16)
    made = compiled(of_group(64), *args)
    left = rows < FULL or not host_machine().has("amx-bf16")  # which multiply many rows
    assert [call.target for call in made.report().externs] == ["aten._weight_int4pack_mm_for_cpu.default"] * left
    assert torch.equal(run(made, *args), of_group(64)(*args))


@needs_panels
@pytest.mark.skipif(not host_machine().has("amx-bf16"), reason="without tile registers many rows stay with ATen")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_many_rows_are_products_in_tile_registers(dtype: torch.dtype) -> None:
    """As of a prompt: the weight is dequantized as it is packed for the tiles."""
    for rows, columns, summed, group in ((40, 128, 256, 64), (130, 192, 384, 128)):
        args, weight = operands(rows, columns, summed, group, dtype)
        made = compiled(of_group(group), *args)
        assert not made.report().externs
        check_near(run(made, *args), of_group(group)(*args), args[0].double() @ weight.t())


def test_a_layout_that_is_not_known_stays_with_aten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_products, "panel_columns", lambda: 0)
    args, _ = operands(1, 128, 128, 64, torch.bfloat16)
    made = compiled(of_group(64), *args)
    assert len(made.report().externs) == 1 and torch.equal(run(made, *args), of_group(64)(*args))


def test_the_layout_is_seen_by_packing() -> None:
    """As it is with AVX2, and one that nobody has."""

    def in_panels_of_32(numbers: torch.Tensor, _: int) -> torch.Tensor:
        halves = numbers.view(-1, 2, 16, numbers.shape[1]).permute(0, 3, 1, 2)
        return (halves[:, :, 0] | halves[:, :, 1] << 4).to(torch.uint8).reshape(numbers.shape[0], -1)

    assert panels_of_layout(in_panels_of_32) == 32
    assert panels_of_layout(lambda numbers, k: in_panels_of_32(numbers, k).flip(0)) == 0


def test_scales_that_do_not_fit_are_refused() -> None:
    x, packed, scales = operands(1, 64, 128, 32, torch.bfloat16)[0]
    graph = make_fx(of_group(32), tracing_mode="fake")(x, packed, scales[:3])
    with pytest.raises(UnsupportedGraphError, match=r"scales have shape \[3, 64, 2\]"):
        compile_graph(graph)
    graph = make_fx(of_group(48), tracing_mode="fake")(x, packed, scales)
    with pytest.raises(UnsupportedGraphError, match="its groups have 48 numbers"):
        compile_graph(graph)


@pytest.mark.parametrize("columns", [32, 128])
def test_weights_in_another_layout_are_refused(columns: int) -> None:
    """As a weight of half as many numbers, or of bytes that hold one number each."""
    x, _, scales = operands(1, 64, 128, 64, torch.bfloat16)[0]
    other = torch.zeros(64, columns, dtype=torch.uint8)
    graph = make_fx(of_group(64), tracing_mode="fake")(x, other, scales)
    with pytest.raises(UnsupportedGraphError, match=rf"uint8 of shape \[64, {columns}\].* uint8 of shape \[64, 64\]"):
        compile_graph(graph)
    with pytest.raises(RuntimeError, match="to be K/2"):
        of_group(64)(x, other, scales)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 3, 8, 12])
def test_weights_of_eight_bits(rows: int, dtype: torch.dtype) -> None:
    for columns, summed in ((16, 32), (96, 160), (128, 1024)):
        x, scales = torch.randn(rows, summed).to(dtype), (torch.rand(columns) / 100).to(dtype)
        weight = torch.randint(-128, 128, (columns, summed), dtype=torch.int8)
        made = compiled(lambda x, w, s: aten._weight_int8pack_mm(x, w, s), x, weight, scales)
        assert not made.report().externs and made.report().kernel_count == 1
        true = x.double() @ weight.double().t() * scales.double()
        check_near(run(made, x, weight, scales), aten._weight_int8pack_mm(x, weight, scales), true)


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_scale_of_eight_bits_that_is_not_finite_reaches_what_it_reaches_in_eager(value: float) -> None:
    """Each weight is multiplied by it, and those of both signs are added up, which is nan."""
    x, scales = torch.randn(2, 160), torch.rand(96)
    weight = torch.randint(-128, 128, (96, 160), dtype=torch.int8)
    scales[3] = value
    made = compiled(lambda x, w, s: aten._weight_int8pack_mm(x, w, s), x, weight, scales)
    assert not made.report().externs
    want, got = aten._weight_int8pack_mm(x, weight, scales), run(made, x, weight, scales)
    assert want[:, 3].isnan().all()
    assert torch.equal(want.isnan(), got.isnan()) and torch.equal(want.isinf(), got.isinf())
