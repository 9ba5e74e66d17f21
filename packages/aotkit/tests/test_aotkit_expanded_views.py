"""Outputs that repeat an input, and views of inputs that repeat memory: their gradients are eager's."""

from __future__ import annotations

import pytest
import torch

import aotkit
from aotkit_functionalize import Unsupported


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("sizes", [(6, 5, 7), (2, 6, 5, 7), (6, 5, 1)], ids=str)
def test_the_gradient_of_an_expanded_output_has_eagers_bits(dtype, sizes):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(6, 5, 1, generator=generator).to(dtype).requires_grad_()
    given = torch.randn(sizes, generator=generator).to(dtype)
    out = torch.compile(lambda x: x.expand(sizes), backend="aotkit")(x)
    eager = x.expand(sizes)
    assert out.shape == eager.shape and out.stride() == eager.stride() and out._base is x
    (found,) = torch.autograd.grad(out, x, given)
    (wanted,) = torch.autograd.grad(eager, x, given)
    assert torch.equal(found, wanted)


OVERLAPPING = {
    "expanded": lambda: torch.arange(4.0).expand(2, 3, 4),
    "expanded within": lambda: torch.arange(8.0).view(2, 1, 4).expand(2, 3, 4),
    "windows": lambda: torch.arange(40.0).as_strided((2, 3, 4), (9, 2, 1), 3),
    "planes that share a row": lambda: torch.arange(40.0).as_strided((2, 3, 4), (8, 4, 1)),
}
VIEWS = {
    "select": lambda x: x.select(1, 1),
    "slice": lambda x: x[:, 1:],
    "permute": lambda x: x.permute(2, 0, 1),
    "unsqueeze": lambda x: x.unsqueeze(1),
    "two views and a value": lambda x: (x[0], x[:, 2], x * 2),
    "split": lambda x: x.split(2, 1),
    "expand": lambda x: x.unsqueeze(0).expand(2, -1, -1, -1),
    "as_strided": lambda x: x.as_strided((2, 2), (2, 1), x.storage_offset()),
    "itself": lambda x: x.view_as(x),
}


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("layout", OVERLAPPING)
def test_a_gradient_reaches_those_elements_of_an_overlapping_input_that_a_view_leads_to(layout, view):
    def gradient(function):
        x = OVERLAPPING[layout]().detach().requires_grad_()
        results = function(x)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        assert all(y.untyped_storage()._cdata == x.untyped_storage()._cdata for y in results[:2])
        weights = [torch.arange(1.0, y.numel() + 1).view(y.shape) for y in results]
        return torch.autograd.grad(results, x, weights)[0]

    compiled = torch.compile(VIEWS[view], backend="aotkit", options={"fallback": "error"})
    assert torch.equal(gradient(compiled), gradient(VIEWS[view]))


BEYOND = {
    "row": lambda x: x[1].as_strided((3, 2), (4, 1), 0),
    "columns with gaps": lambda x: x[:, ::2].as_strided((3, 2), (4, 1), 0),
    "empty": lambda x: x[1:1].as_strided((3, 2), (4, 1), 0),
    "a view of it": lambda x: x[2].as_strided((3, 2), (4, 1), 0)[:, 1],
    "of a value": lambda x: (lambda y: (y, y[1].as_strided((3, 2), (4, 1), 0)))(x * 2),
    "of a written value": lambda x: (lambda y: (y, y[1].as_strided((3, 2), (4, 1), 0)))((x * 2).mul_(3)),
    "within": lambda x: x[1:].as_strided((2, 2), (4, 1), 4),
    "transposed": lambda x: x.t().as_strided((3, 2), (4, 1), 0),
}


@pytest.mark.parametrize("view", BEYOND)
def test_elements_beyond_the_view_that_as_strided_is_taken_of_get_no_gradient(view):
    def gradient(function):
        x = torch.arange(16.0).view(4, 4).requires_grad_()
        results = function(x)
        results = [results] if isinstance(results, torch.Tensor) else list(results)
        weights = [torch.arange(1.0, y.numel() + 1).view(y.shape) for y in results]
        return torch.autograd.grad(results, x, weights)[0]

    compiled = torch.compile(BEYOND[view], backend="aotkit", options={"fallback": "error"})
    assert torch.equal(gradient(compiled), gradient(BEYOND[view]))


