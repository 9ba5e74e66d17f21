"""Long reductions in chunks: eager's values, the same bits on any number of threads; what stays whole."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph, compile_to_program, decompositions, interpret_program
from aotkit_inductor_lower.ir import LoopNest, Store
from aotkit_inductor_lower.loop_passes.split_reductions import split_reductions
from aotkit_inductor_lower.passes import PassContext
from aotkit_inductor_lower.targets.cpu.target import cpu_target

N = 70_001  # a few chunks and a rest


def random(*sizes, dtype=torch.float64):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sum(sizes))).to(dtype)


def compiled(f, args, mode="fake", **options):
    graph = make_fx(lambda *given: f(*given), decompositions(), tracing_mode=mode)(*args)
    return compile_graph(graph, options=LowerOptions(verify=True, **options))


def on_threads(graph, args, count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return graph(list(args))
    finally:
        torch.set_num_threads(before)


def parts(graph):
    return [kernel.name for kernel in graph.compiled.kernels if kernel.name.endswith("_partial")]


def splits(graph):
    return " ".join(r.reason for r in graph.records if r.kind == "split")


def everything(x):
    return (
        *(x.sum(), x.mean(), x.amax(), x.amin(), x.prod(), (x > 3).any(), (x < 9).all(), x.norm(), x.norm(1)),
        *(x.argmax(), x.argmin(), ((x - 1) ** 2).mean(), (x.abs().sqrt() + 1).log().sum()),
    )


def relu_and_sum(x):
    y = x.relu()
    return y, y.sum(), y.max()


def loss(x, target):
    return torch.nn.functional.cross_entropy(x, target)


def bias_gradient(x, grad):
    kept = torch.where(x > 0, grad, 0.0)
    return kept.sum(0), (kept * x).sum(0)


def long_row(x):
    n = x.shape[-1:]
    return (
        *(x.softmax(-1), x.log_softmax(-1), x.logsumexp(-1), *torch.var_mean(x), x.std(-1, correction=0)),
        *(*torch.native_layer_norm(x, n, None, None, 1e-5), (x - x.mean()) / (x.amax() - x.amin())),
    )


def column_statistics(x):
    return x.var(0), (x - x.mean(0)) * x.std(0), x.softmax(0), x.logsumexp(0)


CASES = {
    "a vector": (everything, (random(N),)),
    "a matrix": (everything, (random(301, 300),)),
    "two long rows": (everything, (random(2, 50_000),)),
    "a transposed matrix": (everything, (random(301, 300).t(),)),
    "what is stored on the way": (relu_and_sum, (random(N),)),
    "few columns": (lambda x: (x.sum(0), x.amax(0), x.argmax(0)), (random(N, 3),)),
    "eight columns": (lambda x: (x.sum(0), x.amin(0), x.norm(dim=0), (x > 3).any(0)), (random(N, 8),)),
    "a column of ones": (lambda x: (x.sum(0), x.sum(0, keepdim=True)), (random(20_001, 1, 5, 1),)),
    "columns of two dimensions": (lambda x: (x.sum(0), x.sum((0, 2))), (random(9000, 3, 2),)),
    "rows of two dimensions": (lambda x: (x.sum((0, 1)), x.amax((0, 1))), (random(311, 64, 7),)),
    "several matrices of few columns": (lambda x: (x.sum(1), x.prod(1)), (random(11, 1000, 6) / 9 + 1,)),
    "weighted columns": (lambda x, w: ((x * w).sum(0), (x - w).abs().amax(0)), (random(N, 5), random(5))),
    "gradients of a bias": (bias_gradient, (random(N, 12), random(N, 12, dtype=torch.float64) - 1)),
    "long rows in passes": (long_row, (random(1, 4 * N),)),
    "long columns in passes": (column_statistics, (random(N, 8),)),
    "wide columns in passes": (column_statistics, (random(9001, 40),)),
    "few rows": (lambda x: (x.sum(1), x.amin(1), x.argmin(1)), (random(3, N),)),
    "integers": (lambda x: (x.sum(), x.amax(), x.prod(), x.argmax()), ((random(N) * 1e18).long(),)),
    "columns of integers": (lambda x: (x.sum(0), x.amax(0)), ((random(N, 6) * 1e18).long(),)),
    "columns of bytes": (lambda x: (x.sum(0), x.amin(0), x.any(0)), ((random(N, 6).abs() * 9).to(torch.uint8),)),
    "columns of halves": (lambda x: (x.amax(0), x.amin(0)), (random(N, 3).bfloat16(),)),
    "halves": (lambda x: (x.amax(), x.argmax(), (x > 3).any()), (random(N).bfloat16(),)),
    "bytes": (lambda x: (x.sum(), x.amax(), x.argmax()), ((random(N) * 9).to(torch.uint8),)),
}


@pytest.mark.covers("F5e.1")
@pytest.mark.parametrize("name", CASES)
def test_chunks_give_the_same_on_any_number_of_threads(name):
    f, args = CASES[name]
    graph = compiled(f, args, redzones=True)
    assert parts(graph)
    one = on_threads(graph, args, 1)
    two = on_threads(graph, args, 2)
    for a, b, reference, want in zip(one, two, interpret_program(graph.program, list(args)), f(*args), strict=True):
        torch.testing.assert_close(a, want)
        torch.testing.assert_close(reference, want)
        assert torch.equal(a, b)


@pytest.mark.parametrize("place", [0, 16_383, 16_384, 69_000, 70_000])
def test_nan_and_the_first_of_equals_are_found_in_every_chunk(place):
    graph = compiled(lambda x: (x.argmax(), x.amax(), x.argmin(), x.sum()), (random(N),))
    assert parts(graph)
    level = torch.full((N,), 2.0, dtype=torch.float64)
    level[place:] = 3.0  # the first of many equal ones
    nans = random(N)
    nans[place], nans[-1] = float("nan"), float("nan")
    for x in (level, nans, torch.full((N,), float("-inf"), dtype=torch.float64)):
        want = (x.argmax(), x.amax(), x.argmin(), x.sum())
        for got, expected in zip(on_threads(graph, [x], 2), want, strict=True):
            torch.testing.assert_close(got, expected, equal_nan=True)


def test_lengths_known_at_run_time_only_are_cut_too():
    def f(x, y):
        return x.sum(), x.argmax(), (y * y).mean(), y.amax(), y.argmin()

    graph = compiled(f, (random(N), random(70, 71)), mode="symbolic")
    assert len(parts(graph)) >= 2
    for n, rows, columns in ((N, 300, 301), (5, 2, 1), (16_384, 1, 70_000), (16_383, 70_000, 1), (32_769, 4096, 3)):
        x, y = random(n), random(rows, columns)
        given = {"x": x, "y": y, "n": n, "rows": rows, "columns": columns}
        args = [given[k] for k in ("x", "y")] if len(graph.program.inputs) == 2 else [n, x, rows, columns, y]
        for got, want in zip(on_threads(graph, args, 2), f(x, y), strict=True):
            torch.testing.assert_close(got, want)


def test_float32_sums_are_as_exact_as_eagers():
    x = random(1_000_003, dtype=torch.float32) + 1
    got = compiled(lambda x: (x.sum(), x.mean()), (x,))([x])
    exact = x.double().sum()
    bound = 1e-6 * x.double().abs().sum()  # some 16 roundings of relative size 6e-8 each
    assert abs(got[0].double() - exact) < bound and abs(got[1].double() * x.numel() - exact) < 2 * bound


def test_an_index_out_of_range_is_reported_from_a_chunk():
    table, at = random(10), torch.zeros(N, dtype=torch.int64)
    graph = compiled(lambda table, at: table[at].sum(), (table, at))
    assert parts(graph)
    at[:] = 3
    torch.testing.assert_close(graph([table, at])[0], table[3] * N)
    at[40_000] = 10
    with pytest.raises(IndexError):
        on_threads(graph, [table, at], 2)


@pytest.mark.parametrize("place", [0, 40_000, N - 1])
def test_an_index_out_of_range_is_reported_from_a_chunk_of_a_device(place):
    table, at = random(10), torch.full((N,), 3)
    graph = make_fx(lambda table, at: table[at].sum(), decompositions())(table, at)
    lowered = compile_to_program(graph, options=LowerOptions(processor="triton-interpreter"))
    (partial,) = [step for step in lowered.scheduled.steps if step.name.endswith("_partial")]
    rows = partial.stages[0].ranges[0].size
    assert partial.outer[0].size * rows != N  # places past the end, which are no error
    (got,) = interpret_program(lowered.scheduled, [table, at])
    torch.testing.assert_close(got, table[3] * N)
    at[place] = 10
    with pytest.raises(IndexError):
        interpret_program(lowered.scheduled, [table, at])


def test_short_reductions_and_those_of_many_rows_stay_whole():
    for f, x in (
        (lambda x: x.sum(), random(1000)),
        (lambda x: x.sum(1), random(64, 5000)),
        (lambda x: x.sum(0), random(300, 1024)),
        (lambda x: x.cumsum(0), random(N)),
        (lambda x: x.sum(), random(0, 5)),
    ):
        graph = compiled(f, (x,))
        assert not parts(graph)
        torch.testing.assert_close(graph([x])[0], f(x))


@pytest.mark.parametrize(
    ("f", "sizes", "cut"),
    [
        (lambda x: x.sum(), (65_535,), False),  # a second thread would not pay
        (lambda x: x.sum(), (65_536,), True),
        (lambda x: x.sum(0), (600, 448), True),  # seven units of 64 columns
        (lambda x: x.sum(0), (600, 449), False),  # eight keep threads busy by themselves
        (lambda x: x.sum(1), (7, 40_000), True),  # a row is a unit where its elements lie side by side
        (lambda x: x.sum(1), (8, 40_000), False),
        (lambda x: x.var(), ((1 << 18) - 1,), False),
        (lambda x: x.var(), (1 << 18,), True),
    ],
)
def test_a_reduction_is_cut_from_the_size_on_from_which_threads_pay(f, sizes, cut):
    graph = compiled(f, (torch.ones(sizes),))
    assert bool(splits(graph)) == cut


def test_columns_of_unknown_length_are_folded_too():
    def f(x):
        y = x.view(-1, 6)
        return y.sum(0), y.amax(0), y.var(0)

    graph = compiled(f, (random(6 * N),), mode="symbolic")
    assert "fill vectors" in splits(graph)
    for n in (N, 1000, 64, 31, 5, 2):
        x = random(6 * n)
        for got, want in zip(on_threads(graph, [x], 2), f(x), strict=True):
            torch.testing.assert_close(got, want)


@pytest.mark.parametrize("columns", [1, 2, 3, 5, 8, 12, 31])
def test_float32_sums_of_columns_are_as_exact_as_eagers(columns):
    x = random(200_003, columns, dtype=torch.float32) + 1
    graph = compiled(lambda x: (x.sum(0), x.bfloat16().sum(0, dtype=torch.float32)), (x,))
    assert ("fill vectors" in splits(graph)) == (columns in (2, 3, 5, 8, 12))
    for got, given in zip(graph([x]), (x, x.bfloat16()), strict=True):
        exact = given.double().sum(0)
        bound = 1e-6 * given.double().abs().sum(0)  # some 16 roundings of relative size 6e-8 each
        assert ((got.double() - exact).abs() < bound).all()


def test_a_row_stays_one_kernel_where_others_keep_threads_busy():
    for x in (random(64, 5000), random(1, N)):
        graph = compiled(lambda x: (x.softmax(-1), x.var(-1)), (x,))
        assert not splits(graph)
        for got, want in zip(graph([x]), (x.softmax(-1), x.var(-1)), strict=True):
            torch.testing.assert_close(got, want)


def test_a_split_leaves_a_record():
    graph = compiled(lambda x: x.sum(), (random(N),))
    assert any(r.kind == "split" and "chunks of 16384" in r.reason for r in graph.records)


def test_passes_over_a_long_row_leave_a_record_from_the_first_to_the_last():
    graph = compiled(lambda x: x.softmax(0), (random(N, 8),))
    (record,) = (r for r in graph.records if r.kind == "split" and "each pass over a long row" in r.reason)
    assert (record.first, record.second) == ("_softmax_pass0", "_softmax")


def test_the_outermost_loop_that_fills_all_units_is_cut_if_need_be_into_chunks_of_one():
    x = random(32, 20_001)
    graph = compiled(lambda x: x[:, :-1].sum(), (x,))
    assert "chunks of 1 of" in splits(graph)
    torch.testing.assert_close(graph([x])[0], x[:, :-1].sum())


@pytest.mark.parametrize(
    ("groups", "rows", "columns", "folded"),
    [
        (1, 701, 3, 32),  # 96 columns fill six vectors
        (5, 704, 3, 32),
        (5, 702, 3, 0),  # 32, 16 and 8 rows leave a rest in each group, 4 fill no vector
        (1, 2000, 1, 0),  # a plain long row
        (1, 400, 16, 0),  # a whole vector already
        (1, 600, 17, 0),  # no number of rows below seventeen vectors
        (1, 100, 3, 0),  # too little
        (3, 256, 8, 8),
        (20, 32, 8, 8),  # four of eight rows
        (20, 31, 8, 2),
        (1, 140, 15, 16),  # 240 columns fill fifteen vectors
    ],
)
def test_few_columns_are_folded_where_whole_vectors_come_of_it(groups, rows, columns, folded):
    x = random(groups, rows + 1, columns, dtype=torch.float32)
    f = lambda x: x[:, :-1].sum((0, 1))
    graph = compiled(f, (x,))
    (got,) = graph([x])
    torch.testing.assert_close(got.double(), f(x.double()), rtol=1e-4, atol=1e-4)
    assert splits(graph) == (f"rows of {folded} at once fill vectors" if folded else "")


@pytest.mark.parametrize(
    ("f", "sizes", "folded"),
    [
        (lambda x: x.sum(0), (20_001, 1, 5, 1), True),
        (lambda x: x.sum(0), (20_001, 3, 2), True),
        (lambda x: x.transpose(1, 2).sum(0), (20_001, 3, 2), False),  # another order of columns
        (lambda x: x[:, ::2].sum(0), (20_001, 12), False),  # columns apart
        (lambda x: x[:, :6].sum(0), (20_001, 7), False),  # rows apart
        (lambda x: x.argmax(0), (20_001, 6), False),  # places would be out of order
        (lambda x: (x * torch.arange(20_001)[:, None]).sum(0), (20_001, 6), False),  # rows are numbered,
        (lambda x: (x * torch.arange(6)).sum(0), (20_001, 6), False),  # or columns
        (lambda x: (x * torch.arange(5)[:, None, None]).sum(1), (5, 4000, 3), True),
    ],
)
def test_columns_are_folded_where_rows_follow_each_other(f, sizes, folded):
    x = random(*sizes)
    graph = compiled(f, (x,))
    torch.testing.assert_close(graph([x])[0], f(x))
    assert ("fill vectors" in splits(graph)) == folded


def test_what_is_overwritten_is_summed_up_as_it_was():
    def f(x):
        y = x * 2 + 1
        x.copy_(y)
        return [y.sum()]

    x = random(N)
    graph = compile_graph(make_fx(f, tracing_mode="fake")(x.clone()))
    mine, theirs = x.clone(), x.clone()
    torch.testing.assert_close(graph([mine]), f(theirs))
    assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("f", "sizes"), [(lambda x: (x - x.mean()) / x.var(), (1, 4 * N)), (lambda x: (x - x.mean(0)) * x.var(0), (N, 8))]
)
def test_a_pass_that_reduces_nothing_has_a_unit_of_work_for_each_element(f, sizes):
    x = torch.ones(sizes)
    program = split_reductions(compiled(f, (x,)).program, PassContext.of(target=cpu_target()))
    large = {b.name for b in program.buffers if all(size.constant in sizes for size in b.sizes) and len(b.sizes) == 2}
    nests = [step for step in program.steps if isinstance(step, LoopNest)]
    assert len(nests) > 2
    for nest in nests:
        if any(isinstance(i, Store) and i.buffer in large for stage in nest.stages for i in stage.body):
            assert len(nest.stages) == 1 and not nest.stages[0].ranges


def test_what_is_stored_before_a_long_sum_is_stored_once():
    def f(x, y):
        z = y.exp()
        return z, (x * z[:, None]).sum(1)

    args = random(3, N), random(3)
    graph = compiled(f, args)
    assert not parts(graph)
    for got, want in zip(graph(list(args)), f(*args), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("columns", range(9, 32))
@pytest.mark.parametrize("rows", [11, 13])
def test_rows_that_no_number_of_rows_divides_are_not_folded_one_by_one(columns, rows):
    x = torch.randn(3, 8, rows, columns, dtype=torch.float64)
    graph = make_fx(lambda x: torch.amin(x, (0, 1, 2)), decompositions(), tracing_mode="fake")(x)
    (got,) = (lambda result: result if isinstance(result, list | tuple) else [result])(compile_graph(graph)([x]))
    assert torch.equal(got, x.amin((0, 1, 2)))
