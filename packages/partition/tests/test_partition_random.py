"""Random ops under recomputation, and recomputation to the bit."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from aotkit_partition import (
    Partition,
    PartitionOptions,
    default_partition,
    min_cut_rematerialization_partition,
    partition,
)
from aotkit_partition.timeline import simulate_modules


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def targets(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def run(result, inputs, tangents):
    returned = result.forward(*inputs)
    saved = list(returned[result.num_fwd_outputs :])
    split = len(saved) - result.num_saved_symints
    return returned[: result.num_fwd_outputs], result.backward(*saved[split:], *saved[:split], *tangents)


def checkpointed(joint):
    for node in joint.graph.nodes:
        if node.op == "call_function" and not isinstance(node.meta["val"], torch.SymInt):
            node.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=0)
    return joint


@pytest.mark.covers("F3.44")
def test_a_mask_is_drawn_again_from_the_saved_state(joint_of):
    def fn(x, w):
        return F.dropout(F.dropout(x @ w, 0.5).sin(), 0.3).cos()

    inputs = (leaf(64, 8), leaf(8, 64))
    joint, count = joint_of(fn, *inputs)
    result = partition(checkpointed(joint), count, PartitionOptions(recompute_random=True))
    assert sum("run_and_save_rng_state" in op for op in targets(result.forward)) == 2
    assert sum("run_with_rng_state" in op for op in targets(result.backward)) == 2
    states = [value for value in result.report.saved if value.op == "generator state"]
    assert [state.bytes for state in states] == [torch.get_rng_state().numel()] * 2
    assert result.report.activation_bytes == sum(state.bytes for state in states), "no mask is saved"
    torch.manual_seed(1)
    outputs, grads = run(result, inputs, [torch.ones(64, 64)])
    after = torch.get_rng_state()
    torch.manual_seed(1)
    expected = fn(*inputs)
    torch.testing.assert_close(outputs[0], expected)
    assert torch.equal(torch.get_rng_state(), after), "the backward leaves the generator as it was"
    torch.testing.assert_close(list(grads), list(torch.autograd.grad(expected.sum(), inputs)))
    assert result.report.peak_bytes == simulate_modules(result.forward, result.backward, count).peak_bytes
    assert Partition.from_json(result.to_json()) == result


@pytest.mark.covers("F3.44")
def test_states_come_before_sizes_and_unchecked_tensors(joint_of):
    def fn(x, w, z):
        return F.dropout(x @ w, 0.5).sin() * z.shape[0]

    joint, count = joint_of(fn, leaf(64, 8), leaf(8, 32), torch.randn(3), tracing_mode="symbolic")
    checkpointed(joint)
    weight = joint.graph.find_nodes(op="placeholder")[1]
    weight.meta["saved_tensor_with_no_vc_check"] = True
    result = partition(joint, count, PartitionOptions(recompute_random=True))
    kinds = [
        "state" if "rng_state" in name else "size" if at >= len(result.saved_names) - result.num_saved_symints
        else "unchecked" if name == weight.name else "tensor"
        for at, name in enumerate(result.saved_names)
    ]  # fmt: skip
    assert set(kinds) == {"tensor", "state", "unchecked", "size"}
    assert kinds == sorted(kinds, key=["tensor", "state", "unchecked", "size"].index)
    assert result.num_saved_without_version_check == 1
    inputs = [leaf(40, 8), leaf(8, 16), torch.randn(5)]
    torch.manual_seed(5)
    _, grads = run(result, inputs, [torch.ones(40, 16)])
    torch.manual_seed(5)
    torch.testing.assert_close(list(grads), list(torch.autograd.grad(fn(*inputs).sum(), inputs[:2])))


@pytest.mark.covers("F3.44")
def test_without_a_policy_or_a_budget_random_results_are_saved_as_before(joint_of):
    joint, count = joint_of(lambda x, w: F.dropout(x @ w, 0.5).sin(), leaf(64, 8), leaf(8, 64))
    plain, asked = (partition(joint, count, PartitionOptions(recompute_random=r)) for r in (False, True))
    assert plain.saved_names == asked.saved_names
    tight = partition(joint, count, PartitionOptions(recompute_random=True, memory_budget=0.0))
    assert tight.report.activation_bytes == torch.get_rng_state().numel() < plain.report.activation_bytes


def network():
    layers = [nn.Linear(16, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.4), nn.Linear(32, 16), nn.Softmax(-1)]
    return nn.Sequential(*layers, *copy.deepcopy(layers))


@pytest.mark.covers("F3.38", "F3.44")
@pytest.mark.parametrize("options", [
    PartitionOptions(memory_budget=0.0), PartitionOptions(memory_budget=0.5), PartitionOptions(strategy="min-peak"),
], ids=["nothing saved", "half saved", "lowest peak"])  # fmt: skip
def test_gradients_under_dropout_equal_eager(options):
    from dataclasses import replace

    from functorch.compile import aot_module, nop

    module, x = network(), torch.randn(64, 16)
    twin = copy.deepcopy(module)
    fn = functools.partial(min_cut_rematerialization_partition, options=replace(options, recompute_random=True))
    for each in (module, aot_module(twin, nop, nop, partition_fn=fn)):
        torch.manual_seed(0)
        each(x).square().sum().backward()
    for one, other in zip(twin.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


class Recorder(torch.fx.Interpreter):
    """Keeps every value by the name of its node."""

    def __init__(self, module):
        super().__init__(module)
        self.values = {}

    def run_node(self, n):
        result = super().run_node(n)
        self.values[n.name] = result.clone() if isinstance(result, torch.Tensor) else result
        return result


def recomputed_twice(result, inputs):
    forward, backward = Recorder(result.forward), Recorder(result.backward)
    returned = forward.run(*inputs)
    saved = list(returned[result.num_fwd_outputs :])
    tangents = [torch.ones_like(output) for output in returned[: result.num_fwd_outputs]]
    backward.run(*saved, *tangents)
    names = [op.name for op in result.report.recomputed]
    return [(name, forward.values[name], backward.values[name]) for name in names]


def bits(tensor):
    return tensor.detach().numpy().tobytes()


@pytest.mark.covers("F3.57")
@pytest.mark.parametrize("budget", [None, 0.3, 0.0])
def test_recomputed_values_equal_the_forwards_bit_for_bit(budget, captured_by_torch):
    module, x = network(), torch.randn(64, 16)
    joint, kwargs = captured_by_torch(module, x)
    options = PartitionOptions(bit_identical=True, recompute_random=True, memory_budget=budget)
    result = partition(joint, kwargs["num_fwd_outputs"], options)
    pairs = recomputed_twice(result, [p.detach() for p in module.parameters()] + [x])
    assert len(pairs) >= 3
    for name, one, other in pairs:
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype and one.stride() == other.stride()
            assert bits(one) == bits(other), name


@pytest.mark.covers("F3.57")
def test_sums_norms_and_products_are_saved_when_bits_count(captured_by_torch):
    joint, kwargs = captured_by_torch(network(), torch.randn(64, 16))
    count = kwargs["num_fwd_outputs"]
    loose = partition(joint, count, PartitionOptions(memory_budget=0.0, recompute_random=True)).report
    exact = partition(
        joint, count, PartitionOptions(memory_budget=0.0, recompute_random=True, bit_identical=True)
    ).report
    inexact = {"aten.addmm", "aten.mm", "aten._softmax", "aten.native_layer_norm"}
    assert inexact & {op.op for op in loose.recomputed}
    assert not inexact & {op.op for op in exact.recomputed}
    assert any(op.op == "aten.gelu" for op in exact.recomputed)
    assert any("other bits" in ban.reason for ban in exact.bans)
    assert exact.activation_bytes > loose.activation_bytes


def test_the_default_partition_has_no_use_for_either(joint_of):
    joint, count = joint_of(lambda x, w: F.dropout(x @ w, 0.5).sin(), leaf(8, 8), leaf(8, 8))
    forward, backward = default_partition(joint, None, num_fwd_outputs=count)
    assert not any("rng_state" in op for op in targets(forward) + targets(backward))


@pytest.mark.covers("F3.45")
@pytest.mark.parametrize("replay", [False, True])
def test_a_mask_drawn_inside_a_subgraph_is_the_same_in_the_backward(replay):
    import operator

    inner = torch.fx.Graph()
    given = inner.placeholder("value")
    inner.output((inner.call_function(torch.ops.aten.bernoulli.p, (given, 0.5)),))
    root = nn.Module()
    root.add_module("body", torch.fx.GraphModule(nn.Module(), inner))
    root.add_module("other", torch.fx.GraphModule(nn.Module(), inner))
    graph = torch.fx.Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    true, other = graph.get_attr("body"), graph.get_attr("other")
    yes = graph.call_function(torch.ops.aten.full.default, ([], True), {"dtype": torch.bool})
    chosen = graph.call_function(torch.ops.higher_order.cond, (yes, true, other, (x,)))
    mask = graph.call_function(operator.getitem, (chosen, 0))
    out = graph.call_function(torch.ops.aten.mul.Tensor, (x, mask))
    grad = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, mask))
    graph.output([out, grad])
    for node in graph.nodes:
        if node.op != "get_attr":
            node.meta["val"] = torch.empty(64, device="meta")
        if node.op == "call_function":
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    yes.meta["val"] = torch.empty((), dtype=torch.bool, device="meta")
    chosen.meta["val"] = (mask.meta["val"],)
    options = PartitionOptions(recompute_random=replay, memory_budget=0.0)
    result = partition(torch.fx.GraphModule(root, graph), 1, options)
    assert not any("cond" in op for op in targets(result.backward))
    value = torch.rand(64) + 1
    output, *saved = result.forward(value)
    (gradient,) = result.backward(*saved, torch.ones(64))
    assert torch.equal(output, value * gradient) and 0 < gradient.sum() < 64
