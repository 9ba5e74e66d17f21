"""Reasons found in FX graphs, one program per reason."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from aotkit_cudagraphs import SkipKind, check_graph

aten = torch.ops.aten
TRACE = '  File "lib.py", line 1, in f\n    g(x)\n  File "model.py", line 12, in forward\n    return x.item()\n'


def graph_with(target, *extra, device="meta", val=None):
    """x -> target(x, *extra) -> output, on a device that is not the CPU."""
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(4, device=device)
    node = graph.call_function(target, (x, *extra))
    node.meta["val"] = torch.empty(4, device=device) if val is None else val
    node.meta["stack_trace"] = TRACE
    graph.output(node)
    return graph


def kinds(graph):
    return [reason.kind for reason in check_graph(graph)]


@pytest.mark.covers("F6.18")
@pytest.mark.parametrize(
    "target",
    [aten._local_scalar_dense.default, aten._assert_scalar.default, aten._fused_moving_avg_obs_fq_helper.default],
)
def test_operators_that_need_the_host_are_named_with_the_users_line(target):
    (reason,) = check_graph(graph_with(target))
    assert reason.kind is SkipKind.INCOMPATIBLE_OP and "aten._" in reason.detail
    assert reason.user_line == "model.py:12: return x.item()"


def test_a_plain_graph_has_no_reasons():
    assert check_graph(graph_with(aten.relu.default)) == ()
    module = torch.fx.GraphModule({}, graph_with(aten.relu.default))
    assert check_graph(module) == ()


@pytest.mark.covers("F6.18")
def test_cpu_tensors_are_a_reason():
    assert kinds(graph_with(aten.relu.default, device="cpu")) == [SkipKind.CPU_DEVICE] * 2


@pytest.mark.covers("F6.18")
def test_control_flow_is_a_reason():
    assert kinds(graph_with(torch.ops.higher_order.cond)) == [SkipKind.CONTROL_FLOW]
    assert kinds(graph_with(torch.ops.higher_order.while_loop)) == [SkipKind.CONTROL_FLOW]


@pytest.mark.covers("F6.18")
@pytest.mark.parametrize("dtype, expected", [(torch.bool, [SkipKind.BOOLEAN_INDEX]), (torch.int64, [])])
def test_writes_through_boolean_masks_are_a_reason(dtype, expected):
    graph = torch.fx.Graph()
    x, mask = graph.placeholder("x"), graph.placeholder("mask")
    x.meta["val"], mask.meta["val"] = torch.empty(4, device="meta"), torch.empty(4, dtype=dtype, device="meta")
    graph.output(graph.call_function(aten.index_put.default, (x, [None, mask], x)))
    assert kinds(graph) == expected


@pytest.mark.covers("F6.18")
def test_operators_tagged_unsafe_are_a_reason():
    with torch.library._scoped_library("aotkit_cudagraphs_test", "FRAGMENT") as library:
        library.define("unsafe(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        (reason,) = check_graph(graph_with(torch.ops.aotkit_cudagraphs_test.unsafe.default))
    assert reason.kind is SkipKind.UNSAFE_TAG and "aotkit_cudagraphs_test.unsafe" in reason.detail


@pytest.mark.covers("F6.18")
def test_sizes_that_depend_on_data_are_a_reason():
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        mode.shape_env.create_unbacked_symint()
        size = mode.shape_env.create_unbacked_symint()
        value = torch.empty((size,), device="meta")
    (reason,) = check_graph(graph_with(aten.relu.default, val=value))
    assert reason.kind is SkipKind.UNBACKED_SIZE and str(size) in reason.detail


@pytest.mark.covers("F6.18")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks")  # torch 2.11 says so even where they are asked for
def test_sparse_values_are_a_reason():
    value = torch.sparse_coo_tensor(size=(4,), device="meta", check_invariants=True)
    assert kinds(graph_with(aten.relu.default, val=value)) == [SkipKind.SPARSE]


@pytest.mark.covers("F6.18")
def test_two_devices_are_a_reason():
    with FakeTensorMode():
        value = torch.empty(4, device="cuda:1")
    reasons = check_graph(graph_with(aten.relu.default, val=value))
    assert [reason.kind for reason in reasons] == [SkipKind.MULTIPLE_DEVICES] and "cuda:1, meta" in reasons[0].detail


@pytest.mark.covers("F6.24", "F6.18")
def test_communication_is_a_reason():
    with torch.library._scoped_library("_c10d_functional", "FRAGMENT") as library:
        if not hasattr(torch.ops._c10d_functional, "wait_tensor"):
            library.define("wait_tensor(Tensor x) -> Tensor")
        target = torch.ops._c10d_functional.wait_tensor.default
        assert kinds(graph_with(target)) == [SkipKind.COLLECTIVE]


@pytest.mark.covers("F6.17", "F6.18")
def test_swapping_or_resizing_the_memory_of_a_tensor_is_a_reason():
    assert kinds(graph_with(aten.resize_.default, [2])) == [SkipKind.STORAGE_MUTATION]
    graph = torch.fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    x.meta["val"] = y.meta["val"] = torch.empty(4, device="meta")
    graph.output(graph.call_function(aten.set_.source_Tensor, (x, y)))
    (reason,) = check_graph(graph)
    assert reason.kind is SkipKind.STORAGE_MUTATION and "aten.set_" in reason.detail


@pytest.mark.covers("F6.18")
@pytest.mark.parametrize(
    "target",
    [
        aten._fused_moving_avg_obs_fq_helper_functional.default,
        torch._prims.rng_prims.run_and_save_rng_state,
        torch._prims.rng_prims.run_with_rng_state,
    ],
)
def test_the_other_operators_with_host_state_are_named_too(target):
    assert kinds(graph_with(target)) == [SkipKind.INCOMPATIBLE_OP]


@pytest.mark.covers("F6.18")
@pytest.mark.parametrize("name", ["dense_to_jagged", "jagged_to_padded_dense"])
def test_operators_of_fbgemm_that_read_offsets_on_the_host_are_named_too(name):
    with torch.library._scoped_library("fbgemm", "FRAGMENT") as library:
        library.define(f"{name}(Tensor x) -> Tensor")
        assert kinds(graph_with(getattr(torch.ops.fbgemm, name).default)) == [SkipKind.INCOMPATIBLE_OP]


def test_with_a_device_given_tensors_elsewhere_are_the_reason():
    graph = graph_with(aten.relu.default, device="meta")
    assert check_graph(graph, torch.device("meta")) == ()
    found = check_graph(graph, torch.device("cpu"))
    assert [reason.kind for reason in found] == [SkipKind.MULTIPLE_DEVICES] * 2


@pytest.mark.covers("F6.18")
@pytest.mark.parametrize("wrapper", ["an operator", "a region"])
def test_what_a_higher_order_operator_calls_is_looked_at(wrapper):
    with torch.library._scoped_library("aotkit_eligibility_test", "FRAGMENT") as library:
        library.define("wait(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
        library.define("go(Tensor x) -> Tensor")
        found = {}
        for op in (torch.ops.aotkit_eligibility_test.wait.default, torch.ops.aotkit_eligibility_test.go.default):
            if wrapper == "a region":
                outer = torch.fx.Graph()
                x, body = outer.placeholder("x"), outer.get_attr("body")
                x.meta["val"] = torch.empty(4, device="meta")
                outer.output(outer.call_function(torch.ops.higher_order.invoke_subgraph, (body, "body", x)))
                graph = torch.fx.GraphModule({"body": torch.fx.GraphModule({}, graph_with(op))}, outer)
            else:
                graph = graph_with(torch.ops.higher_order.auto_functionalized_v2, op)
            found[str(op.overloadpacket)] = kinds(graph)
    assert found == {
        "aotkit_eligibility_test.wait": [SkipKind.UNSAFE_TAG],
        "aotkit_eligibility_test.go": [],
    }
