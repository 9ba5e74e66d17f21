"""What a partition must not do to ops with effects, collectives, opaque values and regions: one graph per rule."""

import operator
import warnings

import pytest
import torch
from torch import nn
from torch._ops import OpOverloadPacket
from torch.utils.checkpoint import CheckpointPolicy

from aotkit_partition import Extensions, PartitionOptions, partition, partition_key
from aotkit_partition.errors import InvalidJointGraphError, InvalidOptionError

aten = torch.ops.aten
RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE
TIGHT = PartitionOptions(memory_budget=0.0)


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def targets(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def activations(result):
    return [value.op for value in result.report.saved if not value.is_input]


class Builder:
    """A joint graph by hand; every value is 4 x 4 unless told otherwise."""

    def __init__(self, *inputs):
        self.graph = torch.fx.Graph()
        self.values = {}
        for name in inputs:
            self.values[name] = self.graph.placeholder(name)
            self.values[name].meta["val"] = torch.empty(4, 4, device="meta")

    def call(self, target, *args, val=None, **meta):
        node = self.graph.call_function(target, args)
        node.meta["val"] = torch.empty(4, 4, device="meta") if val is None else val
        node.meta.update(meta)
        return node

    def joint(self, *outputs):
        self.graph.output(list(outputs))
        return torch.fx.GraphModule(nn.Module(), self.graph)


@pytest.mark.covers("F3.3")
@pytest.mark.parametrize("strategy", ["default", "min-cut"])
def test_a_symbolic_bool_that_only_an_assertion_uses_does_not_cross(joint_of, strategy):
    joint, count = joint_of(
        lambda x, z: torch.sin(x).sin() * z.shape[0], leaf(4, 5), torch.randn(3), tracing_mode="symbolic"
    )
    first = next(node for node in joint.graph.nodes if node.op == "call_function")
    size = next(node for node in joint.graph.nodes if isinstance(node.meta.get("val"), torch.SymInt))
    after = size if size.op == "call_function" else first
    with joint.graph.inserting_after(after):
        positive = joint.graph.call_function(operator.ge, (size, 1))
    positive.meta["val"] = size.meta["val"] >= 1
    with joint.graph.inserting_after(positive):
        joint.graph.call_function(aten._assert_scalar.default, (positive, "positive")).meta["val"] = None
    result = partition(joint, count, PartitionOptions(strategy=strategy))
    assert positive.name not in result.saved_names and positive.name not in targets(result.backward)
    assert sum("_assert_scalar" in op for op in targets(result.forward)) == 1
    assert not any("_assert_scalar" in op for op in targets(result.backward))


@pytest.mark.covers("F3.4")
@pytest.mark.parametrize("strategy", ["default", "min-cut", "min-peak"])
def test_assertions_and_profiler_spans_stay_where_they_are(strategy):
    enter = torch.ops.profiler._record_function_enter_new.default
    leave = torch.ops.profiler._record_function_exit._RecordFunction
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.values.values()
    span = build.call(enter, "forward part", val=object())
    build.call(aten._assert_tensor_metadata.default, x, val=False)
    sine = build.call(aten.sin.default, x)
    build.call(leave, span, val=False)
    again = build.call(enter, "backward part", val=object(), partitioner_tag="is_backward")
    grad = build.call(aten.mul.Tensor, tangent, sine)
    build.call(leave, again, val=False, partitioner_tag="is_backward")
    result = partition(build.joint(sine, grad), 1, PartitionOptions(strategy=strategy))
    for side in (result.forward, result.backward):
        assert sum("enter" in op for op in targets(side)) == sum("exit" in op for op in targets(side)) == 1
    assert sum("_assert_tensor" in op for op in targets(result.forward)) == 1
    assert not any("_assert_tensor" in op for op in targets(result.backward))
    assert set(result.saved_names) <= {"primals_1", sine.name}


@pytest.mark.covers("F3.4")
def test_each_side_gets_the_submodules_that_it_calls_and_none_is_saved():
    root = nn.Module()
    build = Builder("primals_1", "primals_2", "tangents_1")
    positive, x, tangent = build.values.values()
    positive.meta["val"] = torch.empty((), dtype=torch.bool, device="meta")
    branches = []
    branch_functions = {
        "sine": lambda value: (torch.sin(value),),
        "cosine": lambda value: (torch.cos(value),),
        "negative": lambda value: (torch.neg(value),),
    }
    for name, branch in branch_functions.items():
        root.add_module(name, torch.fx.symbolic_trace(branch))
        branches.append(build.graph.get_attr(name))
        branches[-1].meta.clear()
    cond = torch.ops.higher_order.cond
    pair = (x.meta["val"],)
    chosen = build.call(cond, positive, branches[0], branches[1], (x,), val=pair)
    out = build.call(operator.getitem, chosen, 0)
    turned = build.call(
        cond, positive, branches[1], branches[2], (build.call(aten.mul.Tensor, tangent, out),), val=pair
    )
    grad = build.call(operator.getitem, turned, 0)
    build.graph.output([out, None, grad])
    result = partition(torch.fx.GraphModule(root, build.graph), 1)
    assert {str(node.target) for node in result.forward.graph.find_nodes(op="get_attr")} == {"sine", "cosine"}
    assert {str(node.target) for node in result.backward.graph.find_nodes(op="get_attr")} == {"cosine", "negative"}
    assert not {"sine", "cosine", "negative"} & set(result.saved_names)
    value = torch.randn(4, 4)
    output, *saved = result.forward(torch.tensor(True), value)
    torch.testing.assert_close(output, value.sin())
    torch.testing.assert_close(result.backward(*saved, torch.ones(4, 4))[1], value.sin().cos())


@pytest.mark.covers("F3.5")
def test_a_checkpoint_region_with_a_write_is_refused():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.values.values()
    sine = build.call(aten.sin.default, x, recompute=RECOMPUTE)
    build.call(aten.copy_.default, x, sine, recompute=RECOMPUTE)
    grad = build.call(aten.mul.Tensor, tangent, sine)
    with pytest.raises(InvalidJointGraphError, match=r"checkpoint.*'copy_.*writes to its argument"):
        partition(build.joint(sine, grad), 1)


@pytest.mark.covers("F3.6")
def test_policies_under_the_default_strategy_are_left_to_the_cut():
    def joint(writes):
        build = Builder("primals_1", "primals_2", "tangents_1")
        x, y, tangent = build.values.values()
        sine = build.call(aten.sin.default, x, recompute=RECOMPUTE)
        out = build.call(aten.mul.Tensor, sine, y)
        if writes:
            build.call(aten.copy_.default, y, out)
        return build.joint(out, build.call(aten.mul.Tensor, tangent, sine))

    options = PartitionOptions(strategy="default")
    with pytest.warns(UserWarning, match="minimum cut"):
        result = partition(joint(writes=True), 1, options)
    assert result.report.strategy == "min-cut"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert partition(joint(writes=False), 1, options).report.strategy == "min-cut"


@pytest.mark.covers("F3.14")
def test_the_size_of_a_script_object_is_unknown_unless_declared_free():
    from torch._library.fake_class_registry import FakeScriptObject

    thing = FakeScriptObject(object(), "__torch__.torch.classes.test._Thing", None)
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.values.values()
    made = build.call(aten._fused_dropout.default, x, 0.5, val=thing)
    out = build.call(aten.sin.default, x)
    grad = build.call(aten.mul.Tensor, tangent, made)
    joint = build.joint(out, grad)
    with pytest.raises(Exception, match=r"script_objects_are_free") as caught:
        partition(joint, 1)
    assert made.name in str(caught.value)
    result = partition(joint, 1, PartitionOptions(script_objects_are_free=True))
    assert result.saved_names[-1] == made.name and result.num_saved_symints == 0
    (row,) = [value for value in result.report.saved if value.name == made.name]
    assert row.kind == "other" and row.bytes == 0


@pytest.mark.covers("F3.16")
def test_what_a_tangent_reaches_is_never_saved_and_a_needed_input_is_saved_as_it_is():
    build = Builder("primals_1", "primals_2", "tangents_1")
    x, offsets, tangent = build.values.values()
    out = build.call(aten.mul.Tensor, build.call(aten.sin.default, x), 2.0)
    scaled = build.call(aten.mul.Tensor, tangent, offsets)
    shifted = build.call(aten.add.Tensor, scaled, offsets)
    result = partition(build.joint(out, shifted, offsets), 1)
    assert result.saved_names == ("primals_2",)
    returned = result.forward.graph.find_nodes(op="output")[0].args[0]
    assert returned[-1].op == "placeholder", "the input itself, not a copy"
    assert result.backward.graph.find_nodes(op="output")[0].args[0][1].name == "primals_2"


@pytest.mark.covers("F3.32")
@pytest.mark.parametrize("options", [PartitionOptions(), TIGHT, PartitionOptions(strategy="min-peak")])
def test_communication_happens_once_whatever_the_budget(options):
    def joint():
        build = Builder("primals_1", "tangents_1")
        x, tangent = build.values.values()
        sine = build.call(aten.sin.default, x)
        c10d = torch.ops._c10d_functional
        gathered = build.call(c10d.all_gather_into_tensor.default, sine, 2, "0", val=torch.empty(8, 4, device="meta"))
        waited = build.call(c10d.wait_tensor.default, gathered, val=torch.empty(8, 4, device="meta"))
        halves = build.call(aten.slice.Tensor, waited, 0, 0, 4)
        out = build.call(aten.cos.default, halves)
        return build.joint(out, build.call(aten.mul.Tensor, tangent, build.call(aten.sin.default, halves)))

    result = partition(joint(), 1, options)
    assert not any("c10d" in op for op in targets(result.backward))
    assert sum("all_gather" in op for op in targets(result.forward)) == 1
    assert "_c10d_functional.wait_tensor" in activations(result) or "aten.sin" in activations(result)
    asked = partition(joint(), 1, PartitionOptions(memory_budget=0.0, recompute_collectives=True))
    assert any("all_gather" in op for op in targets(asked.backward))


def gathered_joint(**policy):
    """A product with a parameter that is gathered, after a cast, and its two gradients."""
    build, c10d = Builder("primals_1", "primals_2", "tangents_1"), torch.ops._c10d_functional
    x, part, tangent = build.values.values()
    part.meta["val"], whole = torch.empty(2, 4, device="meta"), torch.empty(4, 4, device="meta")
    cast = build.call(aten._to_copy.default, part, val=part.meta["val"], **policy)
    gathered = build.call(c10d.all_gather_into_tensor.default, cast, 2, "0", val=whole, **policy)
    weight = build.call(c10d.wait_tensor.default, gathered, val=whole, **policy)
    out = build.call(aten.sin.default, build.call(aten.mm.default, x, weight, **policy))
    by_x = build.call(aten.mm.default, tangent, build.call(aten.t.default, weight))
    by_weight = build.call(aten.mm.default, build.call(aten.t.default, x), tangent)
    reduced = build.call(c10d.reduce_scatter_tensor.default, by_weight, "sum", 2, "0", val=part.meta["val"])
    return build.joint(out, by_x, build.call(c10d.wait_tensor.default, reduced, val=part.meta["val"]))


def gathers(module):
    return sum("all_gather" in target for target in targets(module))


def test_parameters_are_gathered_again_where_the_option_says_so():
    kept = partition(gathered_joint(), 1)
    assert gathers(kept.backward) == 0 and "_c10d_functional.wait_tensor" in activations(kept)
    again = partition(gathered_joint(), 1, PartitionOptions(regather=True))
    assert gathers(again.backward) == 1 and not activations(again)


def test_communication_in_a_checkpoint_happens_again_as_in_eager_mode():
    result = partition(gathered_joint(recompute=RECOMPUTE), 1)
    assert gathers(result.forward) == gathers(result.backward) == 1 and not activations(result)


@pytest.mark.covers("F3.35")
def test_communication_whose_result_nobody_uses_is_dropped():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.values.values()
    c10d = torch.ops._c10d_functional
    build.call(c10d.wait_tensor.default, build.call(c10d.all_reduce.default, x, "sum", "0"))
    out = build.call(aten.sin.default, x)
    result = partition(build.joint(out, build.call(aten.mul.Tensor, tangent, x)), 1)
    assert not any("c10d" in op for op in targets(result.forward) + targets(result.backward))


CALLS = []


@torch.library.custom_op("aotkit_partition_test::noted", mutates_args=())
def noted(x: torch.Tensor) -> torch.Tensor:
    CALLS.append(tuple(x.shape))
    return x * 3


@pytest.mark.covers("F3.33")
@pytest.mark.parametrize("options", [PartitionOptions(), TIGHT, PartitionOptions(strategy="min-peak")])
def test_an_op_with_an_effect_runs_once_per_step(options):
    from torch._higher_order_ops.effects import with_effects

    build = Builder("primals_1", "primals_2", "tangents_1")
    token, x, tangent = build.values.values()
    op = torch.ops.aotkit_partition_test.noted.default
    both = build.call(with_effects, token, op, x, val=(token.meta["val"], x.meta["val"]))
    after, value = (build.call(operator.getitem, both, place) for place in range(2))
    out = build.call(aten.sin.default, value)
    joint = build.joint(after, out, None, build.call(aten.mul.Tensor, tangent, build.call(aten.cos.default, value)))
    result = partition(joint, 2, options)
    CALLS.clear()
    inputs = torch.zeros(4, 4), torch.randn(4, 4)
    _, output, *saved = result.forward(*inputs)
    grads = result.backward(*saved, torch.ones(4, 4))
    assert CALLS == [(4, 4)]
    torch.testing.assert_close(output, (inputs[1] * 3).sin())
    torch.testing.assert_close(grads[1], (inputs[1] * 3).cos())


@pytest.mark.covers("F3.34")
@pytest.mark.parametrize("options", [PartitionOptions(), TIGHT, PartitionOptions(strategy="min-peak")])
def test_a_buffer_that_both_sides_write_ends_as_in_eager(options):
    build = Builder("primals_1", "primals_2", "tangents_1")
    buffer, x, tangent = build.values.values()
    total = build.call(aten.add.Tensor, buffer, x)
    build.call(aten.copy_.default, buffer, total)
    out = build.call(aten.mul.Tensor, total, 2.0)
    later = build.call(aten.add.Tensor, total, tangent)
    build.call(aten.copy_.default, buffer, later)
    joint = build.joint(out, None, build.call(aten.mul.Tensor, tangent, 2.0))
    result = partition(joint, 1, options)
    start, given = torch.randn(4, 4), torch.randn(4, 4)
    state = start.clone()
    output, *saved = result.forward(state, given)
    torch.testing.assert_close(state, start + given)
    result.backward(*saved, torch.full((4, 4), 5.0))
    torch.testing.assert_close(state, start + given + 5)
    torch.testing.assert_close(output, (start + given) * 2)


def budgeted(joint, budgets):
    calls = [node for node in joint.graph.nodes if node.op == "call_function"]
    for node, budget in zip(calls, budgets(calls), strict=True):
        if budget is not None:
            node.meta["custom"] = {"_region_activation_memory_budget": budget}
    return joint


@pytest.mark.covers("F3.41")
def test_the_budget_of_a_region_holds_for_the_graph(joint_of):
    def fn(x, w, v):
        return torch.tanh(torch.tanh(x @ w) @ v)

    def fresh():
        return joint_of(fn, leaf(64, 4), leaf(4, 4), leaf(4, 4))

    joint, count = fresh()
    full = partition(joint, count).report.activation_bytes
    asked = partition(budgeted(joint, lambda calls: [0.5] * len(calls)), count)
    assert asked.report.activation_bytes <= full / 2 and asked.report.strategy == "min-cut within budget 0.5"
    joint, count = fresh()
    for node in joint.graph.nodes:
        node.meta["memory_budget"] = 0.0
    assert partition(joint, count).report.strategy == "min-cut within budget 0.0"
    joint, count = fresh()
    with pytest.raises(InvalidOptionError, match=r"different memory budgets: 0\.5 at 'mm'.*0\.25"):
        partition(budgeted(joint, lambda calls: [0.5, 0.25] + [0.5] * (len(calls) - 2)), count)
    joint, count = fresh()
    with pytest.raises(InvalidOptionError, match=r"covers 'mm' but not 'tanh'"):
        partition(budgeted(joint, lambda calls: [0.5] + [None] * (len(calls) - 1)), count)


@pytest.mark.covers("F3.41")
@pytest.mark.skipif(not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="torch before 2.13")
def test_torchs_own_region_marker_is_read():
    import functools

    from functorch.compile import nop
    from torch._dynamo.backends.common import aot_autograd

    from aotkit_partition import min_cut_rematerialization_partition

    seen = []

    def split(joint, inputs, **kwargs):
        seen.append(partition(joint, kwargs["num_fwd_outputs"]).report.strategy)
        return min_cut_rematerialization_partition(joint, inputs, **kwargs)

    def fn(x, w):
        with torch.autograd.graph.region_activation_memory_budget(0.0):
            return torch.tanh(torch.tanh(x @ w) @ w)

    x, w = leaf(16, 4), leaf(4, 4)
    backend = aot_autograd(fw_compiler=nop, bw_compiler=nop, partition_fn=functools.wraps(split)(split))
    compiled = torch.compile(fn, backend=backend, fullgraph=True)
    grads = torch.autograd.grad(compiled(x, w).sum(), (x, w))
    assert seen == ["min-cut within budget 0.0"]
    torch.testing.assert_close(grads, torch.autograd.grad(torch.tanh(torch.tanh(x @ w) @ w).sum(), (x, w)))


@pytest.mark.covers("F3.53")
def test_a_pass_over_the_joint_graph_runs_before_the_cut_on_a_copy(joint_of):
    joint, count = joint_of(lambda x, w: torch.sin(x @ w), leaf(4, 5), leaf(5, 6))
    before = str(joint.graph)

    def mark(module):
        product = module.graph.find_nodes(op="call_function", target=aten.mm.default)[0]
        with module.graph.inserting_after(product):
            marker = module.graph.call_function(aten.clone.default, (product,))
        marker.meta = dict(product.meta)
        product.replace_all_uses_with(marker, delete_user_cb=lambda user: user is not marker)

    result = partition(joint, count, extensions=Extensions("marker", joint_pass=mark))
    assert targets(result.forward).count("aten.clone.default") == 1
    assert str(joint.graph) == before
    kept = partition(joint, count, extensions=Extensions("none", joint_pass=lambda module: module))
    assert kept.saved_names == partition(joint, count).saved_names


@pytest.mark.covers("F3.28")
def test_what_a_functional_mutation_or_triton_kernel_copies_fuses_and_its_result_does_not():
    from torch._higher_order_ops.auto_functionalize import auto_functionalized
    from torch._higher_order_ops.triton_kernel_wrap import triton_kernel_wrapper_functional

    from aotkit_partition.fusion import is_fusible
    from aotkit_partition.joint import analyze_joint

    with torch.library._scoped_library("aotkit_partition_test", "FRAGMENT") as lib:
        lib.define("bump(Tensor(a!) x, Tensor y) -> ()")
        build = Builder("primals_1")
        (x,) = build.values.values()
        scaled = [build.call(aten.mul.Tensor, x, float(n)) for n in range(4)]
        mutated, read, cloned, kept = (build.call(aten.sin.default, value) for value in scaled)
        bump = torch.ops.aotkit_partition_test.bump.default
        changed = build.graph.call_function(auto_functionalized, (bump,), {"x": mutated, "y": read})
        kernel = build.graph.call_function(
            triton_kernel_wrapper_functional, (), {"kwargs": {"a": cloned, "b": kept}, "tensors_to_clone": ["a"]}
        )
        for node in (changed, kernel):
            node.meta["val"] = torch.empty(4, 4, device="meta")
        after = build.call(aten.cos.default, kernel)
        joint = analyze_joint(build.joint(changed, after), 2)
    at = joint.position
    assert is_fusible(joint, at[mutated], at[changed]) and not is_fusible(joint, at[read], at[changed])
    assert is_fusible(joint, at[cloned], at[kernel]) and not is_fusible(joint, at[kept], at[kernel])
    assert not is_fusible(joint, at[kernel], at[after])


@pytest.mark.covers("F3.31")
@pytest.mark.parametrize("strategy", ["default", "min-cut"])
def test_the_input_of_a_checkpoint_region_is_saved(joint_of, strategy):
    joint, count = joint_of(lambda x, w, v: torch.sin(torch.cos(x @ w) @ v), leaf(8, 8), leaf(8, 8), leaf(8, 8))
    for node in joint.graph.nodes:
        if node.name in ("mm_1", "sin"):
            node.meta.update(recompute=RECOMPUTE, ac_graph_id=1)
    result = partition(joint, count, PartitionOptions(strategy=strategy))
    assert "mm_1" in {op.name for op in result.report.recomputed}
    assert "mm_1" not in result.saved_names and {"mm", "cos"} & set(result.saved_names)


@pytest.mark.covers("F3.31")
def test_a_value_whose_gradient_has_a_hook_is_saved_inside_a_region(joint_of):
    joint, count = joint_of(lambda x, w: torch.sin(torch.cos(x @ w)), leaf(8, 8), leaf(8, 8))
    for node in joint.graph.nodes:
        if node.name in ("mm", "cos", "sin"):
            node.meta.update(recompute=RECOMPUTE, ac_graph_id=1)
    assert activations(partition(joint, count)) == []
    next(node for node in joint.graph.nodes if node.name == "cos").meta["has_backward_hook"] = True
    result = partition(joint, count)
    assert activations(result) == ["aten.cos"]
    assert "hook" in next(ban.reason for ban in result.report.bans if ban.name == "cos")


TABLE = {
    "recomputed": """
        aten.sin aten.exp aten.relu aten.gelu aten.add aten.mul aten.where aten.clone aten.cat aten.index aten.gather
        aten.embedding aten.full aten.arange aten.sum aten.amax aten._softmax aten.native_layer_norm aten._to_copy
        aten.view aten.permute aten.expand aten.slice aten.select aten.squeeze aten.unsqueeze aten.t aten.as_strided
        aten.alias prims.convert_element_type prims.broadcast_in_dim prims.iota
    """,
    "intensive": """
        aten.mm aten.bmm aten.addmm aten.convolution aten.convolution_backward aten._scaled_dot_product_flash_attention
        aten._scaled_dot_product_efficient_attention aten._flash_attention_forward aten._efficient_attention_forward
        aten.upsample_bilinear2d aten._scaled_mm
    """,
    "random": "aten.native_dropout aten.rand_like aten.randn_like",
}


@pytest.mark.covers("F3.25", "F3.26", "F3.27")
def test_the_table_of_operators_says_what_each_may_be():
    from aotkit_partition.op_facts import op_facts

    def facts(name):
        packet = torch.ops
        for part in name.split("."):
            packet = getattr(packet, part)
        return op_facts(getattr(packet, packet.overloads()[0]))

    for name in TABLE["recomputed"].split():
        assert facts(name).is_recomputable and not facts(name).is_compute_intensive, name
    for name in TABLE["intensive"].split():
        assert facts(name).is_compute_intensive and not facts(name).is_recomputable, name
    for name in TABLE["random"].split():
        assert facts(name).is_random and not facts(name).is_recomputable, name
    views = "squeeze unsqueeze alias view slice t expand as_strided permute select split"
    for name in views.split(" "):
        assert facts(f"aten.{name}").is_view, name
    packets = [getattr(aten, name) for name in dir(aten)]
    ops = [getattr(packet, packet.overloads()[0]) for packet in packets if isinstance(packet, OpOverloadPacket)]
    pointwise = [op for op in ops if torch.Tag.pointwise in op.tags and not op._schema.is_mutable]
    assert len(pointwise) > 150
    wrong = [str(op) for op in pointwise if not op_facts(op).is_recomputable and not op_facts(op).is_random]
    assert not wrong


@pytest.mark.covers("F3.52")
def test_the_key_of_a_partition_changes_with_all_that_changes_its_result(joint_of):
    def solver(weights, gains, capacity):
        return ()

    joint, count = joint_of(lambda x, w: torch.sin(x @ w), leaf(4, 5), leaf(5, 6))
    other, _ = joint_of(lambda x, w: torch.cos(x @ w), leaf(4, 5), leaf(5, 6))
    calls = [
        (joint, count),
        (other, count),
        (joint, count - 1),
        (joint, count, PartitionOptions(strategy="min-peak")),
        (joint, count, PartitionOptions(), Extensions("first", solver)),
        (joint, count, PartitionOptions(), Extensions("second", solver)),
    ]
    keys = [partition_key(*call) for call in calls]
    assert len(set(keys)) == len(keys)
    assert keys == [partition_key(*call) for call in calls]
    with pytest.raises(InvalidOptionError, match="no name"):
        partition_key(joint, count, PartitionOptions(), Extensions(knapsack=solver))
