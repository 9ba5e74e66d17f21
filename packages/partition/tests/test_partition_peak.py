"""Memory over time: simulated against measured, and the strategies that lower it."""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from aotkit_partition import Extensions, PartitionError, PartitionOptions, PartitionReport, partition
from aotkit_partition.errors import InfeasiblePartitionError, InvalidOptionError
from aotkit_partition.measure import measure_peak
from aotkit_partition.runtime_estimate import FlopsEstimator, MeasuredEstimator, RooflineEstimator, graph_flops
from aotkit_partition.timeline import MemoryTimeline, simulate_modules

STEPS = [step / 10 for step in range(11)]


class Block(nn.Module):
    def __init__(self, width=32, heads=4):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.heads = heads

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = (q @ k.transpose(-1, -2) * width**-0.5).softmax(-1) @ v
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Language(nn.Module):
    def __init__(self, layers=4):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.Sequential(*(Block() for _ in range(layers)))

    def forward(self, ids):
        logits = self.blocks(self.embed(ids)) @ self.embed.weight.t()
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def convolutions():
    def stage(n):
        return nn.Sequential(nn.Conv2d(n, n, 3, padding=1), nn.BatchNorm2d(n), nn.ReLU())

    return nn.Sequential(
        nn.Conv2d(3, 8, 3, 2), stage(8), stage(8), nn.MaxPool2d(2), stage(8), nn.Flatten(), nn.Linear(128, 4)
    )


CASES = {
    "language": (Language, lambda: torch.randint(0, 64, (4, 24))),
    "convolutions": (convolutions, lambda: torch.randn(4, 3, 18, 18)),
    "dropout": (lambda: nn.Sequential(Block(), nn.Dropout(0.3), Block()), lambda: torch.randn(2, 16, 32)),
    "unequal views": (
        lambda: nn.Sequential(nn.Linear(16, 64), nn.GLU(), nn.Unflatten(1, (4, 8)), nn.Softmax(1), nn.Flatten()),
        lambda: torch.randn(8, 16),
    ),
}
OPTIONS = {
    "min-cut": PartitionOptions(),
    "no recomputation": PartitionOptions(strategy="default"),
    "a third of the bytes": PartitionOptions(memory_budget=0.3),
    "nothing saved, recomputed first": PartitionOptions(memory_budget=0.0, recompute_late=False),
    "lowest peak": PartitionOptions(strategy="min-peak"),
}


@pytest.fixture(scope="module")
def captured(captured_by_torch):
    """The joint graph of a case, its count of forward outputs, inputs; captured once, for no test changes them."""

    @functools.cache
    def capture(name):
        make, inputs = CASES[name]
        torch.manual_seed(0)
        module, x = make(), inputs()
        joint, kwargs = captured_by_torch(module, x)
        state = [*dict(module.named_parameters()).values(), *dict(module.named_buffers()).values()]
        return joint, kwargs["num_fwd_outputs"], [value.detach().clone() for value in state] + [x]

    return capture


def measured(result, inputs):
    inputs = [value.clone() for value in inputs]
    return measure_peak(result.forward, result.backward, result.num_fwd_outputs, inputs)


@pytest.mark.covers("F3.55")
@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("how", OPTIONS)
@pytest.mark.parametrize("name", CASES)
def test_the_simulated_peak_is_the_measured_one(name, how, captured):
    joint, count, inputs = captured(name)
    result = partition(joint, count, OPTIONS[how])
    found = measured(result, inputs)
    assert result.report.peak_bytes == pytest.approx(found.bytes, rel=0.05)
    assert found.bytes_with_workspace >= found.bytes
    assert simulate_modules(result.forward, result.backward, count).peak_bytes == result.report.peak_bytes


@pytest.mark.covers("F3.38", "F3.55")
@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["convolutions", "dropout", "language"])
def test_the_measured_peak_rises_with_the_peak_budget(name, captured):
    joint, count, inputs = captured(name)
    results = [partition(joint, count, PartitionOptions(strategy="min-peak", memory_budget=b)) for b in STEPS]
    peaks = [measured(result, inputs).bytes for result in results]
    assert peaks == sorted(peaks) and peaks[3] < 0.8 * peaks[10]
    seconds = [result.report.recompute_seconds for result in results]
    assert seconds[0] > seconds[10] and seconds == sorted(seconds, reverse=True)
    default = partition(joint, count).report.peak_bytes
    lowest = results[0].report.peak_bytes
    for budget, result in zip(STEPS, results, strict=True):
        assert result.report.peak_bytes <= max(lowest, budget * default)


