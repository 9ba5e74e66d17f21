"""Exported graphs: of modules with their signatures, of flat functions, above autograd, and what is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import nn
from torch._functorch.aot_autograd import aot_export_module as torchs_export
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.testing._internal.two_tensor import TwoTensor

from aotkit_aot_trace import GraphMetadata, Unsupported
from aotkit_aot_trace.callables import create_functional_call, detect_attribute_assignment
from aotkit_aot_trace.export import (
    ExportError,
    GraphSignature,
    aot_export_function,
    aot_export_joint_simple,
    aot_export_module,
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x, counter, *, weight=2.0):
        self.calls.add_(1)
        counter.mul_(2)
        hidden = self.norm(self.linear(x)) * weight
        return hidden.square().mean(), hidden.detach(), x.detach(), 7, None


class Returns(nn.Module):
    """A parameter, and whatever ``body`` does with it and the arguments."""

    def __init__(self, body):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))
        self.register_buffer("total", torch.zeros(3))
        self.body = body

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


def flat_tensors(module):
    return [*dict(module.named_parameters()).values(), *dict(module.named_buffers()).values()]


def joint(body, *args, loss=0):
    return aot_export_module(Returns(body), args, trace_joint=True, output_loss_index=loss)


@pytest.mark.covers("F2.15", "F2.20")
def test_a_joint_export_returns_updates_outputs_and_gradients_of_the_loss_without_a_tangent():
    module, x, counter = Net(), torch.randn(3, 4, requires_grad=True), torch.ones(2)
    graph, signature = aot_export_module(
        module, (x, counter), trace_joint=True, output_loss_index=0, kwargs={"weight": 3.0}
    )
    tensors = flat_tensors(module)
    results = dict(
        zip(
            [n.name if isinstance(n, torch.fx.Node) else None for n in _outputs(graph)],
            graph(*tensors, x, counter, 3.0),
            strict=True,
        )
    )
    assert len(graph.graph.find_nodes(op="placeholder")) == len(tensors) + 3
    expected = module(x, counter, weight=3.0)
    expected[0].backward()
    torch.testing.assert_close(results[signature.user_outputs[0]], expected[0])
    torch.testing.assert_close(results[signature.user_outputs[1]], expected[1])
    assert signature.user_outputs[2] == signature.user_inputs[0] and signature.user_outputs[3:] == [None, None]
    backward = signature.backward_signature
    assert backward.loss_output == signature.user_outputs[0]
    for output, name in backward.gradients_to_parameters.items():
        torch.testing.assert_close(results[output], module.get_parameter(name).grad)
    assert set(backward.gradients_to_parameters.values()) == {n for n, _ in module.named_parameters()}
    ((output, name),) = backward.gradients_to_user_inputs.items()
    assert name == signature.user_inputs[0]
    torch.testing.assert_close(results[output], x.grad)
    for output, name in signature.buffers_to_mutate.items():
        torch.testing.assert_close(results[output], module.get_buffer(name))
    ((output, name),) = signature.user_inputs_to_mutate.items()
    assert name == signature.user_inputs[1]
    torch.testing.assert_close(results[output], counter)


@pytest.mark.covers("F2.20")
@pytest.mark.parametrize("trace_joint", [False, True])
def test_the_signature_says_what_torchs_says_and_survives_json(trace_joint):
    module, args = Net(), (torch.randn(3, 4), torch.ones(2))
    loss = 0 if trace_joint else None
    given = {"trace_joint": trace_joint, "output_loss_index": loss}
    if trace_joint:
        module.forward = lambda x, counter: Net.forward(module, x, counter)[:2]
    else:
        module.forward = lambda x, counter: Net.forward(module, x, counter)
    _, ours = aot_export_module(module, args, **given)
    _, theirs = torchs_export(module, args, **given)
    for name in ("parameters", "buffers"):
        assert getattr(ours, name) == getattr(theirs, name)
    for name in ("inputs_to_parameters", "inputs_to_buffers", "buffers_to_mutate", "parameters_to_mutate"):
        assert list(getattr(ours, name).values()) == list(getattr(theirs, name).values())
    assert len(ours.user_inputs) == len(theirs.user_inputs) and len(ours.user_outputs) == len(theirs.user_outputs)
    assert ours.in_spec == theirs.in_spec and ours.out_spec == theirs.out_spec
    if trace_joint:
        mine, its = ours.backward_signature, theirs.backward_signature
        assert list(mine.gradients_to_parameters.values()) == list(its.gradients_to_parameters.values())
    assert GraphSignature.from_json(ours.to_json()) == ours


@pytest.mark.covers("F2.20")
def test_symbolic_sizes_of_an_export_are_asked_for_or_inferred_from_fake_arguments():
    module = nn.Sequential(nn.Linear(4, 4))
    module.forward = lambda x: (module[0](x),)
    mode = FakeTensorMode(shape_env=ShapeEnv())
    for args, dynamic in (((torch.randn(5, 4),), True), ((mode.from_tensor(torch.randn(5, 4)),), None)):
        graph, _ = aot_export_module(module, args, trace_joint=False, dynamic_shapes=dynamic)
        (result,) = graph(*flat_tensors(module), torch.ones(9, 4))
        torch.testing.assert_close(result, module(torch.ones(9, 4))[0])


@pytest.mark.covers("F2.20")
def test_a_tied_weight_is_exported_under_both_names():
    module = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    module[1].weight = module[0].weight
    module.forward = lambda x: (module[1](module[0](x)).sum(),)
    graph, signature = aot_export_module(module, (torch.ones(2, 3),), trace_joint=True, output_loss_index=0)
    assert signature.parameters == ["0.weight", "1.weight"]
    weight, x = module[0].weight, torch.ones(2, 3)
    loss, *gradients = graph(weight, weight, x)
    torch.testing.assert_close(sum(gradients), torch.autograd.grad(module(x)[0], weight)[0])
    torch.testing.assert_close(loss, module(x)[0])


@pytest.mark.covers("F2.19")
def test_what_an_exported_graph_cannot_express_is_refused_in_the_documented_words():
    def transposes(self, x):
        x.t_()
        return (x.sum() * self.weight.sum(),)

    def writes(self, x):
        x.mul_(2)
        return (x.sum() * self.weight.sum(),)

    with pytest.raises(ExportError, match=r"(?s)received a metadata mutation, .*banned in the aot_export workflow"):
        joint(transposes, torch.randn(2, 3))
    with pytest.raises(
        ExportError, match=r"(?s)requires gradients, and received a mutation.*please file a github issue"
    ):
        joint(writes, torch.randn(2, 3, requires_grad=True) * 1)
    with pytest.raises(ExportError, match=r"(?s)not currently supported with traceable tensor subclass.*<CREATE_ISSUE"):
        joint(lambda self, x: (x.sum() * self.weight.sum(),), TwoTensor(torch.ones(2), torch.ones(2)))


@pytest.mark.covers("F4.18")
def test_overlapping_arguments_of_which_one_is_written_to_cannot_be_exported():
    x = torch.randn(4)
    with pytest.raises(ExportError, match="Encountered duplicated inputs that are mutated in the graph"):
        aot_export_module(Returns(lambda self, a, b: (a.mul_(2), b + 1)), (x, x[:2]), trace_joint=False)


@pytest.mark.covers("F2.21")
@pytest.mark.parametrize(
    "body, loss, words",
    [
        (lambda self, x: (self.weight.sum(),), None, "If trace_joint=Trueit is required .* output_loss_index"),
        (
            lambda self, x: {"loss": self.weight.sum()},
            0,
            "Expected forward output to be either a tensor or a list/tuple",
        ),
        (lambda self, x: (self.weight.sum(), self.weight * 2), 0, "requires gradients, that was not the scalar loss"),
        (lambda self, x: (x.sum(),), 0, "index 0 was marked as the loss, but it does not require gradients"),
        (lambda self, x: (self.weight * x,), 0, "to be a scalar, but it has shape \\(3,\\)"),
        (lambda self, x: (self.weight.sum(),), 3, "no tensor among the 1 outputs there"),
    ],
)
def test_a_joint_export_needs_one_scalar_loss(body, loss, words):
    with pytest.raises(ExportError, match=f"(?s){words}"):
        joint(body, torch.ones(3), loss=loss)


@pytest.mark.covers("F2.21")
def test_a_joint_export_is_not_made_above_autograd_nor_of_a_parameter_without_influence():
    with pytest.raises(ExportError, match=r"pre_dispatch is not supported when trace_joint is True\."):
        aot_export_module(Net(), (), trace_joint=True, pre_dispatch=True)
    with pytest.raises(ExportError, match="a parameter that did not receive a gradient"):
        joint(lambda self, x: (x.sum(),), torch.ones(3, requires_grad=True))
    graph, _ = joint(lambda self, x: self.weight.sum() * x, torch.ones(()))
    torch.testing.assert_close(graph(torch.ones(3), torch.zeros(3), torch.tensor(2.0))[1], torch.full((3,), 2.0))


@pytest.mark.covers("F2.22")
@pytest.mark.parametrize("trace_joint", [False, True])
def test_a_simple_export_has_the_functions_own_calling_convention(trace_joint):
    def fn(x, y):
        return x * y, None, y.sum()

    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    graph = aot_export_joint_simple(fn, (x, y), trace_joint=trace_joint)
    tangents = [torch.ones(3)] if trace_joint else []
    results = graph(x, y, *tangents)
    torch.testing.assert_close(results[0], x * y)
    assert results[1] is None
    torch.testing.assert_close(results[2], y.sum())
    if trace_joint:
        torch.testing.assert_close(results[3], y)
        assert results[4] is None


@pytest.mark.covers("F2.22")
@pytest.mark.parametrize(
    "fn, args, words",
    [
        (lambda x: (x.add_(1) * 2,), (torch.ones(2),), "does not support input mutations"),
        (lambda x: (x.view(-1),), (torch.ones(2),), "does not support outputs that alias inputs"),
        (lambda x: (x,), (torch.ones(2),), "does not support outputs that alias inputs"),
        (lambda x: (x[0] + 1,), ([torch.ones(2)],), "requires individual inputs not to be pytrees"),
        (lambda x: x + 1, (torch.ones(2),), "requires outputs to be a single list/tuple"),
        (lambda x: (x + 1, [x + 2]), (torch.ones(2),), "requires individual outputs not to be pytrees"),
    ],
)
def test_a_simple_export_refuses_what_changes_the_calling_convention(fn, args, words):
    with pytest.raises(ExportError, match=f"aot_export_joint_simple {words}"):
        aot_export_joint_simple(fn, args, trace_joint=False)


@pytest.mark.covers("F2.23")
def test_the_export_of_a_function_comes_with_metadata_and_both_structures():
    args = ({"x": torch.randn(3)}, [torch.randn(3)])
    graph, metadata, in_spec, out_spec = aot_export_function(
        lambda d, xs, *, k: {"sum": d["x"] + xs[0] * k}, args, kwargs={"k": 2}
    )
    assert isinstance(graph, torch.fx.GraphModule) and isinstance(metadata, GraphMetadata)
    flat = pytree.tree_leaves((args, {"k": 2}))
    assert in_spec.unflatten(flat) == (args, {"k": 2})
    torch.testing.assert_close(out_spec.unflatten(graph(*flat))["sum"], args[0]["x"] + args[1][0] * 2)


def test_all_gradients_of_a_function_come_one_per_input():
    x, y = torch.randn(3, requires_grad=True), torch.randn(3)
    graph, metadata, _, _ = aot_export_function(lambda a, b: [(a * b).sum()], (x, y), loss=0)
    torch.testing.assert_close(graph(x, y)[1], y)
    assert graph(x, y)[2] is None and metadata.is_training and not metadata.tangents


@pytest.mark.covers("F2.26")
def test_tensors_stored_on_the_module_are_found_named_and_taken_off_again():
    class Stores(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = nn.Linear(2, 2)
            self.cache, self.number = [], 1

        def forward(self, x):
            self.number = 2
            if x.dim() == 2:
                self.inner.last = x + 1
                self.cache.append(x * 2)
            self.seen = x * 3
            return (x,)

    module = Stores()
    one = r"The tensor attribute self\.seen was assigned during export\. Such attributes must be registered as buffers"
    with pytest.raises(ValueError, match=one):
        aot_export_module(module, (torch.ones(2),), trace_joint=False)
    several = r"The tensor attributes self\.cache\[0\], self\.seen, self\.inner\.last were assigned during export"
    with pytest.raises(ValueError, match=several):
        aot_export_module(module, (torch.ones(2, 2),), trace_joint=False)
    assert module.cache == [] and not hasattr(module, "seen") and not hasattr(module.inner, "last")
    assert module.number == 1
    with detect_attribute_assignment(module):
        module.number = 5
    assert module.number == 1


@pytest.mark.covers("F2.27")
def test_a_buffer_that_is_assigned_is_a_mutated_one():
    def assigns(self, x):
        self.total = self.total + x
        return (self.total * 2,)

    module = Returns(assigns)
    before = module.total
    graph, signature = aot_export_module(module, (torch.ones(3),), trace_joint=False)
    assert list(signature.buffers_to_mutate.values()) == ["total"] and module.total is before
    results = graph(module.weight, torch.full((3,), 5.0), torch.ones(3))
    torch.testing.assert_close(results, [torch.full((3,), 6.0), torch.full((3,), 12.0)])

    def resizes(self, x):
        self.total = torch.zeros(7)
        return (x * 2,)

    with pytest.raises(Unsupported, match="total of the module is assigned another kind of value"):
        aot_export_module(Returns(resizes), (torch.ones(3),), trace_joint=False)


@pytest.mark.covers("F2.28")
def test_nodes_know_the_submodule_they_come_from_in_both_directions():
    module = nn.Sequential(nn.Sequential(nn.Linear(3, 3), nn.Tanh()), nn.ReLU())
    original = module.forward
    module.forward = lambda x: (original(x).sum(),)
    hooks = [len(m._forward_pre_hooks) for m in module.modules()]
    graph, _ = aot_export_module(module, (torch.ones(2, 3),), trace_joint=True, output_loss_index=0)
    stacks = {n.target: list(n.meta.get("nn_module_stack", {})) for n in graph.graph.nodes if n.op == "call_function"}
    assert stacks[torch.ops.aten.addmm.default] == ["", "0", "0.0"]
    assert stacks[torch.ops.aten.tanh.default] == ["", "0", "0.1"]
    assert stacks[torch.ops.aten.relu.default] == ["", "1"]
    (linear,) = [n for n in graph.graph.nodes if n.target is torch.ops.aten.addmm.default]
    assert linear.meta["nn_module_stack"]["0.0"] == ("0.0", "torch.nn.modules.linear.Linear")
    assert [len(m._forward_pre_hooks) for m in module.modules()] == hooks


@pytest.mark.covers("F2.29")
def test_a_functional_call_replaces_tensors_passes_keywords_and_insists_on_a_tuple():
    graph = torch.fx.symbolic_trace(Keywords())
    for module in (Keywords(), graph):
        call = create_functional_call(module)
        assert call.names == ("weight",)
        weight, x, y = torch.ones(2), torch.full((2,), 3.0), torch.full((2,), 4.0)
        torch.testing.assert_close(call(weight, x, scale=2.0, bias=y)[0], x * weight * 2 + y)
        torch.testing.assert_close(call(weight, x, y)[0], x * weight + y)
        assert not torch.equal(module.weight, weight)
    with pytest.raises(TypeError, match="no input 'nothing'"):
        create_functional_call(graph)(torch.ones(2), torch.ones(2), nothing=1)
    with pytest.raises(TypeError, match="'bias' of the graph is given no value"):
        create_functional_call(graph)(torch.ones(2), torch.ones(2), scale=1.0)
    with pytest.raises(RuntimeError, match=r"Graph output must be a tuple\(\)\."):
        create_functional_call(nn.ReLU())(torch.ones(2))
    torch.testing.assert_close(create_functional_call(nn.ReLU(), strict_out_tuple=False)(torch.ones(2)), torch.ones(2))


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2))

    def forward(self, x, bias, scale=1.0):
        return (x * self.weight * scale + bias,)


@pytest.mark.covers("F2.11", "F2.20")
def test_above_autograd_operators_stay_whole_and_modes_stay_visible():
    class Above(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

        def forward(self, x, y):
            y.add_(1)
            with torch.no_grad():
                a = self.linear(x)
            with torch.autocast("cpu"):
                b = self.linear(x)
            return F.scaled_dot_product_attention(a[None], a[None], a[None]), self.norm(b.float()), y

    module, x, y = Above(), torch.randn(3, 4), torch.zeros(2)
    graph, signature = aot_export_module(module, (x, y), trace_joint=False, pre_dispatch=True)
    targets = [n.target for n in graph.graph.nodes]
    aten = torch.ops.aten
    assert targets.count(aten.linear.default) == 2 and aten.scaled_dot_product_attention.default in targets
    assert targets.count(torch._C._set_grad_enabled) == 2
    assert torch.amp.autocast_mode._enter_autocast in targets and torch.amp.autocast_mode._exit_autocast in targets
    results = graph(*(t.detach().clone() for t in flat_tensors(module)), x, y)
    expected = module(x, y.clone())
    torch.testing.assert_close(results[-3:], [t.detach() for t in expected])
    assert list(signature.user_inputs_to_mutate.values()) == [signature.user_inputs[1]]
    assert set(signature.buffers_to_mutate.values()) == {n for n, _ in module.named_buffers()}


@pytest.mark.covers("F2.19")
def test_a_changed_shape_is_refused_above_autograd_too():
    with pytest.raises(ExportError, match="metadata mutation"):
        aot_export_module(
            Returns(lambda self, x: (x.t_() + 1,)), (torch.ones(2, 3),), trace_joint=False, pre_dispatch=True
        )


def _outputs(graph):
    (output,) = graph.graph.find_nodes(op="output")
    return output.args[0]
