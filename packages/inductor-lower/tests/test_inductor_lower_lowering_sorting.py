"""Sorting of short rows: eager's values and places bit for bit, whatever is equal, and what else their kernel does."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    CompiledGraph,
    LowerOptions,
    bind_program,
    compile_graph,
    interpret_program,
    lower_graph,
    parse_program,
    print_program,
    schedule_program,
    verify_program,
)
from aotkit_inductor_lower.ir import ExternCall
from aotkit_inductor_lower.launch_plan.codec import compiled_from_json, compiled_to_json
from aotkit_inductor_lower.targets.cpu import processor_machine
from aotkit_inductor_lower.targets.cpu.generate import generate

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
INTS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
REDO = "aotkit_inductor_lower.fix_up_rows.default"
Function = Callable[[Tensor], Sequence[Tensor]]


def plain(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=g, dtype=torch.float64).to(dtype)
    return torch.randint(-(2**40), 2**40, shape, generator=g).to(dtype)


def tied(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Few different values, zeros of both signs among them."""
    x = torch.randint(
        0 if dtype in (torch.uint8, torch.bool) else -1, 3, shape, generator=torch.Generator().manual_seed(1)
    )
    x = x.to(dtype)
    return torch.where(plain(*shape) < 0, -x, x) if dtype.is_floating_point else x


