"""Sorts of long rows: eager's values and places bit for bit, and which unstable sorts a stable one stands for."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import CompiledGraph, LowerOptions, bind_program, compile_graph
from aotkit_inductor_lower.launch_plan.codec import compiled_from_json, compiled_to_json

FLOATS = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
TYPES = [*FLOATS, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
REDO = "aotkit_inductor_lower.fix_up_rows.default"
Function = Callable[[Tensor], Sequence[Tensor]]


def plain(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Elements of all sizes."""
    g = torch.Generator().manual_seed(0)
    if dtype.is_floating_point:
        x = torch.randn(shape, generator=g, dtype=torch.float64)
        return (x * torch.logspace(-50, 30, x.shape[-1], dtype=torch.float64)).to(dtype)
    return (torch.randint(-(2**62), 2**62, shape, generator=g) * 2).to(dtype)


def tied(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Five different values, and zeros of both signs."""
    x = torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    return torch.where(plain(*shape) < 0, -x, x) if dtype.is_floating_point else x


def odd(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Infinities, subnormal numbers, zeros, and nans of both signs; of integers the largest and the smallest."""
    x = plain(*shape, dtype=dtype)
    flat = x.view(-1)
    if dtype.is_floating_point:
        least = torch.finfo(dtype).smallest_normal / 4
        for start, value in enumerate((math.nan, math.inf, -math.inf, -0.0, 0.0, least, -least)):
            flat[start :: 7 + start] = value
        flat[5::13] = torch.tensor(math.nan, dtype=dtype).neg()
    elif dtype is not torch.bool:
        flat[::7], flat[3::11] = torch.iinfo(dtype).max, torch.iinfo(dtype).min
    return x


def compiled(f: Function, *examples: Tensor, mode: str = "fake", **options: object) -> CompiledGraph:
    graph = make_fx(lambda *x: list(f(*x)), tracing_mode=mode)(*examples)
    made = compile_graph(graph, options=LowerOptions(verify=True, **options))  # type: ignore[arg-type]
    assert isinstance(made, CompiledGraph)
    return made


def assert_equal(got: Sequence[Tensor], want: Sequence[Tensor]) -> None:
    whole = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    for g, w in zip(got, want, strict=True):
        assert (g.dtype, g.shape, g.stride()) == (w.dtype, w.shape, w.stride())
        assert torch.equal(*(t.view(whole[t.itemsize]) if t.is_floating_point() else t for t in (g, w)))


def calls(made: CompiledGraph) -> set[str]:
    return {extern.target for extern in made.report().externs}


def check(f: Function, *xs: Tensor, left: Sequence[str] = (), **options: object) -> CompiledGraph:
    """One compiled graph gives eager's bits for each of the tensors, which are alike; no calls but those."""
    made = compiled(f, xs[0], **options)
    assert calls(made) == set(left)
    for x in xs:
        assert_equal(made([x]), f(x))
    return made


def stable(dim: int = -1, descending: bool = False) -> Function:
    return lambda x: torch.sort(x, dim=dim, descending=descending, stable=True)


@pytest.mark.covers("F5g.12")
@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_long_rows_of_every_type_are_sorted_stably(dtype: torch.dtype) -> None:
    inputs = [make(200, 3, dtype=dtype).t() for make in (plain, tied, odd)]
    both = check(lambda x: [*stable()(x), *stable(0, descending=True)(x.t())], *inputs)
    assert both.report().kernel_count == 2


@pytest.mark.covers("F5g.12")
@pytest.mark.parametrize(
    ("count", "dtype"), [(65, torch.float32), (4099, torch.int64), (4099, torch.float16), (128_000, torch.float32)]
)
def test_rows_of_any_length_are_sorted_stably(count: int, dtype: torch.dtype) -> None:
    check(stable(descending=True), *(make(count, dtype=dtype) for make in (plain, tied, odd)))


@pytest.mark.covers("F5g.12")
def test_rows_whose_length_a_call_tells_are_sorted_between_redzones_too() -> None:
    made = compiled(stable(1), plain(5, 70, 3), mode="symbolic")
    assert calls(made) == set()
    watched = bind_program(compiled_from_json(compiled_to_json(made.compiled)), made.constants, redzones=True)
    for shape in ((2, 2, 5), (7, 31, 2), (3, 1000, 2), (4, 1, 2)):
        for x in (plain(*shape), odd(*shape)):
            assert_equal(made([x]), stable(1)(x))
            assert_equal(watched([x]), stable(1)(x))
    assert [found.shape for found in watched([torch.empty(4, 0, 2)])] == [(4, 0, 2)] * 2


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_are_shared_out_to_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        check(stable(), odd(37, 3001), tied(37, 3001))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("processor", ["x86-64", "x86-64-v3", "interpreter"])
def test_other_processors_sort_alike(processor: str) -> None:
    left = ("aten.sort.stable",) if processor == "interpreter" else ()
    check(stable(0), odd(161, 3), tied(161, 3), processor=processor, left=left)


# -- unstable sorts --------------------------------------------------------------------------------------


def values(x: Tensor) -> list[Tensor]:
    return [x.sort(-1).values]


def nucleus(x: Tensor) -> list[Tensor]:
    """As transformers keeps the most probable words."""
    found, places = torch.sort(x, descending=False)
    dropped = found.abs().cumsum(-1) <= 9
    return [x.masked_fill(dropped.scatter(1, places, dropped), -math.inf)]


def gathered(x: Tensor) -> list[Tensor]:
    """By a key that has more equal elements than what is gathered."""
    return [x.gather(1, x.round().argsort(1, descending=True)), x.msort()]


def both(x: Tensor) -> list[Tensor]:
    return list(x.sort(-1, descending=True))


@pytest.mark.covers("F5g.12")
@pytest.mark.parametrize("f", [values, nucleus, gathered, both], ids=lambda f: f.__name__)
def test_unstable_sorts_are_eagers_where_equal_elements_can_be_told_apart(f: Function) -> None:
    few = plain(70, 170)
    few[3, 5::9], few[8, :100] = 0.0, 1.25
    some = torch.where(few > 0, few, few.bfloat16())  # of few bits in some rows
    some[::2] = some[::2].half()
    check(f, few, tied(70, 170), odd(70, 170), tied(70, 170) + 5, some, left=(REDO,))


def test_what_was_sorted_may_be_overwritten_before_its_places_are_used() -> None:
    def f(x: Tensor) -> list[Tensor]:
        found, places = (x + 0).sort(-1), x.sort(-1).indices
        dropped = found.values.abs() < 4
        x.copy_(found.values.flip(-1))
        return [dropped.scatter(1, places, dropped), x.sin()]

    made = compiled(f, tied(4, 300).half())
    assert "aten.sort.default" in calls(made)
    x, y = (tied(4, 300).half() + 5 for _ in range(2))
    assert_equal(made([x]), f(y))
    assert_equal([x], [y])


def test_orders_of_few_bytes_are_atens() -> None:
    f: Function = lambda x: [x.gather(1, x.argsort(1))]
    (extern,) = check(f, tied(4, 300).half(), left=("aten.sort.default",)).report().externs
    assert "two bytes" in extern.reason


def test_values_of_integers_tell_no_order() -> None:
    check(values, *(make(9, 300, dtype=torch.int16) for make in (plain, tied)))


def test_orders_that_are_told_are_atens() -> None:
    told: list[tuple[Function, Tensor]] = [
        (both, tied(4, 300).half()),
        (both, tied(2, 3000)),
        (lambda x: [x.argsort(-1) + 1], tied(4, 300, dtype=torch.int64)),
        (lambda x: [x.gather(0, x.argsort(-1))], tied(300, 300).half()),
        (lambda x: [x.scatter(1, x.argsort(-1), 2.0)], tied(4, 300).half()),
    ]
    for f, x in told:
        (extern,) = check(f, x, left=("aten.sort.default",)).report().externs
        assert "order of equal elements" in extern.reason


def test_fast_numerics_sort_stably() -> None:
    made = compiled(lambda x: [*x.sort(-1), *x[:, :20].sort(-1)], tied(4, 3000), numerics="fast")
    assert calls(made) == set()
    x = tied(4, 3000)
    assert_equal(made([x]), [*stable()(x), *stable()(x[:, :20])])


def test_what_is_left_to_aten_says_why() -> None:
    made = check(stable(), plain(4, 50), left=("aten.sort.stable",))
    (choice,) = made.report().products
    assert not choice.ours and "50 elements" in choice.what
    (choice,) = check(stable(), plain(4, 90)).report().products
    assert choice.ours and "digit by digit" in choice.what
    check(stable(), plain(4, 90), disable=("generate-sorts",), left=("aten.sort.stable",))
