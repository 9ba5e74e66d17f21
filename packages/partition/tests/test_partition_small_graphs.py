"""Graphs of a few ops, built by hand, with the exact plan, price, reason or memory that must come out."""

import json
import operator
import random

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

from aotkit_partition import Partition, PartitionError, PartitionOptions, partition
from aotkit_partition.budget import lenient
from aotkit_partition.cost import distances_from_backward
from aotkit_partition.errors import InfeasiblePartitionError, InvalidJointGraphError
from aotkit_partition.exact import solve_exactly
from aotkit_partition.joint import analyze_joint
from aotkit_partition.knapsack import SOLVERS, checked_solution
from aotkit_partition.min_cut import make_cut_problem, solve_min_cut
from aotkit_partition.op_facts import op_facts
from aotkit_partition.peak import PeakSearch
from aotkit_partition.runtime_estimate import FlopsEstimator
from aotkit_partition.timeline import MemoryTimeline, Program, Step, simulate

aten = torch.ops.aten
RECOMPUTE = CheckpointPolicy.MUST_RECOMPUTE


class Builder:
    """A joint graph by hand; every value is 4 x 4 floats unless told otherwise."""

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

    def joint(self, *outputs, root=None):
        self.graph.output(list(outputs))
        return torch.fx.GraphModule(root or nn.Module(), self.graph)


def targets(module):
    return [str(node.target) for node in module.graph.nodes if node.op == "call_function"]


def bans(result):
    return {ban.name: ban.reason for ban in result.report.bans}


def activations(result):
    return [value.name for value in result.report.saved if not value.is_input]


def chain(length, target=aten.sin.default):
    """A chain of ``length`` ops, with a backward that reads each of their arguments."""
    build = Builder("primals_1", "tangents_1")
    x, grad = build.inputs
    values = [x]
    for _ in range(length):
        values.append(build.call(target, values[-1]))
    for value in reversed(values[:-1]):
        grad = build.call(aten.mul.Tensor, grad, value)
    return build.joint(values[-1], grad)


# Memory over time


def random_program(seed):
    """Steps that read up to three values and make new memory or look at what they read."""
    rng = random.Random(seed)
    sizes = {}

    def steps(prefix, known, count):
        made = []
        for number in range(count):
            read = rng.sample(known, min(len(known), rng.randint(0, 3)))
            storages = []
            for part in range(rng.choice([1, 1, 1, 2])):
                shared = [piece for step in read for piece in step.storages]
                if shared and rng.random() < 0.3:
                    storages.append(rng.choice(shared))
                else:
                    sizes[prefix, number, part] = rng.randint(0, 50)
                    storages.append(((prefix, number, part), sizes[prefix, number, part]))
            made.append(Step((prefix, number), f"{prefix}{number}", [step.key for step in read], storages))
            known = [*known, made[-1]]
        return made

    inputs = steps("in", [], 2)
    forward = steps("fw", inputs, rng.randint(1, 8))
    pool = [*inputs, *forward]
    saved = rng.sample(pool, rng.randint(0, min(4, len(pool))))
    tangents = steps("tg", [], 2)
    backward = steps("bw", [*saved, *tangents], rng.randint(1, 8))
    outputs = rng.sample(forward, 1)
    gradients = rng.sample([*backward, *tangents], 2)
    program = Program(
        inputs, forward, [s.key for s in outputs], [(s.key, s.key) for s in saved], tangents, backward,
        [s.key for s in gradients],
    )  # fmt: skip
    return program, {step.key: step for step in (*pool, *tangents, *backward)}


def kinds_and_spans(program, steps):
    """For each piece of memory (name of its step, bytes, first, last, kind), by looking at every use of it."""
    loss = len(program.forward)
    end = loss + len(program.backward)
    time = {step.key: at for at, step in enumerate(program.forward)}
    time |= {step.key: loss for step in program.tangents}
    time |= {step.key: loss + 1 + at for at, step in enumerate(program.backward)}
    given = {piece for step in program.forward_inputs for piece, _ in step.storages}
    born, uses, size, maker = {}, {}, {}, {}
    for step in (*program.forward, *program.tangents, *program.backward):
        for piece, number in step.storages:
            if piece not in given:
                born.setdefault(piece, time[step.key])
                maker.setdefault(piece, step.name)
                size[piece] = number
        for key in step.inputs:
            for piece, _ in steps[key].storages:
                uses.setdefault(piece, []).append(time[step.key])

    def held(keys):
        return {piece for key in keys for piece, _ in steps[key].storages}

    outputs, gradients, saved = held(program.outputs), held(program.gradients), held(k for k, _ in program.saved)
    rows = set()
    for piece, first in born.items():
        last = max([first, *uses.get(piece, [])])
        if piece in saved:
            last = max(last, loss)
        if piece in outputs | gradients:
            last = end
        kind = "activation" if first < loss else "tangent" if first == loss else "temporary"
        kind = "saved" if piece in saved else kind
        kind = "gradient" if piece in gradients else kind
        kind = "output" if piece in outputs else kind
        if size[piece]:
            rows.add((maker[piece], size[piece], first, last, kind))
    return rows


