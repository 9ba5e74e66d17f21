"""Small graphs whose text, whose merged form or whose carried values must come out exactly so."""

import operator

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils.checkpoint import CheckpointPolicy

from aotkit_partition import dump_graph, load_graph, partition
from aotkit_partition._torch_compat import backed_hints
from aotkit_partition.activation_offload import offload_activations
from aotkit_partition.command import main
from aotkit_partition.errors import GraphFormatError, InvalidOptionError, UnserializableGraphError
from aotkit_partition.graph_text import graph_constants
from aotkit_partition.graph_text.symbols import SymbolReader
from aotkit_partition.measure import measure_peak
from aotkit_partition.one_graph import merge, recompute_by_tags, split_backward

aten = torch.ops.aten
RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE


class Builder:
    """A graph by hand; every value is 4 x 4 floats unless told otherwise."""

    def __init__(self, *inputs):
        self.graph = torch.fx.Graph()
        self.root = nn.Module()
        self.inputs = [self.graph.placeholder(name) for name in inputs]
        for node in self.inputs:
            node.meta["val"] = torch.empty(4, 4, device="meta")

    def call(self, target, *args, val=None, **meta):
        short = target.__name__.split(".")[0]
        node = self.graph.create_node("call_function", target, args, {}, name=short)
        node.meta["val"] = torch.empty(4, 4, device="meta") if val is None else val
        node.meta.update(meta)
        return node

    def constant(self, name, value):
        self.root.register_buffer(name, value)
        node = self.graph.get_attr(name)
        node.meta["val"] = value.to("meta")
        return node

    def branch(self, name, function):
        self.root.add_module(name, torch.fx.symbolic_trace(function))
        return self.graph.get_attr(name)

    def module(self, *outputs):
        self.graph.output(list(outputs))
        return torch.fx.GraphModule(self.root, self.graph)


