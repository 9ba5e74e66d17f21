"""Graphs are cut at what can't be recorded; the rest is."""

import json
import warnings

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_cudagraphs import CudagraphNotice, CudagraphTrees, SkipKind, SkipReason, wrap_graph
from aotkit_cudagraphs.drivers import SimulatedDriver
from aotkit_cudagraphs.plan import GraphPlan, attributes_of, bind_plan, plan_graph
from aotkit_cudagraphs.split import SplitOptions, split_graph

CPU = torch.device("cpu")


def trace(fn, *inputs):
    return make_fx(fn, tracing_mode="fake", _allow_non_fake_inputs=True)(*inputs)


def compile_part(graph, name):
    def run(args):
        values = list(args)
        args.clear()
        return graph(*values)

    run._boxed_call = True
    run.__name__ = name
    return run


def unsafe(library):
    library.define("wait(Tensor x) -> Tensor", tags=(torch.Tag.cudagraph_unsafe,))
    library.impl("wait", lambda x: x * 3, "CompositeExplicitAutograd")
    return torch.ops.aotkit_cudagraphs_split.wait


def run_steps(fast, fn, *shapes, steps=4):
    for _ in range(steps):
        inputs = [torch.randn(shape) for shape in shapes]
        got, expected = fast(list(inputs)), fn(*inputs)
        assert len(got) == len(expected) and all(map(torch.equal, got, expected))
        del got


@pytest.mark.covers("F6.20", "F5a.16")
def test_a_graph_is_recorded_around_an_operator_that_cant_be():
    with torch.library._scoped_library("aotkit_cudagraphs_split", "FRAGMENT") as library:
        wait = unsafe(library)

        def fn(x, y):
            first = torch.relu(x) + y
            second = wait(first)
            return [torch.tanh(second) * y, first]

        graph = trace(fn, torch.ones(4), torch.ones(4))
        segments = split_graph(graph, device=CPU)
        assert [tuple(r.kind for r in segment.reasons) for segment in segments] == [(), (SkipKind.UNSAFE_TAG,), ()]
        assert segments[0].inputs == ("x_1", "y_1") and segments[1].nodes == ("wait",)
        assert set(segments[2].inputs) == {"wait", "y_1"}
        trees = CudagraphTrees(SimulatedDriver(capacity=1 << 16))
        with pytest.warns(CudagraphNotice, match="tagged cudagraph_unsafe"):
            fast = wrap_graph(graph, compile_part, trees)
        run_steps(fast, fn, 4, 4)
        names = [(info.name, info.replays) for info in trees.report().functions]
        assert names == [("graph-0", 3), ("graph-2", 3)]


