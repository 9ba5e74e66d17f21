"""Inputs that are written to are computed in place, unless their old value is still needed."""

from __future__ import annotations

import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, interpret_program, lower_graph, schedule_program, verify_program
from aotkit_inductor_lower.ir import BufferKind

F = torch.nn.functional


def both(value, f):
    """The value has several readers in ``f``."""
    return f(value)


def check(f, *args, aten=()):
    """Results and inputs afterwards equal eager's; the number of kernels, and the temporaries left. No ATen calls but
    those that are named."""
    graph = make_fx(f, tracing_mode="fake")(*[a.clone() for a in args])
    mine, theirs = [a.clone() for a in args], [a.clone() for a in args]
    compiled = compile_graph(graph)
    assert {call.target.split(".")[1] for call in compiled.report().externs} == set(aten), "what is left to ATen"
    got, want = compiled(list(mine)), f(*theirs)
    for a, b in zip([*got, *mine], [*want, *theirs], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    program, _ = schedule_program(lower_graph(graph))
    return compiled.report().kernel_count, {b.name for b in program.buffers if b.kind is BufferKind.TEMPORARY}


def test_an_update_in_place_is_one_kernel_without_temporaries():
    def adam(p, g, m, v):
        new_m = torch.lerp(m, g, 0.1)
        new_v = v * 0.999 + g * g * 0.001
        p.copy_(p - 0.01 * new_m / (new_v.sqrt() + 1e-8))
        m.copy_(new_m)
        v.copy_(new_v)
        return []

    assert check(adam, *[torch.rand(5, 7) for _ in range(4)]) == (1, set())


def test_rows_may_be_normalized_in_place():
    def f(x, w):
        x.copy_(F.softmax(x * w, -1))
        return []

    assert check(f, torch.rand(4, 9), torch.rand(9)) == (1, set())


@pytest.mark.parametrize(
    "f",
    [
        lambda x, y: [x.copy_(y * 2 + x), (x + y).sum(0)][1:],
        lambda x, y: both((x * y).exp(), lambda s: [x + s.sum(1, keepdim=True), x.copy_(s)][:1]),
        lambda x, y: both((x * y).exp(), lambda s: [x.flip(1) + s.sum(1, keepdim=True), x.copy_(s)][:1]),
        lambda x, y: [x.copy_(x.t() + y), y + 1][1:],
        lambda x, y: [x.copy_(x.flip(0)), y.copy_(y.roll(1, 0))][:0],
        lambda x, y: [x.copy_(y + 1), y.copy_(y * 3)][:0],
        lambda x, y: [x.copy_(y), y.copy_(y * 3)][:0],
        lambda x, y: [x.copy_(x - x.sum(0))][:0],
        lambda x, y: [x.copy_(x - x.sum(1, keepdim=True)), y.copy_(x + y)][:0],
        lambda x, y: [x.copy_(x.cumsum(0)), y.copy_(y.cumsum(1))][:0],
        lambda x, y: [torch.index_put(x, [torch.tensor([1, 0])], y[:2]), x.copy_(x * 2)][:1],
    ],
)
def test_old_values_that_are_still_needed_are_read_before_they_are_overwritten(f):
    check(f, torch.rand(5, 5), torch.rand(5, 5))


def test_an_old_value_that_an_aten_call_needs_is_read_before_it_is_overwritten():
    check(lambda x, y: [y @ x, x.copy_(x.exp())][:1], torch.rand(5, 5), torch.rand(5, 5), aten=("mm",))


def test_a_returned_value_keeps_memory_of_its_own():
    def f(x, y):
        new = x * 2 + y
        x.copy_(new)
        return [new, new + 1]

    x, y = torch.rand(4, 3), torch.rand(4, 3)
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(x.clone(), y))
    new, _ = compiled([x, y])
    before = new.clone()
    x.zero_()
    assert torch.equal(new, before)


def test_a_value_that_is_copied_into_two_inputs_is_computed_in_one_of_them():
    def f(x, y):
        new = F.softmax(x + y, -1)
        x.copy_(new)
        y.copy_(new)
        return []

    assert check(f, torch.rand(5, 5), torch.rand(5, 5)) == (2, set())


def test_a_copy_that_must_stay_does_not_keep_the_next_one():
    def f(x, y, z):
        x.copy_(y @ y)
        z.copy_(F.softmax(y + z, -1))
        return []

    kernels, temporaries = check(f, *[torch.rand(5, 5) for _ in range(3)], aten=("mm",))
    assert kernels == 2 and len(temporaries) == 1


def random_updates(seed):
    """Three tensors that are written to, some of them twice, with old and new values read in between."""

    def f(*xs):
        rng = random.Random(seed)
        values, results = list(xs), []
        kinds = (torch.sin, lambda t: t.softmax(-1), lambda t: t.softmax(0), lambda t: t.flip(0), lambda t: t.cumsum(1))
        for _ in range(14):
            kind = rng.randrange(4)
            if kind < 2:
                values.append(rng.choice(kinds)(rng.choice(values)) + rng.choice(values))
            elif kind == 2:
                rng.choice(xs).copy_(rng.choice(values[3:] or values))
            else:
                results.append(rng.choice(values).sum(rng.randrange(2)))
        return results

    return f


@pytest.mark.parametrize("seed", range(24))
def test_random_updates_leave_what_eager_leaves(seed):
    f = random_updates(seed)
    xs = [torch.rand(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(k)) for k in range(3)]
    program, _ = schedule_program(lower_graph(make_fx(f, tracing_mode="fake")(*[x.clone() for x in xs])))
    verify_program(program)
    mine, theirs = [x.clone() for x in xs], [x.clone() for x in xs]
    for got, want in zip([*interpret_program(program, mine), *mine], [*f(*theirs), *theirs], strict=True):
        torch.testing.assert_close(got, want)
