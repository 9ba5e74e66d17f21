"""Joining, padding, indexing and creation: values, index errors, masks that read nothing outside."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, decompositions, lower_graph
from aotkit_inductor_lower.ir import CheckedIndex
from aotkit_inductor_lower.ir.walk import nests

aten = torch.ops.aten
F = torch.nn.functional


@pytest.mark.covers("F5g.7")
@pytest.mark.parametrize("pieces", [1, 2, 3, 6])
def test_cat_of_any_number_of_pieces_equals_eager(check, pieces):
    xs = [torch.randn(3, k + 1, 4) for k in range(pieces)]
    result = check(lambda *xs: torch.cat(xs, 1), *xs)
    assert not result.externs
    result = check(lambda *xs: torch.cat(xs, 1).relu() + 1, *xs)
    assert not result.externs


def test_cat_promotes_and_takes_empty_pieces(check):
    check(
        lambda a, b, c: (torch.cat((a, b), 0), torch.cat((a, c, a), 0)),
        torch.randn(2, 3),
        torch.randint(0, 9, (4, 3)),
        torch.randn(0, 3),
    )


def test_a_few_pieces_read_by_code_become_one_kernel_without_a_copy(check):
    def rotate_half(x, cos, sin):
        a, b = x.chunk(2, -1)
        return x * cos + torch.cat((-b, a), -1) * sin

    x, cos, sin = torch.randn(2, 4, 6, 8), torch.randn(6, 8), torch.randn(6, 8)
    assert check(rotate_half, x, cos, sin).kernels == 1


@pytest.mark.covers("F5g.14")
def test_padding_and_cropping_equal_eager(check):
    result = check(
        lambda x: (F.pad(x, (1, 2)), F.pad(x, (0, 1, 3, 0), value=2.5), F.pad(x, (-1, 1)), F.pad(x.exp(), (2, 2)) * 2),
        torch.randn(4, 5),
    )
    assert not result.externs


def test_stack_and_scatter_of_slices_equal_eager(check):
    x, y = torch.randn(4, 6), torch.randn(4, 6)
    result = check(
        lambda x, y: (
            torch.stack((x, y), 1),
            torch.slice_scatter(x, y[:, :2], 1, 1, 5, 2),
            torch.slice_scatter(x, y[:2], 0, -2),
            torch.select_scatter(x, y[0], 0, -1),
            aten.slice_backward(y[:, :3], [4, 6], 1, 1, 6, 2),
            aten.select_backward(y[0], [4, 6], 0, 2),
            torch.stack((x, y, y), -1),
            torch.stack((x, y), -2),
            torch.slice_scatter(x, y[:, :2], -1, 1, 5, 2),
            torch.select_scatter(x, y[:, 1], -1, 2),
            aten.slice_backward(y[:, :3], [4, 6], -1, 1, 6, 2),
            aten.slice_backward(y[:2], [4, 6], -2, -2, 9, 1),
            aten.select_backward(y[:, 0], [4, 6], -1, -3),
        ),
        x,
        y,
    )
    assert not result.externs


def test_arguments_that_are_left_out_are_eagers(check):
    x, y = torch.randn(4, 4), torch.randn(4, 4).abs() + 1
    result = check(
        lambda x, y: (
            *(aten.diagonal_scatter(x, y[0]), aten.diagonal(x) + 1, aten.stack([x, y]), aten.slice_scatter(x, y)),
            *(aten.slice(x) + 1, aten.unbind(x)[1] + 1, aten.split(x, 2)[1] + 1, aten.addcdiv(x, y, y)),
            *(aten.addcmul(x, y, y), aten.elu(x), aten.leaky_relu(x), aten.hardtanh(x), aten.softplus(x)),
            *(aten.add(x, y), aten.rsub(x, y), aten.kthvalue(x, 2)[0], *aten.sort(x), aten.topk(x, 2)[0]),
            *(aten.argmax(x), aten.any(x > 1), aten.tril(x), aten.triu(x), aten.logit(x.sigmoid()), aten.arange(5)),
            *(aten.constant_pad_nd(x, [1, 2]), aten.nan_to_num(x / 0), aten.glu(x), aten.hardshrink(x)),
        ),
        x,
        y,
        table=decompositions(),
    )
    assert result.kernels


def test_positions_that_follow_from_sizes_are_generated(check):
    def f(x, y):
        n = x.shape[0]
        slices = (torch.slice_scatter(x, y[:2], 0, n - 2, n), torch.slice_scatter(x, y[:2], 0, -2))
        rows = (torch.select_scatter(x, y[0], 0, n - 1), torch.select_scatter(x, y[0], 0, -n), x.select(0, n - 1) + 1)
        return (*slices, *rows, torch.slice_scatter(x, y[:0], 0, n, n), torch.slice_scatter(x, y, 0, 0, n))

    x, y = torch.randn(5, 6), torch.randn(5, 6)
    compiled = check(f, x, y, mode="symbolic").compiled
    x, y = torch.randn(9, 3), torch.randn(9, 3)
    for got, want in zip(compiled([x, y]), f(x, y), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("position", [0, 2, -1])
def test_a_position_that_is_known_is_not_looked_at_in_the_kernel(position):
    def put(x, y):
        return aten.select_scatter(x, y, 0, position), aten.select_backward(y, [3, 4], 0, position)

    program = lower_graph(make_fx(put)(torch.randn(3, 4), torch.randn(4)))
    instructions = [i for nest in nests(program) for stage in nest.stages for i in stage.body]
    assert instructions and not any(isinstance(i, CheckedIndex) for i in instructions)


@pytest.mark.parametrize("sizes", [(3, 4), (3, 1), (1, 4)], ids=str)
def test_a_position_that_a_tensor_holds_is_looked_at_where_it_is_used(sizes):
    def put(x, y, at):
        return (aten.select_scatter(x, y, 0, at.item()),)

    x, y, zero = torch.randn(sizes), torch.randn(sizes[1:]), torch.tensor(0)
    compiled = compile_graph(make_fx(put, tracing_mode="symbolic")(x, y, zero))
    assert [call.target for call in compiled.report().externs] == ["aten._local_scalar_dense.default"]
    for position in (0, sizes[0] - 1, -1, -sizes[0]):
        assert torch.equal(compiled([x, y, zero + position])[0], put(x, y, zero + position)[0])
    for position in (sizes[0], -sizes[0] - 1):
        for call in (put, lambda *args: compiled(list(args))):
            with pytest.raises(IndexError):
                call(x, y, zero + position)


def test_elements_at_masked_places_are_fetched_and_added(check):
    x, at = torch.randn(7, 3), torch.tensor([2, 99, 0, -50])
    mask = (at >= 0) & (at < 7)
    check(lambda x, i, m: aten._unsafe_masked_index(x, m[:, None].expand(4, 3), [i, None], 2.5), x, at, mask)
    check(
        lambda x, i, m, v: aten._unsafe_masked_index_put_accumulate(x, m[:, None].expand(4, 3), [i, None], v),
        *(x, at, mask, torch.randn(4, 3)),
    )


@pytest.mark.covers("F5g.13")
def test_gathers_equal_eager(check):
    table = torch.randn(10, 6)
    rows = torch.randint(0, 10, (3, 4))
    result = check(
        lambda t, r: (
            F.embedding(r, t),
            t[r],
            t[:, r[0] % 6],
            t[r[0], r[1] % 6],
            t[:, None, :][r - 10],
            torch.gather(t, 0, r),
            torch.index_select(t, 1, r[0] % 6),
            torch.gather(t, 1, (r % 6)).exp() * 2,
        ),
        table,
        rows,
    )
    assert not result.externs


def test_index_tensors_that_are_not_neighbours_come_first(check):
    x = torch.randn(3, 4, 5)
    i, j = torch.tensor([0, 2, 1]), torch.tensor([[1], [4]])
    check(lambda x, i, j: (x[i, :, j], x[:, i % 4, j]), x, i, j)


@pytest.mark.covers("F5g.13", "F5c.10")
@pytest.mark.parametrize(
    ("f", "bad"),
    [
        (lambda t, r: t[r], 10),
        (lambda t, r: t[r], -11),
        (lambda t, r: F.embedding(r, t), -1),
        (lambda t, r: torch.gather(t, 0, r[:, None]), 12),
        (lambda t, r: torch.index_select(t, 0, r), 10),
    ],
)
def test_an_index_out_of_range_raises_eagers_error_and_names_the_op(f, bad):
    table, rows = torch.randn(10, 6), torch.tensor([1, 2, 3])
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(table, rows))
    assert not compiled.report().externs
    assert torch.equal(compiled([table, rows])[0], f(table, rows))
    wrong = torch.tensor([1, bad, 3])
    with pytest.raises((IndexError, RuntimeError)) as eager:
        f(table, wrong)
    with pytest.raises(eager.type, match="index"):  # which of the two depends on the operator
        compiled([table, wrong])


@pytest.mark.parametrize("size", [(0,), (0, 1)], ids=str)
def test_the_only_index_of_a_kernel_may_lead_into_nothing(size):
    # nothing varies in such a kernel, so that all of it could be computed ahead of the loop that is skipped
    def f(t, row):
        return torch.gather(t, 0, row)

    empty, row = torch.zeros(size), torch.zeros((1,) * len(size), dtype=torch.int64)
    compiled = compile_graph(make_fx(f, tracing_mode="fake")(empty, row))
    assert not compiled.report().externs
    with pytest.raises(IndexError, match="out of range"):
        compiled([empty, row])


def test_creation_ops_are_constants_of_their_readers(check):
    def f(x):
        mask = torch.ones(5, 5, dtype=torch.bool).tril()
        steps = torch.arange(5, dtype=torch.float32) * 0.5
        return x.masked_fill(~mask, float("-inf")) + steps + torch.full((5,), 2) + torch.zeros(5)

    assert check(f, torch.randn(5, 5)).kernels == 1


def test_ranges_and_fills_equal_eager(check):
    check(
        lambda x: (
            torch.arange(7), torch.arange(2, 9, 3), torch.arange(0.5, 3, 0.25), torch.full((2, 3), 1.5),
            torch.zeros_like(x, dtype=torch.int64), torch.ones(3, dtype=torch.bfloat16), torch.eye(3, 4),
            x.triu(1), x.new_full((2,), 7), torch.full((), True),
        ),
        torch.randn(3, 3),
    )  # fmt: skip
