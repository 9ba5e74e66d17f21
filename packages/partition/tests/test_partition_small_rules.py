"""More graphs of a few ops: writes, random states, missing tangents, checkpoints for the lowest peak."""

import operator
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from aotkit_partition import Extensions, PartitionOptions, dump_graph, load_graph, partition
from aotkit_partition.flow_network import Edge, min_cut
from aotkit_partition.fusion import is_fusible
from aotkit_partition.joint import analyze_joint, value_bytes
from aotkit_partition.min_cut import make_cut_problem, solve_min_cut
from aotkit_partition.missing_tangents import without_tangents
from aotkit_partition.peak import PeakSearch
from aotkit_partition.rank_sync import Exchange
from aotkit_partition.runtime_estimate import MeasuredEstimator, estimator_named
from aotkit_partition.timeline import Allocation, MemoryTimeline

aten = torch.ops.aten


class Builder:
    """A graph by hand; every value is 4 x 4 floats unless told otherwise."""

    def __init__(self, *inputs):
        self.graph = torch.fx.Graph()
        self.inputs = [self.graph.placeholder(name) for name in inputs]
        for node in self.inputs:
            node.meta["val"] = torch.empty(4, 4, device="meta")

    def call(self, target, *args, val=None, kwargs=None, **meta):
        short = target.__name__.split(".")[0]
        node = self.graph.create_node("call_function", target, args, kwargs or {}, name=short)
        node.meta["val"] = torch.empty(4, 4, device="meta") if val is None else val
        node.meta.update(meta)
        return node

    def module(self, *outputs):
        self.graph.output(list(outputs))
        return torch.fx.GraphModule(nn.Module(), self.graph)


def bans(result):
    return {ban.name: ban.reason for ban in result.report.bans}


@pytest.mark.parametrize("takes_in", [(), (1,)])
def test_an_argument_that_a_call_computes_itself_is_not_saved(takes_in):
    """As the mask of an attention, of positions: both calls say so. Else it is saved, not written a second time."""
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    small = build.call(aten.arange.default, 4, val=torch.empty(4, device="meta"))
    mask = build.call(aten.expand.default, build.call(aten.neg.default, small, val=small.meta["val"]), [4, 4])
    mask = build.call(aten.exp.default, mask)
    out = build.call(aten.mm.default, x, mask, takes_in=takes_in)
    grad = build.call(aten.mm.default, tangent, mask, takes_in=takes_in)
    result = partition(build.module(out, grad), 1)
    saved = [node.name for node in result.backward.graph.find_nodes(op="placeholder")]
    assert ("exp" in saved) == (not takes_in)


@pytest.mark.parametrize("compare", [aten.eq.Tensor, aten.lt.Tensor])
def test_what_decides_which_elements_are_equal_is_not_computed_anew(compare):
    """As in the gradient of ``amax``; what elementwise ops make of it has the same bits again."""
    build = Builder("primals_1", "primals_2", "tangents_1")
    x, y, tangent = build.inputs
    scaled = build.call(aten.mul.Tensor, build.call(aten._softmax.default, x, -1, False), y)
    top = build.call(aten.amax.default, scaled, [-1], True, val=torch.empty(4, 1, device="meta"))
    equal = build.call(compare, scaled, top, val=torch.empty(4, 4, dtype=torch.bool, device="meta"))
    grad = build.call(aten.mul.Tensor, tangent, build.call(aten.div.Tensor, equal, y))
    result = partition(build.module(top, grad), 1)
    again = result.backward.graph.find_nodes(op="call_function", target=aten._softmax.default)
    assert bool(again) == (compare is aten.lt.Tensor)
    assert bans(result).get("_softmax", "").startswith("it decides which elements") == (compare is aten.eq.Tensor)


@pytest.mark.parametrize("compare", [aten.eq.Tensor, aten.ge.Tensor])
@pytest.mark.parametrize("exact", [False, True])
def test_a_choice_of_the_forward_is_not_made_again_from_other_bits(compare, exact):
    build = Builder("primals_1", "primals_2", "tangents_1")
    x, y, tangent = build.inputs
    weights = build.call(aten.exp.default, x) if exact else build.call(aten._softmax.default, x, -1, False)
    scaled = build.call(aten.mul.Tensor, weights, y)
    chosen = build.call(compare, scaled, y, val=torch.empty(4, 4, dtype=torch.bool, device="meta"))
    out = build.call(aten.mul.Tensor, chosen, y)
    result = partition(build.module(out, build.call(aten.mul.Tensor, tangent, chosen)), 1)
    reason = bans(result).get(compare.__name__.split(".")[0], "")
    assert reason.startswith("it decides which elements") == (not exact)
    assert exact or not result.backward.graph.find_nodes(op="call_function", target=compare)


