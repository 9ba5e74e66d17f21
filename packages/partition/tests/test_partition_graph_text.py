import json
import math
import sys

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import CheckpointPolicy

from aotkit_partition import dump_graph, load_graph
from aotkit_partition.errors import GraphFormatError, UnserializableGraphError
from aotkit_partition.graph_text import graph_constants


def traced(fn, *inputs, mode="fake"):
    return make_fx(fn, tracing_mode=mode)(*inputs)


def body(graph_module):
    return str(graph_module.graph)


def assert_round_trip(graph_module, **kwargs):
    text = dump_graph(graph_module)
    loaded = load_graph(text, **kwargs)
    assert body(loaded) == body(graph_module)
    assert dump_graph(loaded) == text
    return loaded


def test_a_loaded_graph_prints_and_computes_as_the_original():
    def fn(x, y):
        a, b = torch.split(x @ y, [3, 5], dim=1)
        return a.sum(dim=[0], dtype=torch.float64), torch.cat([b, b[:, 1:3]], 1).to(torch.bfloat16)

    inputs = torch.randn(4, 6), torch.randn(6, 8)
    gm = traced(fn, *inputs)
    loaded = assert_round_trip(gm)
    for got, wanted in zip(loaded(*inputs), gm(*inputs), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    "argument",
    [
        math.inf, -math.inf, 1.0, -0.0, True, None, 3 + 4j, slice(None, 2, -1), Ellipsis, torch.float8_e4m3fn,
        torch.device("cuda:1"), torch.channels_last, torch.strided, (1, (2, [3, {"a": None}])),
        [slice(0, 1), (None,)], torch.ops.aten.mm.default, CheckpointPolicy.MUST_SAVE, "text with \"quotes\"",
    ],
    ids=repr,
)  # fmt: skip
def test_every_kind_of_argument_survives(argument):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(torch.ops.aten.add.Tensor, (x, argument), {"alpha": argument}))
    loaded = load_graph(dump_graph(torch.fx.GraphModule(torch.nn.Module(), graph)))
    (node,) = loaded.graph.find_nodes(op="call_function", target=torch.ops.aten.add.Tensor)
    assert repr(node.args[1]) == repr(argument) and repr(node.kwargs["alpha"]) == repr(argument)
    assert type(node.args[1]) is type(argument) or isinstance(argument, list)


def test_not_a_number_survives():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(torch.ops.aten.full.default, ([2], math.nan)))
    loaded = load_graph(dump_graph(torch.fx.GraphModule(torch.nn.Module(), graph)))
    assert math.isnan(next(iter(loaded.graph.nodes)).args[1])


def test_metadata_of_values_comes_back_as_fakes_with_their_aliasing():
    def fn(x):
        y = x.transpose(0, 1)[1:]
        return y, y.clone(memory_format=torch.contiguous_format), x.sum()

    gm = traced(fn, torch.randn(4, 6, requires_grad=True))
    loaded = load_graph(dump_graph(gm))
    for before, after in zip(gm.graph.nodes, loaded.graph.nodes, strict=True):
        if before.op == "output":
            continue
        a, b = before.meta["val"], after.meta["val"]
        assert isinstance(b, torch._subclasses.FakeTensor)
        assert (a.shape, a.stride(), a.storage_offset()) == (b.shape, b.stride(), b.storage_offset())
        assert (a.dtype, a.device, a.requires_grad) == (b.dtype, b.device, b.requires_grad)

    def aliasing(module):
        storages = [n.meta["val"].untyped_storage()._cdata for n in module.graph.nodes if "val" in n.meta]
        return [storages.index(s) for s in storages]

    assert aliasing(loaded) == aliasing(gm)


