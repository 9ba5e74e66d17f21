"""Custom operators that write to their arguments: called as they are, on copies only where the old value is wanted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import aotkit

GIVEN = torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def increase(x: Tensor, y: Tensor) -> None:
    x.add_(y)


def increase_both(x: Tensor, z: Tensor | None, y: Tensor) -> Tensor:
    x.add_(y)
    if z is not None:
        z.mul_(2)
    return y * 2


def increase_all(xs: list[Tensor], y: Tensor) -> None:
    for x in xs:
        x.add_(y)


@pytest.fixture
def ops() -> Iterator[Any]:
    with torch.library._scoped_library("aotkit_test_writes", "FRAGMENT") as library:
        for name, schema, run, fake in (
            ("increase", "(Tensor(a!) x, Tensor y) -> ()", increase, lambda x, y: None),
            (
                "increase_both",
                "(Tensor(a!) x, Tensor(b!)? z, Tensor y) -> Tensor",
                increase_both,
                lambda x, z, y: torch.empty_like(y),
            ),
            ("increase_all", "(Tensor(a!)[] xs, Tensor y) -> ()", increase_all, lambda xs, y: None),
        ):
            library.define(name + schema)
            library.impl(name, run, "CPU")
            library.impl(name, fake, "Meta")
        yield torch.ops.aotkit_test_writes


def fresh_value(ops: Any, x: Tensor) -> Any:
    y = x * 2
    ops.increase(y, x)
    return y + 1


def returned_value(ops: Any, x: Tensor) -> Any:
    y = x * 2
    ops.increase(y, x)
    return y


def twice(ops: Any, x: Tensor) -> Any:
    y = x * 2
    ops.increase(y, x)
    z = y.sin()
    ops.increase(y, z)
    return y, z


def parts(ops: Any, x: Tensor) -> Any:
    y, z = x * 2, x.sin()
    w = ops.increase_both(y[1:3], z[:, 1:].t(), x[1:3])
    return y + 1, z, w


def absent(ops: Any, x: Tensor) -> Any:
    y = x * 2
    return ops.increase_both(y.t(), None, x.t()), y


def old_value(ops: Any, x: Tensor) -> Any:
    y = x * 2
    view = y[1:]
    old = y.clone()
    ops.increase(y, x)
    return old.sum(0), y, view * 3


def lists(ops: Any, x: Tensor) -> Any:
    y, z = x * 2, x.cos()
    ops.increase_all([y, z[2:4].view(4, 2)[:, :1]], x[0, 0])
    return y, z * 2


def argument(ops: Any, x: Tensor) -> Any:
    ops.increase(x, x.sin())
    return x * 2


def argument_twice(ops: Any, x: Tensor) -> Any:
    ops.increase(x[2:], x[2:] * 3)
    ops.increase(x[:, 1], x[:, 0])
    return x.sum()


def argument_returned(ops: Any, x: Tensor) -> Any:
    ops.increase(x, x.sin())
    return x


def argument_read_before(ops: Any, x: Tensor) -> Any:
    before = x.cos()
    old = x.clone()
    ops.increase(x, before)
    return old - x, before


def view_of_argument(ops: Any, x: Tensor) -> Any:
    part = x[1:4]
    ops.increase(part, part * 1)
    x.mul_(2)
    return part + 1


PROGRAMS: list[Callable[[Any, Tensor], Any]] = [
    fresh_value,
    returned_value,
    twice,
    parts,
    absent,
    old_value,
    lists,
    argument,
    argument_twice,
    argument_returned,
    argument_read_before,
    view_of_argument,
]


def compiled(fn: Callable[..., Any], dynamic: bool = False) -> tuple[Callable[..., Any], aotkit.Recorder]:
    torch._dynamo.reset()
    recorder = aotkit.Recorder()
    options = {"fallback": "error", "cache": False, "observer": recorder, "redzones": True}
    return torch.compile(fn, backend="aotkit", fullgraph=True, dynamic=dynamic, options=options), recorder


def calls(recorder: aotkit.Recorder) -> list[str]:
    return [call.target for record in recorder.graphs for call in record.report.externs]


@pytest.mark.covers("F5f.36")
@pytest.mark.parametrize(
    "program, dynamic",
    [*((program, False) for program in PROGRAMS), (parts, True), (argument, True)],
    ids=lambda value: value.__name__ if callable(value) else ("dynamic" if value else "static"),
)
def test_a_custom_operator_that_writes_is_called_itself_and_writes_what_it_writes_in_eager_mode(
    ops: Any, program: Callable[..., Any], dynamic: bool
) -> None:
    run, recorder = compiled(lambda x: program(ops, x), dynamic)
    for _ in range(2):
        want_x, got_x = GIVEN.clone(), GIVEN.clone()
        want, got = program(ops, want_x), run(got_x)
        torch.testing.assert_close(got, want, check_stride=True)
        torch.testing.assert_close(got_x, want_x)
        assert not isinstance(want, Tensor) or (got is got_x) == (want is want_x)
    if not dynamic:  # sizes that are not known keep the call that copies
        assert not [target for target in calls(recorder) if "auto_functionalized" in target]
        assert any(target.startswith("aotkit_test_writes.increase") for target in calls(recorder))


@pytest.mark.covers("F5f.36")
def test_a_copy_is_made_only_where_the_old_value_is_wanted() -> None:
    addresses: list[int] = []

    @torch.library.custom_op("aotkit_test_writes::watched", mutates_args=("x",))
    def watched(x: Tensor, y: Tensor) -> None:
        addresses.append(x.data_ptr())
        x.add_(y)

    @watched.register_fake
    def _(x: Tensor, y: Tensor) -> None:
        return None

    def cached(cache: Tensor, x: Tensor) -> Tensor:
        watched(cache[2:4], x)
        watched(cache[0], x[1])
        return cache.sum(0)

    def made(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        y = cache * 2
        old = y.sin()
        watched(y[2:4], x)
        return y, old

    def wanted(cache: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        old = cache.clone()
        watched(cache[2:4], x)
        return old * 2, cache

    ones = torch.ones(2, 4, dtype=torch.float64)
    for fn in (cached, made, wanted):
        run, recorder = compiled(fn)
        want_cache, got_cache = GIVEN.clone(), GIVEN.clone()
        want = fn(want_cache, ones)
        addresses.clear()
        got = run(got_cache, ones)
        torch.testing.assert_close(got, want)
        torch.testing.assert_close(got_cache, want_cache)
        assert not [target for target in calls(recorder) if "auto_functionalized" in target]
        if fn is cached:
            assert addresses == [got_cache[2].data_ptr(), got_cache.data_ptr()]
        if fn is made:
            assert addresses == [got[0][2].data_ptr()]


@pytest.mark.covers("F5f.36")
def test_a_view_as_another_type_is_read_in_the_kernel(ops: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        halved = ((x.float() * 2).view(torch.int32) - (1 << 23)).view(torch.float32)
        return halved + 1

    run, recorder = compiled(fn)
    torch.testing.assert_close(run(GIVEN), fn(GIVEN))
    assert [record.report.kernel_count for record in recorder.graphs] == [1] and not calls(recorder)


@pytest.mark.covers("F5f.36")
def test_writes_through_views_are_scatters_that_need_no_call(ops: Any) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.clone()
        y[2:5].t()[1:3].mul_(2)
        y.diagonal().fill_(0)
        y[:, ::3].add_(1)
        return y

    run, recorder = compiled(fn)
    torch.testing.assert_close(run(GIVEN), fn(GIVEN))
    assert not calls(recorder)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows": lambda x: x[1:3],
    "columns": lambda x: x[:, 1:3],
    "block": lambda x: x[1:3, 1:3],
    "row": lambda x: x[1],
    "transposed": lambda x: x.t(),
}


@pytest.mark.covers("F5f.36")
@pytest.mark.parametrize("options", [{}, {"dynamic": True}, {"lowering": "none"}], ids=["kernels", "sizes", "aten"])
@pytest.mark.parametrize("view", VIEWS)
def test_views_are_written_to_wherever_in_its_storage_the_tensor_begins(
    ops: Any, view: str, options: dict[str, Any]
) -> None:
    def given(x: Tensor) -> Tensor:
        ops.increase(VIEWS[view](x), x.sum())
        return x + 1

    def equal(x: Tensor) -> Tensor:  # a pass may put x in the place of y
        y = x * 1
        ops.increase(VIEWS[view](y), x.sum())
        return y + 1

    for fn in (given, equal):
        torch._dynamo.reset()
        settings = {"fallback": "error", "cache": False, **{k: v for k, v in options.items() if k != "dynamic"}}
        run = torch.compile(fn, backend="aotkit", dynamic=options.get("dynamic", False), options=settings)
        for offset in (1, 0, 4):
            want_memory, got_memory = GIVEN.flatten().clone(), GIVEN.flatten().clone()
            want = fn(want_memory[offset : offset + 16].view(4, 4))
            got = run(got_memory[offset : offset + 16].view(4, 4))
            torch.testing.assert_close(got, want)
            torch.testing.assert_close(got_memory, want_memory)


@pytest.mark.covers("F5f.36")
@pytest.mark.parametrize("made", [False, True])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.view_as_complex(x),
        lambda x: x.view(torch.int64),
        lambda x: torch.view_as_complex(x).real,
    ],
)
def test_views_as_another_type_are_written_to_as_that_type(ops: Any, view: Any, made: bool) -> None:
    def fn(x: Tensor) -> Tensor:
        y = x.sin() if made else x
        part = view(y)
        ops.increase(part, part.new_full((), 3))
        return y + 1

    run, _ = compiled(fn)
    want_x, got_x = GIVEN[:, :2].clone(), GIVEN[:, :2].clone()
    torch.testing.assert_close(run(got_x), fn(want_x), rtol=0, atol=0)
    torch.testing.assert_close(got_x, want_x, rtol=0, atol=0)


def shares_what_it_reads(ops: Any, x: Tensor) -> Any:
    y = x * 2
    return ops.increase_both(y[:3], y[4:], y[5]), y


def shares_what_it_writes(ops: Any, x: Tensor) -> Any:
    y = x * 2
    return ops.increase_both(y[:3], y[2:], x[:3]), y


def reads_what_it_writes(ops: Any, x: Tensor) -> Any:
    return ops.increase_both(x, None, x), x + 1


@pytest.mark.covers("F5f.36")
@pytest.mark.parametrize("program", [shares_what_it_reads, shares_what_it_writes, reads_what_it_writes])
def test_arguments_that_share_memory_show_what_was_written(ops: Any, program: Callable[..., Any]) -> None:
    torch._dynamo.reset()
    options = {"cache": False, "lowering": "none"}
    run = torch.compile(lambda x: program(ops, x), backend="aotkit", options=options)
    want_x, got_x = GIVEN.clone(), GIVEN.clone()
    with pytest.warns(UserWarning, match="writes to memory that others of its arguments may share"):
        got = run(got_x)
    torch.testing.assert_close(got, program(ops, want_x))
    torch.testing.assert_close(got_x, want_x)


@pytest.mark.covers("F5f.36")
@pytest.mark.parametrize("dynamic", [False, True])
def test_parts_of_one_tensor_are_told_apart_and_written_to(ops: Any, dynamic: bool) -> None:
    def fn(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.sin()
        q, k, _ = y.split([2, 1, 1], 1)
        r = ops.increase_both(q, k, x[0, 0])
        ops.increase_all(list(y.chunk(2)), x.sum())
        return y, r

    run, recorder = compiled(fn, dynamic)
    torch.testing.assert_close(run(GIVEN), fn(GIVEN))
    if not dynamic:
        assert not [target for target in calls(recorder) if "auto_functionalized" in target]


@pytest.mark.covers("F5f.36")
def test_equal_values_of_which_one_is_written_to_stay_two(ops: Any) -> None:
    def fn(x: Tensor) -> tuple[Tensor, ...]:
        y, z = x * 2, x * 2
        r = ops.increase_both(y[1:3], z[3:5], x[:2])
        ops.increase(y[:2], z[:2])
        return y, z, r

    run, _ = compiled(fn)
    torch.testing.assert_close(run(GIVEN), fn(GIVEN))


def writes_to_equal_values(ops: Any, x: Tensor) -> Any:
    a, b, scale = torch.zeros(6, 4), torch.zeros(6, 4), torch.full((6, 4), 3.0)
    ops.increase_both(a, b, scale)
    return x * a, a, b


def reads_an_equal_value(ops: Any, x: Tensor) -> Any:
    read, a, b = torch.ones(6, 4), torch.ones(6, 4), torch.ones(6, 4)
    w = ops.increase_both(a, b, read)
    return x * a, a, b, w, read


def writes_to_equal_values_in_a_list(ops: Any, x: Tensor) -> Any:
    y = x.detach()
    a, b, c = y.sin(), y.sin(), y.sin()
    ops.increase_all([a[1:], b[1:]], c[1:])
    return x * a, b, c


@pytest.mark.covers("F5f.36")
@pytest.mark.parametrize("train", [False, True])
@pytest.mark.parametrize("program", [writes_to_equal_values, reads_an_equal_value, writes_to_equal_values_in_a_list])
def test_equal_values_that_one_call_is_given_stay_as_many(ops: Any, program: Callable[..., Any], train: bool) -> None:
    run, _ = compiled(lambda x: program(ops, x))
    results = []
    for fn in (run, lambda x: program(ops, x)):
        x = GIVEN.clone().requires_grad_(train)
        outputs = fn(x)
        gradient = torch.autograd.grad(outputs[0].sum(), x) if train else ()
        results.append([value.detach() for value in (*outputs, *gradient)])
    for ours, eager in zip(*results, strict=True):
        torch.testing.assert_close(ours, eager)


@pytest.mark.covers("F5f.36")
@pytest.mark.skipif(not hasattr(torch.Tag, "out"), reason="this torch has no tag `out`, by which they are declared")
def test_results_of_operators_that_return_what_they_wrote_are_their_arguments() -> None:
    def doubled(y: Tensor, *, out: Tensor) -> Tensor:
        return out.copy_(y * 2)

    with torch.library._scoped_library("aotkit_test_returns", "FRAGMENT") as library:
        library.define("doubled(Tensor y, *, Tensor(a!) out) -> Tensor(a!)", tags=(torch.Tag.out,))
        library.define("increase_(Tensor(a!) x, Tensor y) -> Tensor(a!)", tags=(torch.Tag.inplace,))
        library.impl("doubled", doubled, "CPU")
        library.impl("doubled", lambda y, *, out: out, "Meta")
        library.impl("increase_", lambda x, y: x.add_(y), "CPU")
        library.impl("increase_", lambda x, y: x, "Meta")
        ops = torch.ops.aotkit_test_returns

        def fn(x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
            made = y.sin()
            ops.increase_(made[1:], y[1:]).mul_(3)
            ops.increase_(y, x).mul_(3)
            ops.doubled(y, out=x).mul_(2)
            return x + 1, y + 1, made

        run, _ = compiled(fn)
        want, got = ([GIVEN.clone(), GIVEN.cos()] for _ in range(2))
        torch.testing.assert_close(run(*got), fn(*want))
        torch.testing.assert_close(got, want)
