"""Which values to keep under a byte budget: 0/1 knapsack solvers with their stated bounds (F3.39).

Each solver takes weights (bytes), gains (seconds of recomputation avoided) and a capacity, and returns the sorted
positions to keep. Any callable of this form serves as a custom solver; what it returns is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from .errors import PartitionError

KnapsackSolver = Callable[[Sequence[int], Sequence[float], int], "tuple[int, ...]"]

# The dynamic program rounds weights up to multiples of capacity / this.
DP_STEPS = 10_000


def greedy(weights: Sequence[int], gains: Sequence[float], capacity: int) -> tuple[int, ...]:
    """By gain per byte, or the best single item if that is better. At least half the optimum."""
    order = sorted(range(len(weights)), key=lambda item: (-gains[item] / max(weights[item], 1), item))
    kept, room = [], capacity
    for item in order:
        if weights[item] <= room:
            kept.append(item)
            room -= weights[item]
    fitting = [item for item in range(len(weights)) if weights[item] <= capacity]
    best = max(fitting, key=lambda item: gains[item], default=None)
    if best is not None and gains[best] > sum(gains[item] for item in kept):
        return (best,)
    return tuple(sorted(kept))


def dynamic_program(weights: Sequence[int], gains: Sequence[float], capacity: int) -> tuple[int, ...]:
    """Optimal after rounding each weight up to a multiple of capacity / 10 000 (exact for capacities below that)."""
    if capacity < 0:
        return ()
    step = max(1, -(-capacity // DP_STEPS))
    cells = capacity // step
    rounded = [-(-weight // step) for weight in weights]
    best = np.zeros(cells + 1)
    taken = np.zeros((len(weights), cells + 1), dtype=bool)
    for item, weight in enumerate(rounded):
        if weight > cells:
            continue
        candidate = np.full(cells + 1, -1.0)
        candidate[weight:] = best[: cells + 1 - weight] + gains[item]
        taken[item] = candidate > best
        best = np.maximum(best, candidate)
    kept, room = [], cells
    for item in range(len(weights) - 1, -1, -1):
        if taken[item, room]:
            kept.append(item)
            room -= rounded[item]
    return tuple(reversed(kept))


def exact(weights: Sequence[int], gains: Sequence[float], capacity: int) -> tuple[int, ...]:
    """Optimal, by integer programming (HiGHS through scipy)."""
    from scipy.optimize import LinearConstraint, milp  # 0.15 s, which no other solver needs

    if not weights or capacity < 0:
        return ()
    scale = max(max(gains), 1e-30)
    unit = float(max(capacity, 1))
    constraint = LinearConstraint(np.asarray([weights], dtype=float) / unit, -np.inf, capacity / unit)
    solved = milp(
        -np.asarray(gains) / scale,
        constraints=constraint,
        bounds=(0, 1),
        integrality=np.ones(len(weights)),
        options={"mip_rel_gap": 0.0},
    )
    if solved.x is None:
        return greedy(weights, gains, capacity)
    kept = tuple(int(item) for item in np.flatnonzero(solved.x > 0.5))
    # The solver's feasibility tolerance may let a few bytes too many through.
    return kept if sum(weights[item] for item in kept) <= capacity else greedy(weights, gains, capacity)


def dynamic_program_low_memory(weights: Sequence[int], gains: Sequence[float], capacity: int) -> tuple[int, ...]:
    """As :func:`dynamic_program`, with memory for two rows instead of one per item, at twice the time.

    The best share of the capacity for the first half of the items is found from the last rows of both halves, then
    each half is solved for its share (Hirschberg's divide and conquer, 1975).
    """
    if capacity < 0:
        return ()
    step = max(1, -(-capacity // DP_STEPS))
    rounded = [-(-weight // step) for weight in weights]

    def last_row(items: range, cells: int) -> Any:
        best = np.zeros(cells + 1)
        for item in items:
            weight = rounded[item]
            if weight <= cells:
                best[weight:] = np.maximum(best[weight:], best[: cells + 1 - weight] + gains[item])
        return best

    kept: list[int] = []
    pending = [(range(len(weights)), capacity // step)]
    while pending:
        items, cells = pending.pop()
        if len(items) == 1:
            if rounded[items[0]] <= cells and gains[items[0]] > 0:
                kept.append(items[0])
        elif len(items) > 1:
            left, right = items[: len(items) // 2], items[len(items) // 2 :]
            share = int(np.argmax(last_row(left, cells) + last_row(right, cells)[::-1]))
            pending += [(left, share), (right, cells - share)]
    return tuple(sorted(kept))


def checked_solution(
    solver: KnapsackSolver, weights: Sequence[int], gains: Sequence[float], capacity: int
) -> tuple[int, ...]:
    """What a solver says, refused if it names no items or exceeds the capacity.

    Raises:
        PartitionError: the solver's answer is none.
    """
    kept = tuple(solver(weights, gains, capacity))
    name = getattr(solver, "__name__", type(solver).__name__)
    if len(set(kept)) != len(kept) or not all(isinstance(i, int) and 0 <= i < len(weights) for i in kept):
        raise PartitionError(
            f"the knapsack solver {name} returned {kept!r}; expected distinct positions below {len(weights)}."
        )
    total = sum(weights[item] for item in kept)
    if total > capacity:
        raise PartitionError(f"the knapsack solver {name} keeps {total} bytes, but the capacity is {capacity}.")
    return kept


SOLVERS: Mapping[str, KnapsackSolver] = {
    "greedy": greedy,
    "dp": dynamic_program,
    "dp-low-memory": dynamic_program_low_memory,
    "milp": exact,
}