@pytest.mark.covers("F3.55")
def test_memory_over_time_is_what_looking_at_every_use_gives():
    kinds = set()
    for seed in range(200):
        program, steps = random_program(seed)
        timeline = simulate(program)
        found = [(a.name, a.bytes, a.first, a.last, a.kind) for a in timeline.allocations]
        wanted = kinds_and_spans(program, steps)
        assert set(found) == wanted and timeline.loss == len(program.forward)
        live = [sum(row[1] for row in found if row[2] <= at <= row[3]) for at in range(len(timeline.steps))]
        assert list(timeline.live_bytes) == live and timeline.peak_bytes == max(live)
        kinds |= {row[4] for row in wanted}
    assert kinds == {"output", "saved", "activation", "gradient", "tangent", "temporary"}


def test_a_step_without_any_memory_has_a_peak_of_nothing():
    empty = MemoryTimeline((), 0, ())
    assert (empty.peak_bytes, empty.peak_step, empty.live_bytes) == (0, 0, ())


# Costs and bans


@pytest.mark.covers("F3.10", "F3.19")
def test_distances_count_the_steps_to_the_nearest_value_of_the_backward():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    one = build.call(aten.sin.default, x)
    two = build.call(aten.cos.default, one)
    three = build.call(aten.tanh.default, two)
    four = build.call(aten.neg.default, three)
    joint = build.joint(four, build.call(aten.mul.Tensor, tangent, three))
    analysed = analyze_joint(joint, 1)
    found = {node.name: number for node, number in zip(analysed.nodes, distances_from_backward(analysed), strict=True)}
    assert [found[node.name] for node in (x, one, two, three, four)] == [4, 3, 2, 1, 1]
    assert found[tangent.name] == found["mul"] == 0
    near = bans(partition(joint, 1, PartitionOptions(max_distance=1)))
    assert near[one.name] == "3 steps away from the backward, more than 1"
    assert near[two.name] == "2 steps away from the backward, more than 1"
    assert three.name not in near and four.name not in near


@pytest.mark.covers("F3.22")
@pytest.mark.parametrize("limit", [1, 3, 5])
def test_of_a_long_chain_every_nth_op_is_kept_and_counting_begins_anew_behind_it(limit):
    result = partition(chain(13), 1, PartitionOptions(max_fusible_chain=limit))
    kept = [ban.name for ban in result.report.bans if "of a chain" in ban.reason]
    names = ["sin", *(f"sin_{number}" for number in range(1, 13))]
    assert kept == names[limit :: limit + 1]
    assert {ban.reason for ban in result.report.bans} == {f"the {limit}th op of a chain that would be recomputed whole"}


@pytest.mark.covers("F3.12")
def test_inputs_are_free_unless_only_the_static_ones_are():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    x.meta["val"] = torch.empty(64, 64, device="meta")
    least = build.call(aten.amax.default, x, [1], val=torch.empty(64, device="meta"))
    out = build.call(aten.sin.default, least, val=torch.empty(64, device="meta"))
    joint = build.joint(out, build.call(aten.mul.Tensor, tangent, least, val=torch.empty(64, device="meta")))
    free = {"ban_reductions": False}
    assert partition(joint, 1, PartitionOptions(**free)).saved_names == ("primals_1",)
    assert partition(joint, 1, PartitionOptions(**free, inputs_are_free=False)).saved_names == ("amax",)
    static = PartitionOptions(**free, inputs_are_free=False, static_inputs=(0,))
    assert partition(joint, 1, static).saved_names == ("primals_1",)


