"""The order in which the backward runs.

Note [Recompute late]
A joint graph lists everything that the forward computes before anything that a tangent reaches. A backward in that
order would first recompute all it recomputes, and hold it at once: as if nothing had been given up. So the nodes that
a tangent reaches keep their order, which is that of the autograd engine, and each recomputed value is made just before
its first use. Writes, random draws and side effects stay where they were among everything that precedes them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from .joint import JointGraph


def backward_order(joint: JointGraph, computed: Sequence[int], alone: Collection[int]) -> list[int]:
    """An order of ``computed`` (sorted positions) in which every value is made late and tuples are unpacked at once.

    Args:
        alone: the nodes that stand without their arguments (literals).
    """
    wanted = set(computed)
    order: list[int] = []
    done: set[int] = set()

    def emit(root: int) -> None:
        pending = [root]
        while pending:
            index = pending[-1]
            if index in done:
                pending.pop()
                continue
            missing = [] if index in alone else [i for i in joint.inputs_of[index] if i in wanted and i not in done]
            if missing:
                pending.extend(sorted(missing, reverse=True))
                continue
            pending.pop()
            _append(joint, index, wanted, done, order)

    before_fence = 0
    for place, index in enumerate(computed):
        if _is_fence(joint, index):
            for earlier in computed[before_fence:place]:
                emit(earlier)
            before_fence = place
        elif not joint.in_backward[index]:
            continue
        emit(index)
    for index in computed[before_fence:]:
        emit(index)
    return order


def _append(joint: JointGraph, index: int, wanted: set[int], done: set[int], order: list[int]) -> None:
    done.add(index)
    order.append(index)
    for user in joint.users_of[index]:
        if joint.facts[user].is_getitem and user in wanted and user not in done:
            done.add(user)
            order.append(user)


def _is_fence(joint: JointGraph, index: int) -> bool:
    facts = joint.facts[index]
    # A random op of the forward side runs here from a saved state, and draws nothing.
    return facts.is_mutating or facts.has_side_effects or (facts.is_random and joint.in_backward[index])
