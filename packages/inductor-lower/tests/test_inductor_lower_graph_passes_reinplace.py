"""Writes to parts of inputs: in place where nobody needs the old values, and right where somebody does."""

from __future__ import annotations

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_inductor_lower import LowerOptions, compile_graph
from aotkit_inductor_lower.driver import run_graph_passes

aten = torch.ops.aten
SCATTERS = (aten.slice_scatter.default, aten.select_scatter.default, aten.index_put.default, aten.index_copy.default)
SCATTERS += (aten.index_add.default, aten.scatter.src, aten.scatter.value, aten.scatter_add.default)


def functional(f, *args):
    """The graph as functionalization leaves it: writes become copies into inputs at the end."""
    return make_fx(torch.func.functionalize(lambda *given: f(*given)), tracing_mode="fake")(*args)


def scatters_left(f, *args) -> int:
    """How many scatters into new tensors remain, once results and arguments were found to be eager's."""
    graph = functional(f, *args)
    want, got = [a.clone() for a in args], [a.clone() for a in args]
    expected = f(*want)
    expected = list(expected) if isinstance(expected, tuple) else [expected]
    results = compile_graph(graph, options=LowerOptions(verify=True))(list(got))
    for a, b in zip([*results, *got], [*expected, *want], strict=True):
        assert torch.equal(a, b)
    passed = run_graph_passes(graph, LowerOptions())
    return sum(node.target in SCATTERS for node in passed.graph.nodes)


def cache() -> torch.Tensor:
    return torch.arange(2 * 8 * 3, dtype=torch.float32).view(2, 8, 3)


NEW = torch.full((2, 2, 3), -1.5)
AT = torch.tensor([6, 1])


def set_slice(k, new, at):
    k[:, 2:4] = new
    return k.sum(1) + 1


def set_entry(k, new, at):
    k[:, 5] = new[:, 0]
    return k * 2


def set_both(k, new, at):
    k[:, 2:4] = new
    k[:, 5] = new[:, 1] * 3
    return k * 2


def put(k, new, at):
    k[:, at] = new
    return k.sum(1)


def put_more(k, new, at):
    k.index_put_((torch.tensor([0, 1]), at), new[:, 0], accumulate=True)
    return k + 1


def index_copy(k, new, at):
    k.index_copy_(1, at, new)
    return k.sum(1)


def index_add(k, new, at):
    k.index_add_(1, at, new, alpha=2)
    return k.sum(1)


def scatter(k, new, at):
    k.scatter_(1, at.view(1, 2, 1).expand(2, 2, 3), new)
    return k.sum(1)


def scatter_value(k, new, at):
    k.scatter_(1, at.view(1, 2, 1).expand(2, 2, 3), 7.0)
    return k.sum(1)


def scatter_add(k, new, at):
    k.scatter_add_(1, at.view(1, 2, 1).expand(2, 2, 3), new)
    return k.sum(1)


def read_before(k, new, at):
    old = k.sum(1)
    k[:, 2:4] = new + old[:, None]
    return k.sum(1) - old


def nothing_back(k, new, at):
    k[:, 2:4] = new
    return new * 2


WRITES = [set_slice, set_entry, set_both, put, put_more, index_copy, index_add, scatter, scatter_value, scatter_add]
WRITES += [read_before, nothing_back]


@pytest.mark.covers("F5b.9", "F5f.35")
@pytest.mark.parametrize("f", WRITES)
def test_a_part_of_an_input_is_written_without_a_copy_of_the_rest(f):
    assert scatters_left(f, cache(), NEW, AT) == 0


def old_read_later(k, new, at):
    old = k[:, 3:5]
    k_new = aten.slice_scatter(k, new, 1, 2, 4)
    result = old * 2 + k_new[:, 3:5]
    k.copy_(k_new)
    return result


def old_returned(k, new, at):
    old = k.clone()
    k[:, 2:4] = new
    return old, k.sum(1)


def shifted(k, new, at):
    k[:, 1:] = k[:, :-1].clone()
    return k.sum(1)


def shifted_and_scaled(k, new, at):
    k[:, 1:] = k[:, :-1] * 2
    return k.sum(1)


def new_returned(k, new, at):
    k_new = aten.slice_scatter(k, new, 1, 2, 4)
    k.copy_(k_new)
    return k_new


def changed_before_it_is_copied(k, new, at):
    k[:, 2:4] = new
    k.mul_(2)
    return k.sum(1)


@pytest.mark.covers("F5f.35")
@pytest.mark.parametrize(
    "f", [old_read_later, old_returned, shifted, shifted_and_scaled, new_returned, changed_before_it_is_copied]
)
def test_old_values_that_are_needed_are_not_overwritten(f):
    assert scatters_left(f, cache(), NEW, AT) in (0, 1)


@pytest.mark.covers("F5f.35")
@pytest.mark.parametrize("f", [old_read_later, new_returned, changed_before_it_is_copied])
def test_a_copy_stays_where_the_old_or_the_new_is_needed_beside_the_other(f):
    assert scatters_left(f, cache(), NEW, AT) == 1


def test_an_index_out_of_range_raises_what_it_does_in_eager():
    compiled = compile_graph(functional(put, cache(), NEW, AT))
    with pytest.raises(IndexError):
        compiled([cache(), NEW, torch.tensor([6, 9])])