def targets(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


# Text


def call_with(argument):
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.output(graph.call_function(aten.add.Tensor, (x, argument)))
    return torch.fx.GraphModule(nn.Module(), graph)


def call_of(gm):
    (node,) = [node for node in gm.graph.nodes if node.op == "call_function"]
    return node


def test_a_packet_of_operators_survives_and_a_class_is_refused():
    graph = torch.fx.Graph()
    graph.output(graph.call_function(aten.sin, (graph.placeholder("x"),)))
    gm = torch.fx.GraphModule(nn.Module(), graph)
    assert call_of(load_graph(dump_graph(gm))).target is aten.sin
    graph = torch.fx.Graph()
    graph.output(graph.call_function(dict, ()))
    with pytest.raises(UnserializableGraphError, match=r"call target builtins\.dict"):
        dump_graph(torch.fx.GraphModule(nn.Module(), graph))


@pytest.mark.parametrize("elements", [0, 1, 16 * 1024, 16 * 1024 + 1])
def test_constants_of_up_to_64_kib_travel_inside_the_text(elements):
    build = Builder("x")
    constant = build.constant("constant", torch.arange(elements, dtype=torch.float32))
    gm = build.module(build.call(aten.mul.Tensor, constant, 2.0))
    text = dump_graph(gm)
    if elements > 16 * 1024:
        with pytest.raises(GraphFormatError, match="too big"):
            load_graph(text)
        loaded = load_graph(text, constants=graph_constants(gm))
    else:
        loaded = load_graph(text)
    assert torch.equal(loaded(torch.ones(()))[0], torch.arange(elements, dtype=torch.float32) * 2)


@pytest.mark.parametrize("depth", range(8))
def test_metadata_survives_up_to_five_levels_deep(depth):
    value = 1
    for level in range(depth):
        value = [value] if level % 2 else {"a": value}
    gm = call_with(2)
    node = call_of(gm)
    node.meta["custom"] = value
    node.meta["other"], node.meta["recompute"] = object(), None
    loaded = call_of(load_graph(dump_graph(gm)))
    assert "other" not in loaded.meta and "recompute" not in loaded.meta
    if depth <= 5:
        assert loaded.meta["custom"] == value
    else:
        assert "custom" not in loaded.meta


def test_nested_values_keep_their_kind_of_container():
    gm = call_with(2)
    node = call_of(gm)
    node.meta["val"] = ([1, 2.5, None], (True, "text"), torch.Size([3]))
    loaded = call_of(load_graph(dump_graph(gm)))
    assert loaded.meta["val"] == ([1, 2.5, None], (True, "text"), (3,))
    assert [type(item) for item in loaded.meta["val"]] == [list, tuple, tuple]


@pytest.mark.parametrize("hint", [7, 2.5, ["float", (0.1).hex()]])
def test_the_example_value_of_a_symbol_is_read_exactly(hint):
    env = ShapeEnv()
    SymbolReader({"z0": {"assumptions": {}, "range": None, "hint": hint}}, [], FakeTensorMode(shape_env=env))
    ((symbol, value),) = backed_hints(env).items()
    assert (symbol.name, float(value)) == ("z0", 0.1 if isinstance(hint, list) else hint)
    assert value.is_Integer == isinstance(hint, int)


# Both graphs as one, one as two


def test_a_merged_graph_holds_the_constants_of_both_sides():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    first = build.constant("first", torch.full((4, 4), 2.0))
    second = build.constant("second", torch.full((4, 4), 3.0))
    out = build.call(aten.sin.default, build.call(aten.mul.Tensor, x, first))
    grad = build.call(aten.mul.Tensor, build.call(aten.mul.Tensor, tangent, out), second)
    result = partition(build.module(out, grad), 1)
    merged = merge(result)
    value, ones = torch.randn(4, 4), torch.ones(4, 4)
    found = merged(value, ones)
    torch.testing.assert_close(found[0], (value * 2).sin())
    torch.testing.assert_close(found[1], (value * 2).sin() * 3)
    assert [node.op for node in merged.graph.nodes][:2] == ["placeholder", "placeholder"]
    assert len(targets(merged)) == len(targets(result.forward)) + len(targets(result.backward))


def tagged(drawn):
    """A region of an op, a view and an item, which the backward reads; ``drawn`` is what the item is of."""
    build = Builder("x")
    (x,) = build.inputs
    region = {"recompute": RECOMPUTE}
    x.meta.update(region)
    pair = build.call(*drawn(build, x), val=(x.meta["val"], x.meta["val"]), **region)
    item = build.call(operator.getitem, pair, 0, **region)
    view = build.call(aten.t.default, item, **region)
    sine = build.call(aten.sin.default, view, **region)
    loss = build.call(aten.mul.Tensor, sine, sine)
    grad = build.call(aten.mul.Tensor, loss, sine, partitioner_tag="is_backward")
    return build.module(loss, build.call(aten.mul.Tensor, grad, view, partitioner_tag="is_backward"))


@pytest.mark.covers("F3.59")
def test_a_random_op_in_a_region_without_tangents_runs_once_and_the_rest_twice():
    random = recompute_by_tags(tagged(lambda build, x: (aten.native_dropout.default, x, 0.5, True)))
    assert targets(random).count("aten.native_dropout.default") == 1
    assert targets(random).count("<built-in function getitem>") == 1
    assert targets(random).count("aten.t.default") == targets(random).count("aten.sin.default") == 2
    plain = recompute_by_tags(tagged(lambda build, x: (aten.sort.default, x)))
    assert targets(plain).count("aten.sort.default") == targets(plain).count("<built-in function getitem>") == 2
    torch.manual_seed(0)
    value = torch.randn(4, 4)
    loss, grad = random(value)
    shown = torch.where(loss == 0, 0.0, loss.sqrt())
    assert torch.equal(loss == 0, grad == 0) and shown.abs().max() > 0


@pytest.mark.covers("F3.59")
def test_a_branch_that_draws_runs_once():
    def drawn(build, x):
        one = build.branch("one", lambda value: (aten.rand_like.default(value), aten.cos.default(value)))
        return torch.ops.higher_order.cond, True, one, one, (x,)

    assert targets(recompute_by_tags(tagged(drawn))).count("cond") == 1


@pytest.mark.covers("F3.51")
def test_a_branch_that_draws_runs_with_the_first_gradients_even_if_none_needs_it():
    build = Builder("saved", "tangents_1")
    saved, tangent = build.inputs
    one = build.branch("one", lambda value: (aten.rand_like.default(value),))
    build.call(torch.ops.higher_order.cond, True, one, one, (saved,), val=(saved.meta["val"],))
    first = build.call(aten.sin.default, tangent)
    second = build.call(aten.cos.default, saved)
    backward = build.module(first, second)
    now, later = split_backward(backward, [0])
    assert targets(now) == ["cond", "aten.sin.default"] and targets(later) == ["aten.cos.default"]
    for wrong in ([2], [-1], [0, 7]):
        with pytest.raises(InvalidOptionError, match="returns 2 gradients"):
            split_backward(backward, wrong)


@pytest.mark.covers("F3.51")
def test_writes_and_checks_of_the_backward_happen_with_the_first_gradients():
    build = Builder("saved", "buffer", "tangents_1")
    saved, buffer, tangent = build.inputs
    build.call(aten.copy_.default, buffer, build.call(aten.neg.default, saved))
    build.call(aten._assert_tensor_metadata.default, tangent, val=False)
    backward = build.module(build.call(aten.sin.default, tangent), build.call(aten.cos.default, saved))
    now, later = split_backward(backward, [1])
    checked = "aten._assert_tensor_metadata.default"
    assert targets(now) == ["aten.neg.default", "aten.copy_.default", checked, "aten.cos.default"]
    assert targets(later) == ["aten.sin.default"]


def test_the_command_answers_a_refusal_with_one(tmp_path, capsys):
    (tmp_path / "graph.json").write_text("{}")
    assert main([str(tmp_path / "graph.json")]) == 1
    assert capsys.readouterr().err.startswith("aotkit_partition: ")


# Carried values


def lead_of(bytes_per_second):
    """How many ops of the backward lie between the return of the first product and its use, the constant's included."""
    build = Builder("primals_1", "tangents_1")
    x, grad = build.inputs
    product = build.call(aten.mm.default, x, x)
    out = build.call(aten.sin.default, product)
    for _ in range(3):
        grad = build.call(aten.neg.default, grad)
    constant = build.constant("constant", torch.ones(4, 4))
    grad = build.call(aten.mul.Tensor, grad, constant)
    grad = build.call(aten.neg.default, grad)
    grad = build.call(aten.mul.Tensor, grad, product)
    result = partition(build.module(out, grad), 1)
    moved = offload_activations(result, device="meta", names=["mm"], bytes_per_second=bytes_per_second)
    body = [node for node in moved.backward.graph.nodes if node.op not in ("placeholder", "output")]
    back = next(at for at, node in enumerate(body) if "_to_copy" in str(node.target))
    use = next(at for at, node in enumerate(body) if body[back] in node.all_input_nodes)
    return [node.name for node in body[back + 1 : use]]


@pytest.mark.covers("F3.47")
def test_an_offloaded_value_comes_back_as_early_as_its_transfer_takes():
    """64 bytes; by the roofline a negation moves 128 bytes at 1e11 a second, a product of two 192."""
    ops = ["neg", "neg_1", "neg_2", "constant", "mul", "neg_3"]
    assert lead_of(float("inf")) == []
    assert lead_of(64 / 1.2e-9) == ops[-1:]
    assert lead_of(64 / 3.1e-9) == ops[-2:]
    assert lead_of(64 / 4.0e-9) == ops[-4:], "a constant takes no time"
    assert lead_of(64 / 1.0) == ops


def test_a_measured_step_uses_tangents_of_ones_unless_told_otherwise():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    tangent.meta["val"] = torch.empty(4, 4)
    out = build.call(aten.sin.default, x)
    result = partition(build.module(out, build.call(aten.mul.Tensor, tangent, build.call(aten.cos.default, x))), 1)
    value = torch.randn(4, 4)
    found = measure_peak(result.forward, result.backward, 1, [value])
    torch.testing.assert_close(found.gradients[0], value.cos())
    twice = measure_peak(result.forward, result.backward, 1, [value], lambda outputs: [2 * torch.ones(4, 4)])
    torch.testing.assert_close(twice.gradients[0], 2 * value.cos())
    assert found.bytes == 2 * 64 + 64 or found.bytes == result.report.peak_bytes