def test_an_op_that_is_not_known_to_be_cheap_is_recomputed_only_without_the_list():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    value = build.call(aten.cummax.default, x, 0, val=(x.meta["val"], x.meta["val"]))
    unknown = build.call(aten._cdist_backward.default, x, x, 1.0, x)
    cheap = build.call(aten.cos.default, unknown)
    joint = build.joint(value, cheap, build.call(aten.mul.Tensor, tangent, unknown))
    strict = partition(joint, 2)
    assert bans(strict)[unknown.name] == "not known to be cheap" and activations(strict) == [unknown.name]
    assert cheap.name not in bans(strict)
    loose = partition(joint, 2, PartitionOptions(allowlist_only=False, ban_materialized_in_backward=False))
    assert unknown.name not in bans(loose) and activations(loose) == []


def test_what_feeds_a_write_of_the_backward_is_banned_like_what_feeds_any_op_of_it():
    build = Builder("primals_1", "primals_2", "tangents_1")
    x, buffer, tangent = build.inputs
    sine = build.call(aten.sin.default, x)
    out = build.call(aten.cos.default, sine)
    product = build.call(aten.mm.default, sine, tangent)
    build.call(aten.copy_.default, buffer, product)
    result = partition(build.joint(out, None, None), 1)
    assert bans(result)[sine.name] == f"the backward would write it to memory for '{product.name}'"
    assert activations(result) == [sine.name]


def test_an_input_that_the_backward_writes_to_cannot_be_needed_as_it_was_before():
    build = Builder("primals_1", "primals_2", "primals_3", "tangents_1")
    x, buffer, other, tangent = build.inputs
    total = build.call(aten.add.Tensor, buffer, x)
    build.call(aten.copy_.default, buffer, total)
    build.call(aten.copy_.default, other, buffer, partitioner_tag="must_be_in_backward")
    build.call(aten.copy_.default, buffer, build.call(aten.mul.Tensor, tangent, tangent))
    with pytest.raises(InvalidJointGraphError, match=r"'primals_2' is overwritten.*both read .'copy__1'"):
        partition(build.joint(total, None, None, None), 1)


def test_a_value_that_is_neither_tensor_nor_number_says_so_where_it_would_have_to_be_saved():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    made = build.call(aten._fused_dropout.default, x, 0.5, val=torch.Generator())
    joint = build.joint(build.call(aten.sin.default, x), build.call(aten.mul.Tensor, tangent, made))
    with pytest.raises(InfeasiblePartitionError, match="its value is a Generator, not a tensor") as caught:
        partition(joint, 1)
    assert caught.value.chain == (made.name,)


def test_an_argument_written_under_its_keyword_counts_as_written():
    build = Builder("primals_1", "primals_2", "tangents_1")
    x, buffer, tangent = build.inputs
    before = build.call(aten.cos.default, buffer)
    build.call(aten.sin.out, x, kwargs={"out": buffer})
    result = partition(build.joint(before, None, build.call(aten.mul.Tensor, tangent, buffer)), 1)
    assert bans(result)["sin"] == "writes to its argument"
    assert [row.is_input for row in result.report.saved if row.name == "primals_2"] == [False], "saved as a copy"
    given, state = torch.randn(4, 4), torch.randn(4, 4)
    old = state.clone()
    out, *saved = result.forward(given, state)
    torch.testing.assert_close(state, given.sin())
    torch.testing.assert_close(out, old.cos())
    assert len(saved) == 1


def test_metadata_under_the_older_key_serves_as_well():
    joint = chain(3)
    for node in joint.graph.nodes:
        if "val" in node.meta:
            node.meta["example_value"] = node.meta.pop("val")
    result = partition(joint, 1, PartitionOptions(details="decisions"))
    assert targets(result.forward) == targets(partition(chain(3), 1).forward)


def test_a_number_that_tracing_fixed_may_be_a_gradient():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    rows = build.call(aten.sym_size.int, x, 0, val=4)
    result = partition(build.joint(build.call(aten.sin.default, x), rows, build.call(aten.neg.default, tangent)), 1)
    assert result.saved_names == () and result.backward(torch.ones(4, 4))[0] == 4
    assert result.report.timeline.steps == ("sin", "loss", "neg")


# The report


def test_the_report_counts_the_ops_of_both_graphs():
    root = nn.Module()
    root.register_buffer("constant", torch.ones(4, 4))
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    constant = build.graph.get_attr("constant")
    constant.meta["val"] = torch.empty(4, 4, device="meta")
    sine = build.call(aten.sin.default, build.call(aten.add.Tensor, x, constant))
    grad = build.call(aten.mul.Tensor, build.call(aten.mul.Tensor, tangent, sine), constant)
    report = partition(build.joint(build.call(aten.exp.default, sine), grad, root=root), 1).report
    assert (report.num_forward_ops, report.num_backward_ops) == (3, 4)
    assert [op.name for op in report.recomputed] == ["add", "sin"] and report.strategy == "min-cut"