@pytest.mark.covers("F3.58")
def test_what_reads_an_input_behind_a_write_is_not_made_again_and_what_reads_it_before_is():
    build = Builder("primals_1", "primals_2", "tangents_1")
    x, buffer, tangent = build.inputs
    before = build.call(aten.sin.default, buffer)
    build.call(aten.copy_.default, buffer, x)
    after = build.call(aten.cos.default, buffer)
    out = build.call(aten.exp.default, build.call(aten.add.Tensor, before, after))
    grad = build.call(aten.mul.Tensor, build.call(aten.mul.Tensor, tangent, before), after)
    result = partition(build.module(out, grad, None), 1)
    assert bans(result)["cos"] == "reads 'primals_2', which 'copy_' overwrites" and "sin" not in bans(result)
    value, state = torch.randn(4, 4), torch.randn(4, 4)
    old = state.clone()
    _, *saved = result.forward(value, state)
    state.zero_()
    torch.testing.assert_close(result.backward(*saved, torch.ones(4, 4))[0], old.sin() * value.cos())


@pytest.mark.covers("F3.56")
@pytest.mark.parametrize("cost", [1, 2**29, 2**30 - 1, 2**30, 2**31, 2**40])
def test_a_cut_may_cost_any_number_of_bytes(cost):
    assert min_cut(2, [Edge(0, 1, cost, 7)], 0, 1) == (cost, {7})
    both = [Edge(0, 2, cost, 7), Edge(2, 1, cost + 1, 8), Edge(0, 2, 0, 9)]
    assert min_cut(3, both, 0, 1) == (cost, {7, 9})


def test_bytes_of_values_that_are_no_plain_tensors():
    assert value_bytes(torch.eye(4).to_sparse()) == 64
    assert value_bytes(torch.empty(1, 4).expand(3, 4)) == 16
    assert value_bytes((torch.empty(2), [torch.empty(3, dtype=torch.int64)], 5, None)) == 8 + 24
    assert value_bytes(torch.empty(0, 4)) == 0


@torch.library.custom_op("aotkit_partition_test::fill_both", mutates_args={"one", "two"})
def fill_both(source: torch.Tensor, one: torch.Tensor, two: torch.Tensor) -> None:
    one.copy_(source)
    two.copy_(source)


@pytest.mark.covers("F3.28")
def test_each_argument_that_a_custom_op_writes_to_fuses_with_what_makes_it():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    source, one, two = (build.call(op, x) for op in (aten.sin.default, aten.cos.default, aten.exp.default))
    op = torch.ops.aotkit_partition_test.fill_both.default
    val = (None, x.meta["val"], x.meta["val"])
    done = build.call(auto_functionalized, op, val=val, kwargs={"source": source, "one": one, "two": two})
    out = build.call(operator.getitem, done, 1)
    joint = analyze_joint(build.module(out, build.call(aten.neg.default, tangent)), 1)
    at = {node.name: index for index, node in enumerate(joint.nodes)}
    fused = [name for name in ("sin", "cos", "exp") if is_fusible(joint, at[name], at[done.name])]
    assert fused == ["cos", "exp"]


@pytest.mark.covers("F3.44")
@pytest.mark.parametrize(("device", "size"), [("cpu", torch.get_rng_state().numel()), ("cuda", 16)])
def test_a_random_op_that_runs_again_keeps_what_is_known_of_its_value(device, size):
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    with FakeTensorMode() as mode:
        x.meta["val"] = tangent.meta["val"] = torch.empty(4, 4, device=device)
    region = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "val": x.meta["val"]}
    drawn = build.call(aten.rand_like.default, x, **region, custom={"stage": 3})
    out = build.call(aten.sin.default, drawn, **region)
    cosine = build.call(aten.cos.default, drawn, val=x.meta["val"])
    grad = build.call(aten.mul.Tensor, tangent, cosine, val=x.meta["val"])
    result = partition(build.module(out, grad), 1, PartitionOptions(recompute_random=True))
    assert result.saved_names == ("primals_1", "rand_like_rng_state") and mode is not None
    (state,) = [row for row in result.report.saved if row.op == "generator state"]
    assert state.bytes == size
    for side in (result.forward, result.backward):
        (again,) = [node for node in side.graph.nodes if node.name == "rand_like"]
        assert again.meta["val"] is x.meta["val"] and again.meta["custom"] == {"stage": 3}


