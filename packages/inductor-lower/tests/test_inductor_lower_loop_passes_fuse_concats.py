"""Joined tensors: parts are computed into their places, or where they are read; nothing is stored twice."""

from __future__ import annotations

import random

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, lower_graph, schedule_program
from aotkit_inductor_lower.ir import BufferKind

F = torch.nn.functional


def numbers(*sizes, seed=0):
    return torch.randn(*sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def temporaries(result):
    """Buffers that are neither inputs nor results, of the program and of the plan."""
    kinds = {b.kind for b in result.compiled.program.buffers}
    stored = {b.name for b in result.compiled.program.buffers if b.kind is BufferKind.TEMPORARY}
    assert BufferKind.OUTPUT in kinds
    return stored | {a.buffer for a in result.compiled.compiled.plan.arena}


def decisions(result):
    return [(r.fused, r.reason) for r in result.compiled.records if r.kind == "concat"]


def four(a, b):
    return [a.sin(), b * 2, a.softmax(-1), F.layer_norm(b, (48,))]


@pytest.mark.covers("F5h.7")
@pytest.mark.parametrize(
    "f",
    [
        lambda a, b: torch.cat(four(a, b)),
        lambda a, b: torch.cat(four(a, b), -1),
        lambda a, b: torch.stack(four(a, b), 1),
        lambda a, b: torch.stack(four(a, b), -1),
        lambda a, b: torch.cat([a.exp(), a.exp(), b.sum(0, keepdim=True)]),
        lambda a, b: torch.cat([a.exp().t(), b[:, 3:19].t(), b.view(24, 2, 48)[:, 1]]),
    ],
    ids=["rows", "columns", "stack", "stack last", "twice and a sum", "views"],
)
def test_parts_are_computed_into_their_places(check, f):
    a, b = numbers(48, 48), numbers(48, 48, seed=1)
    result = check(f, a, b)
    assert not temporaries(result)
    assert not result.externs


@pytest.mark.covers("F5h.7")
def test_the_argument_of_an_aten_call_is_the_only_buffer(check):
    a, b = numbers(48, 48), numbers(48, 48, seed=1)
    result = check(lambda a, b: torch.cat([a.sin(), b.exp(), a + b]) @ b, a, b, aten=("mm",))
    assert temporaries(result) == {"cat"}
    assert decisions(result) == [(False, "the whole is needed in memory by an ATen call or the caller")]


@pytest.mark.covers("F5h.7")
@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("pieces", [2, 5, 9])
def test_a_pointwise_reader_is_cut_at_the_borders(check, dim, pieces):
    xs = [numbers(30 + k if dim == 0 else 300, 300 + k if dim else 30, seed=k) for k in range(pieces)]
    result = check(lambda *xs: (torch.cat([x.sin() if k % 2 else x for k, x in enumerate(xs)], dim) + 1).exp(), *xs)
    assert not temporaries(result)
    assert decisions(result) == [(True, "its reader's loop is cut at the borders of the parts")]


@pytest.mark.parametrize(("columns", "cut"), [(31, False), (32, True)])
def test_a_reader_is_cut_where_parts_are_not_too_short(check, columns, cut):
    result = check(lambda *xs: torch.cat(xs, 1).exp() + 1, *[numbers(30, columns, seed=k) for k in range(8)])
    (found,) = decisions(result)
    assert ("cut at the borders" in found[1]) == cut


@pytest.mark.covers("F5h.7")
@pytest.mark.parametrize(
    ("f", "reason", "kernels"),
    [
        (lambda a, b: F.layer_norm(torch.cat([a, b * 2], 1), (96,)), "one kernel picks", 1),
        (lambda a, b: torch.cat([a, b * 2], 1).exp().softmax(1), "its reader picks", 1),
        (lambda a, b: (torch.cat([a, b]).view(24, 4, 48) + 1).sum((0, 2)), "picks the part", 1),
        (lambda a, b: torch.stack([a, -b], -1).flatten(-2).cos(), "its reader picks", 1),
        (lambda a, b: torch.cat([a, b]) * torch.cat([b, a]), "its reader", 2),
        (lambda a, b: F.layer_norm(torch.cat([a.sin(), b.exp()], 1), (96,)), "a part is dear", 3),
        (lambda a, b: F.layer_norm(torch.cat([a] * 9, 1), (432,)), "it has more than 8", 2),
        (
            lambda a, b: F.layer_norm(torch.cat([a.softmax(1), b.softmax(1)], 1), (96,)),
            "a part can be stored by the kernel that makes it",
            3,
        ),
        (lambda a, b: (lambda w: (w.exp(), w.sin()))(torch.cat([a, b * 2], 1)), "one kernel picks", 1),
        (lambda a, b: (lambda s: (s, F.layer_norm(torch.cat([s, b], 1), (96,))))(a.softmax(1)), "one kernel picks", 2),
    ],
)
def test_parts_are_picked_by_their_reader_where_that_is_cheap(check, f, reason, kernels):
    result = check(f, numbers(48, 48), numbers(48, 48, seed=1))
    assert all(reason in why for _, why in decisions(result)), decisions(result)
    assert decisions(result)
    assert result.kernels == kernels


def test_parts_that_their_reader_cannot_take_in_are_stored():
    for columns in (9, 300):
        x = numbers(9, columns)
        graph = make_fx(lambda a, b: torch.cat([a, b * 2], 1).exp() + 1, tracing_mode="fake")(x, x)
        program, records = schedule_program(lower_graph(graph), LowerOptions(max_fusion_instructions=12))
        (concat,) = [r for r in records if r.kind == "concat"]
        assert concat.reason == "its reader cannot take the parts in"
        assert (concat.first, concat.second) == ("cat", program.steps[-1].name)
    graph = make_fx(lambda a, b: torch.cat([a, b * 2]), tracing_mode="fake")(x, x)
    _, records = schedule_program(lower_graph(graph))
    assert [(r.first, r.second) for r in records if r.kind == "concat"] == [("cat", "the caller")]


@pytest.mark.covers("F5h.7")
def test_results_that_are_parts_have_memory_of_their_own(check):
    def f(a, b):
        part = a.sin()
        whole = torch.cat([part, b])
        return whole, part, whole[:48]

    a, b = numbers(48, 48), numbers(48, 48, seed=1)
    compiled = check(f, a, b).compiled
    whole, part, view = compiled([a, b])
    part.zero_()
    torch.testing.assert_close(whole, torch.cat([a.sin(), b]))
    whole.zero_()
    assert not view.any()


def test_types_are_promoted_and_empty_pieces_take_no_part(check):
    whole, ints = numbers(6, 4), torch.arange(12).view(3, 4)

    def f(x, y, empty, flat):
        return (
            torch.cat([x.sin(), y + 1, empty.exp()], -2),
            torch.cat([empty, empty]),
            torch.cat([flat, flat]),
            torch.cat([flat, x, y.bool()]) * 2,
            torch.stack([y.t(), y.t() * 2]),
        )

    check(f, whole, ints, torch.empty(0, 4, dtype=torch.float64), torch.empty(0, dtype=torch.float64))


def test_a_part_of_an_input_that_is_overwritten_later_is_read_before(check):
    def f(x, y):
        whole = torch.cat([x, y])
        x.copy_(x * 2)
        return [whole.exp(), whole.softmax(0), torch.cat([x, y]).sin()]

    check(f, numbers(40, 8), numbers(40, 8, seed=1))


def test_sizes_may_be_unknown_and_zero(check):
    def f(x, y):
        whole = torch.cat([x.sin(), y, x * 2], 1)
        return (
            whole.exp(),
            torch.cat([y, x], -1).softmax(-1),
            torch.stack([x, x.exp()]),
            torch.cat([x.cos(), x]) @ x.t(),
        )

    x, y = numbers(6, 40), numbers(6, 80, seed=1)
    compiled = check(f, x, y, mode="symbolic", aten=("mm",)).compiled
    for columns, more in ((2, 7), (1, 90), (33, 0)):
        x, y = numbers(5, columns), numbers(5, more, seed=1)
        sizes = [*x.shape, *y.shape]
        for got, want in zip(compiled([x, y]), f(x, y), strict=True):
            torch.testing.assert_close(got, want, msg=lambda text, at=sizes: f"{at}: {text}")


def random_join(rng, tensors):
    """One more tensor of rank 2 and 12 columns or rows, made of the others."""
    kind = rng.randrange(5)
    a = rng.choice(tensors)
    same = [t for t in tensors if t.shape == a.shape]
    if kind == 0:
        return rng.choice([torch.sin, torch.neg, lambda t: t * 2 + 1, lambda t: t.softmax(-1), lambda t: t - t.mean()])(
            a
        )
    if kind == 1:
        return a + rng.choice(same) * 0.5
    dim = rng.randrange(2)
    fitting = [t for t in tensors if t.shape[1 - dim] == a.shape[1 - dim] and t.shape[dim] < 100]
    pieces = [rng.choice(fitting or [a]) for _ in range(rng.randrange(2, 5))]
    if kind == 4 and a.shape[dim] > 3:
        pieces.append(a.narrow(dim, 1, a.shape[dim] - 2))
    return torch.cat(pieces, dim - 2 * rng.randrange(2))


@pytest.mark.covers("F5h.7")
@pytest.mark.sample(5)
@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_of_joins_equal_eager(seed):
    def f(*xs):
        rng = random.Random(seed)
        tensors = list(xs)
        for _ in range(14):
            tensors.append(random_join(rng, tensors))
        return [t for t in tensors[3:] if rng.random() < 0.3] + tensors[-2:]

    xs = [numbers(12, 36, seed=seed), numbers(36, 12, seed=seed + 1), numbers(12, 12, seed=seed + 2)]
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(*xs), options=LowerOptions(verify=True))
    for got, want in zip(compiled(list(xs)), f(*xs), strict=True):
        torch.testing.assert_close(got, want)