def test_partitions_are_equal_if_they_say_the_same():
    first, again, other = partition(chain(2), 1), partition(chain(2), 1), partition(chain(3), 1)
    assert first == again and hash(first) == hash(again)
    assert first != other and first != "a partition"
    assert Partition.from_json(json.dumps(json.loads(first.to_json()))) == first


@pytest.mark.parametrize("outputs", ["none", "nested", "nested beside a flat one"])
def test_a_graph_without_a_flat_list_of_outputs_is_refused(outputs):
    graph = torch.fx.Graph()
    x = graph.placeholder("primals_1")
    x.meta["val"] = torch.empty(4)
    graph.output([[x, x]] if outputs == "nested" else [x, (x, x)])
    module = torch.fx.GraphModule(nn.Module(), graph)
    if outputs == "none":
        module.graph.erase_node(module.graph.find_nodes(op="output")[0])
    with pytest.raises(InvalidJointGraphError, match="no output node" if outputs == "none" else "nested outputs"):
        partition(module, 0)


# Solvers


@pytest.mark.covers("F3.39")
@pytest.mark.parametrize("name", SOLVERS)
def test_a_solver_cares_for_no_unit_and_keeps_what_weighs_nothing(name):
    solver = SOLVERS[name]
    assert solver([0, 3], [1.0, 1.0], 0) == (0,)
    assert solver([3], [1.0], -1) == solver([], [], 5) == ()
    weights, gains = [3, 4, 5, 6], [3.0, 4.5, 5.5, 6.0]
    wanted = solver(weights, gains, 9)
    assert sum(gains[item] for item in wanted) == 10.0
    for unit in (1e-12, 1e-6, 1e6):
        assert solver(weights, [gain * unit for gain in gains], 9) == wanted


@pytest.mark.parametrize("answer", [(2,), (-1,), (0, 0), ("0",)])
def test_an_answer_that_names_no_item_is_refused(answer):
    with pytest.raises(PartitionError, match="distinct positions below 2"):
        checked_solution(lambda weights, gains, capacity: answer, [1, 2], [1.0, 1.0], 5)
    assert checked_solution(lambda weights, gains, capacity: [1, 0], [1, 2], [1.0, 1.0], 3) == (1, 0)


@pytest.mark.covers("F3.56")
@pytest.mark.parametrize("rows", [1, 10**6, 10**10])
def test_the_exact_strategy_finds_the_cut_for_values_of_any_size(rows):
    rng = random.Random(rows)
    for _ in range(6):
        build = Builder("primals_1", "tangents_1")
        x, tangent = build.inputs
        values = [x]
        for _ in range(8):
            read = rng.sample(values, min(2, len(values)))
            values.append(build.call(aten.cat.default, read, val=torch.empty(rows * rng.randint(1, 9), device="meta")))
        grads = [build.call(aten.mul.Tensor, tangent, value) for value in rng.sample(values[1:], 4)]
        analysed = analyze_joint(build.joint(values[-1], *grads), 1)
        for options in (PartitionOptions(), PartitionOptions(inputs_are_free=False), lenient(PartitionOptions())):
            problem = make_cut_problem(analysed, options)
            assert solve_exactly(problem).cost == pytest.approx(solve_min_cut(problem).cost, rel=1e-6)


def test_a_strategy_names_itself_and_its_price():
    exact = partition(chain(3), 1, PartitionOptions(strategy="exact"))
    cut = partition(chain(3), 1)
    assert exact.report.strategy == "exact" and exact.saved_names == cut.saved_names == ("primals_1",)
    assert exact.report.cut_cost == cut.report.cut_cost == 8.0
    lowest = partition(chain(3), 1, PartitionOptions(strategy="min-peak")).report.strategy
    within = partition(chain(3), 1, PartitionOptions(strategy="min-peak", memory_budget=1.0)).report.strategy
    assert lowest.startswith("min-peak (") and within.startswith("min-peak within 1.0 of the default cut's (")


@pytest.mark.covers("F3.40")
def test_arithmetic_of_an_op_with_several_results_counts_the_elements_of_all():
    build = Builder("primals_1")
    pair = build.call(aten.sort.default, *build.inputs, val=(torch.empty(4, 4), [torch.empty(8), None]))
    assert FlopsEstimator().seconds(pair) == pytest.approx(24e-12)