@pytest.mark.covers("F3.44")
@pytest.mark.parametrize("why", ["", "generator", "positional generator", "devices"])
def test_a_random_op_with_another_generator_than_the_saved_one_does_not_run_again(why):
    """The state that is saved is that of the present device's default generator."""
    build = Builder("primals_1", "primals_2", "tangents_1")
    x, second, tangent = build.inputs
    with FakeTensorMode() as mode:
        x.meta["val"] = tangent.meta["val"] = torch.empty(4, 4, device="cuda:0" if why == "devices" else "cpu")
        second.meta["val"] = torch.empty(4, device="cuda:1" if why == "devices" else "cpu")
    region = {"recompute": CheckpointPolicy.MUST_RECOMPUTE, "val": x.meta["val"]}
    drawn = build.call(aten.bernoulli.default, x, **region)
    if "generator" in why:
        second.meta["val"] = torch.Generator()
        positional = why.startswith("positional")
        drawn.args, drawn.kwargs = ((x, second), {}) if positional else ((x,), {"generator": second})
    out = build.call(aten.sin.default, drawn, **region)
    cosine = build.call(aten.cos.default, drawn, val=x.meta["val"])
    grad = build.call(aten.mul.Tensor, tangent, cosine, val=x.meta["val"])
    result = partition(build.module(out, grad), 1, PartitionOptions(recompute_random=True))
    assert result.saved_names == (("bernoulli",) if why else ("primals_1", "bernoulli_rng_state")) and mode is not None


@pytest.mark.covers("F4.29")
@pytest.mark.parametrize("op", [aten.exp.default, aten.cos.default, aten.neg.default, aten.sinh.default], ids=str)
def test_of_a_missing_tangent_only_what_is_linear_is_zero(op):
    build = Builder("tangents_1", "tangents_2")
    for node in build.inputs:
        node.meta["val"] = torch.empty(4, 4)
    one, two = build.inputs
    changed = build.call(op, two, val=torch.empty(4, 4))
    backward = build.module(build.call(aten.add.Tensor, one, changed, val=torch.empty(4, 4)))
    without = without_tangents(backward, [1])
    given = torch.randn(4, 4)
    torch.testing.assert_close(without(given, None)[0], backward(given, torch.zeros(4, 4))[0])


@pytest.mark.covers("F4.29")
@pytest.mark.parametrize("strides", [(4, 1), (1, 4), (8, 2)])
def test_zeros_take_the_place_of_a_tangent_in_its_own_layout(strides):
    build = Builder("tangents_1", "tangents_2")
    one, two = build.inputs
    one.meta["val"], two.meta["val"] = torch.empty(4, 4), torch.empty_strided((4, 4), strides)
    chosen = build.call(aten.where.self, build.call(aten.gt.Scalar, one, 0, val=torch.empty(4, 4) > 0), one, two)
    without = without_tangents(build.module(chosen), [1])
    given = torch.randn(4, 4)
    torch.testing.assert_close(without(given, None)[0], given.clamp(min=0))


def test_the_report_says_where_the_peak_lies():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    report = partition(build.module(build.call(aten.sin.default, x), build.call(aten.neg.default, tangent)), 1).report
    for place, words in enumerate(("forward", "loss", "backward")):
        timeline = MemoryTimeline(("sin", "loss", "neg"), 1, (Allocation("big", 100, place, place, "saved"),))
        found = str(replace(report, timeline=timeline, before=None))
        assert f"peak memory 100 B at '{timeline.steps[place]}' ({words}), inputs left out\n" in found


def test_symbols_bound_by_data_survive_in_the_text():
    graph = make_fx(lambda x: x.nonzero().sum(0), tracing_mode="symbolic")(torch.tensor([1.0, 0.0, 2.0]))
    before = [node for node in graph.graph.nodes if "unbacked_bindings" in node.meta]
    loaded = load_graph(dump_graph(graph))
    after = [node for node in loaded.graph.nodes if "unbacked_bindings" in node.meta]
    assert len(before) == len(after) == 1
    ((symbol, path),), ((other, others),) = (nodes[0].meta["unbacked_bindings"].items() for nodes in (before, after))
    assert symbol.name == other.name and path == others
    assert [str(size) for size in after[0].meta["val"].shape] == [str(size) for size in before[0].meta["val"].shape]


