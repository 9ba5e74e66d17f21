"""Functions of wrapper subclasses are captured as dense functions of the tensors inside."""

from __future__ import annotations

import pytest
import torch
from torch._subclasses import FakeTensor
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_aot_trace import TraceOptions, capture
from aotkit_functionalize import FunctionalLayer, Unsupported
from aotkit_functionalize.subclasses import tensors_inside


def two(*sizes: int) -> TwoTensor:
    return TwoTensor(torch.randn(*sizes), torch.randn(*sizes))


@pytest.mark.covers("F2.31", "F2.32", "F2.52")
def test_one_run_of_the_function_gives_a_dense_joint_graph_and_what_gradients_are_made_of() -> None:
    runs = []

    def fn(x, y):
        runs.append(1)
        return [(x * y).exp()]

    x, y = two(3).requires_grad_(), torch.randn(3, requires_grad=True)
    captured = capture(fn, [x, y])
    boundary = captured.metadata.subclasses
    assert len(runs) == 1 and boundary is not None
    names = [node.name for node in captured.graph.graph.find_nodes(op="placeholder")]
    assert names == ["primals_1", "primals_2", "primals_3", "tangents_1", "tangents_2"]
    values = [node.meta["val"] for node in captured.graph.graph.nodes if node.op != "output"]
    assert all(isinstance(value, FakeTensor) for value in values)
    assert boundary.num_gradients == 4 and [len(made.parts) for made in boundary.gradients] == [2, 2]
    tangents = [torch.randn(3), torch.randn(3)]
    found = captured.graph(x.a, x.b, y.detach(), *tangents)
    out = (x * y).exp()
    out.backward(TwoTensor(*tangents))
    expected = [out.a, out.b, x.grad.a, x.grad.b, y.grad.a, y.grad.b]
    torch.testing.assert_close(list(found), [value.detach() for value in expected])


def test_gradients_know_by_which_tangents_they_are_reached() -> None:
    def fn(x, w, y):
        return [x * y, w * 2, y.sin()]

    args = [two(3).requires_grad_(), two(3).requires_grad_(), torch.randn(3, requires_grad=True)]
    boundary = capture(fn, args).metadata.subclasses
    assert boundary is not None and boundary.reached_by == ((0,), (1,), (0,))


def test_a_graph_module_that_makes_a_subclass_is_captured() -> None:
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    doubled = graph.call_function(torch.mul, (x, 2))
    made = graph.call_function(TwoTensor, (x, doubled))
    made.meta["example_value"] = two(3)
    graph.output([graph.call_method("sin", (made,))])
    captured = capture(torch.fx.GraphModule(torch.nn.Module(), graph), [torch.randn(3)])
    value = torch.randn(3)
    torch.testing.assert_close(list(captured.graph(value)), [value.sin(), (value * 2).sin()])


def test_an_attribute_that_is_a_subclass_is_taken_apart_too() -> None:
    weight = two(3)
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output([graph.call_function(torch.mul, (x, graph.get_attr("weight")))])
    root = torch.nn.Module()
    root.register_buffer("weight", weight)
    module = torch.fx.GraphModule(root, graph)
    for value in (torch.randn(3), two(3)):
        captured = capture(module, [value])
        expected = value * weight
        found = captured.graph(*tensors_inside(value))
        torch.testing.assert_close(list(found), [expected.a, expected.b])
    with pytest.raises(Unsupported, match="tensor attribute weight of the graph is a TwoTensor"):
        capture(module, [torch.randn(3)], options=TraceOptions(layer=FunctionalLayer.DISPATCHER))
