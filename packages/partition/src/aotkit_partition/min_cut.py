"""Rematerialization as a minimum cut.

Every value that either side could compute is an edge from "available to the backward" in, to "available to the
backward" out; its capacity is the cost of saving it. A value that must not be recomputed hangs on the source; one that
the backward uses directly hangs on the sink; using a value in a recomputation is an infinite edge. The cut edges are
the saved values. The idea is from the recomputation literature on min-cut (see J. Zhang, 2021, "min-cut
rematerialization"); ties go to the values nearest to the backward, so that the least is recomputed.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch.fx

from .ban_rules import ban_reasons
from .cost import UNSAVEABLE, SaveCost, is_free, save_costs
from .errors import InfeasiblePartitionError
from .flow_network import Edge, min_cut
from .joint import JointGraph
from .options import PartitionOptions
from .policies import must_recompute, must_save

_SOURCE, _SINK = 0, 1


@dataclass(frozen=True, slots=True)
class CutProblem:
    """One rematerialization problem: who may be recomputed, what saving costs, what the backward needs as is."""

    joint: JointGraph
    options: PartitionOptions
    bans: list[str | None]
    costs: list[SaveCost]
    needed: list[bool]

    def candidates(self) -> list[int]:
        """Nodes that matter: what the backward needs, and what recomputing that would need; in graph order."""
        seen = [False] * len(self.needed)
        pending = [index for index, needed in enumerate(self.needed) if needed]
        for index in pending:
            seen[index] = True
        while pending:
            index = pending.pop()
            if self.bans[index] is not None:
                continue
            for used in self.joint.inputs_of[index]:
                if not seen[used] and not is_free(self.joint, used):
                    seen[used] = True
                    pending.append(used)
        return [index for index, found in enumerate(seen) if found]


@dataclass(frozen=True, slots=True)
class CutResult:
    """The saved nodes in graph order, and the cost of the cut."""

    saved: tuple[int, ...]
    cost: float


def needed_by_backward(joint: JointGraph) -> list[bool]:
    """Nodes of the forward side that a node of the backward, or the list of gradients, uses directly."""
    needed = [
        not joint.in_backward[index]
        and node.op != "output"
        and not is_free(joint, index)
        and any(joint.in_backward[user] for user in joint.users_of[index])
        for index, node in enumerate(joint.nodes)
    ]
    for gradient in joint.gradients:
        if isinstance(gradient, torch.fx.Node):
            index = joint.position[gradient]
            needed[index] = needed[index] or not (joint.in_backward[index] or is_free(joint, index))
    return needed


def make_cut_problem(joint: JointGraph, options: PartitionOptions) -> CutProblem:
    """Apply policies, ban rules and cost rules to a joint graph."""
    save, recompute = must_save(joint), must_recompute(joint)
    return CutProblem(
        joint=joint,
        options=options,
        bans=ban_reasons(joint, options, save, recompute),
        costs=save_costs(joint, options, recompute, save),
        needed=needed_by_backward(joint),
    )


def solve_min_cut(problem: CutProblem) -> CutResult:
    """The cheapest set of values to save.

    Raises:
        InfeasiblePartitionError: some value may be neither recomputed nor saved, nor anything after it.
    """
    edges: list[Edge] = []
    always_saved: list[int] = []
    enters: dict[int, int] = {}
    leaves: dict[int, int] = {}
    count = 2
    candidates = problem.candidates()
    for index in candidates:
        banned, needed = problem.bans[index] is not None, problem.needed[index]
        cost = problem.costs[index].cost
        if cost == UNSAVEABLE:
            if banned and needed:
                raise infeasible(problem)
            vertex = _SOURCE if banned else _SINK if needed else count
            count += vertex == count
            enters[index] = leaves[index] = vertex
            continue
        enters[index] = _SOURCE if banned else count
        count += not banned
        leaves[index] = _SINK if needed else count
        count += not needed
        if banned and needed:
            always_saved.append(index)
        else:
            edges.append(Edge(enters[index], leaves[index], cost, index))
    for index in candidates:
        if problem.bans[index] is not None:
            continue
        for used in problem.joint.inputs_of[index]:
            if used in leaves and leaves[used] != _SINK and enters[index] != _SOURCE:
                if leaves[used] == _SOURCE and enters[index] == _SINK:
                    raise infeasible(problem)
                edges.append(Edge(leaves[used], enters[index], UNSAVEABLE))
    solution = min_cut(count, edges, _SOURCE, _SINK)
    if solution is None:
        raise infeasible(problem)
    cost, tags = solution
    saved = sorted({*always_saved, *tags})
    return CutResult(tuple(saved), cost + sum(problem.costs[index].cost for index in always_saved))


def infeasible(problem: CutProblem) -> InfeasiblePartitionError:
    """Find a chain of unsaveable values from a banned one to a needed one, and put it into words."""
    joint = problem.joint
    came_from: dict[int, int] = {}
    pending: deque[int] = deque()
    candidates = set(problem.candidates())
    for index in sorted(candidates):
        if problem.bans[index] is not None and problem.costs[index].cost == UNSAVEABLE:
            came_from[index] = -1
            pending.append(index)
    while pending:
        index = pending.popleft()
        if problem.needed[index]:
            return _infeasible_error(problem, _path(came_from, index))
        for user in joint.users_of[index]:
            blocked = user in candidates and problem.bans[user] is None and problem.costs[user].cost == UNSAVEABLE
            if blocked and user not in came_from:
                came_from[user] = index
                pending.append(user)
    return InfeasiblePartitionError(
        "no set of saved values satisfies all constraints, though no single chain shows why."
    )


def _path(came_from: dict[int, int], index: int) -> list[int]:
    path = [index]
    while came_from[path[-1]] >= 0:
        path.append(came_from[path[-1]])
    return path[::-1]


def _infeasible_error(problem: CutProblem, path: list[int]) -> InfeasiblePartitionError:
    joint = problem.joint
    names = [joint.nodes[index].name for index in path]
    headline = (
        f"can't split the joint graph: '{names[0]}' must not be recomputed ({problem.bans[path[0]]}), the backward "
        f"needs '{names[-1]}', and nothing on the way may be saved:"
    )
    lines = [headline]
    for index in path:
        user = next((joint.nodes[u].name for u in joint.users_of[index] if joint.in_backward[u]), None)
        tail = f"; used in the backward by '{user}'" if user and index == path[-1] else ""
        lines.append(
            f"  {joint.nodes[index].format_node() or joint.nodes[index].name}  # {problem.costs[index].why}{tail}"
        )
    lines.append("Allow saving one of these values (drop its recompute policy), or allow recomputing the first one.")
    return InfeasiblePartitionError("\n".join(lines), names)
