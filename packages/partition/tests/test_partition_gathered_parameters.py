"""Parameters that the forward gathers: kept for the backward or gathered again, by a budget of bytes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.fx.experimental.proxy_tensor import make_fx

from aotkit_partition import PartitionOptions, PartitionReport, partition
from aotkit_partition.errors import InvalidOptionError
from aotkit_partition.measure import measure_peak

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed")

# Of the parameters, which take 32, 128 and 64 KiB.
WIDTHS = (64, 128, 256, 64)


@pytest.fixture(autouse=True)
def two_ranks() -> Iterator[None]:
    """This process is the first of two, and gathers give the memory that they are told to write to."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def whole(part):
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_gather_into_tensor(part, 2, dist.group.WORLD.group_name))


def parameters(widths=WIDTHS):
    return [torch.randn(rows // 2, columns) for rows, columns in itertools.pairwise(widths)]


def layers(widths=WIDTHS, by_input=True):
    """Layers of which each rank has half of the rows of the weight; their joint graph and its inputs."""
    primals = [torch.randn(4, widths[0]), *parameters(widths)]

    def joint(primals, tangents):
        wanted = [value.detach().requires_grad_() for value in primals]
        value = wanted[0] if by_input else primals[0]
        for part in wanted[1:]:
            value = torch.tanh(value @ whole(part))
        gradients = torch.autograd.grad([value], wanted[not by_input :], tangents)
        return [value, *([] if by_input else [None]), *gradients]

    graph = make_fx(joint, tracing_mode="fake")(primals, [torch.ones(4, widths[-1])])
    names = [f"primals_{i + 1}" for i in range(len(primals))] + ["tangents_1"]
    for node, name in zip(graph.graph.find_nodes(op="placeholder"), names, strict=True):
        node.target = name
    return graph, primals


def gathers(module):
    return sum("all_gather" in str(node.target) for node in module.graph.nodes)


def split(graph, budget=None, **options):
    chosen = {} if budget is None else {"regather": True, "regather_budget": budget}
    return partition(graph, 1, PartitionOptions(chunk_loss_bytes=0, **chosen, **options))


BYTES = [rows * columns * 4 for rows, columns in itertools.pairwise(WIDTHS)]


@pytest.mark.parametrize(
    ("budget", "kept"),
    [
        *((0, []), (BYTES[2] - 1, [0]), (BYTES[2], [2]), (BYTES[1], [0, 2]), (BYTES[0] + BYTES[2], [0, 2])),
        *((BYTES[1] + BYTES[0], [0, 1]), (sum(BYTES) - 1, [1, 2]), (sum(BYTES), [0, 1, 2])),
    ],
)
def test_what_fits_into_the_budget_is_kept_and_the_rest_gathered_again(budget, kept):
    graph, _ = layers()
    result = split(graph, budget)
    assert [i for i, one in enumerate(result.report.gathers) if not one.again] == kept
    assert gathers(result.forward) == 3 and gathers(result.backward) == 3 - len(kept)
    for one, size in zip(result.report.gathers, BYTES, strict=True):
        assert one.bytes == size and one.seconds == pytest.approx(20e-6 + size / 4e9)
        where = "beyond" if one.again else "within"
        assert f"{where} the {budget} bytes of regather_budget" in one.reason
    assert [one.inputs for one in result.report.gathers] == [(f"primals_{i}",) for i in (2, 3, 4)]
    assert all(one.reason in str(result.report) for one in result.report.gathers)
    assert PartitionReport.from_json(result.report.to_json()) == result.report


def test_on_a_slow_start_the_small_ones_are_kept_and_on_a_narrow_link_as_many_bytes_as_possible():
    graph, _ = layers()
    budget = BYTES[1]  # one large parameter, or both small ones
    late = split(graph, budget, link_latency=1.0)
    assert [one.again for one in late.report.gathers] == [False, True, False]
    narrow = split(graph, budget, link_latency=1e-12)
    assert [one.again for one in narrow.report.gathers] == [True, False, True]


def test_without_the_option_all_are_kept_and_the_record_says_so():
    graph, _ = layers()
    result = split(graph)
    assert gathers(result.backward) == 0
    assert [(one.again, one.reason) for one in result.report.gathers] == [(False, "kept")] * 3


def test_a_parameter_that_the_backward_does_not_need_takes_nothing_of_the_budget():
    """The first layer's, if the gradient of the input is not wanted."""
    graph, _ = layers(by_input=False)
    result = split(graph, BYTES[0] + BYTES[2])
    assert [one.again for one in result.report.gathers] == [False, True, False]
    assert result.report.gathers[0].reason == "the backward does not need it"
    assert gathers(result.backward) == 1


def test_the_smaller_the_budget_the_lower_the_peak_that_is_simulated_and_measured():
    graph, primals = layers((128,) * 7)
    each = 128 * 128 * 4
    budgets = [number * each for number in (2, 4, 6)]
    results = [split(graph, budget) for budget in budgets]
    peaks = [result.report.peak_bytes for result in results]
    assert peaks == sorted(set(peaks)), peaks
    assert peaks[-1] == split(graph).report.peak_bytes and peaks[-1] - peaks[0] >= 2 * each
    saved = [result.report.activation_bytes for result in results]
    assert [more - saved[0] for more in saved] == [budget - budgets[0] for budget in budgets]  # the rest is activations
    assert [gathers(result.backward) for result in results] == [4, 2, 0]
    for result, simulated in zip(results, peaks, strict=True):
        measured = measure_peak(result.forward, result.backward, 1, primals)
        assert measured.bytes == pytest.approx(simulated, rel=0.05)


@pytest.mark.parametrize("wrong", [{"regather_budget": -1}, {"link_latency": 0.0}, {"link_bandwidth": float("inf")}])
def test_wrong_numbers_are_refused(wrong):
    with pytest.raises(InvalidOptionError, match=next(iter(wrong))):
        PartitionOptions(**wrong)


class _Communicates(torch.autograd.Function):
    """The backward multiplies by what all ranks have of ``part``: their parts side by side, or the sum of them."""

    @staticmethod
    def forward(ctx, x, part, sums):
        ctx.sums = sums
        ctx.save_for_backward(part)
        return x.sin()

    @staticmethod
    def backward(ctx, gradient):
        (part,), c10d = ctx.saved_tensors, torch.ops._c10d_functional
        group = dist.group.WORLD.group_name
        started = c10d.reduce_scatter_tensor(part, "sum", 2, group) if ctx.sums else None
        return gradient * (whole(part) if started is None else c10d.wait_tensor(started)), None, None


@pytest.mark.parametrize("sums", [False, True], ids=["gather", "sum"])
def test_what_only_the_backward_communicates_is_never_saved_before_it_is_there(sums):
    primals = [torch.randn(4, 8), torch.randn(8 if sums else 2, 8)]

    def joint(primals, tangents):
        x = primals[0].detach().requires_grad_()
        value = _Communicates.apply(x, primals[1].exp() if sums else primals[1], sums)
        return [value, *torch.autograd.grad([value], [x], tangents), None]

    graph = make_fx(joint, tracing_mode="fake")(primals, [torch.ones(4, 8)])
    for node, name in zip(
        graph.graph.find_nodes(op="placeholder"), ("primals_1", "primals_2", "tangents_1"), strict=True
    ):
        node.target = name
    result = split(graph)
    saved = result.forward.graph.output_node().args[0][1:]
    assert not any("all_gather" in str(value.target) or "reduce_scatter" in str(value.target) for value in saved)
    waits = [
        sum("wait_tensor" in str(n.target) for n in module.graph.nodes) for module in (result.forward, result.backward)
    ]
    assert waits in ([0, 1], [1, 0]) and (sums or waits == [0, 1])  # a gather makes more of what is there already
