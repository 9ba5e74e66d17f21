import math
import random
import time

import numpy as np
import pytest
import torch
from scipy.optimize import LinearConstraint, milp
from scipy.sparse import lil_matrix

from aotkit_partition import PartitionOptions, partition
from aotkit_partition.flow_network import Edge, min_cut


def random_network(seed, scale=1):
    rng = random.Random(seed)
    count = rng.randint(4, 14)
    edges = []
    for start in range(count):
        for end in range(count):
            if start < end and start != 1 and end != 0 and rng.random() < 0.45:
                infinite = rng.random() < 0.15 and not (start == 0 and end == 1)
                edges.append(Edge(start, end, math.inf if infinite else scale * rng.randint(0, 9), len(edges)))
    # vertex 1 is the sink: reach it from the last ones
    for start in range(2, count):
        if rng.random() < 0.4:
            edges.append(Edge(start, 1, scale * rng.randint(1, 9), len(edges)))
    return count, edges


def exact_cut(count, edges):
    """The optimum by integer programming: potential 1 on the source side, 0 on the sink side, an edge pays its drop."""
    big = 1 + sum(edge.capacity for edge in edges if not math.isinf(edge.capacity))
    rows = lil_matrix((len(edges), count + len(edges)))
    for row, edge in enumerate(edges):
        rows[row, edge.start] = 1
        rows[row, edge.end] = -1
        rows[row, count + row] = -1
    cost = np.concatenate([np.zeros(count), [min(edge.capacity, big) for edge in edges]])
    lower, upper = np.zeros(count + len(edges)), np.ones(count + len(edges))
    lower[0] = 1
    upper[1] = 0
    solved = milp(cost, constraints=LinearConstraint(rows.tocsr(), -np.inf, 0), bounds=(lower, upper),
                  integrality=np.ones(count + len(edges)))  # fmt: skip
    return None if solved.fun >= big else solved.fun


@pytest.mark.covers("F3.56")
@pytest.mark.parametrize("seeds", [range(50), range(50, 100)])
def test_the_cut_is_the_optimum_of_the_integer_program(seeds):
    for seed in seeds:
        count, edges = random_network(seed)
        found, wanted = min_cut(count, edges, 0, 1), exact_cut(count, edges)
        if wanted is None:
            assert found is None
            continue
        cost, tags = found
        assert cost == pytest.approx(wanted)
        assert sum(edges[tag].capacity for tag in tags) == pytest.approx(cost)


@pytest.mark.covers("F3.56")
def test_costs_beyond_32_bits_are_cut_as_well_as_small_ones():
    for seed in range(20):
        count, edges = random_network(seed)
        _, huge = random_network(seed, scale=10**11)
        small, large = min_cut(count, edges, 0, 1), min_cut(count, huge, 0, 1)
        assert (small is None) == (large is None)
        if small is not None:
            assert large[0] == pytest.approx(small[0] * 10**11, rel=1e-6)


def test_an_infinite_path_has_no_cut():
    assert min_cut(3, [Edge(0, 2, math.inf), Edge(2, 1, math.inf)], 0, 1) is None


def test_nothing_to_cut_costs_nothing():
    assert min_cut(2, [], 0, 1) == (0, frozenset())


def long_joint(length, skips=0):
    """A chain of ``length`` ops, every fifth a product, with ``skips`` extra uses far down, and its backward."""
    rng = random.Random(length)
    graph = torch.fx.Graph()
    x, w, t = graph.placeholder("primals_1"), graph.placeholder("primals_2"), graph.placeholder("tangents_1")
    forward = [x]
    for position in range(length):
        if position % 5 == 0:
            forward.append(graph.call_function(torch.ops.aten.mm.default, (forward[-1], w)))
        elif skips and rng.random() < skips / length:
            forward.append(graph.call_function(torch.ops.aten.add.Tensor, (forward[-1], rng.choice(forward))))
        else:
            forward.append(graph.call_function(torch.ops.aten.sin.default, (forward[-1],)))
    grad = t
    for position in range(length, 0, -1):
        cosine = graph.call_function(torch.ops.aten.cos.default, (forward[position - 1],))
        turned = graph.call_function(torch.ops.aten.neg.default, (cosine,))
        grad = graph.call_function(torch.ops.aten.mul.Tensor, (grad, turned))
    graph.output([forward[-1], grad, None])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(8, rng.randint(1, 64) if skips else 8, device="meta")
    return torch.fx.GraphModule(torch.nn.Module(), graph)


@pytest.mark.covers("F3.56")
@pytest.mark.sample(1)
@pytest.mark.parametrize("skips", [3000, 0])
def test_a_graph_of_fifty_thousand_nodes_is_split_in_ten_seconds(skips):
    joint = long_joint(12_500, skips)
    assert len(joint.graph.nodes) > 50_000
    begun = time.process_time()
    result = partition(joint, 1)
    assert time.process_time() - begun < 10
    products = sum(saved.op == "aten.mm" for saved in result.report.saved)
    assert 0 < products <= 2500 and result.report.peak_bytes > 0
    assert skips or len(result.report.saved) <= 2501


@pytest.mark.covers("F3.55", "F3.56")
def test_the_lowest_peak_of_a_long_chain_grows_with_its_root():
    """Checkpoints at even distances: about twice the root of the chain's length is alive at once."""
    joint = long_joint(1000)
    lowest = partition(joint, 1, PartitionOptions(strategy="min-peak")).report
    everything = partition(joint, 1, PartitionOptions(strategy="default")).report
    size = 8 * 8 * 4
    assert everything.peak_bytes > 1000 * size > 8 * lowest.peak_bytes
