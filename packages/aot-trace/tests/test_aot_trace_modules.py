"""Joint and inference graphs of nn modules equal eager, and what their nodes carry."""

from __future__ import annotations

import copy
import operator

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._decomp import core_aten_decompositions
from torch.func import functional_call

from aotkit_aot_trace import TraceOptions, Unsupported, capture, trace_inference, trace_joint
from aotkit_aot_trace.callables import GraphFunction
from aotkit_aot_trace.functional_call import create_functional_call, named_tensors


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.out = nn.Linear(8, 8)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).view(2, -1, 3, 2, 4).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(x.shape))


class Sharing(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(11, 6)

    def forward(self, tokens):
        return F.log_softmax(self.table(tokens) @ self.table.weight.t(), -1)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(5, 4, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


MODULES = {
    "mlp": (lambda: nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)), lambda: torch.randn(4, 5)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()
        ),
        lambda: torch.randn(2, 3, 8, 8),
    ),
    "attention": (Block, lambda: torch.randn(2, 6, 8)),
    "embedding": (Sharing, lambda: torch.randint(0, 11, (3, 4))),
    "recurrent": (Recurrent, lambda: torch.randn(2, 3, 5)),
    "channels last": (
        lambda: nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last),
        lambda: torch.randn(2, 3, 8, 8).to(memory_format=torch.channels_last),
    ),
    "groups": (lambda: nn.GroupNorm(2, 4), lambda: torch.randn(2, 4, 5, requires_grad=True)),
}


def flat_module(module):
    """The module as a function of flat parameters, buffers and inputs."""
    named = {**dict(module.named_parameters()), **dict(module.named_buffers())}

    def fn(*flat):
        return [functional_call(module, dict(zip(named, flat, strict=False)), flat[len(named) :])]

    return fn, list(named.values())


@pytest.mark.covers("F2.12", "F2.13", "F2.14")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("decompositions", [{}, core_aten_decompositions()], ids=["aten", "core"])
@pytest.mark.parametrize("name", MODULES)
def test_the_joint_graph_of_a_module_computes_eagers_outputs_and_gradients(layer, run_graph, name, decompositions):
    make, make_input = MODULES[name]
    torch.manual_seed(0)
    module, x = make(), make_input()
    twin, x2 = copy.deepcopy(module), x.detach().clone().requires_grad_(x.requires_grad)
    expected = twin(x2)
    fn, values = flat_module(module)
    captured = capture(fn, [*values, x], decompositions=decompositions, options=TraceOptions(layer=layer))
    assert captured.metadata.is_training
    captured.graph.graph.lint()
    (result,) = run_graph(captured, [*values, x])
    torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5)
    assert result.stride() == expected.stride()
    weight = torch.randn_like(expected)
    (result * weight).sum().backward()
    (expected * weight).sum().backward()
    for (key, ours), theirs in zip(module.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5, msg=lambda m, key=key: f"{key}: {m}")
    for (key, ours), theirs in zip(module.named_buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs, msg=lambda m, key=key: f"{key}: {m}")
    if x.requires_grad:
        torch.testing.assert_close(x.grad, x2.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("name", MODULES)
def test_the_inference_graph_of_a_module_computes_eagers_outputs(layer, run_graph, name):
    make, make_input = MODULES[name]
    module, x = make().eval(), make_input()
    fn, values = flat_module(module)
    with torch.no_grad():
        captured = capture(fn, [*values, x], options=TraceOptions(layer=layer))
        assert not captured.metadata.is_training
        torch.testing.assert_close(run_graph(captured, [*values, x])[0], module(x), rtol=1e-5, atol=1e-5)


@pytest.mark.covers("F2.10", "F2.11")
def test_the_kind_of_graph_is_decided_by_what_needs_a_gradient():
    x = torch.ones(3, requires_grad=True)
    assert capture(lambda x: [x * 2], [x]).metadata.is_training
    assert not capture(lambda x: [x.detach() * 2], [x]).metadata.is_training
    assert not capture(lambda x: [x.view(-1)], [x]).metadata.is_training, "the caller's own autograd covers a view"
    assert not capture(lambda x: [x.argmax()], [x]).metadata.is_training
    with torch.no_grad():
        assert not capture(lambda x: [x * 2], [x]).metadata.is_training
    assert not trace_inference(lambda x: [x * 2], [x]).metadata.is_training
    assert trace_joint(lambda x: [x * 2], [x]).metadata.is_training
    with pytest.raises(Unsupported, match="nothing that the function computes requires grad"):
        trace_joint(lambda x: [x * 2], [torch.ones(3)])


@pytest.mark.covers("F2.14")
def test_an_input_without_influence_has_no_gradient():
    x, y = torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)
    captured = capture(lambda x, y: [x.sin()], [x, y])
    output = next(n for n in captured.graph.graph.nodes if n.op == "output")
    assert captured.metadata.differentiable_inputs == (0,)
    assert output.args[0][1] is not None and output.args[0][2] is None