def odd(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Infinities, zeros of both signs, and nans of both signs; of integers the largest and the smallest."""
    x = plain(*shape, dtype=dtype)
    flat = x.view(-1)
    if not dtype.is_floating_point:
        if dtype is not torch.bool:
            flat[::7], flat[3::11] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
        return x
    for start, value in enumerate((math.nan, math.inf, -math.inf, -0.0, 0.0)):
        flat[start :: 7 + start] = value
    flat[5::13] = torch.tensor(math.nan, dtype=dtype).neg()
    return x


def bits(x: Tensor) -> Tensor:
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize]) if x.is_floating_point() else x


def assert_equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride())
        assert torch.equal(bits(g), bits(w)), (g, w)


def compiled(f: Function, example: Tensor, processor: str = "host") -> CompiledGraph:
    graph = make_fx(lambda x: list(f(x)), tracing_mode="fake")(example)
    made = compile_graph(graph, options=LowerOptions(verify=True, processor=processor))  # type: ignore[arg-type]
    assert isinstance(made, CompiledGraph)
    return made


def check(f: Function, *xs: Tensor, processor: str = "host", aten: tuple[str, ...] = ()) -> CompiledGraph:
    """One compiled graph gives eager's bits for each of the tensors, which are alike; no ATen calls but those."""
    made = compiled(f, xs[0], processor)
    assert {target.split(".")[1] for target in targets(made) - {REDO}} == set(aten), "what is left to ATen"
    for x in xs:
        assert_equal(made([x]), f(x))
    return made


def targets(made: CompiledGraph) -> set[str]:
    return {extern.target for extern in made.report().externs}


@pytest.mark.covers("F5g.12")
@pytest.mark.parametrize("dtype", [*FLOATS, *INTS], ids=str)
def test_values_and_places_of_every_type_are_eagers_bits(dtype: torch.dtype) -> None:
    def orders(x: Tensor) -> list[Tensor]:
        stable = x.sort(dim=0, stable=True, descending=True)
        return [*x.sort(-1), *stable, x.argsort(-1, descending=True), torch.msort(x)]

    def chosen(x: Tensor) -> list[Tensor]:
        return [*x.topk(3), *x.topk(2, 0, largest=False), *x.kthvalue(4), *x.median(0, keepdim=True)]

    inputs = [make(21, 9, dtype=dtype) for make in (plain, tied, odd)]
    assert targets(check(lambda x: orders(x[:16]), *inputs)) == set()
    if dtype is not torch.bool:
        left = () if dtype.itemsize > 1 else ("topk", "kthvalue", "median")
        made = check(lambda x: chosen(x[:16]), *inputs, aten=left)
        assert (REDO in targets(made)) == (dtype.itemsize > 1)


@pytest.mark.covers("F5g.12")
@pytest.mark.parametrize("count", [1, 2, 3, 5, 8, 13, 16, 17, 23, 32])
def test_rows_of_every_length_are_sorted_as_by_eager(count: int) -> None:
    def f(x: Tensor) -> list[Tensor]:
        return [*x.sort(-1, descending=True), *x.sort(stable=True, dim=-1)]

    made = check(f, *(make(19, count) for make in (plain, tied, odd)))
    assert targets(made) == ({REDO} if count > 16 else set())
    if count <= 16:
        check(lambda x: x.sort(-1), *(make(19, count, dtype=torch.int64) for make in (plain, tied, odd)))


@pytest.mark.covers("F5g.12")
@pytest.mark.parametrize(
    ("count", "k"), [(1, 1), (4, 4), (8, 2), (16, 15), (20, 5), (32, 20), (64, 1), (64, 7), (128, 2)]
)
def test_the_best_of_rows_of_every_length_are_eagers(count: int, k: int) -> None:
    for largest in (True, False):
        made = check(lambda x: x.topk(k, largest=largest), *(make(19, count) for make in (plain, tied, odd)))  # noqa: B023
        assert targets(made) == ({REDO} if count > 1 else set())
    if k <= 2:
        check(lambda x: x.topk(k, sorted=False), *(make(19, count) for make in (plain, tied, odd)))


def test_the_worst_of_rows_of_large_values_are_found_in_passes() -> None:
    x = (plain(19, 40).abs() + 2).exp()
    x[:, 5:] = math.inf
    check(lambda x: [*x.topk(7, largest=False), *x.neg().topk(7)], x, odd(19, 40), tied(19, 40))


@pytest.mark.covers("F5g.12")
def test_rows_lie_anywhere_in_memory() -> None:
    def f(dim: int) -> Function:
        return lambda x: [*x.sort(dim), *x.topk(2, dim), *x.median(dim)]

    x = odd(6, 5, 7)
    for dim in (0, 1, -1):
        check(f(dim), x, tied(6, 5, 7))
        check(f(dim), x.permute(2, 0, 1))
    check(f(0), odd(9), tied(9))
    check(f(1), odd(9, 40)[::2, 3:12], tied(9, 40)[::2, 3:12])
    check(f(1), odd(9, 1).expand(9, 6))
    check(lambda x: x.view(3, 14, 5).sort(1), x)
    assert targets(check(lambda x: x.sort(1), plain(0, 4))) == set()


@pytest.mark.covers("F5g.12")
@pytest.mark.parametrize("rows", [40, 4000])
def test_rows_with_equal_elements_are_done_again_by_the_same_compiled_graph(rows: int) -> None:
    def f(x: Tensor) -> list[Tensor]:
        return [*x.topk(3, 0), *x.kthvalue(5, 0), *x.median(0), *x.sort(0)]

    none, some, all_ = plain(20, rows), plain(20, rows), tied(20, rows)
    some[:, ::17] = tied(20, rows)[:, ::17]
    some[4, 1::19] = math.nan
    made = check(f, none, some, none, all_, none)
    text = compiled_to_json(made.compiled)
    again = bind_program(compiled_from_json(text), made.constants)
    assert_equal(again([some]), f(some))


def test_equal_elements_are_redone_also_of_a_tensor_that_requires_grad() -> None:
    x = tied(30, 8).requires_grad_()
    made = compiled(lambda x: x.topk(2), x)
    assert targets(made) == {REDO}
    assert_equal([t.detach() for t in made([x])], x.detach().topk(2))


@pytest.mark.covers("F5h.6")
def test_a_sort_and_what_is_around_it_are_one_kernel() -> None:
    made = check(lambda x: [x.mul(2).neg().sort(-1).values + 1], odd(40, 12))
    assert (made.report().kernel_count, targets(made)) == (1, set())
    made = compiled(lambda x: [torch.softmax(x, -1).sort(-1, descending=True).values.cumsum(-1)], plain(40, 12))
    assert (made.report().kernel_count, targets(made)) == (1, set())


@pytest.mark.covers("F5h.6")
@pytest.mark.parametrize("experts", [8, 64])
def test_a_softmax_and_its_best_two_are_one_kernel(experts: int) -> None:
    """The other kernel looks whether any row was marked."""
    made = compiled(lambda x: torch.softmax(x, -1).topk(2), plain(64, experts))
    assert (made.report().kernel_count, targets(made)) == (2, {REDO})
    x = plain(64, experts)
    x[3] = x[5, 0] = -math.inf
    x[7, :4] = 2.0
    values, places = made([x])
    want, where = torch.softmax(x.double(), -1).topk(2)
    torch.testing.assert_close(values.double(), want, rtol=1e-5, atol=1e-6, equal_nan=True)
    distinct = [row for row in range(64) if row not in (3, 7)]
    assert torch.equal(places[distinct], where[distinct])


@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "interpreter"])
def test_other_processors_sort_alike(processor: str) -> None:
    check(lambda x: [*x.sort(-1), *x.topk(2, 0)], odd(19, 11), tied(19, 11), processor=processor)
    check(lambda x: x.topk(3), odd(19, 40), tied(19, 40), processor=processor)


