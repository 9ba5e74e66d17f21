"""One small joint graph per rule."""

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy

from aotkit_partition import PartitionOptions, PartitionReport, partition
from aotkit_partition.errors import InfeasiblePartitionError, InvalidJointGraphError, InvalidOptionError

aten = torch.ops.aten


def ops(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def placeholders(module):
    return [str(node.target) for node in module.graph.find_nodes(op="placeholder")]


def saved(result):
    return {value.name: value for value in result.report.saved}


def activations(result):
    return [value.op for value in result.report.saved if not value.is_input]


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def run(result, joint_inputs, num_primals):
    outputs = result.forward(*joint_inputs[:num_primals])
    kept = list(outputs[result.num_fwd_outputs :])
    symints = kept[len(kept) - result.num_saved_symints :]
    tensors = kept[: len(kept) - result.num_saved_symints]
    return outputs[: result.num_fwd_outputs], result.backward(*symints, *tensors, *joint_inputs[num_primals:])


@pytest.mark.covers("F3.17", "F3.26")
def test_cheap_ops_are_recomputed_and_matrix_products_are_not(joint_of):
    joint, count = joint_of(lambda x, w: torch.sin(torch.sin(torch.sin(x @ w))), leaf(4, 5), leaf(5, 6))
    result = partition(joint, count)
    assert activations(result) == ["aten.mm"]
    assert {ban.name: ban.reason for ban in result.report.bans}["mm"] == "compute-intensive"
    assert any(op.op == "aten.sin" for op in result.report.recomputed)
    assert ops(result.backward).count("aten.mm.default") == 2


@pytest.mark.covers("F3.2", "F3.3")
@pytest.mark.parametrize("strategy", ["default", "min-cut"])
def test_a_tensor_used_for_its_sizes_alone_is_not_saved(joint_of, strategy):
    def fn(x, y):
        return (x.sum() * 1.0).expand(y.shape[0], y.shape[1]) * 2

    joint, count = joint_of(fn, leaf(3), torch.randn(5, 7), tracing_mode="symbolic")
    result = partition(joint, count, PartitionOptions(strategy=strategy, inputs_are_free=False))
    assert "primals_2" not in result.saved_names
    assert all(not isinstance(n.meta["val"], torch.Tensor) or "primals" not in n.name or n.name == "primals_1"
               for n in result.backward.graph.find_nodes(op="placeholder"))  # fmt: skip


@pytest.mark.covers("F3.3", "F3.36", "F3.37")
@pytest.mark.parametrize("strategy", ["default", "min-cut"])
def test_saved_sizes_leave_last_and_enter_first(joint_of, strategy):
    def fn(x, w, z):
        return torch.sin(x @ w) * z.shape[0]

    joint, count = joint_of(fn, leaf(4, 5), leaf(5, 6), torch.randn(3), tracing_mode="symbolic")
    result = partition(joint, count, PartitionOptions(strategy=strategy))
    assert result.num_saved_symints >= 1
    values = [n.meta["val"] for n in result.backward.graph.find_nodes(op="placeholder")]
    kinds = [isinstance(value, torch.SymInt) for value in values]
    assert kinds == sorted(kinds, reverse=True) and sum(kinds) == result.num_saved_symints
    returned = result.forward.graph.find_nodes(op="output")[0].args[0][count:]
    assert [isinstance(n.meta["val"], torch.SymInt) for n in returned] == sorted(kinds[: len(returned)])
    names = placeholders(result.backward)
    tensors = len(result.saved_names) - result.num_saved_symints
    assert names[result.num_saved_symints : len(result.saved_names)] == list(result.saved_names[:tensors])
    assert names[-1] == "tangents_1"
    inputs = [leaf(7, 5), leaf(5, 3), torch.randn(8), torch.ones(7, 3)]
    _, grads = run(result, inputs, 3)
    wanted = torch.autograd.grad(fn(*inputs[:3]).sum(), inputs[:2])
    torch.testing.assert_close(list(grads), list(wanted))


@pytest.mark.covers("F3.36")
def test_a_symbol_that_occurs_in_saved_shapes_is_handed_over(joint_of):
    joint, count = joint_of(lambda n, x: torch.sin(torch.sin(x)), leaf(4), leaf(4), tracing_mode="symbolic")
    size = joint.graph.find_nodes(op="placeholder")[0]
    size.meta["val"] = joint.graph.find_nodes(op="placeholder")[1].meta["val"].shape[0]
    grads = joint.graph.find_nodes(op="output")[0]
    grads.args = ([grads.args[0][0], None, grads.args[0][2]],)
    result = partition(joint, count)
    assert placeholders(result.backward)[0] == "primals_1" and result.num_saved_symints == 1


@pytest.mark.covers("F3.8")
def test_symbols_that_no_input_of_the_backward_tells_are_handed_over(joint_of):
    def grown(x, w):
        return w.expand(2 * x.shape[0] + 1) * 1

    module, num_fwd_outputs = joint_of(grown, torch.randn(4), leaf(1), tracing_mode="symbolic")
    symbol = next(n for n in module.graph.nodes if n.name == "primals_1").meta["val"].shape[0].node.expr
    result = partition(module, num_fwd_outputs)
    told = {
        size.node.expr
        for node in result.backward.graph.find_nodes(op="placeholder")
        for size in (node.meta["val"].shape if isinstance(node.meta["val"], torch.Tensor) else [node.meta["val"]])
        if isinstance(size, torch.SymInt)
    }
    assert symbol in told


def test_equal_computations_are_merged_unless_random_or_both_returned(joint_of):
    def fn(x):
        return torch.exp(x) * torch.exp(x), x + 1, x + 1

    joint, count = joint_of(fn, leaf(4))
    result = partition(joint, count)
    assert ops(result.forward).count("aten.exp.default") == 1
    assert ops(result.forward).count("aten.add.Tensor") == 2
    plain = partition(joint, count, PartitionOptions(cse=False))
    assert ops(plain.forward).count("aten.exp.default") == 2

    random, count = joint_of(lambda x: F.dropout(x, 0.5) * F.dropout(x, 0.5), leaf(4))
    result = partition(random, count)
    draws = [op for op in ops(result.forward) if "bernoulli" in op or "dropout" in op or "rand" in op]
    assert len(draws) == 2


@pytest.mark.covers("F3.8")
def test_two_results_do_not_become_one_through_an_equal_value_that_is_no_result(joint_of):
    joint, count = joint_of(lambda x: (x.sin().sum(), x.sin(), x.sin()), leaf(4))
    result = partition(joint, count)
    assert ops(result.forward).count("aten.sin.default") == 2
    (output,) = result.forward.graph.find_nodes(op="output")
    assert output.args[0][1] is not output.args[0][2]


@pytest.mark.covers("F3.8")
def test_merging_does_not_cross_a_mutation():
    graph = torch.fx.Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    value = torch.empty(4)
    first = graph.call_function(aten.sin.default, (x,))
    graph.call_function(aten.copy_.default, (x, first))
    second = graph.call_function(aten.sin.default, (x,))
    total = graph.call_function(aten.add.Tensor, (first, second))
    grad = graph.call_function(aten.mul.Tensor, (tangent, first))
    graph.output([total, grad])
    for node in graph.nodes:
        node.meta["val"] = value.clone()
    result = partition(torch.fx.GraphModule(torch.nn.Module(), graph), 1)
    assert ops(result.forward).count("aten.sin.default") == 2


@pytest.mark.covers("F3.8")
def test_values_that_differ_in_requires_grad_stay_apart(joint_of):
    joint, count = joint_of(lambda x: torch.exp(x) * torch.exp(x), leaf(4))
    second = joint.graph.find_nodes(op="call_function", target=aten.exp.default)[1]
    second.meta["val"] = second.meta["val"].detach().requires_grad_(True)
    assert ops(partition(joint, count).forward).count("aten.exp.default") == 2


@pytest.mark.covers("F3.9")
def test_a_graph_whose_gradients_need_nothing_from_the_forward_saves_nothing(joint_of):
    joint, count = joint_of(lambda x: x * 2 + 1, leaf(4))
    result = partition(joint, count)
    assert result.saved_names == ()
    assert placeholders(result.backward) == ["tangents_1"]


@pytest.mark.covers("F3.10")
def test_among_equal_costs_the_value_nearest_to_the_backward_is_saved(joint_of):
    def fn(x, w):
        return torch.ops.aten.cumsum(torch.neg(torch.neg(x @ w)), 0).sin()

    joint, count = joint_of(fn, leaf(4, 5), leaf(5, 6))
    result = partition(joint, count, PartitionOptions(unmaterialized_factor=1.0))
    assert activations(result) == ["aten.cumsum"]


@pytest.mark.covers("F3.11")
def test_a_value_that_would_not_reach_memory_otherwise_costs_double(joint_of):
    from aotkit_partition.cost import save_costs
    from aotkit_partition.joint import analyze_joint

    joint, count = joint_of(lambda x, w: x.sin().cos() @ w, leaf(4, 4), leaf(4, 4))
    analysed = analyze_joint(joint, count)
    nothing = [None] * len(analysed.nodes)
    costs = save_costs(analysed, PartitionOptions(unmaterialized_factor=2.0), [False] * len(nothing), nothing)
    by_name = {node.name: cost.cost for node, cost in zip(analysed.nodes, costs, strict=True)}
    assert by_name["sin"] == 2 * 64 and by_name["cos"] == 64


@pytest.mark.covers("F3.11")
def test_the_sums_between_residual_blocks_are_saved_and_not_what_is_added(joint_of):
    """They reach memory anyhow, since the next sum waits for the block between; of the products alone each backward
    kernel would have to add up all blocks before it."""

    def fn(x, *weights):
        for w in weights:
            x = x + (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)) @ w
        return x.pow(3)

    joint, count = joint_of(fn, leaf(8, 6), *(leaf(6, 6) for _ in range(4)))
    result = partition(joint, count)
    assert activations(result).count("aten.add") == 3
    assert activations(result).count("aten.mm") == 1, "the last sum goes nowhere but into what follows"


