"""Memory budgets between "save inputs only" (0) and the default cut (1) (F3.38).

The floor is the cut with every rule about cost lifted: the fewest bytes that can be saved at all. The other values
that the default cut saves are candidates; a knapsack chooses which of them to keep as well, by the seconds that keeping
each one avoids, within ``budget`` times the default's bytes. Then the cut is solved again with the kept values banned
from recomputation: its bytes cannot exceed floor plus kept, because saving those is one of the cuts it chooses from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .joint import JointGraph
from .knapsack import SOLVERS
from .min_cut import CutProblem, CutResult, make_cut_problem, solve_min_cut
from .options import PartitionOptions
from .runtime_estimate import estimate_seconds


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


def solve_with_budget(joint: JointGraph, options: PartitionOptions) -> BudgetedCut:
    """The cut for ``options.memory_budget``.

    Raises:
        InfeasiblePartitionError: as :func:`solve_min_cut`.
    """
    default = make_cut_problem(joint, options)
    chosen = solve_min_cut(default)
    total = sum(_activation_bytes(joint, index) for index in chosen.saved)
    if options.memory_budget >= 1.0:
        return BudgetedCut(default, chosen, total)
    free = make_cut_problem(joint, lenient(options))
    free = replace(free, bans=[_without_cost(joint, reason, index) for index, reason in enumerate(free.bans)])
    floor = set(solve_min_cut(free).saved)
    candidates = [index for index in chosen.saved if index not in floor and _activation_bytes(joint, index) > 0]
    capacity = int(options.memory_budget * total)
    room = capacity - sum(_activation_bytes(joint, index) for index in floor)
    kept: set[int] = set()
    if room > 0 and candidates:
        weights = [_activation_bytes(joint, index) for index in candidates]
        gains = _recompute_seconds(free, candidates, set(chosen.saved))
        kept = {candidates[item] for item in SOLVERS[options.knapsack](weights, gains, room)}
    bans = [
        f"kept within the budget of {options.memory_budget}" if i in kept else ban for i, ban in enumerate(free.bans)
    ]
    problem = replace(free, bans=bans)
    return BudgetedCut(problem, solve_min_cut(problem), capacity)


def _without_cost(joint: JointGraph, reason: str | None, index: int) -> str | None:
    """Lift "compute-intensive", the one rule about cost that has no option: a budget is a request to pay it."""
    return None if joint.facts[index].is_compute_intensive and reason == "compute-intensive" else reason


def _activation_bytes(joint: JointGraph, index: int) -> int:
    is_input = joint.nodes[index].op == "placeholder" and index not in joint.mutated_inputs
    return 0 if is_input else joint.bytes_of[index]


def _recompute_seconds(problem: CutProblem, candidates: list[int], saved: set[int]) -> list[float]:
    """For each candidate the time to compute it from the other saved values and the inputs."""
    joint = problem.joint
    seconds = []
    for candidate in candidates:
        pending, seen, total = [candidate], {candidate}, 0.0
        while pending:
            index = pending.pop()
            total += estimate_seconds(joint, index)
            for used in joint.inputs_of[index]:
                if used not in seen and used not in saved and problem.bans[used] is None:
                    seen.add(used)
                    pending.append(used)
        seconds.append(total)
    return seconds