# Plans for the lowest peak


def products(length):
    """A chain of products of which the default cut saves each."""
    build = Builder("primals_1", "primals_2", "tangents_1")
    x, weight, grad = build.inputs
    values = [x]
    for _ in range(length):
        values.append(build.call(aten.mm.default, values[-1], weight))
    for value in reversed(values[:-1]):
        grad = build.call(aten.mul.Tensor, grad, value)
    return build.joint(values[-1], grad, None)


def search(joint):
    analysed = analyze_joint(joint, 1)
    default = make_cut_problem(analysed, PartitionOptions())
    found = PeakSearch(analysed, default, solve_min_cut(default), FlopsEstimator())
    return analysed, found, found.run()


@pytest.mark.covers("F3.55")
def test_checkpoints_of_an_even_chain_are_as_many_as_said_and_evenly_spread():
    analysed, found, _ = search(products(24))
    products_at = [index for index, node in enumerate(analysed.nodes) if node.target is aten.mm.default]
    plans = {choice.label: choice.saved for choice in found.choices if choice.label.endswith(("checkpoint", "points"))}
    assert list(plans)[:6] == [f"{count} checkpoint{'s' * (count > 1)}" for count in (1, 2, 3, 4, 6, 8)]
    for label, saved in plans.items():
        count = int(label.split()[0])
        places = [products_at.index(index) + 1 for index in saved if index in products_at]
        if count > 12:
            continue  # stretches of one product each
        assert len(places) == count and set(saved) - set(products_at) <= {0, 1}, "besides them inputs only"
        gaps = [after - before for before, after in zip([0, *places], [*places, 24], strict=True)]
        assert max(gaps) <= 2 * 24 / (count + 1) + 1, "each lies in a stretch of its own"


@pytest.mark.covers("F3.55")
def test_the_five_lowest_plans_are_filled_up_in_twelve_steps():
    _, found, front = search(products(24))
    labels = [choice.label for choice in found.choices]
    assert labels[:3] == ["default cut", "no recomputation", "floor"]
    bases = [label for label in labels if " + " not in label and label not in labels[:2]]
    measured = sorted((c.peak_bytes, c.seconds, c.label) for c in found.choices if c.label in bases)
    filled = list(dict.fromkeys(label.partition(" + ")[0] for label in labels if " + " in label))
    assert filled == [label for _, _, label in measured[:5]]
    for base in filled:
        shares = [int(label.split(" + ")[1].removesuffix(" %")) for label in labels if label.startswith(f"{base} + ")]
        assert len(shares) <= 12 and shares == sorted(set(shares)) and shares[-1] == 100
        assert max(after - before for before, after in zip([0, *shares], shares, strict=False)) <= 100 / 12 + 6
    peaks = {choice.label: (choice.peak_bytes, choice.seconds) for choice in found.choices}
    assert all(not (p < c.peak_bytes and s < c.seconds) for c in front for p, s in peaks.values())
    assert front[0].peak_bytes == min(p for p, _ in peaks.values())
    assert front[-1].seconds == min(s for _, s in peaks.values())


# Operators


def library(schema):
    lib = torch.library.Library("aotkit_partition_facts", "FRAGMENT")
    name = lib.define(schema)
    return lib, getattr(torch.ops.aotkit_partition_facts, name.partition("::")[2] or name).default


def test_an_op_is_a_view_only_if_all_its_results_are():
    lib, both = library("both_views(Tensor(a) x, Tensor(b) y) -> (Tensor(a), Tensor(b))")
    with_copy = library("view_and_copy(Tensor(a) x) -> (Tensor(a), Tensor)")[1]
    writes = library("written_view(Tensor(a!) x) -> Tensor(a!)")[1]
    nothing = library("says_nothing(Tensor x) -> ()")[1]
    assert op_facts(both).is_view and not op_facts(with_copy).is_view
    assert not op_facts(writes).is_view and op_facts(writes).is_mutating
    assert op_facts(nothing).has_side_effects and not op_facts(nothing).is_mutating and lib is not None


def test_python_functions_are_known_by_what_they_do():
    assert op_facts(print).has_side_effects and op_facts(torch._check).has_side_effects
    assert not op_facts(torch.sin).has_side_effects
    assert not op_facts(torch.sin).is_symbolic and not op_facts(torch.sin).is_builtin
    assert op_facts(torch.sym_max).is_symbolic and op_facts(operator.add).is_symbolic and op_facts(max).is_symbolic