@pytest.mark.covers("F3.12", "F3.24")
def test_an_input_is_saved_itself_and_for_free(joint_of):
    joint, count = joint_of(lambda x, w: torch.sin(x @ w.t()), leaf(4, 5), leaf(6, 5))
    result = partition(joint, count)
    assert {"primals_1", "primals_2"} <= set(result.saved_names)
    assert activations(result) == ["aten.mm"]
    kept = result.forward.graph.find_nodes(op="output")[0].args[0][count:]
    assert {node.op for node in kept if node.name != "mm"} == {"placeholder"}


@pytest.mark.covers("F3.13")
def test_a_symbolic_float_is_never_saved(joint_of):
    def fn(x):
        scale = torch.sym_float(x.shape[0]) / 3.0
        return torch.sin(x * scale)

    joint, count = joint_of(fn, leaf(4, 5), tracing_mode="symbolic")
    result = partition(joint, count)
    values = [n.meta["val"] for n in result.backward.graph.find_nodes(op="placeholder")]
    assert not any(isinstance(value, (torch.SymFloat, torch.SymBool)) for value in values)
    assert any("truediv" in op for op in ops(result.backward))


@pytest.mark.covers("F3.15")
def test_of_a_tuple_only_items_are_saved(joint_of):
    joint, count = joint_of(lambda x: torch.ops.aten.native_dropout(x, 0.5, True)[0].sin(), leaf(8))
    result = partition(joint, count)
    assert activations(result) and set(activations(result)) <= {"getitem", "aten.native_dropout", "aten.sin"}
    assert "aten.native_dropout" not in activations(result)
    assert "aten.native_dropout.default" not in ops(result.backward)


