"""Scans: every type, dimension and layout, ties and nan, what fuses with them, and their text."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import compile_graph, decompositions, lower_graph, parse_program, print_program

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8]


def numbers(*shape, dtype=torch.float32):
    torch.manual_seed(0)
    return (torch.randn(*shape) * 3).to(dtype)


@pytest.mark.covers("F5g.11")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bool], ids=str)
@pytest.mark.parametrize("dim", [0, 1, -1])
def test_cumulative_sums_products_and_extrema_equal_eager(check, dtype, dim):
    result = check(
        lambda x: (x.cumsum(dim), x.cumprod(dim), *x.cummax(dim), *x.cummin(dim)),
        numbers(5, 9, 7, dtype=dtype),
    )
    assert not result.externs


def test_scans_of_scalars_columns_and_other_layouts_equal_eager(check):
    check(lambda x: (x.cumsum(0), x.cumprod(0), *x.cummax(0)), torch.tensor(2.0))
    check(lambda x: (x.cumsum(0), x.cumsum(1)), numbers(8, 6).t())
    check(lambda x: (x.cumsum(1), x.cumsum(0)), numbers(33, 17)[::2, 3:])
    check(lambda x: (x.cumsum(0), x.cumprod(1), *x.cummin(1)), numbers(0, 4))
    check(lambda x: x.cumsum(0, dtype=torch.float64), numbers(9, dtype=torch.int32))
    check(lambda x: (x.cumsum(1), x.cumsum(0)), numbers(1, 5))


def test_the_last_of_equal_extrema_and_the_last_nan_are_pointed_at(check):
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0, float("nan"), 5.0, float("nan"), 1.0], [0.0, -0.0, 0.0, -1.0, 1, 1, 1, 0]])
    check(lambda x: (*x.cummax(1), *x.cummin(1), *x.cummax(0)), x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_an_extremum_of_zeros_has_the_sign_of_the_last_one(check, dtype):
    zeros = torch.tensor([0.0, -0.0], dtype=dtype)[torch.tensor([[0, 1, 1, 0, 1], [1, 0, 0, 1, 0], [1, 1, 0, 0, 1]])]
    x = torch.stack([zeros, zeros.flip(0), -1 * zeros.abs() - 1, zeros])
    check(lambda x: [torch.signbit(scan(x, dim)[0]) for scan in (torch.cummax, torch.cummin) for dim in (0, 1, 2)], x)


def test_what_surrounds_a_scan_joins_its_kernel(check):
    result = check(lambda x, y: (x * y).exp().cumsum(-1) * 2 + 1, numbers(6, 40) * 0.1, numbers(6, 40))
    assert result.kernels == 1
    result = check(lambda x: torch.softmax(x, -1).cumsum(-1), numbers(6, 40))
    assert result.kernels == 1
    check(
        lambda x: (x.cumsum(0).sum(0), x.cumsum(1).amax(1), x.cumsum(1) - x.sum(1, keepdim=True)),
        numbers(9, 12).double(),
    )


def test_scans_over_merged_and_permuted_dimensions_run_in_order(check):
    check(lambda x: x.reshape(-1).cumsum(0).reshape(4, 5, 6) + x, numbers(4, 5, 6))
    check(lambda x: x.permute(2, 0, 1).reshape(6, 20).cumsum(1), numbers(4, 5, 6))
    check(lambda x: (x.permute(2, 0, 1).reshape(6, 20).cumsum(1), x.sum((0, 1))), numbers(4, 5, 6))
    check(lambda x: (x.t().reshape(-1).argmax(), x.sum(), x.reshape(-1).argmin()), numbers(4, 5))


def test_a_long_scan_is_as_exact_as_eager():
    x = numbers(1_000_000)
    graph = make_fx(lambda x: x.cumsum(0), tracing_mode="fake")(x)
    compiled = compile_graph(graph)
    assert not compiled.report().externs
    assert torch.equal(compiled([x])[0], x.cumsum(0))


def test_gradients_of_scans_equal_eager(check):
    def f(x, g):
        scans = (lambda x: x.cumsum(1), lambda x: x.cumprod(1), lambda x: x.cummax(1)[0])
        return [torch.func.vjp(scan, x)[1](g)[0] for scan in scans]

    check(torch.func.functionalize(f), numbers(4, 6), numbers(4, 6), table=decompositions(), tolerance=1e-5)


def test_scans_survive_printing_and_parsing():
    program = lower_graph(make_fx(lambda x: x.cumsum(0), tracing_mode="fake")(numbers(5)))
    text = print_program(program)
    assert "= scan sum %" in text
    assert parse_program(text) == program


@pytest.mark.parametrize("dim", [0, 1])
def test_one_compile_serves_scans_of_other_sizes(dim):
    compiled = compile_graph(make_fx(lambda x: x.cumsum(dim), tracing_mode="symbolic")(numbers(4, 6)))
    assert not compiled.report().externs
    for shape in ((4, 6), (2, 3), (17, 33)):
        x = numbers(*shape)
        torch.testing.assert_close(compiled([x])[0], x.cumsum(dim))