def branches(build, root, name, function):
    root.add_module(name, torch.fx.symbolic_trace(function))
    node = build.graph.get_attr(name)
    node.meta.clear()
    return node


@pytest.mark.covers("F3.33")
def test_a_higher_order_op_is_dropped_unless_it_draws_or_acts_however_deep_inside():
    def joint(inner, depth):
        root, build = nn.Module(), Builder("primals_1", "primals_2", "tangents_1")
        flag, x, tangent = build.inputs
        flag.meta["val"] = torch.empty((), dtype=torch.bool, device="meta")
        one = branches(build, root, "one", inner)
        if depth:
            outer = torch.fx.Graph()
            value = outer.placeholder("value")
            module = nn.Module()
            module.add_module("deep", root.one)
            deep = outer.get_attr("deep")
            outer.output(outer.call_function(torch.ops.higher_order.cond, (True, deep, deep, (value,))))
            root.one = torch.fx.GraphModule(module, outer)
        build.call(torch.ops.higher_order.cond, flag, one, one, (x,), val=(x.meta["val"],))
        return build.joint(build.call(aten.sin.default, x), None, build.call(aten.neg.default, tangent), root=root)

    for depth in (0, 1):
        plain = partition(joint(lambda v: (aten.cos.default(v),), depth), 1)
        drawn = partition(joint(lambda v: (aten.rand_like.default(v),), depth), 1)
        assert targets(plain.forward) == ["aten.sin.default"]
        assert targets(drawn.forward) == ["cond", "aten.sin.default"]


@pytest.mark.covers("F3.29")
def test_a_higher_order_op_counts_as_no_op_of_aten():
    root, build = nn.Module(), Builder("primals_1", "primals_2", "tangents_1")
    flag, x, tangent = build.inputs
    flag.meta["val"] = torch.empty((), dtype=torch.bool, device="meta")
    one = branches(build, root, "one", lambda v: (torch.cos(v),))
    pair = build.call(torch.ops.higher_order.cond, flag, one, one, (x,), val=(x.meta["val"],))
    item = build.call(operator.getitem, pair, 0)
    joint = build.joint(item, None, build.call(aten.mul.Tensor, tangent, item), root=root)
    assert bans(partition(joint, 1))[pair.name] == "not an ATen op: its cost is unknown"


def test_a_call_with_an_argument_that_cannot_be_hashed_is_not_merged():
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    one, two = (build.call(aten.add.Tensor, x, bytearray(b"1")) for _ in range(2))
    joint = build.joint(one, two, build.call(aten.neg.default, tangent))
    assert targets(partition(joint, 2).forward) == ["aten.add.Tensor"] * 2


# Checkpoint policies


@pytest.mark.covers("F3.30")
@pytest.mark.parametrize("view", [False, True])
def test_items_and_views_of_a_random_draw_keep_it_from_being_drawn_again(view):
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    if view:
        drawn = build.call(aten.rand_like.default, x, recompute=RECOMPUTE)
        item = build.call(aten.t.default, drawn, recompute=RECOMPUTE)
    else:
        drawn = build.call(aten.native_dropout.default, x, 0.5, True, val=(x.meta["val"],) * 2, recompute=RECOMPUTE)
        item = build.call(operator.getitem, drawn, 0, recompute=RECOMPUTE)
    out = build.call(aten.sin.default, item, recompute=RECOMPUTE)
    joint = build.joint(out, build.call(aten.mul.Tensor, tangent, build.call(aten.cos.default, item)))
    result = partition(joint, 1)
    assert not any("rand" in op or "dropout" in op for op in targets(result.backward))
    assert activations(result) == [drawn.name if view else item.name]


@pytest.mark.covers("F3.30")
@pytest.mark.parametrize("user", ["forward op", "op of the region", "result alone"])
def test_the_result_of_a_region_is_saved_if_an_op_of_the_forward_outside_uses_it(user):
    build = Builder("primals_1", "tangents_1")
    x, tangent = build.inputs
    inner = build.call(aten.tanh.default, x, recompute=RECOMPUTE)
    last = build.call(aten.mm.default, inner, inner, recompute=RECOMPUTE)
    tag = {"forward op": {}, "op of the region": {"recompute": RECOMPUTE}}
    out = last if user == "result alone" else build.call(aten.mm.default, last, last, **tag[user])
    result = partition(build.joint(out, build.call(aten.mul.Tensor, tangent, last)), 1)
    assert activations(result) == ([last.name] if user == "forward op" else [])