def test_node_metadata_that_matters_survives():
    gm = traced(lambda x: (x * 2).sin(), torch.randn(3))
    node = next(n for n in gm.graph.nodes if n.op == "call_function")
    node.meta.update(
        seq_nr=7, stack_trace='File "a.py", line 3, in f\n  y = x * 2', partitioner_tag="is_forward",
        recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=2, custom={"stage": 1},
        nn_module_stack={"L__self__": ("", torch.nn.Linear)}, original_aten=torch.ops.aten.mul.Tensor,
    )  # fmt: skip
    loaded = load_graph(dump_graph(gm))
    meta = next(n for n in loaded.graph.nodes if n.op == "call_function").meta
    for key in ("seq_nr", "stack_trace", "partitioner_tag", "recompute", "ac_graph_id", "custom", "original_aten"):
        assert meta[key] == node.meta[key]
    assert meta["nn_module_stack"] == {"L__self__": ("", "torch.nn.modules.linear.Linear")}


def symbolic():
    def fn(x, y):
        rows = x.shape[0] * 2 + torch.sym_min(x.shape[1], y.shape[1]) // 3
        return torch.cat([x, x]).reshape(-1, x.shape[1]).sum(1) * rows, y.new_zeros(rows)

    return traced(fn, torch.randn(5, 7), torch.randn(5, 9), mode="symbolic")


def test_symbolic_sizes_come_back_by_name_in_the_original_shape_environment():
    gm = symbolic()
    mode = next(iter(gm.graph.nodes)).meta["val"].fake_mode
    guards = len(mode.shape_env.guards)
    loaded = assert_round_trip(gm, fake_mode=mode)
    for before, after in zip(gm.graph.nodes, loaded.graph.nodes, strict=True):
        if isinstance(before.meta.get("val"), torch.Tensor):
            pairs = zip(before.meta["val"].shape, after.meta["val"].shape, strict=True)
            assert all(str(a) == str(b) for a, b in pairs)
            assert all(a.node.expr == b.node.expr for a, b in pairs if isinstance(a, torch.SymInt))
    assert len(mode.shape_env.guards) == guards


def test_views_with_symbolic_sizes_are_read_back_without_new_conditions_on_them():
    def fn(x, y):
        return x[:, 1:] + 1, x[::2], y[:, :, ::2].transpose(0, 1), x.unsqueeze(1).expand(-1, 3, -1)

    gm = traced(fn, torch.randn(5, 7), torch.randn(4, 5, 6), mode="symbolic")
    mode = next(iter(gm.graph.nodes)).meta["val"].fake_mode
    guards = len(mode.shape_env.guards)
    assert_round_trip(gm, fake_mode=mode)
    assert len(mode.shape_env.guards) == guards


def test_symbolic_sizes_come_back_with_hints_and_ranges_in_a_fresh_environment():
    gm = symbolic()
    loaded = assert_round_trip(gm)
    old, new = next(iter(gm.graph.nodes)).meta["val"], next(iter(loaded.graph.nodes)).meta["val"]
    assert new.fake_mode is not old.fake_mode
    assert str(new.shape) == str(old.shape)
    assert [s.node.hint for s in new.shape] == [5, 7]
    symbol = new.shape[0].node.expr
    env = new.fake_mode.shape_env
    assert env.var_to_range[symbol] == old.fake_mode.shape_env.var_to_range[old.shape[0].node.expr]
    assert bool(new.shape[0] < 1000)  # the new environment can guard on it
    inputs = torch.randn(4, 3), torch.randn(4, 8)
    for got, wanted in zip(loaded(*inputs), gm(*inputs), strict=True):
        assert torch.equal(got, wanted)


def test_higher_order_ops_bring_their_submodules():
    def fn(x):
        return torch.cond(x.sum() > 0, lambda t: t.sin() + 1, lambda t: t.cos(), (x,))

    gm = traced(fn, torch.randn(3), mode="real")
    loaded = assert_round_trip(gm)
    for x in (torch.ones(3), -torch.ones(3)):
        assert torch.equal(loaded(x), gm(x))


