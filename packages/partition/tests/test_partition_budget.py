import copy
import functools
import itertools
import random

import pytest
import torch
from torch import nn

from aotkit_partition import PartitionOptions, min_cut_rematerialization_partition, partition
from aotkit_partition.budget import lenient
from aotkit_partition.errors import InvalidOptionError
from aotkit_partition.exact import solve_exactly
from aotkit_partition.joint import analyze_joint
from aotkit_partition.knapsack import SOLVERS
from aotkit_partition.min_cut import make_cut_problem, solve_min_cut
from aotkit_partition.plan import make_plan

BUDGETS = [step / 10 for step in range(11)]


def model():
    layers = [nn.Linear(16, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.2)]
    return nn.Sequential(*layers, *copy.deepcopy(layers), nn.Linear(16, 16))


@pytest.mark.covers("F3.38", "F3.39")
@pytest.mark.parametrize("solver", ["greedy", "dp", "dp-low-memory", "milp"])
def test_bytes_stay_within_every_budget_and_zero_saves_only_what_cannot_be_repeated(solver, captured_by_torch):
    joint, kwargs = captured_by_torch(model(), torch.randn(8, 16))
    full = partition(joint, kwargs["num_fwd_outputs"]).report.activation_bytes
    reports = [
        partition(joint, kwargs["num_fwd_outputs"], PartitionOptions(memory_budget=b, knapsack=solver)).report
        for b in BUDGETS
    ]
    least = reports[0]
    random_sources = {ban.name for ban in least.bans if "random" in ban.reason}
    assert random_sources and all(value.op == "getitem" for value in least.saved if not value.is_input)
    for budget, report in zip(BUDGETS, reports, strict=True):
        assert report.activation_bytes <= max(budget * full, least.activation_bytes)
    assert reports[-1].activation_bytes == full > reports[5].activation_bytes >= least.activation_bytes


@pytest.mark.covers("F3.38")
@pytest.mark.parametrize("budget", [0.0, 0.3, 0.7])
def test_gradients_equal_eager_within_a_budget(budget):
    from functorch.compile import aot_module, nop

    module = model()
    twin = copy.deepcopy(module)
    options = PartitionOptions(memory_budget=budget)
    fn = functools.partial(min_cut_rematerialization_partition, options=options)
    compiled = aot_module(twin, nop, nop, partition_fn=fn)
    x = torch.randn(8, 16)
    for run in (module, compiled):
        torch.manual_seed(0)
        run(x).square().sum().backward()
    for one, other in zip(twin.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


@pytest.mark.covers("F3.38")
def test_a_budget_outside_zero_to_one_is_refused():
    with pytest.raises(InvalidOptionError, match="memory_budget"):
        PartitionOptions(memory_budget=1.5)
    with pytest.raises(InvalidOptionError, match="knapsack"):
        PartitionOptions(knapsack="quantum")


def brute_force(weights, gains, capacity):
    subsets = itertools.chain.from_iterable(
        itertools.combinations(range(len(weights)), n) for n in range(len(weights) + 1)
    )
    return max(sum(gains[i] for i in s) for s in subsets if sum(weights[i] for i in s) <= capacity)


@pytest.mark.covers("F3.39")
def test_knapsack_solvers_keep_their_stated_bounds():
    rng = random.Random(0)
    for _ in range(60):
        count = rng.randint(1, 9)
        weights = [rng.randint(1, 40) for _ in range(count)]
        gains = [rng.random() for _ in range(count)]
        capacity = rng.randint(0, 120)
        optimum = brute_force(weights, gains, capacity)
        for name, solver in SOLVERS.items():
            kept = solver(weights, gains, capacity)
            assert sum(weights[i] for i in kept) <= capacity
            gain = sum(gains[i] for i in kept)
            assert gain >= (optimum / 2 if name == "greedy" else optimum) - 1e-9


def random_joint(seed, size=None):
    """A random DAG of cheap and costly ops with differing sizes; the backward needs a few of the values."""
    rng = random.Random(seed)
    graph = torch.fx.Graph()
    inputs = [graph.placeholder(f"primals_{i + 1}") for i in range(2)]
    tangent = graph.placeholder("tangents_1")
    values = list(inputs)
    ops = [torch.ops.aten.sin.default, torch.ops.aten.add.Tensor, torch.ops.aten.mm.default, torch.ops.aten.cat.default]
    for _ in range(size or rng.randint(4, 9)):
        op = rng.choice(ops)
        a, b = rng.choice(values[-4:]), rng.choice(values)
        args = (a,) if op is ops[0] else ([a, b],) if op is ops[3] else (a, b)
        values.append(graph.call_function(op, args))
    used = rng.sample(values[2:], min(3 + (size or 0) // 5, len(values) - 2))
    grads = [graph.call_function(torch.ops.aten.mul.Tensor, (tangent, value)) for value in used]
    graph.output([values[-1], *grads])
    for node in graph.nodes:
        node.meta["val"] = torch.empty(rng.randint(1, 50), 4, device="meta")
    return torch.fx.GraphModule(torch.nn.Module(), graph)


def cheapest_by_enumeration(problem):
    """Over all subsets of saveable values: the cheapest from which everything the backward needs can be computed."""
    joint = problem.joint
    candidates = problem.candidates()
    saveable = [i for i in candidates if problem.costs[i].cost != float("inf")]

    def computable(index, saved):
        if index in saved:
            return True
        if problem.bans[index] is not None:
            return False
        return all(computable(used, saved) for used in joint.inputs_of[index])

    best = float("inf")
    for chosen in itertools.product([False, True], repeat=len(saveable)):
        saved = {index for index, take in zip(saveable, chosen, strict=True) if take}
        cost = sum(problem.costs[index].cost for index in saved)
        if cost < best and all(computable(i, saved) for i in candidates if problem.needed[i]):
            best = cost
    return best


@pytest.mark.covers("F3.7")
def test_the_chosen_values_are_the_cheapest_of_all_possible_choices():
    for seed in range(60):
        joint = analyze_joint(random_joint(seed), 1)
        strict, free = PartitionOptions(), PartitionOptions(ban_materialized_in_backward=False, ban_reductions=False)
        for options in (strict, free):
            problem = make_cut_problem(joint, options)
            assert solve_min_cut(problem).cost == pytest.approx(cheapest_by_enumeration(problem))


@pytest.mark.covers("F3.7", "F3.56")
@pytest.mark.parametrize("seeds", [range(100), range(100, 200)])
def test_the_cut_costs_as_much_as_the_exact_optimum(seeds):
    """200 graphs of up to 60 values, under strict rules and under none."""
    differing = 0
    for seed in seeds:
        joint = analyze_joint(random_joint(seed, size=random.Random(seed).randint(10, 60)), 1)
        for options in (PartitionOptions(), lenient(PartitionOptions())):
            problem = make_cut_problem(joint, options)
            cut, exact = solve_min_cut(problem), solve_exactly(problem)
            assert cut.cost == pytest.approx(exact.cost)
            assert sum(problem.costs[index].cost for index in cut.saved) == pytest.approx(cut.cost)
            differing += cut.saved != exact.saved
            make_plan(joint, exact.saved)  # is a cut
    assert differing < len(seeds), "ties aside the sets agree"
