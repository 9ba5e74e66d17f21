"""Integer arguments as positions, bounds and steps: negative ones, and ones that are out of range, at later calls.

Each call gets the middle of a larger tensor, all of which is compared: what lies beside is neither read nor written.
"""

from __future__ import annotations

import pytest
import torch

import aotkit
from aotkit_inductor_lower import LowerOptions, compile_graph, decompositions

LENGTH = 7


def assigned(a, key, value=-1.0):
    a[key] = value
    return a


POSITIONS = {
    "a[n]": lambda a, n: a[n] * 2,
    "a[n] =": lambda a, n: assigned(a, n),
    "a[n] in rows": lambda a, n: a[:6].view(3, 2).t()[:, n % 3] * 2 + a[n],
    "a[1:][n] =": lambda a, n: assigned(a[1:], n),
    "a[n:]": lambda a, n: a[n:] * 2,
    "a[:n] =": lambda a, n: assigned(a, slice(None, n)),
    "a[n:n+2] =": lambda a, n: assigned(a, slice(n, n + 2)),
    "narrow": lambda a, n: a.narrow(0, n, 2) * 2,
    "as_strided": lambda a, n: a.as_strided((2,), (1,), n) * 2,
    "as_strided by steps": lambda a, n: a.as_strided((2,), (n,)) * 2,
    "select_scatter": lambda a, n: a.select_scatter(a[0] * 2, 0, n) + 1,
    "slice_scatter": lambda a, n: a.slice_scatter(a[:2] * 2, 0, n, n + 2) + 1,
    "slice_scatter to an end": lambda a, n: a.slice_scatter(a[:2] * 2, 0, 2, n) + 1,
    "diagonal =": lambda a, n: a[:6].view(2, 3).diagonal(n).fill_(-1.0),
    "tril": lambda a, n: a[:6].view(2, 3).tril(n) * 2,
    "roll": lambda a, n: a.roll(n, 0) * 2,
    "quotients": lambda a, n: a[n // 2] + (n % 3) + 7 // n + 7 % n,
}


@pytest.fixture(autouse=True)
def no_graphs_of_other_tests():
    torch._dynamo.reset()


def outcome(fn, *args):
    """The result, or the type of the error, and the tensor around the argument afterwards."""
    big = torch.arange(1000.0) * 0.5
    try:
        return fn(big[500 : 500 + LENGTH], *args).clone(), big
    except (IndexError, RuntimeError) as error:
        return error, big


def agree(fn, compiled, numbers, as_argument=lambda n: n):
    for n in numbers:
        (expected, around), (got, found) = outcome(fn, n), outcome(compiled, as_argument(n))
        assert isinstance(got, Exception) == isinstance(expected, Exception), (n, got, expected)
        if isinstance(expected, Exception):
            assert torch.equal(found, torch.arange(1000.0) * 0.5), n
        else:
            assert torch.equal(got, expected), n
            assert torch.equal(found, around), n


@pytest.mark.parametrize("name", POSITIONS)
def test_a_dynamic_position_counts_from_the_end_or_is_refused_as_in_eager_mode(name):
    options = {"fallback": "error", "redzones": True, "cache": False}
    compiled = torch.compile(POSITIONS[name], backend="aotkit", dynamic=True, options=options)
    agree(POSITIONS[name], compiled, (2, 3, -1, -7, 6, 9, -8))


@pytest.mark.parametrize("name", ["a[n]", "a[n] =", "a[1:][n] =", "select_scatter", "as_strided", "quotients"])
def test_a_position_counts_from_the_end_in_functions_compiled_by_hand(name):
    def lower(graph, _):
        return compile_graph(graph, LowerOptions(redzones=True))

    fn = POSITIONS[name]
    compiled = aotkit.aot_function(fn, lower, decompositions=decompositions(), dynamic=True)
    agree(fn, compiled, (2, 3, -1, -7, 6, 9, -8))


@pytest.mark.parametrize("name", ["a[n]", "a[n] =", "a[1:][n] =", "a[n:]", "select_scatter", "narrow"])
@torch._dynamo.config.patch(capture_scalar_outputs=True)
def test_a_position_that_a_tensor_holds_counts_from_the_end(name):
    fn = POSITIONS[name]
    options = {"redzones": True, "cache": False}
    compiled = torch.compile(lambda a, n: fn(a, n.item()), backend="aotkit", options=options)
    agree(fn, compiled, (2, 3, -1, -7, 6, 9, -8), torch.tensor)


def test_gradients_reach_a_dynamic_negative_position():
    def fn(a, n):
        return a[n] * a[n:].sum()

    options = {"fallback": "error", "redzones": True, "cache": False}
    compiled = torch.compile(fn, backend="aotkit", dynamic=True, options=options)
    for n in (2, 3, -1, -7):
        a, b = (torch.arange(float(LENGTH)).requires_grad_() for _ in range(2))
        fn(a, n).backward()
        compiled(b, n).backward()
        assert torch.equal(a.grad, b.grad), n


INTO_EMPTY = {
    "gather": lambda x, i: torch.gather(x, 1, i),
    "index": lambda x, i: x[:, i[0]],
    "index_select": lambda x, i: x.index_select(1, i[0]),
    "scatter": lambda x, i: x.scatter(1, i, 3.0),
    "scatter_add": lambda x, i: x.scatter_add(1, i, torch.ones(i.shape)),
    "index_add": lambda x, i: x.index_add(1, i[0], torch.ones(x.shape[0], i.shape[1])),
    "index_put": lambda x, i: x.index_put((i[0], i[1]), x.new_ones(())),
    "embedding": lambda x, i: torch.nn.functional.embedding(i[0], x.t()),
}


@pytest.mark.parametrize("name", INTO_EMPTY)
def test_an_index_into_a_dimension_that_became_empty_reads_nothing_and_raises_as_in_eager_mode(name):
    compiled = torch.compile(INTO_EMPTY[name], backend="aotkit", dynamic=True)
    index = torch.tensor([[0, 1, 2], [3, 0, 1], [1, 1, 1], [2, 0, 3]])
    x = torch.rand(4, 5)
    assert torch.equal(compiled(x, index), INTO_EMPTY[name](x, index))
    for rows in (4, 100_000):
        index = torch.zeros(rows, 3, dtype=torch.int64)
        if name == "index_add":  # the one of these whose indices eager does not look at where nothing is added
            assert compiled(torch.rand(rows, 0), index).shape == INTO_EMPTY[name](torch.rand(rows, 0), index).shape
            continue
        with pytest.raises((IndexError, RuntimeError), match=r"out of (range|bounds)|should be positive"):
            compiled(torch.rand(rows, 0), index)
    assert torch.equal(compiled(torch.rand(4, 0), index[:4, :0]), INTO_EMPTY[name](torch.rand(4, 0), index[:4, :0]))


@pytest.mark.parametrize("size", [(0,), (0, 3), (3, 0)], ids=str)
def test_a_position_is_looked_at_where_nothing_is_written(size):
    def fn(a, n):
        return a.select_scatter(a.new_ones(a.shape[1:]), 0, n)

    compiled = torch.compile(fn, backend="aotkit", dynamic=True)
    full = torch.rand(9, *size[1:])
    for n in (8, 7, -2):
        assert torch.equal(compiled(full, n), fn(full, n)), n
    with pytest.raises(IndexError, match="out of range"):
        fn(torch.rand(size), 9)
    with pytest.raises((IndexError, RuntimeError), match="out of range"):
        compiled(torch.rand(size), 9)


def test_an_index_into_an_expanded_tensor_that_became_empty_raises_before_anything_is_read():
    def gathered(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return x.gather(1, index) + 1

    compiled = torch.compile(gathered, backend="aotkit", dynamic=True, options={"fallback": "error"})
    index = torch.full((5, 1), 7)
    whole = torch.rand(1).as_strided((5, 11), (0, 0))
    torch.testing.assert_close(compiled(whole, index), gathered(whole, index))
    for function in (gathered, compiled):
        with pytest.raises((IndexError, RuntimeError), match="out of"):
            function(torch.empty(0).as_strided((3, 0), (0, 0)), index[:3])


@pytest.mark.parametrize("columns", [17, 4])
def test_a_guard_with_an_alternative_in_it_leaves_the_others_as_they_are(columns):
    """A reshape asks whether sizes are equal or divisible; the number before it is part of the graph all the same."""

    def fn(x, n):
        v = x.diagonal(n, 1, 2)
        return [v, v.reshape(-1, columns), v * n]

    compiled = aotkit.aot_function(fn, compile_graph, decompositions=decompositions(), dynamic=True)
    x = torch.arange(17 * 4 * 19.0).view(17, 4, 19)
    for n in (1, 3, 0, 5, 3, 1):
        for got, want in zip(compiled(x, n), fn(x, n), strict=True):
            assert torch.equal(got, want), n
