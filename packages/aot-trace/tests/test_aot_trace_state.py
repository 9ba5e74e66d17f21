"""What a capture leaves behind: nothing. Also randomness, autocast, checkpointing, custom operators, threads."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.checkpoint import checkpoint

from aotkit_aot_trace import FunctionalLayer, TraceOptions, Unsupported, capture
from aotkit_aot_trace.callables import TRACING_LOCK


def ambient():
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
        torch.is_autocast_cache_enabled(),
        len(_get_current_dispatch_mode_stack()),
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
        torch.get_rng_state().tolist(),
        type(torch.ones(1) + 1),
        torch._C._functorch.get_dynamic_layer_stack_depth(),
        torch._C._autograd._saved_tensors_hooks_is_enabled(),
        torch._C._is_fwd_grad_enabled(),
    )


class Planted(Exception):
    pass


def fails_in_the_forward(x):
    torch.set_grad_enabled(False)
    torch.rand(3)
    raise Planted


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        raise Planted


def fails_in_an_autocast_region(x):
    torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)
    raise Planted


def fails_in_a_transform(x):
    """As graphs of Dynamo enter it: by calls, and not by context managers."""
    torch._C._autograd._saved_tensors_hooks_disable("not here")
    torch._C._functorch._grad_increment_nesting()
    torch._C._functorch._jvp_increment_nesting()
    torch._C._set_fwd_grad_enabled(False)
    torch._C._enter_dual_level()
    raise Planted


@pytest.mark.covers("F2.8")
@pytest.mark.parametrize(
    "fn",
    [
        fails_in_the_forward,
        lambda x: [FailsInBackward.apply(x)],
        fails_in_an_autocast_region,
        fails_in_a_transform,
    ],
    ids=["forward", "backward", "autocast", "transform"],
)
def test_a_capture_that_fails_leaves_everything_as_it_was(layer, fn):
    x = torch.ones(3, requires_grad=True)
    before = ambient()
    with pytest.raises(Planted):
        capture(fn, [x], options=TraceOptions(layer=layer))
    assert ambient() == before
    assert torch._C._exit_dual_level(level=torch._C._enter_dual_level()) is None  # there is one, and it is free
    assert capture(lambda x: [x * 2], [x], options=TraceOptions(layer=layer)).metadata.is_training


@pytest.mark.parametrize("fn", [lambda x: [F.dropout(x) + torch.rand(3)], lambda x: [x.set_(x + 1)]])
def test_a_capture_leaves_random_state_and_modes_alone(layer, fn):
    before = ambient()
    with contextlib.suppress(Unsupported):
        capture(fn, [torch.ones(3)], options=TraceOptions(layer=layer))
    assert ambient() == before


@pytest.mark.covers("F2.39")
def test_random_operations_stay_operations_in_program_order(layer, run_graph):
    def fn(x):
        return [F.dropout(x, 0.5) + torch.rand(8), torch.randn(2), F.dropout(x.cos(), 0.2)]

    x = torch.randn(8)
    captured = capture(fn, [x], options=TraceOptions(layer=layer))
    torch.manual_seed(3)
    expected = fn(x)
    torch.manual_seed(3)
    for ours, theirs in zip(run_graph(captured, [x]), expected, strict=True):
        assert torch.equal(ours, theirs)


def test_an_unused_random_operation_still_advances_the_generator(layer, run_graph):
    def fn(x):
        torch.rand(5)
        return [x + torch.rand(3)]

    x = torch.randn(3)
    captured = capture(fn, [x], options=TraceOptions(layer=layer))
    torch.manual_seed(3)
    (expected,) = fn(x)
    torch.manual_seed(3)
    assert torch.equal(run_graph(captured, [x])[0], expected)


@pytest.mark.covers("F2.16")
def test_autocast_applies_in_the_forward_and_not_in_the_backward(layer, run_graph):
    w, x = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4)

    def inside(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            return [(x @ w).float().exp()]

    with torch.autocast("cpu", torch.bfloat16):
        around = capture(lambda w, x: [(x @ w).float().exp()], [w, x], options=TraceOptions(layer=layer))
    for captured in (around, capture(inside, [w, x], options=TraceOptions(layer=layer))):
        (ours,), (theirs,) = run_graph(captured, [w, x]), inside(w, x)
        torch.testing.assert_close(ours, theirs)
        (a,) = torch.autograd.grad(ours.sum(), w)
        (b,) = torch.autograd.grad(theirs.sum(), w)
        torch.testing.assert_close(a, b)


@pytest.mark.covers("F1.56")
def test_leaving_autocast_on_is_refused(layer):
    def fn(x):
        torch.amp.autocast_mode._enter_autocast("cpu", torch.bfloat16, True, True)
        return [x * 2]

    before = ambient()
    with pytest.raises(Unsupported, match="leaves autocast in another state"):
        capture(fn, [torch.ones(3)], options=TraceOptions(layer=layer))
    assert ambient() == before


def test_a_checkpointed_region_is_captured_inline(layer, run_graph):
    def fn(x, w):
        return [checkpoint(lambda a: torch.tanh(a @ w).sin(), x, use_reentrant=False)]

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    captured = capture(fn, [x, w], options=TraceOptions(layer=layer))
    (ours,), (theirs,) = run_graph(captured, [x, w]), fn(x, w)
    torch.testing.assert_close(ours, theirs)
    for a, b in zip(torch.autograd.grad(ours.sum(), [x, w]), torch.autograd.grad(theirs.sum(), [x, w]), strict=True):
        torch.testing.assert_close(a, b)


def dynamo_capture(fn, args, **options):
    """What Dynamo gives a backend, captured."""
    found = []

    def backend(graph, examples):
        found.append((graph, examples, capture(graph, examples, **options)))
        return graph

    torch._dynamo.reset()
    torch.compile(fn, backend=backend, fullgraph=True)(*args)
    ((graph, examples, captured),) = found
    return graph, examples, captured


@pytest.mark.covers("F2.18", "F2.41")
def test_checkpoint_tags_of_dynamo_reach_the_nodes(run_graph):
    def fn(x, w):
        return checkpoint(lambda a: torch.tanh(a @ w).sin(), x, use_reentrant=False) * 2

    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(4, 4, requires_grad=True)
    graph, examples, captured = dynamo_capture(fn, [x, w])
    assert any("checkpoint" in str(n.target) for n in graph.graph.nodes), "Dynamo gives a checkpoint operator"
    tagged = {n.target for n in captured.graph.graph.nodes if n.meta.get("recompute") is not None}
    assert {torch.ops.aten.mm.default, torch.ops.aten.tanh.default} <= tagged
    (ours,) = run_graph(captured, list(examples))
    torch.testing.assert_close(ours, fn(x, w))


def test_the_graph_of_dynamo_is_captured_with_stack_traces_in_the_cheap_layer():
    def fn(x, w):
        return (x @ w).relu()

    graph, _, captured = dynamo_capture(fn, [torch.randn(3, 4), torch.randn(4, 4, requires_grad=True)])
    from aotkit_aot_trace.callables import GraphFunction

    assert GraphFunction(graph).preferred_layer() is FunctionalLayer.DISPATCHER
    for node in captured.graph.graph.nodes:
        if node.op == "call_function":
            assert "(x @ w).relu()" in node.meta["stack_trace"], node


@pytest.mark.covers("F2.41")
def test_a_conditional_operator_is_captured_or_refused_readably(run_graph):
    def fn(p, x):
        return torch.cond(p, lambda x: x.sin(), lambda x: x.cos() * 2, (x,))

    p, x = torch.tensor(True), torch.randn(4, requires_grad=True)
    _, examples, captured = dynamo_capture(fn, [p, x])
    (ours,) = run_graph(captured, list(examples))
    torch.testing.assert_close(ours, fn(p, x))
    torch.testing.assert_close(torch.autograd.grad(ours.sum(), x)[0], x.cos())


@pytest.fixture
def library():
    with torch.library._scoped_library("aotkit_trace_test", "FRAGMENT") as lib:
        yield lib


def bump(x, y):
    x.add_(y)


@pytest.mark.covers("F1.63")
def test_custom_operators_are_captured_pure_and_mutating(layer, library, run_graph):
    library.define("twice(Tensor x) -> Tensor")
    library.define("bump_(Tensor(a!) x, Tensor y) -> ()")
    library.impl("twice", lambda x: x * 2, "CompositeExplicitAutograd")
    library.impl("bump_", bump, "CompositeExplicitAutograd")
    torch.library.register_fake("aotkit_trace_test::twice", lambda x: torch.empty_like(x), lib=library)
    torch.library.register_fake("aotkit_trace_test::bump_", lambda x, y: None, lib=library)
    ops = torch.ops.aotkit_trace_test
    x = torch.randn(3)
    pure = capture(lambda x: [ops.twice(x) + 1], [x], options=TraceOptions(layer=layer))
    assert torch.equal(run_graph(pure, [x])[0], x * 2 + 1)

    def mutating(x, y):
        ops.bump_(x, y)
        return [x * 2]

    if layer is FunctionalLayer.DISPATCHER:
        with pytest.raises(Unsupported, match="in-place operation cannot be replaced"):
            capture(mutating, [x, torch.ones(3)], options=TraceOptions(layer=layer))
        return
    captured = capture(mutating, [x, torch.ones(3)], options=TraceOptions(layer=layer))
    expected = x + 1
    (double,) = run_graph(captured, [x, torch.ones(3)])
    assert torch.equal(x, expected) and torch.equal(double, expected * 2)


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_branch_that_depends_on_data_is_refused(layer, dynamic):
    with pytest.raises(Unsupported, match=r"depends? on") as refusal:
        capture(
            lambda x: [x if x.sum() > 0 else -x], [torch.ones(3)], options=TraceOptions(layer=layer, dynamic=dynamic)
        )
    assert refusal.value.do


@pytest.mark.covers("F1.59")
@pytest.mark.parametrize(
    "fn",
    [lambda x: [x * x.sum().item()], lambda x: [x.nonzero()], lambda x: [x[x > 0]]],
    ids=["item", "nonzero", "mask"],
)
@pytest.mark.parametrize("dynamic", [False, True])
def test_results_that_depend_on_data_are_recorded(layer, run_graph, fn, dynamic):
    captured = capture(fn, [torch.ones(3)], options=TraceOptions(layer=layer, dynamic=dynamic))
    x = torch.tensor([1.0, -2.0, 3.0])
    assert torch.equal(run_graph(captured, [x])[0], fn(x)[0])


def test_a_closed_over_tensor_is_refused_by_name_of_the_remedy(layer):
    weight = torch.ones(3, requires_grad=True)
    with pytest.raises(Unsupported, match="argument"):
        capture(lambda x: [x * weight], [torch.ones(3)], options=TraceOptions(layer=layer))


@pytest.mark.covers("F1.71")
def test_writing_to_overlapping_elements_is_refused(layer):
    with pytest.raises(Unsupported):
        capture(lambda x: [x.unfold(0, 3, 1).add_(1), x], [torch.ones(6)], options=TraceOptions(layer=layer))


def test_a_tensor_subclass_is_refused():
    class Mine(torch.Tensor):
        pass

    with pytest.raises(Unsupported, match="tensor subclass"):
        capture(lambda x: [x + 1], [torch.ones(3).as_subclass(Mine)])


@pytest.mark.covers("F2.52")
def test_concurrent_captures_give_the_same_graphs_as_sequential_ones():
    programs = [lambda x, k=k: [(x * k).sin() @ x.t()] for k in range(6)]
    x = torch.randn(3, 3, requires_grad=True)
    expected = [capture(p, [x]).graph.code for p in programs]
    found: list[str | None] = [None] * len(programs)

    def run(k):
        found[k] = capture(programs[k], [x]).graph.code

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == expected


def test_the_lock_is_reentrant():
    with TRACING_LOCK:
        assert capture(lambda x: [x + 1], [torch.ones(2)]).metadata.num_forward_outputs == 1


@pytest.mark.parametrize("exponent", [True, False])
def test_a_power_of_truth_values_is_a_truth_value(layer, run_graph, exponent):
    captured = capture(lambda x: [x**exponent], [torch.tensor([True, False])], options=TraceOptions(layer=layer))
    assert captured.metadata.outputs[0].meta.dtype == "bool"
    x = torch.tensor([False, True])
    assert torch.equal(run_graph(captured, [x])[0], x**exponent)


def test_a_split_at_places_that_depend_on_data_is_captured_or_refused(layer, run_graph):
    def split(x, places):
        return [part + 1 for part in x.tensor_split(places)]

    args = torch.arange(6.0), torch.tensor([2, 4])
    if layer is FunctionalLayer.MODE:
        with pytest.raises(Unsupported, match="elements of a tensor"):
            capture(split, args, options=TraceOptions(layer=layer))
        return
    captured, other = capture(split, args, options=TraceOptions(layer=layer)), (args[0], torch.tensor([1, 5]))
    for mine, theirs in zip(run_graph(captured, other), split(*other), strict=True):
        assert torch.equal(mine, theirs)


def test_an_in_place_product_that_resizes_its_target_is_refused(layer):
    args = torch.ones(3), torch.ones(4, 2, 5), torch.ones(4, 5, 3)
    with pytest.raises(Unsupported, match="resizes"):
        capture(lambda m, a, b: [m.clone().addbmm_(a, b)], args, options=TraceOptions(layer=layer))


def test_a_gradient_is_captured_while_anomalies_are_looked_for():
    # autograd's own look for nan reads elements, which a capture has none of
    with torch.autograd.set_detect_anomaly(True):
        captured = capture(lambda x: [x.sin().sqrt()], [torch.ones(3, requires_grad=True)])
        assert torch.is_anomaly_check_nan_enabled()
    assert captured.metadata.is_training and not torch.is_anomaly_enabled()
