"""Views that are given as ``out=``: they get what eager mode writes to them."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import aotkit

Function = Callable[[Tensor], Tensor]


def sums_behind_a_zero(x: Tensor) -> Tensor:
    out = x.new_empty(x.size(0) + 1, x.size(1))
    out.narrow(0, 0, 1).zero_()
    torch.cumsum(x, dim=0, out=out.narrow(0, 1, x.size(0)))
    return out


def rows(x: Tensor) -> Tensor:
    out = torch.empty(2, *x.shape)
    torch.add(x, 1, out=out[0])
    torch.matmul(x, x[:, : x.size(1)], out=out[1])
    return out


def columns(x: Tensor) -> Tensor:
    out = torch.zeros(x.size(0), 2 * x.size(1))
    return out + torch.mul(x, 2, out=out[:, ::2]).sum()


def rows_of_the_argument(x: Tensor) -> Tensor:
    torch.add(x[0], 1, out=x[1])
    torch.mul(x[1], 3, out=x[2])
    return x * 2


def types(x: Tensor) -> Tensor:
    out = torch.zeros(2, *x.shape, dtype=torch.bool)
    torch.gt(x, 0, out=out[1])
    return out


def elements_that_are_read(x: Tensor) -> Tensor:
    part, same = (x * 1).t()[1:].unbind(1)[1], x * 1
    torch.mul(part, part, out=part)
    torch.where(part > 9, -part, part, out=part)
    torch.add(same[1], part.sum(), out=same[1])
    return same + part.sum()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("fn", [sums_behind_a_zero, rows, columns, rows_of_the_argument, types, elements_that_are_read])
def test_results_are_written_to_the_view(fn: Function, dynamic: bool) -> None:
    run = torch.compile(fn, backend="aotkit", dynamic=dynamic, options={"fallback": "error"})
    given, twin = (torch.arange(16.0).view(4, 4) - 7 for _ in range(2))
    if dynamic and fn is rows_of_the_argument:  # whether its rows share memory is not known then
        with pytest.raises(Exception, match="out argument of add is a view"):
            run(given)
        return
    torch.testing.assert_close(run(given), fn(twin), rtol=0, atol=0)
    torch.testing.assert_close(given, twin, rtol=0, atol=0)


def of_another_type(x: Tensor) -> Tensor:
    out = torch.zeros(2, 4, 4, dtype=torch.float64)
    torch.add(x, 1, out=out[0])
    return out


def that_is_read(x: Tensor) -> Tensor:
    out = x * 1
    torch.cumsum(out[0], 0, out=out[0])
    return out


@pytest.mark.parametrize("fn", [of_another_type, that_is_read])
def test_views_that_may_not_fit_are_left_to_eager_mode(fn: Function) -> None:
    x = torch.arange(16.0).view(4, 4)
    with pytest.warns(aotkit.EagerFallback, match="is a view"):
        found = torch.compile(fn, backend="aotkit")(x)
    torch.testing.assert_close(found, fn(x), rtol=0, atol=0)


def test_a_view_that_is_read_in_another_order_is_refused_as_in_eager_mode() -> None:
    def fn(x: Tensor) -> Tensor:
        out = x * 1
        return torch.mul(out[1:], 2, out=out[:-1])

    x = torch.arange(16.0).view(4, 4)
    with pytest.raises(RuntimeError, match="refer to a single memory location"):
        fn(x)
    with (
        pytest.warns(aotkit.EagerFallback, match="is a view"),
        pytest.raises(RuntimeError, match="refer to a single memory location"),
    ):
        torch.compile(fn, backend="aotkit")(x)


def test_each_of_several_results_keeps_the_strides_of_its_out_argument() -> None:
    def fn(x: Tensor, values: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        torch.sort(x, 1, out=(values, places))
        return values * 2, places + 1

    def out() -> tuple[Tensor, Tensor]:
        return torch.zeros(4, 3).t(), torch.zeros(4, 6, dtype=torch.int64).t()[::2]

    x = torch.randn(3, 4)
    given, twins = out(), out()
    found, wanted = torch.compile(fn, backend="aotkit", options={"fallback": "error"})(x, *given), fn(x, *twins)
    torch.testing.assert_close((*found, *given), (*wanted, *twins), rtol=0, atol=0)
    assert [t.stride() for t in (*found, *given)] == [t.stride() for t in (*wanted, *twins)]


def test_gradients_are_refused_as_in_eager_mode() -> None:
    def fn(x: Tensor) -> Tensor:
        out = torch.zeros(2, *x.shape)
        torch.sin(x, out=out[0])
        return out

    for run in (fn, torch.compile(fn, backend="aotkit")):
        with pytest.raises(RuntimeError, match="automatic differentiation"):
            run(torch.randn(3, requires_grad=True))
    with torch.no_grad():
        x = torch.ones(3, requires_grad=True)
        torch.testing.assert_close(torch.compile(fn, backend="aotkit", options={"fallback": "error"})(x), fn(x))