@pytest.mark.covers("F3.18")
def test_what_the_backward_would_write_to_memory_is_saved(joint_of):
    joint, count = joint_of(lambda x, w, v: torch.sin(x @ w) @ v, leaf(4, 5), leaf(5, 6), leaf(6, 7))
    assert "aten.sin" in activations(partition(joint, count))
    free = partition(joint, count, PartitionOptions(ban_materialized_in_backward=False))
    assert activations(free) == ["aten.mm"]
    reasons = {ban.name: ban.reason for ban in partition(joint, count).report.bans}
    assert "write it to memory" in reasons["sin"]


@pytest.mark.covers("F3.19")
def test_values_too_far_from_the_backward_are_not_recomputed(joint_of):
    joint, count = joint_of(lambda x: torch.sin(torch.cos(torch.sin(torch.cos(x)))).tanh() + 0 * x, leaf(4))
    assert not any("steps away" in ban.reason for ban in partition(joint, count).report.bans)
    near = partition(joint, count, PartitionOptions(max_distance=1))
    assert any("steps away" in ban.reason for ban in near.report.bans)


@pytest.mark.covers("F3.20")
def test_a_reduction_is_saved(joint_of):
    joint, count = joint_of(lambda x: x.sin().sum(1, keepdim=True).exp().cos() * 2, leaf(4, 64))
    result = partition(joint, count)
    assert "aten.sum" in {ban.op for ban in result.report.bans}
    assert not any(op.op == "aten.sum" for op in result.report.recomputed)