def test_a_view_of_an_input_that_changed_its_shape_is_a_view_of_that_input():
    def program(x):
        x.squeeze_()
        return x.as_strided((2, 2), (2, 1))

    base = torch.rand(3, 3, 2).requires_grad_().clone()
    view = aotkit.aot_function(program, aotkit.nop)(base[:2])
    view.add_(1)
    assert view._base is base

    def of_a_value(x):
        y = x.sin()
        y.squeeze_()
        return y, y.as_strided((2, 2), (2, 1))

    value, view = aotkit.aot_function(of_a_value, aotkit.nop)(base[:2])
    view.add_(1)
    assert view._base is value._base and torch.equal(value.view(-1)[:4], view.view(-1))


def test_such_a_view_of_a_value_that_is_written_to_afterwards_is_refused():
    def program(x):
        y = x * 2
        z = y[1].as_strided((3, 2), (4, 1), 0)
        y.mul_(3)
        return z

    x = torch.arange(16.0).view(4, 4).requires_grad_()
    with pytest.warns(aotkit.EagerFallback, match="a view beyond the elements of another view"):
        found = torch.compile(program, backend="aotkit")(x)
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(program(x).sum(), x)[0])


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("write", [lambda x: x.mul_(2), lambda x: x.detach().mul_(2), lambda x: x[1:].add_(1)])
@pytest.mark.parametrize("late", [False, True])
def test_a_view_by_strides_of_what_does_not_begin_its_storage_is_right_or_refused_once_that_is_written_to(
    late, write, grad
):
    def program(x):
        view = lambda: x.as_strided((2,), (1,), x.storage_offset() + 1)
        seen = None if late else view()
        write(x)
        return [(view() if late else seen).sin(), x * 1]

    results = []
    for call in (program, aotkit.aot_function(program, aotkit.nop)):
        given = (torch.arange(1.0, 17).view(8, 2).requires_grad_(grad) * 1)[2:6]
        try:
            results.append([y.detach() for y in (*call(given), given)])
        except Unsupported:
            return
    assert all(map(torch.equal, *results))


KEPT_QUIET = {
    "part": lambda x: x.split(1)[0],
    "row": lambda x: x[0],
    "itself": lambda x: x[...],
    "transposed": lambda x: x.transpose(0, 1),
}


@pytest.mark.parametrize("view", KEPT_QUIET)
def test_a_view_of_a_view_of_repeated_elements_taken_under_no_grad_says_that_it_requires_grad(view):
    def program(x):
        with torch.no_grad():
            quiet = KEPT_QUIET[view](x)
        return [quiet[:], quiet.transpose(0, -1), quiet, quiet * 1, quiet.detach()]

    for repeat in (lambda m: m.expand(2, 3, 2), lambda m: m[0].unfold(0, 2, 1), lambda m: (m * 1).expand(2, 3, 2)):
        leaf = torch.rand(1, 3, 2).requires_grad_()
        found = aotkit.aot_function(program, aotkit.nop)(repeat(leaf))
        expected = program(repeat(leaf))
        assert [y.requires_grad for y in found] == [y.requires_grad for y in expected]
        assert torch.autograd.grad([y.sum() for y in found[:3]], leaf, allow_unused=True)[0] is None


def test_a_write_to_a_part_of_an_input_that_overlaps_itself_is_refused():
    def program(x):
        x[0].mul_(2)
        return x.sum()

    def make():
        return torch.arange(10.0).as_strided((2, 3), (2, 1), 3)

    with pytest.warns(aotkit.EagerFallback, match="of a tensor that overlaps itself is written to"):
        found = torch.compile(program, backend="aotkit")(make())
    assert torch.equal(found, program(make()))
