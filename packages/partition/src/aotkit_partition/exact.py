"""The same problem as the minimum cut, stated without a network and solved exactly by integer programming.

Two numbers of 0 or 1 per value: whether it is saved, and whether the backward has it. What the backward needs it must
have; it has what is saved, or what it may recompute from values it has. Practical up to some thousand values; its use
is to prove the cut right.
"""

from __future__ import annotations

import numpy as np

from .cost import UNSAVEABLE
from .errors import PartitionError
from .min_cut import CutProblem, CutResult, infeasible


def solve_exactly(problem: CutProblem) -> CutResult:
    """The cheapest set of values to save.

    Raises:
        InfeasiblePartitionError: no set satisfies the constraints.
        PartitionError: the solver gave up.
    """
    from scipy.optimize import LinearConstraint, milp  # 0.15 s, which no other strategy needs
    from scipy.sparse import csr_matrix

    candidates = problem.candidates()
    if not candidates:
        return CutResult((), 0.0)
    count = len(candidates)
    column = {index: place for place, index in enumerate(candidates)}
    costs = [problem.costs[index].cost for index in candidates]
    upper = np.ones(2 * count)
    upper[[place for place, cost in enumerate(costs) if cost == UNSAVEABLE]] = 0
    lower = np.zeros(2 * count)
    lower[[count + column[index] for index in candidates if problem.needed[index]]] = 1
    rows: list[tuple[int, int, float]] = []
    number = 0
    for index in candidates:
        saved, has = column[index], count + column[index]
        banned = problem.bans[index] is not None
        sources = [] if banned else [count + column[used] for used in problem.joint.inputs_of[index] if used in column]
        for source in [None] if banned else sources:  # has <= saved (+ has of each argument)
            rows += [(number, has, 1.0), (number, saved, -1.0)]
            rows += [] if source is None else [(number, source, -1.0)]
            number += 1
    objective = np.concatenate([[0.0 if cost == UNSAVEABLE else cost for cost in costs], np.zeros(count)])
    scale = max(float(objective.max()), 1.0)
    data = ([value for _, _, value in rows], ([row for row, _, _ in rows], [col for _, col, _ in rows]))
    constraints = [LinearConstraint(csr_matrix(data, shape=(number, 2 * count)), -np.inf, 0.0)] if rows else []
    solved = milp(
        objective / scale,
        constraints=constraints,
        bounds=(lower, upper),
        integrality=np.ones(2 * count),
        options={"mip_rel_gap": 0.0},
    )
    if solved.status == 2:
        raise infeasible(problem)
    if solved.x is None:
        raise PartitionError(f"the integer program has no answer: {solved.message}")
    kept = tuple(index for index in candidates if solved.x[column[index]] > 0.5)
    return CutResult(kept, sum(problem.costs[index].cost for index in kept))