@pytest.mark.covers("F3.21")
def test_a_use_beyond_the_end_of_a_fusion_is_not_recomputed(joint_of):
    def fn(x, w):
        y = x.sin()
        return (y @ w + y).cos()

    joint, count = joint_of(fn, leaf(4, 4), leaf(4, 4))
    result = partition(joint, count, PartitionOptions(ban_used_far_apart=True))
    assert any("ended its fusion" in ban.reason for ban in result.report.bans)
    assert not any("ended its fusion" in ban.reason for ban in partition(joint, count).report.bans)


@pytest.mark.covers("F3.22")
def test_a_long_chain_is_broken(joint_of):
    def fn(x):
        for _ in range(150):
            x = x.sin()
        return x

    joint, count = joint_of(fn, leaf(4))
    assert activations(partition(joint, count, PartitionOptions(max_fusible_chain=0))) == []
    assert len(activations(partition(joint, count))) >= 1


@pytest.mark.covers("F3.23", "F3.27")
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x.view(2, 12), lambda x: x.permute(1, 0), lambda x: x.t(), lambda x: x[:], lambda x: x.unsqueeze(0),
        lambda x: x.unsqueeze(0).squeeze(0), lambda x: x.unsqueeze(0).select(0, 0),
        lambda x: x.unsqueeze(0).expand(3, 4, 6),
        lambda x: torch.cat(x.split(2)), lambda x: x.as_strided((4, 6), (6, 1)), lambda x: x.detach() * x,
        lambda x: torch.ops.aten.alias(x),
    ],
)  # fmt: skip
def test_views_are_made_again_and_their_base_is_saved(joint_of, view):
    joint, count = joint_of(lambda x, w: view(x @ w).sin(), leaf(4, 5), leaf(5, 6))
    result = partition(joint, count)
    assert activations(result) == ["aten.mm"]


@pytest.mark.covers("F3.28")
def test_concatenation_and_mutated_arguments_fuse_with_their_producers(joint_of):
    from aotkit_partition.fusion import is_fusible
    from aotkit_partition.joint import analyze_joint

    joint, count = joint_of(lambda x, w: torch.cat([x @ w, x]), leaf(4, 4), leaf(4, 4))
    analysed = analyze_joint(joint, count)
    at = {node.name: index for index, node in enumerate(analysed.nodes)}
    assert is_fusible(analysed, at["mm"], at["cat"])
    assert not is_fusible(analysed, at["cat"], at["mm"])


@torch.library.custom_op("aotkit_partition_test::scale", mutates_args=())
def scale(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@scale.register_fake
def _(x):
    return torch.empty_like(x)


torch.library.register_autograd(
    "aotkit_partition_test::scale", lambda ctx, grad: grad * 3, setup_context=lambda ctx, inputs, output: None
)


@pytest.mark.covers("F3.29")
def test_a_custom_op_is_recomputed_only_on_request(joint_of):
    joint, count = joint_of(lambda x: scale(x).sin(), leaf(4))
    assert not any("scale" in op for op in ops(partition(joint, count).backward))
    asked = partition(joint, count, PartitionOptions(recompute_custom_ops=True, ban_materialized_in_backward=False))
    assert any("scale" in op for op in ops(asked.backward))


def tag(joint, **policies):
    for node in joint.graph.nodes:
        if node.name in policies:
            node.meta["recompute"] = policies[node.name]


@pytest.mark.covers("F3.30")
@pytest.mark.parametrize("policy", [CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE])
def test_a_matrix_product_marked_for_recomputation_is_recomputed(joint_of, policy):
    joint, count = joint_of(lambda x, w: torch.sin(x @ w), leaf(4, 5), leaf(5, 6))
    tag(joint, mm=policy, sin=policy)
    for strategy in ("min-cut", "default"):
        result = partition(joint, count, PartitionOptions(strategy=strategy))
        assert activations(result) == []
        assert any(op.name == "mm" for op in result.report.recomputed)


@pytest.mark.covers("F3.30")
def test_a_cheap_op_marked_for_saving_is_saved(joint_of):
    joint, count = joint_of(lambda x: torch.sin(torch.cos(x)), leaf(4))
    assert activations(partition(joint, count)) == []
    tag(joint, cos=CheckpointPolicy.MUST_SAVE)
    assert activations(partition(joint, count)) == ["aten.cos"]


@pytest.mark.covers("F3.31")
def test_the_boundary_of_two_checkpoint_regions_is_saved_once(joint_of):
    def fn(x, w, v):
        return torch.sin(torch.sin(x @ w) @ v)

    joint, count = joint_of(fn, leaf(4, 4), leaf(4, 4), leaf(4, 4))
    for node in joint.graph.nodes:
        if node.name in ("mm", "sin"):
            node.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=1)
        if node.name in ("mm_1", "sin_1"):
            node.meta.update(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=2)
    result = partition(joint, count)
    assert [value.name for value in result.report.saved if not value.is_input] == ["sin"]
    assert {"mm", "mm_1"} <= {op.name for op in result.report.recomputed}


