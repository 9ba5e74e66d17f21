"""Capture, a change of the graph by the user, compile; and what descriptors say about the graph in between."""

from __future__ import annotations

import copy
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch._functorch.compilers import nop as torchs_nop
from torch._functorch.partitioners import min_cut_rematerialization_partition as torchs_min_cut
from torch.testing._internal.two_tensor import TwoTensor

import aotkit
from aotkit_aot_trace import descriptors as d
from aotkit_aot_trace import graph_queries as queries
from aotkit_inductor_lower import compile_graph, decompositions


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("calls", torch.zeros(3))

    def forward(self, x: torch.Tensor, *, factor: int = 2) -> dict[str, torch.Tensor]:
        self.calls.add_(1)
        hidden = self.linear(x).sin() * factor
        return {"all": hidden, "some": hidden.view(-1)[::2]}


def export(module: nn.Module, *args: Any, **kwargs: Any) -> aotkit.JointWithDescriptors:
    with ExitStack() as stack:
        return aotkit.aot_export_joint_with_descriptors(stack, module, args, kwargs)


def tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(), *module.buffers()]


class Calls(nn.Module):
    def __init__(self, fn: Any) -> None:
        super().__init__()
        self.fn = fn

    def forward(self, *args: Any) -> Any:
        return self.fn(*args)


def placeholders(joint: aotkit.JointWithDescriptors) -> list[Any]:
    return [node.meta["desc"] for node in joint.graph_module.graph.find_nodes(op="placeholder")]


def results(joint: aotkit.JointWithDescriptors) -> tuple[Any, ...]:
    (output,) = joint.graph_module.graph.find_nodes(op="output")
    return output.meta["desc"]


@pytest.mark.covers("F2.24")
@pytest.mark.parametrize("partitioner", [None, torchs_min_cut], ids=["ours", "torchs"])
def test_the_two_halves_together_are_a_compile(partitioner: Any) -> None:
    module = Net()
    reference = copy.deepcopy(module)
    joint = export(module, torch.randn(4, 3, requires_grad=True), factor=3)
    chosen = {} if partitioner is None else {"partition_fn": partitioner}
    compiled = aotkit.aot_compile_joint_with_descriptors(
        joint, fw_compiler=torchs_nop, bw_compiler=torchs_nop, **chosen
    )
    assert joint.params_spec == ("linear.weight", "linear.bias") and joint.buffers_spec == ("calls",)
    for _ in range(2):
        x = torch.randn(4, 3, requires_grad=True)
        y = x.detach().clone().requires_grad_()
        ours, theirs = compiled(*tensors(module), x, factor=3), reference(y, factor=3)
        torch.testing.assert_close(ours, theirs)
        ours["some"].sum().backward()
        theirs["some"].sum().backward()
        torch.testing.assert_close(x.grad, y.grad)
    torch.testing.assert_close(module.linear.weight.grad, reference.linear.weight.grad)
    torch.testing.assert_close(module.calls, reference.calls)
    with pytest.raises(TypeError, match="this was captured for"):
        compiled(*tensors(module), torch.randn(4, 3), torch.randn(4, 3))


@pytest.mark.covers("F2.50")
def test_a_change_of_the_graph_between_the_halves_is_what_runs() -> None:
    module = Net()
    joint = export(module, torch.randn(4, 3))
    graph = joint.graph_module.graph
    (sine,) = graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    sine.target = torch.ops.aten.tanh.default
    weight, gradient = queries.get_param_and_grad_nodes(graph)[d.ParamAOTInput("linear.weight")]
    assert weight.op == "placeholder" and gradient is not None
    with graph.inserting_after(gradient):
        doubled = graph.call_function(torch.ops.aten.mul.Tensor, (gradient, 2))
        doubled.meta.update(gradient.meta)
    gradient.replace_all_uses_with(doubled, delete_user_cb=lambda user: user is not doubled)
    joint.graph_module.recompile()
    compiled = aotkit.aot_compile_joint_with_descriptors(joint)
    x = torch.randn(4, 3)
    ours = compiled(*tensors(module), x)["all"]
    torch.testing.assert_close(ours, module.linear(x).tanh() * 2)
    unchanged = export(Net(), x)
    assert unchanged.graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)
    ours.sum().backward()
    doubled_grad = module.linear.weight.grad
    plain = aotkit.aot_compile_joint_with_descriptors(export(module, x))
    module.linear.weight.grad = None
    plain(*tensors(module), x)["all"].sum().backward()
    # cos(z) of the gradient was left as it is, and so the whole gradient is exactly twice that of sin
    torch.testing.assert_close(doubled_grad, module.linear.weight.grad * 2)


