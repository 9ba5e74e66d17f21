"""Integers in tensors without dimensions, as indices and as the length of a range: read when the graph runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

import aotkit
from aotkit_aot_trace import capture
from aotkit_aot_trace.callables import GraphFunction
from aotkit_functionalize import Unsupported
from aotkit_inductor_lower import compile_graph

Tensor = torch.Tensor


def written(x: Tensor, i: Tensor) -> Tensor:
    """One is a part of a temporary, the other of an argument."""
    y = x.clone()
    y[:, i].mul_(3)
    x[i].add_(1)
    return y * x


def assigned(x: Tensor, i: Tensor) -> Tensor:
    """The same by assignment."""
    y = x.clone()
    y[i] = 7.0
    y[:, i] = x[:, 0]
    x[i] += 1
    return y * x


PROGRAMS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "read": lambda x, i: x[i] * 2,
    "a view": lambda x, i: x[i],
    "two views": lambda x, i: (x[:, i], x.t()[i] + 1),
    "twice": lambda x, i: x[i, i] + 1,
    "beside others": lambda x, i: (x[None, i, ..., None] * 2, x[..., i, 1:] + 1, x[torch.tensor([0, 2]), i]),
    "behind new dimensions": lambda x, i: (x[None, ..., None, i], x[None, i, None] * 2, x[:, None, True, i]),
    "beside a mask": lambda x, i: x[x[:, 0] > 0, i],
    "computed": lambda x, i: x.sin()[(i + 1) % 3],
    "written": written,
}


def as_dynamo_gives(fn: Callable[..., Any]) -> GraphFunction:
    """A graph of Python's operators, without the guard on the number that Dynamo adds."""
    return GraphFunction(torch.fx.symbolic_trace(fn))


@pytest.mark.parametrize("name", PROGRAMS)
def test_one_graph_reads_the_number_of_each_call(name: str) -> None:
    fn = PROGRAMS[name]
    compiles: list[Any] = []

    def compiler(graph: torch.fx.GraphModule, _: Any) -> Any:
        compiles.append(graph)
        return compile_graph(graph)

    run = aotkit.aot_function(as_dynamo_gives(fn), compiler)
    for number in (1, 0, 2, -1, -3):
        theirs = torch.randn(3, 3)
        ours, i = theirs.clone(), torch.tensor(number)
        want, got = fn(theirs, i), run(ours, i)
        torch.testing.assert_close(got, want)
        for a, b in zip(*(r if isinstance(r, tuple) else (r,) for r in (got, want)), strict=True):
            assert (a.stride(), a.storage_offset()) == (b.stride(), b.storage_offset())
            a.add_(1), b.add_(1)  # through views to the arguments
        torch.testing.assert_close(ours, theirs)
    assert len(compiles) == 1


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("fn", [PROGRAMS["read"], PROGRAMS["a view"], assigned], ids=["read", "a view", "assigned"])
def test_dynamos_graphs_with_such_an_index_are_compiled(fn: Callable[..., Any], fullgraph: bool) -> None:
    torch._dynamo.reset()
    options = {"cache": False, "fallback": "error"}
    run = torch.compile(fn, backend="aotkit", options=options, fullgraph=fullgraph)
    for number in (1, -2):
        theirs = torch.randn(3, 3)
        ours, i = theirs.clone(), torch.tensor(number)
        torch.testing.assert_close(run(ours, i), fn(theirs, i))
        torch.testing.assert_close(ours, theirs)


def test_gradients_go_to_the_selected_part() -> None:
    def loss(x: Tensor, i: Tensor) -> Tensor:
        return (x.sin()[i] * x[:, i]).sum()

    run = torch.compile(loss, backend="aotkit", options={"cache": False, "fallback": "error"})
    for number in (1, -1):
        ours, theirs = (torch.eye(3).add(1).requires_grad_() for _ in range(2))
        run(ours, torch.tensor(number)).backward()
        loss(theirs, torch.tensor(number)).backward()
        torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("transform", [lambda f: f, lambda f: torch.func.grad(lambda *given: f(*given).sum())])
def test_a_mapped_index_is_none_to_be_read(transform: Callable[..., Any]) -> None:
    """Of a table that is mapped, too, or not; and one that is not mapped is read beside it."""

    def fn(x: Tensor, i: Tensor, number: Tensor) -> Any:
        rows = torch.vmap(lambda j: transform(lambda table: table[j].sin())(x))(i)
        both = torch.vmap(lambda table, j: transform(lambda of: of[j].cos())(table))(x, i)
        return rows, both, torch.vmap(lambda row: row[number] * 2)(x)

    x, i, number = torch.randn(3, 4), torch.tensor([2, 0, 1]), torch.tensor(2)
    run = torch.compile(fn, backend="aotkit", options={"cache": False, "fallback": "error"})
    torch.testing.assert_close(run(x, i, number), fn(x, i, number))


def test_a_number_out_of_range_is_an_error() -> None:
    run = aotkit.aot_function(as_dynamo_gives(PROGRAMS["read"]), lambda graph, _: compile_graph(graph))
    run(torch.randn(3, 3), torch.tensor(2))
    for number in (3, -4):
        with pytest.raises((IndexError, RuntimeError)):
            run(torch.randn(3, 3), torch.tensor(number))


def test_ranges_that_begin_or_end_at_a_number_that_is_read() -> None:
    def fn(x: Tensor, n: Tensor) -> list[Tensor]:
        return [torch.arange(0, end=n) * 2, torch.arange(end=n, start=0), torch.arange(n, 9), torch.arange(-n, n)]

    run = aotkit.aot_function(as_dynamo_gives(fn), lambda graph, _: compile_graph(graph))
    for n in (4, 0, 3):
        torch.testing.assert_close(run(torch.ones(2), torch.tensor(n)), fn(torch.ones(2), torch.tensor(n)))


@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_range_of_a_length_that_is_read(fullgraph: bool) -> None:
    def fn(x: Tensor, n: Tensor) -> Tensor:
        return torch.arange(n) * 2

    torch._dynamo.reset()
    options = {"cache": False, "fallback": "error"}
    run = torch.compile(fn, backend="aotkit", options=options, fullgraph=fullgraph)
    for n in (4, 1, 0, 7):
        torch.testing.assert_close(run(torch.ones(2), torch.tensor(n)), fn(torch.ones(2), torch.tensor(n)))


@pytest.mark.parametrize("part", [[[True, False], [False, True]], [[0, 1], [1, 0]]], ids=str)
def test_beside_lists_it_is_refused(part: Any) -> None:
    """A list of bools is for as many dimensions as it is deep."""
    run = aotkit.aot_function(as_dynamo_gives(lambda x, i: x[part, i]), lambda graph, _: compile_graph(graph))
    with pytest.raises(Unsupported):
        run(torch.randn(2, 2, 2), torch.tensor(1))


def test_a_capture_leaves_the_fake_mode_as_it_was() -> None:
    """Whether others capture reads of numbers is theirs to say."""
    mode = FakeTensorMode(shape_env=ShapeEnv(allow_scalar_outputs=False))
    for fn in (lambda x, i: [x[i] * 2], lambda x, i: [torch.arange(i)]):
        capture(torch.fx.symbolic_trace(fn), [torch.randn(3), torch.tensor(1)], fake_mode=mode)
        with pytest.raises(Unsupported):
            capture(lambda x, i: [x * i.item()], [torch.randn(3), torch.tensor(1)], fake_mode=mode)
