"""Saved tensors whose memory is nobody else's."""

from __future__ import annotations

import contextlib
import itertools
import operator
from typing import Any

import pytest
import torch
from torch import fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aotkit_partition import donated_buffers

aten = torch.ops.aten


def forward() -> fx.GraphModule:
    """One output; saved are an input, the output itself, a value of its own, two views of one value, and a view."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    output = graph.call_function(aten.sigmoid.default, (x,))
    own = graph.call_function(aten.exp.default, (x,))
    twice = graph.call_function(aten.sin.default, (x,))
    views = [graph.call_function(aten.view.default, (twice, [-1])), graph.call_function(aten.t.default, (twice,))]
    alone = graph.call_function(aten.cos.default, (x,))
    unsafe = graph.call_function(aten._unsafe_view.default, (alone, [-1]))
    graph.output([output, x, output, own, *views, unsafe])
    return fx.GraphModule(torch.nn.Module(), graph)


def test_memory_of_inputs_of_results_and_of_two_saved_tensors_is_not_donated() -> None:
    assert donated_buffers.donated_tensors(forward(), 1, 6) == (2, 5)


def test_each_of_several_results_has_memory_of_its_own() -> None:
    """But for one that is taken twice, and those that are views of one tensor."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    norm = graph.call_function(aten.native_layer_norm.default, (x, [4], None, None, 1e-5))
    items = [graph.call_function(operator.getitem, (norm, k)) for k in (0, 1, 2, 2)]
    view = graph.call_function(aten.view.default, (items[0], [-1]))
    base = graph.call_function(aten.exp.default, (x,))
    parts = graph.call_function(aten.split.Tensor, (base, 2))
    halves = [graph.call_function(operator.getitem, (parts, k)) for k in (0, 1)]
    output = graph.call_function(aten.sigmoid.default, (x,))
    graph.output([output, view, *items[1:], *halves])
    module = fx.GraphModule(torch.nn.Module(), graph)
    assert donated_buffers.donated_tensors(module, 1, 6) == (0, 1)


def test_tensors_of_a_list_among_several_results_are_one_memory() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    counts = graph.call_function(aten.histogramdd.default, (x, [2]))
    edges = graph.call_function(operator.getitem, (counts, 1))
    items = [graph.call_function(operator.getitem, (edges, k)) for k in (0, 1)]
    output = graph.call_function(aten.sigmoid.default, (x,))
    graph.output([output, graph.call_function(operator.getitem, (counts, 0)), *items])
    assert donated_buffers.donated_tensors(fx.GraphModule(torch.nn.Module(), graph), 1, 3) == (0,)


@pytest.mark.parametrize(
    ("target", "sizes"), [(aten.unsafe_split.Tensor, 2), (aten.unsafe_split_with_sizes.default, [2, 2])], ids=str
)
def test_parts_that_are_said_to_be_no_views_are_the_memory_of_what_is_split(target: Any, sizes: Any) -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    output = graph.call_function(aten.sigmoid.default, (x,))
    parts = [graph.call_function(target, (each, sizes)) for each in (x, graph.call_function(aten.exp.default, (x,)))]
    graph.output([output, *(graph.call_function(operator.getitem, (each, k)) for each in parts for k in (0, 1))])
    assert donated_buffers.donated_tensors(fx.GraphModule(torch.nn.Module(), graph), 1, 4) == ()


class _Shared(TorchDispatchMode):
    """Operators that say of no result that it shares memory, though one does."""

    def __init__(self) -> None:
        super().__init__()
        self.found, self.called = set[Any](), set[Any]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        results = [each for each in tree_leaves(made) if isinstance(each, torch.Tensor)]
        silent = all(result.alias_info is None for result in func._schema.returns)
        if func.namespace == "aten" and silent and len(results) > 1:
            self.called.add(func)
            places = [each.untyped_storage().data_ptr() for each in results if each.numel()]
            given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor) and each.numel()]
            if len({*places}) < len(places) or {*places} & {each.untyped_storage().data_ptr() for each in given}:
                self.found.add(func)
        return made


@pytest.mark.nightly("the parts of a split, and a layer norm's results, show it of single operators")
def test_of_torchs_operators_only_silent_views_have_results_that_share_memory() -> None:
    from torch.testing._internal.common_methods_invocations import op_db

    mode = _Shared()
    for op in op_db:
        if torch.float32 not in op.dtypes:
            continue
        with contextlib.suppress(Exception):  # samples that this torch can't make, or that the operator refuses
            for sample in itertools.islice(op.sample_inputs("cpu", torch.float32), 4):
                with mode:
                    op(sample.input, *sample.args, **sample.kwargs)
    assert len(mode.called) > 40 and mode.found <= donated_buffers._SILENT_VIEWS


def test_arguments_of_a_call_that_makes_new_memory_are_not_its_results() -> None:
    for marked, expected in ((False, ()), (True, (0,))):
        graph = fx.Graph()
        own = graph.call_function(aten.exp.default, (graph.placeholder("x"),))
        call = graph.call_function(torch.ops.higher_order.invoke_subgraph, ("region", "name", own))
        call.meta["new_memory"] = marked
        result = graph.call_function(operator.getitem, (call, 0))
        graph.output([result, own])
        module = fx.GraphModule(torch.nn.Module(), graph)
        assert donated_buffers.donated_tensors(module, 1, 1) == expected


def test_inputs_of_the_backward_are_marked_behind_the_sizes() -> None:
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("size", "a", "b", "tangent")]
    graph.output([inputs[3]])
    backward = fx.GraphModule(torch.nn.Module(), graph)
    donated_buffers.mark_donated(backward, 1, (1,))
    assert [n.name for n in backward.graph.find_nodes(op="placeholder") if n.meta.get("donated")] == ["b"]