@pytest.mark.covers("F2.13", "F2.18")
def test_a_joint_graph_has_named_placeholders_tags_and_fake_values():
    x = torch.ones(3, requires_grad=True)
    graph = capture(lambda x, y: [x.sin() * y, x.cos()], [x, torch.ones(3)]).graph.graph
    placeholders = [n.name for n in graph.nodes if n.op == "placeholder"]
    assert placeholders == ["primals_1", "primals_2", "tangents_1", "tangents_2"]
    assert [n.op for n in graph.nodes][:4] == ["placeholder"] * 4
    tags = [n.meta["partitioner_tag"] for n in graph.nodes if n.op == "call_function"]
    assert tags == sorted(tags, reverse=True) and set(tags) == {"is_forward", "is_backward"}
    assert all("val" in n.meta for n in graph.nodes if n.op != "output")
    assert not any(n.meta["val"].requires_grad for n in graph.nodes if n.op != "output")
    inference = capture(lambda x, y: [x * y], [torch.ones(3), torch.ones(3)]).graph.graph
    assert [n.name for n in inference.nodes if n.op == "placeholder"] == ["arg0_1", "arg1_1"]


@pytest.mark.covers("F2.17")
def test_nodes_of_both_directions_carry_the_line_of_the_users_graph(layer):
    inner = torch.fx.Graph()
    x, y = inner.placeholder("x"), inner.placeholder("y")
    product = inner.call_function(operator.mul, (x, y))
    product.meta["stack_trace"] = '  File "model.py", line 12, in forward\n    p = x * y'
    result = inner.call_function(torch.tanh, (product,))
    result.meta["stack_trace"] = '  File "model.py", line 13, in forward\n    return tanh(p)'
    inner.output([result])
    fn = GraphFunction(torch.fx.GraphModule({}, inner))
    args = [torch.ones(3, requires_grad=True), torch.ones(3, requires_grad=True)]
    captured = capture(fn, args, options=TraceOptions(layer=layer))
    lines = {n.name: n.meta.get("stack_trace", "") for n in captured.graph.graph.nodes if n.op == "call_function"}
    assert "line 12" in lines["mul"] and "line 13" in lines["tanh"]
    backward = [n for n in captured.graph.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"]
    of_tanh = [n for n in backward if "line 13" in n.meta.get("stack_trace", "")]
    of_product = [n for n in backward if "line 12" in n.meta.get("stack_trace", "")]
    assert len(of_tanh) >= 1 and len(of_product) == 2


def test_backward_nodes_have_the_modules_of_a_call_that_has_no_line(layer):
    inner = torch.fx.Graph()
    x = inner.placeholder("x")
    result = inner.call_function(torch.tanh, (x,))
    result.meta["nn_module_stack"] = {"0": ("0", nn.Tanh)}
    inner.output([result])
    fn = GraphFunction(torch.fx.GraphModule({}, inner))
    captured = capture(fn, [torch.ones(3, requires_grad=True)], options=TraceOptions(layer=layer))
    backward = [n for n in captured.graph.graph.nodes if n.meta.get("partitioner_tag") == "is_backward"]
    assert [n.meta.get("fwd_nn_module_stack") for n in backward if n.op == "call_function"] == [{"0": ("0", nn.Tanh)}]


def test_a_graph_module_with_its_own_parameters_is_refused():
    module = torch.fx.symbolic_trace(nn.Linear(3, 3))
    with pytest.raises(Unsupported, match="weight of the graph requires grad but is not one of its inputs"):
        capture(module, [torch.ones(2, 3)])


def test_tensor_attributes_of_a_graph_become_constants_and_may_not_be_written(layer, run_graph):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.arange(3.0))
            self.inner = nn.Linear(3, 3).requires_grad_(False)

        def forward(self, x):
            return [self.inner(x) * self.scale + self.scale]

    module = torch.fx.symbolic_trace(Scaled())
    x = torch.randn(2, 3, requires_grad=True)
    captured = capture(module, [x], options=TraceOptions(layer=layer))
    torch.testing.assert_close(run_graph(captured, [x])[0], module(x)[0])

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("count", torch.zeros(3))

        def forward(self, x):
            return [self.count.add_(x)]

    with pytest.raises(Unsupported, match="attribute count of the graph is mutated"):
        capture(torch.fx.symbolic_trace(Counting()), [torch.ones(3)], options=TraceOptions(layer=layer))