def test_small_constants_travel_and_big_ones_must_be_passed():
    small, big = torch.arange(6).reshape(2, 3) % 2 == 0, torch.randn(200, 200)
    gm = traced(lambda x: torch.where(small, x, 0.0).sum() + big, torch.randn(2, 3), mode="real")
    text = dump_graph(gm)
    with pytest.raises(GraphFormatError, match="too big to travel"):
        load_graph(text)
    loaded = load_graph(text, constants={k: v for k, v in graph_constants(gm).items() if v.numel() > 6})
    x = torch.randn(2, 3)
    assert torch.equal(loaded(x), gm(x))


def test_an_unregistered_python_function_is_refused_by_name():
    def helper(x):
        return x

    graph = torch.fx.Graph()
    graph.output(graph.call_function(helper, (graph.placeholder("x"),)))
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(UnserializableGraphError, match="helper") as caught:
        dump_graph(gm)
    assert caught.value.node == "helper"
    text = dump_graph(gm, extra_targets={"helper": helper})
    with pytest.raises(GraphFormatError, match="helper"):
        load_graph(text)
    assert load_graph(text, extra_targets={"helper": helper})(3) == 3


def test_objects_without_text_are_refused():
    graph = torch.fx.Graph()
    drawn = graph.call_function(torch.ops.aten.rand.default, ([2],))
    graph.output(drawn)
    gm = torch.fx.GraphModule(torch.nn.Module(), graph)
    drawn.kwargs = {"generator": torch.Generator()}
    with pytest.raises(UnserializableGraphError, match="Generator"):
        dump_graph(gm)
    gm = traced(lambda x: x + 1, torch.randn(2))
    next(iter(gm.graph.nodes)).meta["val"] = torch.eye(2).to_sparse()
    with pytest.raises(UnserializableGraphError, match="sparse"):
        dump_graph(gm)


def test_an_argument_without_a_description_is_written_if_nothing_reads_it():
    gm = traced(lambda x, other: x + 1, torch.randn(2), torch.randn(2))
    other = list(gm.graph.nodes)[1]
    other.meta["val"] = object()
    loaded = assert_round_trip(gm)
    assert "val" not in list(loaded.graph.nodes)[1].meta and loaded(2, object()) == 3
    gm = traced(lambda x, other: x + other, torch.randn(2), torch.randn(2))
    list(gm.graph.nodes)[1].meta["val"] = object()
    with pytest.raises(UnserializableGraphError, match="object"):
        dump_graph(gm)


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.eval", "aten.no_such_op.default", "higher_order.nothing", "aten.mm"]
)
def test_a_target_outside_the_tables_is_refused_on_load(name):
    document = json.loads(dump_graph(traced(lambda x: x + 1, torch.randn(2))))
    document["graph"]["nodes"][1]["target"] = name
    with pytest.raises(GraphFormatError):
        load_graph(json.dumps(document))


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"format": "aotkit-graph", "version": 99}'])
def test_a_text_of_another_format_is_refused(text):
    with pytest.raises(GraphFormatError):
        load_graph(text)


def test_a_process_local_graph_is_refused_in_another_process():
    document = json.loads(dump_graph(traced(lambda x: x + 1, torch.randn(2))))
    document["process"] = "another"
    with pytest.raises(GraphFormatError, match="Triton"):
        load_graph(json.dumps(document))


def test_work_grows_with_the_number_of_nodes_and_not_faster():
    def chain(length):
        def fn(x):
            for _ in range(length):
                x = x * 2
            return x

        return traced(fn, torch.randn(3))

    def calls(gm):
        seen = 0

        def count(frame, event, arg):
            nonlocal seen
            seen += event == "call"

        sys.setprofile(count)
        try:
            load_graph(dump_graph(gm))
        finally:
            sys.setprofile(None)
        return seen

    assert calls(chain(800)) < 8 * calls(chain(100))