@pytest.mark.covers("F3.25", "F3.30", "F3.44")
def test_dropout_inside_a_checkpoint_region_keeps_its_mask(joint_of):
    joint, count = joint_of(lambda x, w: F.dropout(x @ w, 0.5).sin(), leaf(8, 8), leaf(8, 8))
    for node in joint.graph.nodes:
        if node.op == "call_function":
            node.meta["recompute"] = CheckpointPolicy.PREFER_RECOMPUTE
            node.meta["ac_graph_id"] = 0
    result = partition(joint, count)
    drawn = [op for op in ops(result.backward) if "dropout.default" in op or "bernoulli" in op or "rand" in op]
    assert drawn == []


@pytest.mark.covers("F3.35")
def test_a_value_that_no_gradient_uses_is_not_saved(joint_of):
    joint, count = joint_of(lambda x, w: (torch.sin(x @ w) * 2, torch.cos(x @ w).detach()), leaf(4, 4), leaf(4, 4))
    result = partition(joint, count)
    backward_reads = set(placeholders(result.backward))
    assert set(result.saved_names) <= backward_reads


@pytest.mark.covers("F3.43")
def test_contradicting_constraints_name_the_chain(joint_of):
    joint, count = joint_of(lambda x: scale(x).sin(), leaf(4))
    scaled = next(n for n in joint.graph.nodes if "scale" in n.name)
    x = joint.graph.find_nodes(op="placeholder")[0]
    with joint.graph.inserting_after(x):
        pair = joint.graph.call_function(aten._fused_dropout.default, (x, 0.5))
    pair.meta["val"] = (x.meta["val"], x.meta["val"])
    with joint.graph.inserting_after(pair):
        doubled = joint.graph.call_function(torch.add, (pair, 1))
    doubled.meta["val"] = (x.meta["val"],)
    scaled.args = (doubled,)
    policy = CheckpointPolicy.MUST_RECOMPUTE
    tag(joint, **{doubled.name: policy, scaled.name: policy, "sin": policy})
    with pytest.raises(InfeasiblePartitionError) as caught:
        partition(joint, count)
    assert caught.value.chain[:3] == (pair.name, doubled.name, scaled.name)
    assert "random" in str(caught.value) and "MUST_RECOMPUTE" in str(caught.value)


@pytest.mark.covers("F3.58")
def test_an_input_that_is_overwritten_after_its_use_is_saved_as_a_copy(joint_of):
    def fn(x, y):
        return x.t().clone() * y

    joint, count = joint_of(fn, leaf(3, 3), leaf(3, 3))
    result = partition(joint, count, PartitionOptions(mutated_inputs=(0,)))
    x, y = torch.randn(3, 3), torch.randn(3, 3)
    wanted = x.t().clone()
    (_,), kept = (outputs := result.forward(x, y))[:1], outputs[1:]
    x.add_(1)
    _, grad_y = result.backward(*kept, torch.ones(3, 3))
    assert torch.equal(grad_y, wanted)


@pytest.mark.covers("F3.58")
def test_an_input_that_the_graph_overwrites_is_saved_as_a_copy(joint_of):
    joint, count = joint_of(lambda x, y: torch.sin(x) * y, leaf(4), leaf(4))
    output = joint.graph.find_nodes(op="output")[0]
    x = joint.graph.find_nodes(op="placeholder")[0]
    with joint.graph.inserting_before(output):
        copied = joint.graph.call_function(aten.copy_.default, (x, output.args[0][0]))
    copied.meta["val"] = x.meta["val"]
    result = partition(joint, count)
    assert "aten.copy_.default" in ops(result.forward) and "aten.copy_.default" not in ops(result.backward)
    a, b = torch.randn(4), torch.randn(4)
    wanted = a.cos() * b, a.sin()
    kept = result.forward(a, b)[1:]
    grads = result.backward(*kept, torch.ones(4))
    torch.testing.assert_close(tuple(grads), wanted)


