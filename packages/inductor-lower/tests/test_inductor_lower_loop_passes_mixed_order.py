"""Column sums in the kernel that walks over the same rows: what joins, what does not and why, on one thread and two."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import (
    LowerOptions,
    compile_graph,
    decompositions,
    interpret_program,
    lower_graph,
    schedule_program,
)
from aotkit_inductor_lower.ir import LoopNest, Store

F = torch.nn.functional
aten = torch.ops.aten


def random(*sizes):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes)))


def layer_norm_backward(g, x, w, b):
    mean, rstd = x.mean(-1, keepdim=True), (x.var(-1, keepdim=True) + 1e-5).rsqrt()
    return aten.native_layer_norm_backward(g, x, [x.shape[-1]], mean, rstd, w, b, [True, True, True])


def rms_norm_backward(g, x, w):
    scale = (x * x).mean(-1, keepdim=True).add(1e-6).rsqrt()
    normal = x * scale
    return scale * (g * w - normal * (g * w * normal).mean(-1, keepdim=True)), (g * normal).sum((0, 1))


def bias_gradient(g, x, w):
    y = g * x
    return y @ w, y.sum(0)


def overwritten(x, y):
    total = x.sum(0)
    return total, x.copy_(y * x.sum(1, keepdim=True))


def traced(f, args):
    return make_fx(lambda *given: f(*given), decompositions(), tracing_mode="fake")(*args)


def accumulating(program):
    return [
        step
        for step in program.steps
        if isinstance(step, LoopNest)
        and any(isinstance(i, Store) and i.accumulates for stage in step.stages for i in stage.body)
    ]


CASES = {
    "layer norm": (layer_norm_backward, (random(512, 264), random(512, 264), random(264), random(264)), 2),
    "rms norm": (rms_norm_backward, (random(20, 30, 256), random(20, 30, 256), random(256)), 1),
    "bias": (bias_gradient, (random(300, 500), random(300, 500), random(500, 4)), 1),
    "prime rows": (rms_norm_backward, (random(1, 521, 256), random(1, 521, 256), random(256)), 1),
}


@pytest.mark.covers("F5h.5")
@pytest.mark.parametrize("name", CASES)
def test_column_sums_are_made_in_the_kernel_of_the_rows(name):
    f, args, sums = CASES[name]
    graph = traced(f, args)
    program, records = schedule_program(lower_graph(graph), LowerOptions(verify=True))
    (mixed,) = accumulating(program)
    added = [i for stage in mixed.stages for i in stage.body if isinstance(i, Store) and i.accumulates]
    assert len(added) == sums and len({i.buffer for i in added}) == sums
    assert [r.kind for r in records if r.fused and r.kind == "mixed-order"] == ["mixed-order"]
    expected = f(*(x.double() for x in args))
    interpreted, threads = interpret_program(program, list(args)), torch.get_num_threads()
    compiled, found = compile_graph(graph), []
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(compiled(list(args)))
    finally:
        torch.set_num_threads(threads)
    for results in (interpreted, *found):
        for got, want in zip(results, expected, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=2e-3)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)  # a chunk of rows belongs to one thread, whoever that is


@pytest.mark.parametrize(
    ("f", "args", "reason"),
    [
        (
            lambda g, x: (lambda y: (y, y.sum(0)))(aten.gelu_backward(g, x)),
            (random(512, 512), random(512, 512)),
            "its arithmetic takes longer",
        ),
        (lambda x: (x.softmax(-1), x.t().softmax(-1), x.sum(1)), (random(512, 512),), None),
        (lambda x: (x.softmax(-1), x.sum(0)), (random(64, 64),), None),  # little data
        (lambda x: (x.softmax(-1), x.flip(0).cumsum(0), x.flip(1).sum(0)), (random(512, 512),), "regular way"),
        (
            lambda g, x: ((g * x / x.amax(1, keepdim=True)).sum(0),),
            (random(512, 512), random(512, 512)),
            "known after the last pass",  # of the largest of a row, which its elements are divided by
        ),
        (overwritten, (random(512, 512), random(512, 512)), "overwrite what is summed"),
    ],
)
def test_what_gains_nothing_or_does_not_fit_stays_apart(f, args, reason):
    graph = traced(f, args)
    program, records = schedule_program(lower_graph(graph), LowerOptions(verify=True))
    assert not accumulating(program)
    refused = [r.reason for r in records if r.kind == "mixed-order" and not r.fused]
    assert any(reason in text for text in refused) if reason else True
    given, same = ([each.clone() for each in args] for _ in range(2))  # one writes to them
    for got, want in zip(compile_graph(graph)(given), f(*same), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_sums_that_a_step_in_between_needs_are_not_moved():
    def f(g, x, w):
        total = (g * x).sum(0)
        y = torch.mm(g, w * total)  # needs the sums
        return y, (g * y).softmax(-1)  # reads what only then is there

    args = (random(512, 512), random(512, 512), random(512, 512))
    graph = traced(f, args)
    results = compile_graph(graph)(list(args))
    for got, want in zip(results, f(*(x.double() for x in args)), strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-3, atol=5e-2)


def rows_and_columns(g, x):
    return (g * x).softmax(-1), (g * x).sum(0)


@pytest.mark.parametrize(
    ("rows", "columns", "chunks"),
    [
        (512, 512, 16),  # many columns: a line of sums for each of 16 threads
        (300, 500, 15),  # chunks are of one length
        (521, 256, 1),
        (4096, 32, 64),  # no shorter than 64 rows
        (70000, 4, 1000),
        (2 * 8191, 16, 2),  # no longer than 8192 rows
        (9001, 16, None),
    ],
)
def test_rows_are_cut_into_chunks_that_are_neither_short_nor_long(rows, columns, chunks):
    args = random(rows, columns), random(rows, columns)
    program, records = schedule_program(lower_graph(traced(rows_and_columns, args)), LowerOptions(verify=True))
    partial = [[size.constant for size in b.sizes] for b in program.buffers if "_part" in b.name]
    assert partial == ([[chunks, columns]] if chunks else [])
    if chunks is None:
        (refused,) = [r for r in records if r.kind == "mixed-order"]
        assert "short enough" in refused.reason
    for got, want in zip(interpret_program(program, list(args)), rows_and_columns(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-3)


def kept_and_summed(y):
    return y, y.sum(0)


def pair(*sizes, dtype=torch.float32):
    return random(*sizes).to(dtype), random(*sizes).to(dtype)


SQUARE = pair(512, 512)
DECISIONS = {
    "halves, summed in float32": (rows_and_columns, pair(1024, 512, dtype=torch.half), True, ""),
    "doubles": (rows_and_columns, pair(300, 300, dtype=torch.float64), True, ""),
    "as many doubles as matter": (rows_and_columns, pair(256, 256, dtype=torch.float64), True, ""),
    "one row fewer": (rows_and_columns, pair(255, 256, dtype=torch.float64), False, None),
    "integers": (lambda g, x: ((g * x).sum(-1), (g * x).sum(0)), [torch.ones(512, 512).long()] * 2, False, None),
    "maxima": (lambda g, x: ((g * x).softmax(-1), (g * x).amax(0)), SQUARE, False, None),
    "running sums": (lambda g, x: ((g * x).softmax(-1), (g * x).cumsum(0)), SQUARE, False, None),
    "two sums of columns": (
        lambda g, x: ((g * x).softmax(-1), (g * x).sum(0), (g + x.roll(1, 0)).sum(0)), SQUARE, True, "through arg0_1",
    ),
    "what follows for each column": (lambda g, x: ((g * x).softmax(-1), (g * x).mean(0).exp()), SQUARE, True, ""),
    "of what is just written": (lambda g, x: kept_and_summed(g * x), SQUARE, True, "through mul"),
    "one dear operation": (lambda g, x: kept_and_summed((g * x).sin()), SQUARE, True, "through sin"),
    "two dear operations": (lambda g, x: kept_and_summed((g.cos() * x).sin()), SQUARE, False, "its arithmetic takes"),
    "dear, but row by row": (lambda g, x: ((g.cos() * x).sin().softmax(-1), (g * x).sum(0)), SQUARE, True, ""),
    "of both outer dimensions": (
        lambda g, x: ((g * x).softmax(-1), (g * x).sum((0, 1))), pair(16, 64, 512), True, "",
    ),
    "of the dimension in the middle": (
        lambda g, x: ((g * x).softmax(-1), (g * x).sum(1)), pair(16, 64, 512), False,
        "the rows of the one are not what the other sums over",
    ),
    "of half of the rows": (
        lambda g, x: ((g * x)[:256].exp(), (g * x).sum(0)), SQUARE, False, "does not pass through all",
    ),
    "of other rows of what is just written": (
        lambda g, x: (lambda y: (y, (y * y.flip(0)).sum(0)))(g * x), SQUARE, False, "reads other elements of mul",
    ),
    "rows of both kinds": (lambda g, x: (F.layer_norm(g, (512,)), g.softmax(0)), SQUARE, False, None),
    "under a mask": (
        lambda g, x: (F.pad(g, (0, 0, 1, 1)).sum(0), (g * x).softmax(-1)), SQUARE, False, "is read under a mask",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DECISIONS)
def test_which_sums_of_columns_join_the_kernel_of_the_rows(name):
    f, args, joined, reason = DECISIONS[name]
    program, records = schedule_program(lower_graph(traced(f, args)), LowerOptions(verify=True))
    assert len(accumulating(program)) == joined
    tried = [(r.fused, r.reason) for r in records if r.kind == "mixed-order"]
    assert not tried if reason is None else any(fused == joined and reason in why for fused, why in tried), tried
    half = args[0].dtype is torch.half
    for got, want in zip(interpret_program(program, list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-2 if half else 1e-3, atol=1e-2 if half else 2e-3)


def test_a_kernel_that_gets_too_large_is_left_alone():
    lowered = lower_graph(traced(rows_and_columns, SQUARE))
    apart, records = schedule_program(lowered, LowerOptions(max_fusion_instructions=14))
    assert not accumulating(apart)
    assert "the kernel would get too large" in [r.reason for r in records if r.kind == "mixed-order"]
    together, _ = schedule_program(lowered, LowerOptions(max_fusion_instructions=40))
    assert accumulating(together)