@pytest.mark.covers("F2.24", "F8.9")
def test_our_lowering_compiles_an_exported_graph() -> None:
    module, x = Net(), torch.randn(4, 3)
    with ExitStack() as stack:
        joint = aotkit.aot_export_joint_with_descriptors(stack, module, (x,), decompositions=decompositions())
    compiled = aotkit.aot_compile_joint_with_descriptors(joint, fw_compiler=compile_graph, bw_compiler=compile_graph)
    reference = copy.deepcopy(module)
    ours, theirs = compiled(*tensors(module), x), reference(x)
    torch.testing.assert_close(ours, theirs)
    ours["all"].sum().backward()
    theirs["all"].sum().backward()
    torch.testing.assert_close(module.linear.weight.grad, reference.linear.weight.grad)


@pytest.mark.covers("F2.25")
def test_parameters_buffers_arguments_mutations_bases_tangents_and_gradients_are_described() -> None:
    joint = export(Net(), torch.randn(4, 3))
    weight, bias = d.ParamAOTInput("linear.weight"), d.ParamAOTInput("linear.bias")
    calls, x = d.BufferAOTInput("calls"), d.PlainAOTInput(0)
    assert placeholders(joint) == [weight, bias, calls, x, d.TangentAOTInput(d.PlainAOTOutput(0))]
    gradients = tuple(d.GradAOTOutput(i) for i in (weight, bias, calls, x))
    assert results(joint) == (d.InputMutationAOTOutput(calls), d.PlainAOTOutput(0), *gradients)
    assert [i.expr() for i in placeholders(joint)] == [
        "self.get_parameter('linear.weight')",
        "self.get_parameter('linear.bias')",
        "self.get_buffer('calls')",
        "args[0]",
        "__tangent(results[0])",
    ]
    assert [o.expr() for o in results(joint)][:3] == [
        "__updated(self.get_buffer('calls'))",
        "results[0]",
        "__grad(self.get_parameter('linear.weight'))",
    ]


@pytest.mark.covers("F2.25")
def test_the_base_of_views_that_are_returned_alone_is_described() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return y[0], y[1]

    joint = export(Calls(fn), torch.randn(2, 3, requires_grad=True))
    base = d.IntermediateBaseAOTOutput(d.PlainAOTOutput(0))
    assert base in results(joint) and base.expr() == "results[0]._base"
    assert d.TangentAOTInput(base) in placeholders(joint)