def test_what_the_loop_ir_of_a_sort_says_is_eagers_order() -> None:
    x = tied(7, 20)
    lowered = lower_graph(make_fx(lambda x: [*x.sort(1), *x.topk(2, 1)], tracing_mode="fake")(x))
    assert [s.target for s in lowered.steps if isinstance(s, ExternCall)] == [REDO, REDO]
    scheduled, _ = schedule_program(lowered)
    for program in (lowered, scheduled):
        assert parse_program(print_program(program)) == program
        assert_equal(interpret_program(program, [x]), [*x.sort(1), *x.topk(2, 1)])


def test_what_is_not_generated_is_an_aten_call_that_says_why() -> None:
    cases: list[tuple[Function, Tensor, str]] = [
        (lambda x: x.sort(-1), plain(4, 33), "that length"),
        (lambda x: x.sort(-1), plain(4, 17, dtype=torch.int64), "that length"),
        (lambda x: x.sort(-1), plain(4, 17).half(), "equal elements"),
        (lambda x: x.sort(-1), torch.tensor(2.0), "known length"),
        (lambda x: x.topk(3, sorted=False), plain(4, 9), "unsorted"),
        (lambda x: x.topk(0), plain(4, 9), "known length"),
        (lambda x: x.topk(9), plain(4, 64), "that length"),
        (lambda x: x.median(-1), plain(4, 40), "that length"),
        (lambda x: x.topk(2), tied(4, 9, dtype=torch.int8), "a byte"),
    ]
    for f, x, why in cases:
        (extern,) = compiled(f, x).report().externs
        assert extern.target.startswith("aten.") and why in extern.reason, (extern, why)
        check(f, x, aten=(extern.target.split(".")[1],))
    graph = make_fx(lambda x: list(x.sort(-1)), tracing_mode="fake")(plain(4, 8))
    program = lower_graph(graph, LowerOptions(processor="triton-interpreter"))
    assert [step.name for step in program.steps] == ["sort"]


SCATTERED = """aotkit-ir 2
program scattered
input x
input places
buffer x : float32[37, 5] strides [5, 1] input on cpu
buffer places : int64[37, 5] strides [5, 1] input on cpu
buffer y : float32[37, 5] strides [5, 1] output on cpu
buffer z : float32[37, 5] strides [5, 1] output on cpu
buffer row : float32[5] strides [1] scratch on cpu
loop scattered(i0 < 37):
  stage(r0 < 5):
    %v0 = load x[i0, r0] : f32
    %v1 = load places[i0, r0] : i64
    %v2 = check %v1 < 5
    store row[%v2] = %v0
  stage(r1 < 5):
    %v3 = load row[r1] : f32
    store y[i0, r1] = %v3
    %v4 = load places[i0, r1] : i64
    %v5 = check %v4 < 5
    %v6 = load row[%v5] : f32
    store z[i0, r1] = %v6
return y, z
"""


@pytest.mark.parametrize("processor", ["host", "x86-64"])
def test_a_scratch_row_is_stored_and_read_at_computed_places_in_every_lane(processor: str) -> None:
    program = parse_program(SCATTERED)
    verify_program(program)
    x, places = plain(37, 5), plain(37, 5).argsort(1)
    want = [torch.zeros(37, 5).scatter(1, places, x), x]
    run = bind_program(generate(program, processor_machine(processor)), {})
    for got in (interpret_program(program, [x, places]), run([x, places])):
        assert_equal(got, want)
