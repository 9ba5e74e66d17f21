"""Byte budgets between "save inputs only" (0) and the default cut (1) (F3.38).

The floor is the cut with every rule about cost lifted: the fewest bytes that can be saved at all. The other values
that the default cut saves are candidates; a knapsack chooses which of them to keep as well, by the seconds that keeping
each one avoids, within ``budget`` times the default's bytes. Then the cut is solved again with the kept values banned
from recomputation: its bytes cannot exceed floor plus kept, because saving those is one of the cuts it chooses from.
"""

from __future__ import annotations

from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from .joint import JointGraph
from .knapsack import KnapsackSolver, checked_solution
from .min_cut import CutProblem, CutResult, make_cut_problem, solve_min_cut
from .options import PartitionOptions
from .runtime_estimate import RuntimeEstimator, estimate_seconds


@dataclass(frozen=True, slots=True)
class BudgetedCut:
    """The cut for one budget, and the problem it solves."""

    problem: CutProblem
    result: CutResult
    capacity: int


def lenient(options: PartitionOptions) -> PartitionOptions:
    """The same options with every rule about cost off; rules about correctness stay."""
    return replace(
        options,
        allowlist_only=False,
        recompute_custom_ops=True,
        ban_reductions=False,
        ban_materialized_in_backward=False,
        ban_used_far_apart=False,
        max_fusible_chain=0,
        max_distance=10**9,
        unmaterialized_factor=1.0,
        distance_bias=1.0,
    )


def solve_with_budget(
    joint: JointGraph, options: PartitionOptions, solver: KnapsackSolver, estimator: RuntimeEstimator
) -> BudgetedCut:
    """The cut for ``options.budget``.

    Raises:
        InfeasiblePartitionError: as :func:`solve_min_cut`.
    """
    default = make_cut_problem(joint, options)
    chosen = solve_min_cut(default)
    total = sum(activation_bytes(joint, index) for index in chosen.saved)
    if options.budget >= 1.0:
        return BudgetedCut(default, chosen, total)
    free = floor_problem(joint, default)
    floor = set(solve_min_cut(free).saved)
    candidates = [index for index in chosen.saved if index not in floor and activation_bytes(joint, index) > 0]
    capacity = int(options.budget * total)
    room = capacity - sum(activation_bytes(joint, index) for index in floor)
    kept: set[int] = set()
    if room > 0 and candidates:
        weights = [activation_bytes(joint, index) for index in candidates]
        gains = recompute_seconds(free, candidates, set(chosen.saved), estimator)
        kept = {candidates[item] for item in checked_solution(solver, weights, gains, room)}
    reason = f"kept within the budget of {options.budget}"
    bans = [reason if index in kept else ban for index, ban in enumerate(free.bans)]
    problem = replace(free, bans=bans)
    return BudgetedCut(problem, solve_min_cut(problem), capacity)


def floor_problem(joint: JointGraph, default: CutProblem) -> CutProblem:
    """The problem with every rule about cost lifted: what it bans can't be recomputed at all."""
    free = make_cut_problem(joint, lenient(default.options))
    return replace(free, bans=[_without_cost(joint, reason, index) for index, reason in enumerate(free.bans)])


def _without_cost(joint: JointGraph, reason: str | None, index: int) -> str | None:
    """Lift "compute-intensive", the one rule about cost that has no option: a budget is a request to pay it."""
    return None if joint.facts[index].is_compute_intensive and reason == "compute-intensive" else reason


def activation_bytes(joint: JointGraph, index: int) -> int:
    """Bytes that saving a value keeps beyond the inputs."""
    is_input = joint.nodes[index].op == "placeholder" and index not in joint.mutated_inputs
    return 0 if is_input else joint.bytes_of[index]


def recompute_seconds(
    problem: CutProblem, candidates: list[int], saved: AbstractSet[int], estimator: RuntimeEstimator
) -> list[float]:
    """For each candidate the time to compute it from the other saved values and the inputs."""
    joint = problem.joint
    seconds = []
    for candidate in candidates:
        pending, seen, total = [candidate], {candidate}, 0.0
        while pending:
            index = pending.pop()
            total += estimate_seconds(joint, index, estimator)
            for used in joint.inputs_of[index]:
                if used not in seen and used not in saved and problem.bans[used] is None:
                    seen.add(used)
                    pending.append(used)
        seconds.append(total)
    return seconds