@pytest.mark.covers("F2.25")
@pytest.mark.parametrize("through_data", [False, True], ids=["view", "storage"])
def test_the_base_of_overlapping_arguments_is_described(through_data: bool) -> None:
    def fn(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a.mul_(2)
        return (b + 1,)

    memory = torch.randn(6)
    a = memory[:4]
    b = torch.empty(0).set_(memory.untyped_storage(), 2, (4,)) if through_data else memory[2:]
    kind = d.SyntheticBaseAOTInput if through_data else d.ViewBaseAOTInput
    joint = export(Calls(fn), a, b)
    assert placeholders(joint) == [kind(d.PlainAOTInput(0))]
    assert results(joint)[0] == d.InputMutationAOTOutput(kind(d.PlainAOTInput(0)))
    compiled = aotkit.aot_compile_joint_with_descriptors(joint)
    expected = memory.clone()
    expected[:4] *= 2
    torch.testing.assert_close(compiled(a, b)[0], expected[2:] + 1)


@pytest.mark.covers("F2.25")
def test_the_tensors_inside_of_subclasses_are_described_and_queries_refuse_them() -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (x * 2,)

    x = TwoTensor(torch.randn(3), torch.randn(3)).requires_grad_()
    joint = export(Calls(fn), x)
    argument, result = d.PlainAOTInput(0), d.PlainAOTOutput(0)
    tangent, gradient = d.TangentAOTInput(result), d.GradAOTOutput(argument)
    assert placeholders(joint) == [
        d.SubclassGetAttrAOTInput(argument, "a"),
        d.SubclassGetAttrAOTInput(argument, "b"),
        d.SubclassGetAttrAOTInput(tangent, "a"),
        d.SubclassGetAttrAOTInput(tangent, "b"),
    ]
    assert results(joint) == tuple(
        d.SubclassGetAttrAOTOutput(base, attr) for base in (result, gradient) for attr in ("a", "b")
    )
    assert results(joint)[0].expr() == "results[0].a"
    with pytest.raises(RuntimeError, match=r"\.a is a part of a tensor subclass"):
        queries.get_all_input_and_grad_nodes(joint.graph_module.graph)
    compiled = aotkit.aot_compile_joint_with_descriptors(joint)
    compiled(x)[0].sum().backward()
    torch.testing.assert_close(x.grad.a, torch.full((3,), 2.0))


@pytest.mark.covers("F2.25")
def test_queries_find_nodes_by_meaning() -> None:
    graph = export(Net(), torch.randn(4, 3)).graph_module.graph
    assert list(queries.get_named_param_nodes(graph)) == ["linear.weight", "linear.bias"]
    assert list(queries.get_named_buffer_nodes(graph)) == ["calls"]
    assert [n.name for n in queries.get_param_nodes(graph)] == ["primals_1", "primals_2"]
    assert [n.name for n in queries.get_buffer_nodes(graph)] == ["primals_3"]
    (x, no_gradient) = queries.get_plain_input_and_grad_nodes(graph)[0]
    assert x.name == "primals_4" and no_gradient is None
    (output, tangent) = queries.get_plain_output_and_tangent_nodes(graph)[0]
    assert output is not None and tangent is not None and tangent.name == "tangents_1"
    assert d.InputMutationAOTOutput(d.BufferAOTInput("calls")) in queries.get_all_output_and_tangent_nodes(graph)
    assert d.BufferAOTInput("calls") in queries.get_all_input_and_grad_nodes(graph)
    bare = torch.fx.symbolic_trace(lambda x: x + 1).graph
    with pytest.raises(RuntimeError, match="has no descriptor"):
        queries.get_param_nodes(bare)


class _Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x, *, scale, more):
        return self.linear(x) * scale + more["shift"]


def _by_dynamo(module, x, named):
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    return dynamo_graph_capture_for_export(module)(x, **named)


def _by_export(module, x, named):
    return torch.export.export(module, (x,), named).module()


@pytest.mark.parametrize("graph_of", [_by_dynamo, _by_export])
def test_a_captured_module_may_be_called_with_keywords_in_any_order(graph_of):
    module, x = _Scaled(), torch.randn(4, 3)
    named = {"scale": torch.tensor(3.0), "more": {"shift": torch.arange(2.0)}}
    graph = graph_of(module, x, named)
    for given in (named, dict(reversed(named.items()))):
        with ExitStack() as stack:
            joint = aotkit.aot_export_joint_with_descriptors(stack, graph, (x,), given)
        compiled = aotkit.aot_compile_joint_with_descriptors(joint)
        parameters = [graph.get_parameter(name) for name in joint.params_spec]
        torch.testing.assert_close(compiled(*parameters, x, **given), module(x, **named))