@pytest.mark.covers("F6.20")
def test_a_graph_without_obstacles_is_one_recording_with_its_static_inputs():
    def fn(x, w):
        return [torch.relu(x @ w)]

    trees = CudagraphTrees(SimulatedDriver(capacity=1 << 16))
    weight = torch.randn(4, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fast = wrap_graph(
            trace(fn, torch.ones(4, 4), weight), compile_part, trees, static_input_indices=[1], name="layer"
        )
    for _ in range(3):
        x = torch.randn(4, 4)
        assert torch.equal(fast([x, weight])[0], torch.relu(x @ weight))
    (recording,) = trees.report().recordings
    assert recording.name == "layer" and "float32[4, 4] static" in recording.inputs


@pytest.mark.covers("F6.18", "F6.20")
def test_segments_that_are_too_small_run_as_they_are():
    with torch.library._scoped_library("aotkit_cudagraphs_split", "FRAGMENT") as library:
        wait = unsafe(library)
        graph = trace(lambda x: [wait(torch.relu(x)) + 1], torch.ones(4))
        kinds = [[r.kind for r in segment.reasons] for segment in split_graph(graph, device=CPU)]
        assert kinds == [[SkipKind.SMALL_SEGMENT], [SkipKind.UNSAFE_TAG], [SkipKind.SMALL_SEGMENT]]
        one = SplitOptions(min_nodes=1)
        assert [len(s.reasons) for s in split_graph(graph, device=CPU, options=one)] == [0, 1, 0]
        trees = CudagraphTrees(SimulatedDriver(capacity=1 << 16))
        with pytest.warns(CudagraphNotice, match="1 operators between others"):
            fast = wrap_graph(graph, compile_part, trees)
        assert fast([torch.ones(4)])[0][0] == 4 and trees.report().functions == ()


@pytest.mark.covers("F6.18", "F6.20")
def test_a_policy_sees_each_segment_and_may_refuse_it():
    seen = []

    def policy(segment, graph):
        seen.append((segment.nodes, len(graph.graph.nodes)))
        return SkipReason(SkipKind.DISABLED, "not this one")

    graph = trace(lambda x: [torch.relu(x) + 1], torch.ones(4))
    trees = CudagraphTrees(SimulatedDriver(capacity=1 << 16))
    with pytest.warns(CudagraphNotice, match="not this one; the policy said no"):
        fast = wrap_graph(graph, compile_part, trees, options=SplitOptions(policy=policy))
    assert seen == [(("relu", "add"), 4)] and fast([torch.ones(4)])[0][0] == 2
    assert trees.report().functions == ()


@pytest.mark.covers("F6.20")
def test_what_takes_a_number_from_an_operator_that_waits_stays_with_it():
    with FakeTensorMode():
        x = torch.empty(4, device="meta")
    graph = torch.fx.Graph()
    given = graph.placeholder("x")
    given.meta["val"] = x
    number = graph.call_function(torch.ops.aten._local_scalar_dense.default, (given,))
    number.meta["val"] = 1.5
    scaled = graph.call_function(torch.ops.aten.mul.Tensor, (given, number))
    last = graph.call_function(torch.ops.aten.relu.default, (scaled,))
    after = graph.call_function(torch.ops.aten.neg.default, (last,))
    for node in (scaled, last, after):
        node.meta["val"] = x
    graph.output([after])
    segments = split_graph(torch.fx.GraphModule({}, graph))
    assert [segment.nodes for segment in segments] == [
        ("_local_scalar_dense_default", "mul_tensor"),
        ("relu_default", "neg_default"),
    ]
    assert [r.kind for r in segments[0].reasons] == [SkipKind.INCOMPATIBLE_OP]


@pytest.mark.covers("F6.20")
def test_constants_of_a_graph_are_part_of_its_segments():
    table = torch.arange(4.0)
    with torch.library._scoped_library("aotkit_cudagraphs_split", "FRAGMENT") as library:
        wait = unsafe(library)
        graph = torch.fx.Graph()
        x = graph.placeholder("x")
        constant = graph.get_attr("table")
        first = graph.call_function(torch.ops.aten.add.Tensor, (x, constant))
        second = graph.call_function(torch.ops.aten.mul.Tensor, (first, constant))
        waited = graph.call_function(wait.default, (second,))
        graph.output([waited, constant])
        module = torch.fx.GraphModule({"table": table}, graph)
        for node in graph.nodes:
            if node.op != "output":
                node.meta["val"] = torch.empty(4)
        trees = CudagraphTrees(SimulatedDriver(capacity=1 << 16))
        with pytest.warns(CudagraphNotice):
            fast = wrap_graph(module, compile_part, trees)
        run_steps(fast, lambda x: [(x + table) * table * 3, table], 4)
        assert [info.replays for info in trees.report().functions] == [3]


@pytest.mark.covers("F6.21")
def test_a_backward_graph_is_wrapped_with_its_forward():
    trees = CudagraphTrees(SimulatedDriver(capacity=1 << 16))
    forward = trees.wrap(lambda x: x * 2, training=True, name="forward")
    graph = trace(lambda grad: [grad * 2 + 0], torch.ones(4))
    backward = wrap_graph(graph, compile_part, trees, name="backward", wrap=forward.backward)
    for _ in range(3):
        assert backward([forward(torch.ones(4))])[0][0] == 4
    assert [r.path for r in trees.report().recordings] == [("forward",), ("forward", "backward")]


@pytest.mark.covers("F6.17")
def test_inputs_that_compiled_kernels_write_are_known_from_the_graph():
    def fn(x, total):
        total.view(2, 2)[0].add_(x.sum())
        return [x + 1]

    graph = trace(fn, torch.ones(4), torch.zeros(4))

    def bypass(part, name):
        def run(args):
            x, total = args
            args.clear()
            total.numpy()[:2] += float(x.numpy().sum())  # stands for a kernel that the dispatcher never sees
            return [x + 1]

        run._boxed_call = True
        return run

    trees = CudagraphTrees(SimulatedDriver(capacity=1 << 16))
    fast = wrap_graph(graph, bypass, trees)
    total = torch.zeros(4)
    with pytest.warns(CudagraphNotice, match="input 1 of graph is written"):
        for n in range(1, 4):
            fast([torch.ones(4), total])
            assert total.tolist() == [4 * n, 4 * n, 0, 0]
    assert trees.report().functions[0].replays == 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_a_graph_is_compiled_whole_with_one_notice():
    graph = trace(lambda x: [x + 1], torch.ones(4))
    with pytest.warns(CudagraphNotice, match="no CUDA device") as caught:
        fast = wrap_graph(graph, compile_part, CudagraphTrees())
    assert len(caught) == 1 and fast([torch.ones(4)])[0][0] == 2


@pytest.mark.covers("F6.20")
def test_a_plan_that_was_written_and_read_makes_the_same_recordings_without_the_graph():
    with torch.library._scoped_library("aotkit_cudagraphs_split", "FRAGMENT") as library:
        wait = unsafe(library)
        table = torch.arange(3.0)

        def fn(x, w):
            first = torch.relu(x @ w) + 1
            return [torch.tanh(wait(first)) @ w, first, table, 7, None]

        weight = torch.randn(4, 4)
        graph = trace(fn, torch.ones(4, 4), weight)
        plan, graphs = plan_graph(graph, device=CPU, static_input_indices=[1], name="step")
        reread = GraphPlan.from_json(json.loads(json.dumps(plan.to_json())))
        assert reread == plan and reread.records and [part.recorded for part in reread.parts] == [True, False, True]
        calls = [compile_part(each, part.name) for each, part in zip(graphs, reread.parts, strict=True)]
        held = attributes_of(graph, reread)
        del graph
        trees = CudagraphTrees(SimulatedDriver(capacity=1 << 16))
        with pytest.warns(CudagraphNotice, match="tagged cudagraph_unsafe"):
            fast = bind_plan(reread, calls, trees, attributes=held, prefix="here-")
        for _ in range(3):
            x = torch.randn(4, 4)
            *got, number, nothing = fast([x, weight])
            assert all(map(torch.equal, got, fn(x, weight))) and number == 7 and nothing is None
            del got
        assert [info.name for info in trees.report().functions] == ["here-step-0", "here-step-2"]
        assert all("float32[4, 4] static" in recording.inputs for recording in trees.report().recordings)
        with pytest.raises(ValueError, match="plan of recordings"):
            GraphPlan.from_json({**plan.to_json(), "version": 0})