def test_a_process_alone_asks_nobody():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    joint = build.module(build.call(aten.sin.default, x), build.call(aten.mul.Tensor, tangent, x))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        group = torch.distributed.group.WORLD
        assert Exchange.begin(group, 0.1) is None and Exchange.begin(None, 0.1) is None
        asked = partition(joint, num_fwd_outputs=1, extensions=Extensions(group=group, rank_timeout=0.1))
    finally:
        torch.distributed.destroy_process_group()
    assert asked.to_json() == partition(joint, num_fwd_outputs=1).to_json()


class EveryOp:
    """Each op takes a second."""

    name = "every op"

    def seconds(self, node):
        return 1.0


def test_a_measured_op_runs_four_times_the_first_to_warm_up():
    build = Builder("x")
    build.inputs[0].meta["val"] = torch.empty(4, 4)
    ticks = iter([0, 100, 0, 3, 0, 1, 0, 2])
    estimator = MeasuredEstimator(clock=lambda: float(next(ticks)))
    sine = build.call(aten.sin.default, *build.inputs, val=torch.empty(4, 4))
    assert estimator.seconds(sine) == 2.0
    assert estimator.runs == 4
    named = estimator_named("measured")
    assert named.seconds(sine) > 0 and named.runs == 4


def searched(sizes, uses=()):
    """The plans for a chain of results of these sizes; ops at ``uses`` read the input, too."""
    build = Builder("primals_1", "primals_2", "tangents_1")
    x, weight, grad = build.inputs
    x.meta["val"] = torch.empty(10**6, dtype=torch.uint8, device="meta")
    values = [x]
    for place, size in enumerate(sizes):
        val = torch.empty(size, dtype=torch.uint8, device="meta")
        second = x if place in uses else weight
        values.append(build.call(aten.mm.default, values[-1], second, val=val))
    for value in reversed(values[1:]):
        grad = build.call(aten.mul.Tensor, grad, value)
    joint = analyze_joint(build.module(values[-1], grad, None), 1)
    default = make_cut_problem(joint, PartitionOptions())
    search = PeakSearch(joint, default, solve_min_cut(default), EveryOp())
    search.run()
    return {
        choice.label: [joint.nodes[i].name for i in choice.saved if joint.nodes[i].target is aten.mm.default]
        for choice in search.choices
    }


def one_checkpoint(sizes, uses=()):
    (place,) = searched(sizes, uses)["1 checkpoint"]
    return place


@pytest.mark.covers("F3.55")
def test_what_spares_most_seconds_per_byte_is_kept_first():
    plans = searched([4000, 3000, 1000, 2000])
    assert plans["floor"] == [] and plans["floor + 10 %"] == ["mm_2"]
    assert plans["floor + 100 %"] == ["mm", "mm_1", "mm_2", "mm_3"]


@pytest.mark.covers("F3.55")
def test_a_checkpoint_stands_where_the_fewest_bytes_cross_inputs_left_out():
    even = [1000] * 24
    for narrow in (8, 13, 17):
        assert one_checkpoint([*even[:narrow], 999, *even[narrow + 1 :]]) == f"mm_{narrow}"
    assert one_checkpoint(even) == one_checkpoint(even, uses=(10,)) == one_checkpoint(even, uses=(16,))


@pytest.mark.covers("F3.18")
@pytest.mark.parametrize("kind", ["efficient", "cudnn", "flash"])
def test_what_attention_reads_again_in_the_backward_is_saved_as_attention_reads_it(kind):
    """Its backward counts as random, for its dropout; no kernel computes keys inside it, so they would be written."""
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    forward, backward = (
        getattr(aten, f"_scaled_dot_product_{kind}_attention{end}").default for end in ("", "_backward")
    )
    keys = build.call(aten.mm.default, x, x)
    repeated = build.call(aten.repeat.default, keys, [4, 1], val=torch.empty(16, 4, device="meta"))
    both = build.call(forward, x, repeated, repeated, val=(x.meta["val"],) * 2)
    out = build.call(operator.getitem, both, 0)
    gradients = build.call(backward, tangent, x, repeated, repeated, val=(x.meta["val"],) * 3)
    result = partition(build.module(out, build.call(operator.getitem, gradients, 0)), 1)
    assert "repeat" in result.saved_names and "mm" not in result.saved_names
