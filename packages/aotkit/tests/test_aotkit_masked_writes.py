"""Writes of trained values to what a mask chooses: with eager's values and gradients, in a graph of known sizes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

Write = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], Any]
MASK = torch.tensor([[True, False, True], [False, False, True]])


def whole(y: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    y[m] = v


def behind(y: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    y[m, ...] = v


def with_slices(y: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    y[m, :] = v


def by_name(y: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    y.index_put_((m,), v)


def a_view(y: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    y.transpose(0, 1)[m.t()] = v


def a_row(y: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    y[0][m[0]] = v


def rows(y: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    y[m[:, 0]] = v


def gradients(call: Any, write: Write, value: torch.Tensor, mask: torch.Tensor) -> list[torch.Tensor]:
    x = torch.randn(2, 3, 4, generator=torch.Generator().manual_seed(0)).requires_grad_()
    value = value.detach().clone().requires_grad_()
    result = call(x, mask, value)
    return [result.detach(), *torch.autograd.grad(result.sin().sum(), (x, value))]


@pytest.mark.parametrize("sizes", [(4,), (), (1,), (1, 4)], ids=str)
@pytest.mark.parametrize("write", [whole, behind, with_slices, by_name, a_view, a_row, rows])
def test_each_row_gets_the_value_and_gives_its_gradient(write: Write, sizes: tuple[int, ...]) -> None:
    def step(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x * 2
        write(y, m, v)
        return y

    run = torch.compile(step, backend="aotkit", fullgraph=True, options={"fallback": "error"})
    value = torch.randn(sizes, generator=torch.Generator().manual_seed(1))
    for mask in (MASK, ~MASK, torch.zeros_like(MASK)):
        for got, want in zip(gradients(run, write, value, mask), gradients(step, write, value, mask), strict=True):
            torch.testing.assert_close(got, want)


def test_numbers_that_are_not_finite_stay_where_they_are() -> None:
    def step(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x / 0
        y[m] = v
        return y

    run = torch.compile(step, backend="aotkit", fullgraph=True, options={"fallback": "error"})
    value = torch.tensor([1.0, float("inf"), float("nan"), 2.0])
    for got, want in zip(gradients(run, whole, value, MASK), gradients(step, whole, value, MASK), strict=True):
        torch.testing.assert_close(got, want, equal_nan=True)


def columns(y: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    y[:, m[0]] = v


def last(y: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> None:
    y.transpose(1, 2)[..., m[0]] = v


ROWS = [
    *((write, sizes) for write in (whole, behind, with_slices, by_name, a_view) for sizes in ((3, 4), (3, 1))),
    (a_row, (2, 4)),
    *((columns, sizes) for sizes in ((2, 2, 4), (2, 4), (1, 2, 1), (2, 1, 4), (4,))),
    *((last, sizes) for sizes in ((2, 4, 2), (4, 2), (2,), (2, 1, 1), (4, 1))),
]


@pytest.mark.parametrize("fullgraph", [False, True], ids=["", "fullgraph"])  # the latter has sizes that depend on data
@pytest.mark.parametrize(("write", "sizes"), ROWS, ids=lambda part: getattr(part, "__name__", None) or str(part))
def test_each_row_may_have_a_value_of_its_own(write: Write, sizes: tuple[int, ...], fullgraph: bool) -> None:
    def step(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x * 2
        write(y, m, v)
        return y

    run = torch.compile(step, backend="aotkit", fullgraph=fullgraph, options={"fallback": "error"})
    value = torch.randn(sizes, generator=torch.Generator().manual_seed(1))
    for mask in (MASK, MASK.flip(0, 1)) if write in (whole, behind) else (MASK,):
        for got, want in zip(gradients(run, write, value, mask), gradients(step, write, value, mask), strict=True):
            torch.testing.assert_close(got, want)
    if sizes[0] == 3:
        for call in (step, run):
            with pytest.raises(RuntimeError, match="cannot be broadcast"):
                gradients(call, write, value, ~MASK & MASK)


def test_a_value_that_does_not_fit_is_an_error() -> None:
    def step(x: torch.Tensor, m: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        y = x[..., :1] * 2
        y[m] = v
        return y

    for call in (step, torch.compile(step, backend="aotkit", options={"fallback": "error"})):
        with pytest.raises(Exception, match=r"shape mismatch|depends on the elements of a tensor"):
            gradients(call, whole, torch.randn(4), MASK)
