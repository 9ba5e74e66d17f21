"""Saved values on another device or in eight bits, both graphs in one, a backward in two."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from aotkit_partition import Partition, PartitionOptions, partition
from aotkit_partition.activation_offload import offload_activations, quantize_activations
from aotkit_partition.errors import InvalidOptionError
from aotkit_partition.measure import measure_peak
from aotkit_partition.one_graph import merge, recompute_by_tags, split_backward
from aotkit_partition.rewrite_saved import recodable
from aotkit_partition.timeline import simulate_modules


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def targets(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def layers(x, *weights):
    for weight in weights:
        x = torch.tanh(x @ weight)
    return x


def run(result, inputs, tangent):
    output, *saved = result.forward(*inputs)
    split = len(saved) - result.num_saved_symints
    return output, result.backward(*saved[split:], *saved[:split], tangent)


@pytest.fixture(name="network")
def _network(joint_of):
    inputs = [leaf(32, 8), *(leaf(8, 8) for _ in range(3))]
    joint, count = joint_of(layers, *inputs)
    return partition(joint, count, PartitionOptions(strategy="default")), inputs


def activations(result):
    return [value.name for value in result.report.saved if not value.is_input]


@pytest.mark.covers("F3.47")
def test_offloaded_values_leave_early_and_come_back_before_their_first_use(network):
    result, inputs = network
    names = activations(result)[:2]
    moved = offload_activations(result, names=names)
    assert [row.op for row in moved.report.saved].count("offloaded to cpu") == 2
    assert not set(names) & set(moved.saved_names) and len(moved.saved_names) == len(result.saved_names)
    forward = list(moved.forward.graph.nodes)
    for name in names:
        made = next(node for node in forward if node.name == name)
        assert "_to_copy" in str(made.next.target), "it leaves as soon as it is there"
    tangent = torch.ones(32, 8)
    for one, other in zip(run(moved, inputs, tangent)[1], run(result, inputs, tangent)[1], strict=True):
        assert torch.equal(one, other)
    assert Partition.from_json(moved.to_json()) == moved
    assert activations(result)[:2] == names, "the given partition stays as it is"


def permuted(x, w):
    y = (x @ w).sin().t()
    return (y.exp() * y).cos().t()


def cast(x, w):
    h = (x @ w).to(torch.float64).sin()
    return ((h.to(torch.float32) @ w).exp().to(torch.float64) * h).cos().to(torch.float32)


def normed(x, w):
    return torch.nn.functional.layer_norm(x @ w, (8,)).sin()


@pytest.mark.parametrize("fn", [permuted, cast, normed])
@pytest.mark.parametrize("own_stream", [False, True])
def test_any_number_of_values_leaves_at_once_or_one_after_the_other(joint_of, fn, own_stream):
    """Their names, by which the code of the backward calls them, are those of no other value in it."""
    inputs, tangent = [leaf(32, 8), leaf(8, 8)], torch.randn(32, 8)
    result = partition(*joint_of(fn, *inputs), PartitionOptions(strategy="default"))
    output, wanted = run(result, inputs, tangent)
    every = [node.name for node in recodable(result, 0, None)]
    assert len(every) > 2
    first = offload_activations(result, names=every[:1], own_stream=own_stream)
    rest = [node.name for node in recodable(first, 0, None)]
    for moved in (
        offload_activations(result, names=every, own_stream=own_stream),
        offload_activations(first, names=rest, own_stream=not own_stream),
    ):
        taken = [node.name for node in moved.backward.graph.find_nodes(op="placeholder")]
        assert taken[: len(moved.saved_names)] == list(moved.saved_names)
        again, gradients = run(moved, inputs, tangent)
        assert torch.equal(again, output)
        assert all(map(torch.equal, gradients, wanted))


def test_values_without_elements_are_not_quantized(joint_of):
    def fn(x, w):
        y = (x[:0] @ w).sin()
        return y.exp() * y

    result = partition(*joint_of(fn, leaf(4, 8), leaf(8, 8)), PartitionOptions(strategy="default"))
    assert quantize_activations(result, min_bytes=0) == result


def for_cuda(graph):
    """The graph as if traced on a GPU: fake tensors need none."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=True)
    storages = {}
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor):
            key = value.untyped_storage()._cdata
            if key not in storages:
                storages[key] = torch.empty(value.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
            meta = torch.empty(0, dtype=value.dtype, device="meta")
            meta.set_(storages[key].untyped_storage(), value.storage_offset(), value.size(), value.stride())
            node.meta["val"] = FakeTensor(mode, meta, torch.device("cuda:0"))
    return graph


@pytest.mark.covers("F3.47")
def test_the_peak_of_the_device_falls_by_what_waits_elsewhere(joint_of):
    inputs = [leaf(256, 8), *(leaf(8, 8) for _ in range(12))]
    joint, count = joint_of(layers, *inputs)
    result = partition(for_cuda(joint), count)

    def peak(parts):
        return simulate_modules(parts.forward, parts.backward, count, device="cuda").peak_bytes

    moved = offload_activations(result, min_bytes=1024, bytes_per_second=1e12)
    copies = [node for node in moved.forward.graph.nodes if "_to_copy" in str(node.target)]
    assert len(copies) == 11 and all(node.kwargs["pin_memory"] and node.kwargs["non_blocking"] for node in copies)
    back = [node for node in moved.backward.graph.nodes if "aten._to_copy" in str(node.target)]
    assert {str(node.meta["val"].device) for node in back} == {"cuda:0"}
    assert all(str(node.meta["val"].device) == "cpu" for node in copies)
    assert peak(moved) < 0.5 * peak(result)
    slow = offload_activations(result, min_bytes=1024, bytes_per_second=1e9)
    assert peak(moved) < peak(slow) <= peak(result), "a slow link needs values to come back earlier"
    kept = offload_activations(result, min_bytes=1 << 30)
    assert kept.saved_names == result.saved_names


@pytest.mark.covers("F3.47")
def test_only_activations_with_memory_of_their_own_are_offloaded(joint_of):
    def fn(x, w):
        y = x @ w
        return y.sin(), y.view(-1).cos(), (x * 2).exp()

    joint, count = joint_of(fn, leaf(4, 4), leaf(4, 4))
    result = partition(joint, count, PartitionOptions(strategy="default"))
    with pytest.raises(InvalidOptionError, match="memory of its own"):
        offload_activations(result, names=["primals_1"])
    returned = result.forward.graph.find_nodes(op="output")[0].args[0][:count]
    for name in {node.name for node in returned} & set(result.saved_names):
        with pytest.raises(InvalidOptionError, match=name):
            offload_activations(result, names=[name])


@pytest.mark.covers("F3.48")
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_quantized_values_take_a_quarter_and_stay_within_half_a_unit(network, dtype):
    result, inputs = network
    small = quantize_activations(result, dtype=dtype, min_bytes=0)
    original = {row.name: row.bytes for row in result.report.saved}
    gone = set(result.saved_names) - set(small.saved_names)
    rows = [row for row in small.report.saved if row.op.startswith("quantized to")]
    assert gone == {"tanh", "tanh_1"}, "the third is the user's output"
    assert sum(row.bytes for row in rows) == sum(original[name] for name in gone) // 4 + 2 * 4
    assert Partition.from_json(small.to_json()) == small
    tangent = torch.ones(32, 8)
    wanted, got = run(result, inputs, tangent), run(small, inputs, tangent)
    assert torch.equal(wanted[0], got[0]), "the forward's own results stay exact"
    for one, other in zip(got[1], wanted[1], strict=True):
        assert (one - other).norm() <= 2 * torch.finfo(dtype).eps * other.norm()
        assert not torch.equal(one, other)
    name = activations(result)[0]
    one_value = quantize_activations(result, dtype=dtype, names=[name])
    exact = torch.fx.Interpreter(result.forward).run(*inputs)[1 + result.saved_names.index(name)]
    _, *saved = one_value.forward(*inputs)
    place = result.saved_names.index(name)
    decoded = saved[place].float() * saved[place + 1]
    unit = torch.finfo(dtype).eps / 2
    smallest = torch.finfo(dtype).smallest_normal * saved[place + 1]
    assert ((decoded - exact).abs() <= unit * exact.abs() + unit * smallest + 1e-12).all()


@pytest.mark.covers("F3.48")
def test_inputs_integers_small_and_dynamic_values_are_not_quantized(joint_of, network):
    result, _ = network
    assert quantize_activations(result, min_bytes=1 << 20).saved_names == result.saved_names
    for row in quantize_activations(result, min_bytes=0).report.saved:
        assert row.is_input == row.name.startswith("primals")
    doubles = [torch.rand(*sizes, dtype=torch.float64, requires_grad=True) for sizes in ((32, 8), (8, 7), (7, 6))]
    precise = partition(*joint_of(layers, *doubles), PartitionOptions(strategy="default"))
    assert quantize_activations(precise, min_bytes=0).saved_names == precise.saved_names
    inputs = [leaf(32, 8), leaf(8, 7), leaf(7, 6)]
    joint, count = joint_of(layers, *inputs, tracing_mode="symbolic")
    dynamic = partition(joint, count, PartitionOptions(strategy="default"))
    assert quantize_activations(dynamic, min_bytes=0).saved_names == dynamic.saved_names
    asked = quantize_activations(dynamic, min_bytes=0, dynamic=True)
    assert "quantized to float8_e4m3fn" in {row.op for row in asked.report.saved}
    new = [leaf(16, 9), leaf(9, 5), leaf(5, 4)]
    _, grads = run(asked, new, torch.ones(16, 4))
    for one, other in zip(grads, torch.autograd.grad(layers(*new).sum(), new), strict=True):
        assert (one - other).norm() <= 0.25 * other.norm()
    with pytest.raises(InvalidOptionError, match="one byte"):
        quantize_activations(result, dtype=torch.float16)


@pytest.mark.covers("F3.59")
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_both_graphs_become_one(joint_of, mode):
    inputs = [leaf(32, 8), *(leaf(8, 8) for _ in range(4))]
    joint, count = joint_of(layers, *inputs, tracing_mode=mode)
    result = partition(joint, count, PartitionOptions(strategy="min-peak"))
    whole = merge(result)
    names = [str(node.target) for node in whole.graph.find_nodes(op="placeholder")]
    assert names == [f"primals_{n}" for n in range(1, 6)] + ["tangents_1"]
    outputs = whole(*inputs, torch.ones(32, 8))
    expected = layers(*inputs)
    wanted = [expected, *torch.autograd.grad(expected.sum(), inputs)]
    torch.testing.assert_close(list(outputs), wanted)
    assert len(targets(whole)) == len(targets(result.forward)) + len(targets(result.backward))


def train_step(weights, x):
    value = layers(x, *weights)
    loss = value.square().mean()
    return [loss, *torch.autograd.grad([loss], weights)]


@pytest.mark.covers("F3.49")
def test_tagged_values_of_a_whole_training_step_are_made_again_right_before_use():
    weights, x = [leaf(16, 16) for _ in range(6)], torch.randn(64, 16)
    graph = make_fx(lambda *flat: train_step(list(flat[:-1]), flat[-1]))(*weights, x)
    loss = graph.graph.find_nodes(op="output")[0].args[0][0]
    behind = False
    for node in graph.graph.nodes:
        if behind and node.op == "call_function":
            node.meta["partitioner_tag"] = "is_backward"
        elif node.op == "call_function" and ("tanh" in node.name or "mm" in node.name):
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
            if node.name == "tanh_2":
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        behind = behind or node is loss
    again = recompute_by_tags(graph)
    assert targets(again).count("aten.tanh.default") > targets(graph).count("aten.tanh.default") == 6
    wanted, got = graph(*weights, x), again(*weights, x)
    for one, other in zip(got, wanted, strict=True):
        assert torch.equal(one, other)
    nodes = list(again.graph.nodes)
    middle = next(place for place, node in enumerate(nodes) if node.name == loss.name)
    copies = [node for node in nodes[middle:] if "tanh" in str(node.target) and "backward" not in str(node.target)]
    for node in copies:
        users = sorted(nodes.index(user) for user in node.users)
        assert users[0] - nodes.index(node) <= 12, "its own group, then the use"
    assert not any(node.name.startswith("tanh_2_") for node in copies)


@pytest.mark.covers("F3.51")
def test_a_backward_in_two_computes_nothing_twice(network):
    result, inputs = network
    gradients = result.backward.graph.find_nodes(op="output")[0].args[0]
    now, later = split_backward(result.backward, [0])
    _, *saved = result.forward(*inputs)
    wanted = result.backward(*saved, torch.ones(32, 8))
    first, *carried = now(*saved, torch.ones(32, 8))
    torch.testing.assert_close(first, wanted[0])
    torch.testing.assert_close(list(later(*carried)), list(wanted[1:]))
    assert len(targets(now)) + len(targets(later)) == len(targets(result.backward))
    assert sum("mm" in op for op in targets(later)) == len(gradients) - 1, "one product per weight waits"
    assert sum("mm" in op for op in targets(now)) == len(gradients) - 1
    with pytest.raises(InvalidOptionError, match="there is no 9"):
        split_backward(result.backward, [9])


def test_the_offloaded_partition_can_be_measured(network):
    result, inputs = network
    moved = offload_activations(result, names=activations(result)[:1])
    found = measure_peak(moved.forward, moved.backward, 1, [value.detach() for value in inputs])
    assert found.bytes == pytest.approx(moved.report.peak_bytes, rel=0.05)