@pytest.mark.covers("F3.58")
def test_an_input_overwritten_by_torchs_runtime_is_saved_as_a_copy():
    from functorch.compile import aot_function, nop

    from aotkit_partition import min_cut_rematerialization_partition

    def fn(x, y):
        z = x.t().clone() * y
        x.add_(1)
        return z

    x, y = torch.randn(3, 3), leaf(3, 3)
    wanted = x.t().clone()
    aot_function(fn, nop, nop, partition_fn=min_cut_rematerialization_partition)(x, y).sum().backward()
    assert torch.equal(y.grad, wanted)


def test_a_write_to_an_intermediate_is_refused(joint_of):
    joint, count = joint_of(lambda x: torch.sin(x).cos(), leaf(4))
    sin = joint.graph.find_nodes(op="call_function", target=aten.sin.default)[0]
    with joint.graph.inserting_after(sin):
        joint.graph.call_function(aten.add_.Tensor, (sin, 1)).meta["val"] = sin.meta["val"]
    with pytest.raises(InvalidJointGraphError, match="not functional"):
        partition(joint, count)


def test_a_wrong_number_of_outputs_is_refused(joint_of):
    joint, _ = joint_of(lambda x: torch.sin(x), leaf(4))
    with pytest.raises(InvalidJointGraphError, match="num_fwd_outputs"):
        partition(joint, 7)
    with pytest.raises(InvalidJointGraphError, match="depends on a tangent"):
        partition(joint, 2)


@pytest.mark.parametrize(
    "field", [{"strategy": "best"}, {"distance_bias": 3.0}, {"unmaterialized_factor": 0.5}, {"max_distance": -1}]
)
def test_bad_options_are_refused(field):
    with pytest.raises(InvalidOptionError, match=next(iter(field))):
        PartitionOptions(**field)


def test_an_unknown_input_position_is_refused(joint_of):
    joint, count = joint_of(lambda x: torch.sin(x), leaf(4))
    with pytest.raises(InvalidOptionError, match="input 5"):
        partition(joint, count, PartitionOptions(static_inputs=(5,)))


def test_options_and_report_survive_as_text(joint_of):
    options = PartitionOptions(static_inputs=(0,), max_distance=3)
    assert PartitionOptions.from_json(options.to_json()) == options
    with pytest.raises(InvalidOptionError, match="colour"):
        PartitionOptions.from_json(options.to_json().replace("max_distance", "colour"))
    joint, count = joint_of(lambda x, w: torch.sin(x @ w), leaf(4, 5), leaf(5, 6))
    report = partition(joint, count).report
    assert PartitionReport.from_json(report.to_json()) == report
    assert "aten.mm" in str(report) and "compute-intensive" in str(report)


def test_the_report_names_the_users_line(joint_of):
    joint, count = joint_of(lambda x, w: torch.sin(x @ w), leaf(4, 5), leaf(5, 6))
    mm = next(n for n in joint.graph.nodes if n.name == "mm")
    mm.meta["stack_trace"] = 'File "model.py", line 12, in forward\n    h = x @ w'
    assert saved(partition(joint, count))["mm"].source == "model.py:12: h = x @ w"


def test_an_observer_hears_of_stages_and_graphs(joint_of):
    from contextlib import contextmanager

    heard = []

    class Listener:
        @contextmanager
        def stage(self, name):
            heard.append(name)
            yield

        def dump(self, name, kind, text):
            heard.append((name, kind, len(text()) > 0))

    joint, count = joint_of(lambda x: torch.sin(x), leaf(4))
    partition(joint, count, observer=Listener())
    assert "partition.cut" in heard and ("forward", "graphs", True) in heard


def test_several_sizes_of_an_input_are_saved_rather_than_the_input(joint_of):
    """A saved input keeps its memory alive, and may not be changed before the backward."""
    joint, count = joint_of(lambda x: x[1:].reshape(-1).unsqueeze(0), leaf(5, 4, 3), tracing_mode="symbolic")
    result = partition(joint, count)
    assert len(result.saved_names) == result.num_saved_symints >= 3


def test_a_size_of_two_tensors_is_saved_once(joint_of):
    def fn(x):
        y = x.sum(0)
        return (y.unsqueeze(0) * 2 + x.flip(0)).reshape(-1)

    joint, count = joint_of(fn, leaf(3, 5), tracing_mode="symbolic")
    result = partition(joint, count)
    sizes = [node.meta["val"].node.expr for node in result.forward.graph.find_nodes(op="output")[0].args[0][count:]]
    assert result.num_saved_symints == len(sizes) == len(set(sizes)) >= 2