def test_detach_and_alias_leave_no_node():
    x = torch.ones(3, requires_grad=True)
    graph = capture(lambda x: [(x.detach() * x).exp().alias()] if False else [(x.detach() * x).exp()], [x]).graph.graph
    targets = {n.target for n in graph.nodes}
    assert not targets & {torch.ops.aten.detach.default, torch.ops.aten.alias.default}


@pytest.mark.covers("F1.61")
def test_no_operation_of_a_captured_graph_writes_to_its_arguments(layer):
    def fn(x, y):
        z = torch.zeros(3)
        z[1:].copy_(y[:2])
        z.index_add_(0, torch.tensor([0, 1]), y[:2])
        x.mul_(z)
        return [F.relu(x, inplace=True), torch.nn.init.zeros_(torch.empty(3))]

    graph = capture(fn, [torch.ones(3, requires_grad=True) * 1, torch.ones(3)], options=TraceOptions(layer=layer)).graph
    schemas = [n.target._schema for n in graph.graph.nodes if hasattr(n.target, "_schema")]
    assert schemas and not any(s.is_mutable for s in schemas)


@pytest.mark.covers("F1.61")
def test_batch_norm_of_a_graph_of_dynamo_returns_its_new_statistics(layer, run_graph):
    graph = torch.fx.Graph()
    x, mean, var = (graph.placeholder(n) for n in ("x", "mean", "var"))
    graph.output([graph.call_function(F.batch_norm, (x, mean, var), {"training": True})])
    args = [torch.randn(6, 3, requires_grad=True), torch.zeros(3), torch.ones(3)]
    captured = capture(torch.fx.GraphModule({}, graph), args, options=TraceOptions(layer=layer))
    assert captured.metadata.num_mutated == 2
    expected = [torch.zeros(3), torch.ones(3)]
    F.batch_norm(args[0], *expected, training=True)
    run_graph(captured, args)
    torch.testing.assert_close(args[1:], expected)


def test_a_module_under_two_names_keeps_its_tensors():
    torch.manual_seed(0)
    layer, norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
    module = nn.Sequential(layer, norm, layer, norm)
    tensors, names = dict(module.named_parameters()), named_tensors(module)
    called = create_functional_call(module, strict_out_tuple=False)
    x = torch.randn(4, 3)
    expected, mean = copy.deepcopy(module)(x), norm.running_mean.clone()
    assert torch.equal(called(*names.values(), x), expected) and not torch.equal(norm.running_mean, mean)
    other = [value.detach().clone() for value in names.values()]
    called(*other, x)
    assert all(value is tensors[name] for name, value in module.named_parameters())
    assert all(value is names[name] for name, value in module.named_buffers())
