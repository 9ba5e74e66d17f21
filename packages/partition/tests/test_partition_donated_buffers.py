"""Saved tensors whose memory is nobody else's."""

from __future__ import annotations

import operator

import torch
from torch import fx

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
