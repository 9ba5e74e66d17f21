"""Parameters of which each rank has a part and that the forward gathers: which of them the backward gathers again.

Note [Kept, or gathered again]
    Autograd keeps the whole parameter for the backward, and so does a cut that recomputes no communication. With
    ``regather`` the backward gathers again what does not fit into ``regather_budget`` bytes. What fits is chosen by a
    knapsack: a parameter takes the bytes that its gathers make, and keeping it saves the time of these gathers on a
    link of the given latency and bandwidth. Among equal ones the last of the forward is kept, which lives the shortest.
    All ranks have the same graph, options and parts, so all choose alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .joint import JointGraph
from .knapsack import SOLVERS, checked_solution
from .options import PartitionOptions
from .plan import Plan

__all__ = ["GatherDecision", "GatheredParameter", "gather_decisions", "gathered_parameters", "regathered"]

_MOVES = (
    "aten._to_copy.default",
    "aten.clone.default",
    "prims.convert_element_type.default",
    "aten.cat.default",
    "aten.constant_pad_nd.default",
    "aten.split.Tensor",
    "aten.split_with_sizes.default",
)


@dataclass(frozen=True, slots=True)
class GatheredParameter:
    """A parameter that is whole again, or several that are gathered together, by positions in the joint graph.

    Attributes:
        inputs: what each rank has.
        gathers: the collectives.
        members: all that is made of them by waits, copies, casts and views alone, in graph order.
        bytes: of what the collectives make.
        needed: whether the backward reads a member.
    """

    inputs: tuple[int, ...]
    gathers: tuple[int, ...]
    members: tuple[int, ...]
    bytes: int
    needed: bool


@dataclass(frozen=True, slots=True)
class GatherDecision:
    """What becomes of a parameter that the forward gathers.

    Attributes:
        inputs: the names of what each rank has of it.
        bytes: of the whole.
        seconds: that gathering it takes, as the options describe the link.
        again: whether the backward gathers it again.
        reason: why.
    """

    inputs: tuple[str, ...]
    bytes: int
    seconds: float
    again: bool
    reason: str


def gathered_parameters(joint: JointGraph) -> list[GatheredParameter]:
    """The parameters that the forward gathers from all ranks, in the order of their first gather."""
    sets = _Sets(len(joint.nodes))
    found = [False] * len(joint.nodes)
    plain = [node.op == "placeholder" for node in joint.nodes]
    for index, node in enumerate(joint.nodes):
        used, facts = joint.inputs_of[index], joint.facts[index]
        if node.op != "call_function" or joint.in_backward[index] or not used:
            continue
        if not all(plain[item] or found[item] for item in used):
            continue
        if _is_gather(joint, index) or (_short(joint, index) == "wait_tensor" and found[used[0]]):
            found[index] = True
        elif facts.is_view or facts.is_getitem or str(node.target) in _MOVES:
            found[index], plain[index] = any(found[item] for item in used), all(plain[item] for item in used)
        if found[index]:
            for item in used:
                if found[item]:
                    sets.join(index, item)
    groups: dict[int, list[int]] = {}
    for index in range(len(found)):
        if found[index]:
            groups.setdefault(sets.root(index), []).append(index)
    return [_parameter(joint, members) for members in groups.values()]


def regathered(joint: JointGraph, options: PartitionOptions) -> list[bool]:
    """For each node whether the backward may gather it, or make it of what it gathers, again."""
    again = [False] * len(joint.nodes)
    if options.regather:
        found = gathered_parameters(joint)
        kept = _kept(found, options)
        for number, parameter in enumerate(found):
            for member in parameter.members:
                again[member] = number not in kept
    return again


def gather_decisions(joint: JointGraph, plan: Plan, options: PartitionOptions) -> tuple[GatherDecision, ...]:
    """What the plan makes of each gathered parameter."""
    found = gathered_parameters(joint)
    kept = _kept(found, options) if options.regather else set()
    twice = set(plan.recomputed())
    return tuple(
        GatherDecision(
            inputs=tuple(joint.nodes[index].name for index in parameter.inputs),
            bytes=parameter.bytes,
            seconds=_seconds(parameter, options),
            again=bool(twice.intersection(parameter.gathers)),
            reason=_reason(parameter, plan, options, number in kept),
        )
        for number, parameter in enumerate(found)
    )


def _reason(parameter: GatheredParameter, plan: Plan, options: PartitionOptions, kept: bool) -> str:
    again = set(plan.recomputed()).intersection(parameter.gathers)
    saved = set(plan.tensors).intersection(parameter.members)
    if not again and not saved:
        return "the backward does not need it"
    if not again:
        return f"kept: within the {options.regather_budget} bytes of regather_budget" if kept else "kept"
    if options.regather and not kept:
        return f"gathered again: beyond the {options.regather_budget} bytes of regather_budget"
    return "gathered again: a checkpointed region is computed again"


def _kept(found: Sequence[GatheredParameter], options: PartitionOptions) -> set[int]:
    """Which of them fit into the budget, by number."""
    wanted = [number for number, parameter in enumerate(found) if parameter.needed]
    if not wanted or options.regather_budget <= 0:
        return set()
    weights = [found[number].bytes for number in wanted]
    gains = [_seconds(found[number], options) * (1 + 1e-6 * number / len(found)) for number in wanted]
    unit = math.gcd(*weights) or 1  # so that solvers that round weights have little to round
    room = options.regather_budget // unit
    chosen = checked_solution(SOLVERS[options.knapsack], [weight // unit for weight in weights], gains, room)
    return {wanted[item] for item in chosen}


def _seconds(parameter: GatheredParameter, options: PartitionOptions) -> float:
    return len(parameter.gathers) * options.link_latency + parameter.bytes / options.link_bandwidth


def _parameter(joint: JointGraph, members: Sequence[int]) -> GatheredParameter:
    gathers = tuple(index for index in members if _is_gather(joint, index))
    return GatheredParameter(
        inputs=tuple(sorted(_inputs(joint, gathers))),
        gathers=gathers,
        members=tuple(members),
        bytes=sum(joint.bytes_of[index] for index in gathers if not _is_gathered_again(joint, index, members)),
        needed=any(joint.in_backward[user] for index in members for user in joint.users_of[index]),
    )


def _is_gathered_again(joint: JointGraph, index: int, members: Sequence[int]) -> bool:
    """Whether a gather's result is gathered over another group of ranks, so that it need not be kept."""
    waiting, inside = list(joint.users_of[index]), set(members)
    while waiting:
        user = waiting.pop()
        if user in inside:
            if _is_gather(joint, user):
                return True
            waiting.extend(joint.users_of[user])
    return False


def _inputs(joint: JointGraph, gathers: Sequence[int]) -> set[int]:
    found, waiting = set[int](), list(gathers)
    while waiting:
        index = waiting.pop()
        if joint.nodes[index].op == "placeholder":
            found.add(index)
        waiting.extend(joint.inputs_of[index])
    return found


def _is_gather(joint: JointGraph, index: int) -> bool:
    return _short(joint, index).startswith("all_gather")


def _short(joint: JointGraph, index: int) -> str:
    return str(joint.nodes[index].target).split(".")[1] if joint.facts[index].is_collective else ""


class _Sets:
    """Disjoint sets of numbers below ``count``."""

    def __init__(self, count: int) -> None:
        self._parent = list(range(count))

    def root(self, item: int) -> int:
        while self._parent[item] != item:
            self._parent[item] = item = self._parent[self._parent[item]]
        return item

    def join(self, one: int, other: int) -> None:
        self._parent[self.root(one)] = self.root(other)
