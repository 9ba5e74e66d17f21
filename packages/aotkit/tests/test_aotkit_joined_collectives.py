"""Two ranks whose parameters are gathered in the graph: gathers of a layer are one, and made again where asked for."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import aotkit
from aotkit.errors import RanksDisagree
from aotkit.link import measure_link
from aotkit.reports.page.watch import Watcher

_spec = importlib.util.spec_from_file_location("several_ranks", Path(__file__).with_name("several_ranks.py"))
several_ranks = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(several_ranks)

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this torch is built without distributed")


class Layer(torch.nn.Module):
    """A layer of which each rank has some rows."""

    def __init__(self, rank):
        super().__init__()
        whole = torch.randn(8, 8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
        self.weight, self.bias = (torch.nn.Parameter(w.chunk(2)[rank].clone()) for w in whole)

    def forward(self, x):
        weight, bias = (gathered(part) for part in (self.weight, self.bias))
        return torch.tanh(torch.nn.functional.linear(x, weight, bias))


class Net(torch.nn.Module):
    def __init__(self, rank):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer(rank) for _ in range(3))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def gathered(part):
    ops = torch.ops._c10d_functional
    return ops.wait_tensor(ops.all_gather_into_tensor(part, 2, dist.group.WORLD.group_name))


def train(run, net, rank):
    """Losses, then parameters."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    found = []
    for step in range(4):
        torch.manual_seed(10 * step + rank)
        optimizer.zero_grad()
        loss = run(torch.randn(3, 8, dtype=torch.float64)).pow(2).mean()
        loss.backward()
        optimizer.step()
        found.append(loss.detach())
    return [torch.stack(found), *(p.detach() for p in net.parameters())]


def trained(rank, **options):
    """Collectives of forward and backward, if the numbers are those of eager mode."""
    torch._dynamo.reset()
    eager, net, recorder = Net(rank), Net(rank), aotkit.Recorder()
    options = {"cache": False, "fallback": "error", "rank_timeout": 20, "observer": recorder, **options}
    want = train(eager, eager, rank)
    for a, b in zip(train(torch.compile(net, backend="aotkit", options=options), net, rank), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    counts = {"all_gather_into_tensor": [], "reduce_scatter_tensor": []}
    for graph in recorder.graphs:
        for name, found in counts.items():
            found.append(sum(call.count for call in graph.report.externs if name in call.target))
    return list(counts.values())


def joined(rank, _folder):
    link = measure_link()
    return {
        "joined": trained(rank),
        "apart": trained(rank, disable=["bucket-collectives"]),
        "again": trained(rank, regather=True),
        "some": trained(rank, regather=True, regather_budget=8 * 9 * 8, disable=["bucket-collectives"]),
        "measured": trained(rank, **link),
        "link": [link["link_latency"], link["link_bandwidth"]],
    }


class Wide(torch.nn.Module):
    """What is between its layers is much larger than the layers, and can be computed again."""

    def __init__(self, rank):
        super().__init__()
        self.net = Net(rank)

    def forward(self, x):
        for layer in self.net.layers:
            x = torch.exp(-torch.sin(layer(x)).square()) + x
        return x


def own_budgets(rank, _folder):
    """Bytes that each rank saves, if its numbers are those of eager mode, whatever the other one saves."""
    found = []
    for budget in (1.0, 0.0 if rank else 1.0):
        torch._dynamo.reset()
        eager, net, watcher = Wide(rank), Wide(rank), Watcher()
        options = {"cache": False, "fallback": "error", "rank_timeout": 20, "observer": watcher}
        run = torch.compile(net, backend="aotkit", options={**options, "memory_budget": budget})
        for a, b in zip(train(run, net, rank), train(eager, eager, rank), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
        (report,) = watcher.partitions.values()
        found.append(report.activation_bytes)
    return found


def other_links(rank, _folder):
    """Ranks that would join otherwise learn of it before they start anything."""
    return refused(rank, link_latency=1.0 if rank else 1e-12)


def other_gathers(rank, _folder):
    """So do ranks of which one only would gather again in the backward."""
    return refused(rank, regather=bool(rank))


def refused(rank, **options):
    """The error of a compile whose options are another rank's, or that it ran."""
    options = {"rank_timeout": 20, "cache": False, **options}
    try:
        torch.compile(Net(rank), backend="aotkit", options=options)(torch.ones(3, 8, dtype=torch.float64))
    except Exception as error:  # noqa: BLE001  # the test looks at it
        return type(getattr(error, "inner_exception", error)).__name__
    return "ran"


def test_gathers_and_reductions_of_a_layer_are_one_and_training_is_as_in_eager_mode(
    tmp_path: Path, warm_python: Any
) -> None:
    first, second = several_ranks.run_ranks(warm_python, __file__, "joined", tmp_path)
    assert first == second
    assert first["apart"] == [[6, 0], [0, 6]]
    assert first["joined"] == first["measured"] == [[3, 0], [0, 3]]
    assert first["again"] == [[3, 2], [0, 3]]  # nobody needs the first layer's again
    assert first["some"] == [[6, 1], [0, 6]]  # of the two weights that the backward needs, one fits
    latency, bandwidth = first["link"]
    assert 0 < latency < 1 and bandwidth > 0


@pytest.mark.parametrize("case", ["other_links", "other_gathers"])
def test_ranks_that_would_join_or_gather_otherwise_get_an_error(tmp_path: Path, warm_python: Any, case: str) -> None:
    assert several_ranks.run_ranks(warm_python, __file__, case, tmp_path) == ["RanksDisagree"] * 2


def test_each_rank_has_a_budget_of_its_own(tmp_path: Path, warm_python: Any) -> None:
    first, second = several_ranks.run_ranks(warm_python, __file__, "own_budgets", tmp_path)
    assert first[0] == first[1] == second[0] > second[1] > 0, (first, second)


def test_without_a_process_group_there_is_no_link() -> None:
    with pytest.raises(RanksDisagree, match="init_process_group"):
        measure_link()


@pytest.mark.sample(ways=1)
@pytest.mark.parametrize("name", ["link_latency", "link_bandwidth"])
@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_link_takes_time(name: str, value: float) -> None:
    with pytest.raises(aotkit.UnknownOption, match=name):
        aotkit.Options(**{name: value})


if __name__ == "__main__":
    several_ranks.main({case.__name__: case for case in (joined, other_links, other_gathers, own_budgets)})