@pytest.mark.covers("F3.55")
def test_gradients_equal_eager_at_the_lowest_peak():
    import copy

    from functorch.compile import aot_module, nop

    from aotkit_partition import min_cut_rematerialization_partition

    torch.manual_seed(0)
    module, ids = Language(3), torch.randint(0, 64, (2, 12))
    twin = copy.deepcopy(module)
    fn = functools.partial(min_cut_rematerialization_partition, options=PartitionOptions(strategy="min-peak"))
    module(ids).backward()
    aot_module(twin, nop, nop, partition_fn=fn)(ids).backward()
    for one, other in zip(twin.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.covers("F3.46", "F3.55")
@pytest.mark.parametrize("name", ["language", "convolutions"])
def test_recomputing_late_lowers_the_peak(name, captured):
    joint, count, inputs = captured(name)
    budget = {"memory_budget": 0.4}
    late = partition(joint, count, PartitionOptions(**budget))
    first = partition(joint, count, PartitionOptions(**budget, recompute_late=False))
    assert late.saved_names == first.saved_names
    assert measured(late, inputs).bytes < measured(first, inputs).bytes
    assert late.report.peak_bytes < first.report.peak_bytes


@pytest.mark.covers("F3.46")
def test_what_a_tangent_reaches_keeps_its_order_and_tuples_are_unpacked_at_once(captured):
    joint, count, _ = captured("language")
    result = partition(joint, count, PartitionOptions(memory_budget=0.3))
    backward = [node for node in result.backward.graph.nodes if node.op == "call_function"]
    again = {op.name for op in result.report.recomputed}
    place = {node.name: at for at, node in enumerate(joint.graph.nodes)}
    reached = set()
    for node in joint.graph.nodes:
        if node.name.startswith("tangents") or any(used.name in reached for used in node.all_input_nodes):
            reached.add(node.name)
    original = [place[node.name] for node in backward if node.name in reached]
    assert again and original == sorted(original)
    for before, node in itertools.pairwise(backward):
        if "getitem" in node.name and "getitem" not in before.name:
            assert node.args[0] is before
    for at, node in enumerate(backward):
        if node.name in again and "getitem" not in node.name:
            users = [backward.index(user) for user in node.users]
            assert min(users) > at
            between = backward[at + 1 : min(users)]
            assert not any(step.name in reached for step in between), "only its own group may come between"


@pytest.mark.covers("F3.46")
def test_a_recomputed_value_is_made_before_the_backward_overwrites_what_it_reads():
    graph = torch.fx.Graph()
    x, tangent = graph.placeholder("primals_1"), graph.placeholder("tangents_1")
    sine = graph.call_function(torch.ops.aten.sin.default, (x,))
    out = graph.call_function(torch.ops.aten.neg.default, (sine,))
    graph.call_function(torch.ops.aten.copy_.default, (x, tangent))
    grad = graph.call_function(torch.ops.aten.mul.Tensor, (tangent, sine))
    graph.output([out, grad])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(4, device="meta")
    result = partition(torch.fx.GraphModule(nn.Module(), graph), 1)
    assert [op.op for op in result.report.recomputed] == ["aten.sin"]
    value = torch.randn(4)
    _, *saved = result.forward(value)
    expected = 2 * value.sin()
    torch.testing.assert_close(result.backward(*saved, torch.full((4,), 2.0))[0], expected)
    assert torch.equal(value, torch.full((4,), 2.0))


@pytest.mark.covers("F3.55")
def test_the_timeline_tells_when_what_is_alive(joint_of):
    joint, count = joint_of(
        lambda x, w: torch.sin(x @ w).sum(),
        torch.randn(4, 5, requires_grad=True),
        torch.randn(5, 6, requires_grad=True),
    )
    timeline = partition(joint, count).report.timeline
    assert timeline.steps[timeline.loss] == "loss"
    kinds = {piece.name: piece.kind for piece in timeline.allocations}
    assert kinds["mm"] == "saved" and kinds["sum_1"] == "output" and kinds["tangents_1"] == "tangent"
    assert kinds["sin"] == "activation" and kinds["cos"] == "temporary"
    assert sorted(kinds.values()).count("gradient") == 2
    product = next(piece for piece in timeline.allocations if piece.name == "mm")
    assert product.bytes == 96 and product.first < timeline.loss < product.last
    assert product in timeline.live_at(timeline.loss)
    assert timeline.live_bytes[timeline.peak_step] == timeline.peak_bytes == max(timeline.live_bytes)
    held = [piece for piece in timeline.allocations if piece.kind in ("output", "gradient")]
    assert {piece.last for piece in held} == {len(timeline.steps) - 1}
    assert timeline.live_bytes[-1] >= sum(piece.bytes for piece in held) == 4 + 80 + 120
    assert MemoryTimeline.from_json(timeline.to_json()) == timeline


@pytest.mark.covers("F3.42")
def test_the_front_offers_less_recomputation_for_more_memory(captured):
    joint, count, _ = captured("language")
    report = partition(joint, count, PartitionOptions(details="front")).report
    others = [point for point in report.front if not point.chosen]
    assert len(others) >= 4
    assert [p.peak_bytes for p in others] == sorted(p.peak_bytes for p in others)
    assert [p.seconds for p in others] == sorted((p.seconds for p in others), reverse=True)
    (mine,) = [point for point in report.front if point.chosen]
    assert mine.peak_bytes == report.peak_bytes and mine.saved_bytes == report.activation_bytes
    assert mine.seconds == pytest.approx(report.recompute_seconds)
    assert report.peak_bytes <= report.peak_bytes_before
    assert "plans (peak" in str(report) and "peak memory" in str(report)
    assert PartitionReport.from_json(report.to_json()) == report
    quick = partition(joint, count, PartitionOptions(details="decisions")).report
    assert quick.peak_bytes is None and not quick.front and quick.saved == report.saved


@pytest.mark.covers("F3.40")
def test_estimators_order_a_product_a_sum_and_a_view(joint_of):
    def fn(x, w):
        return ((x @ w).t() + 1).sin()

    joint, _ = joint_of(fn, torch.randn(128, 128, requires_grad=True), torch.randn(128, 256, requires_grad=True))
    nodes = {node.name: node for node in joint.graph.nodes}
    product = 2 * 128 * 128 * 256
    assert FlopsEstimator().seconds(nodes["mm"]) == pytest.approx(product / 1e12)
    assert FlopsEstimator().seconds(nodes["sin"]) == pytest.approx(128 * 256 / 1e12)
    traffic = 4 * 2 * 128 * 256
    assert RooflineEstimator().seconds(nodes["sin"]) == pytest.approx(traffic / 1e11)
    assert RooflineEstimator().seconds(nodes["mm"]) == pytest.approx(product / 1e12)
    assert graph_flops(joint) >= 3 * product
    ticks = iter(range(1000))
    estimator = MeasuredEstimator(repeats=3, clock=lambda: float(next(ticks)))
    assert estimator.seconds(nodes["sin"]) == estimator.seconds(nodes["sin"]) == 1.0
    assert estimator.runs == 4, "once to warm up, three times to measure, and never again"
    times = MeasuredEstimator().seconds
    assert times(nodes["mm"]) > 0 and times(nodes["sin"]) > 0


@pytest.mark.covers("F3.40")
def test_what_cannot_run_on_made_up_values_is_estimated():
    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    bad = graph.call_function(torch.ops.aten.reshape.default, (x, [5, 5]))
    for node in graph.nodes:
        node.meta["val"] = torch.empty(3, 4)
    assert MeasuredEstimator().seconds(bad) == RooflineEstimator().seconds(bad) > 0


class EverySecond:
    """A custom estimator: each op takes a second, so only the number of ops counts."""

    name = "every second"

    def seconds(self, node):
        return 1.0


@pytest.mark.covers("F3.39", "F3.40")
def test_a_solver_and_an_estimator_of_the_callers_own_are_used(captured):
    joint, count, _ = captured("language")
    asked = []

    def largest_first(weights, gains, capacity):
        asked.append((len(weights), set(gains)))
        kept, room = [], capacity
        for item in sorted(range(len(weights)), key=lambda i: (-weights[i], i)):
            if weights[item] <= room:
                kept.append(item)
                room -= weights[item]
        return kept

    options = PartitionOptions(memory_budget=0.5)
    own = partition(joint, count, options, extensions=Extensions("mine", largest_first, EverySecond()))
    (call,) = asked
    assert call[0] > 3 and all(gain == int(gain) >= 1 for gain in call[1])
    assert own.report.activation_bytes <= partition(joint, count).report.activation_bytes // 2
    work = [op for op in own.report.recomputed if not op.is_view and op.op != "getitem"]
    assert work and {op.seconds for op in work} == {1.0}
    for answer, words in (([0, 0], "distinct"), ([99999], "below"), (None, "capacity")):

        def wrong(weights, gains, capacity, answer=answer):
            return answer if answer is not None else range(len(weights))

        with pytest.raises(PartitionError, match=words):
            partition(joint, count, options, extensions=Extensions(knapsack=wrong))


@pytest.mark.parametrize("field", [{"runtime": "guess"}, {"details": "all"}, {"memory_budget": -0.1}])
def test_bad_options_name_the_field(field):
    with pytest.raises(InvalidOptionError, match=next(iter(field))):
        PartitionOptions(**field)


def test_the_exact_strategy_refuses_what_the_cut_refuses(joint_of):
    from torch.utils.checkpoint import CheckpointPolicy

    joint, count = joint_of(lambda x: torch.sin(x).cos(), torch.randn(4, requires_grad=True))
    x = joint.graph.find_nodes(op="placeholder")[0]
    sine = next(node for node in joint.graph.nodes if node.name == "sin")
    with joint.graph.inserting_after(x):
        pair = joint.graph.call_function(torch.ops.aten._fused_dropout.default, (x, 0.5))
    pair.meta["val"] = (x.meta["val"], x.meta["val"])
    with joint.graph.inserting_after(pair):
        doubled = joint.graph.call_function(torch.add, (pair, 1))
    doubled.meta.update(val=(x.meta["val"],), recompute=CheckpointPolicy.MUST_RECOMPUTE)
    sine.args = (doubled,)
    for node in joint.graph.nodes:
        if node.op == "call_function" and node is not pair:
            node.meta["recompute"] = CheckpointPolicy.MUST_RECOMPUTE
    for strategy in ("min-cut", "exact"):
        with pytest.raises(InfeasiblePartitionError, match="can't split"):
            partition(joint, count, PartitionOptions(strategy=strategy))
