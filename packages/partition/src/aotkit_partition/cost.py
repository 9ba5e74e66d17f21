"""What saving a value costs, in bytes-equivalents, or that it can't be saved (F3.10 - F3.15, F3.23)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ._torch_compat import is_script_object
from .fusion import is_fusible
from .joint import JointGraph
from .options import PartitionOptions
from .timeline import waits_for_collective

UNSAVEABLE = float("inf")
MAX_BIASED_DISTANCE = 100
# Free inputs cost a little all the same, so that sizes alone are saved rather than the tensor they are the sizes of:
# as many as a tensor is likely to have. Whole numbers, because maximum flow takes no others.
FREE_INPUT_COST = 8.0
SIZE_COST = 1.0


@dataclass(frozen=True, slots=True)
class SaveCost:
    """Cost of saving one value. ``why`` explains an infinite or unusual cost."""

    cost: float
    why: str = ""


def is_literal(joint: JointGraph, index: int) -> bool:
    """Whether tracing fixed the value to a plain number (or None): then it is written into the backward as is."""
    node = joint.nodes[index]
    if node.op != "call_function" or "val" not in node.meta:
        return False
    value = node.meta["val"]
    return value is None or isinstance(value, (bool, int, float, str))


def is_free(joint: JointGraph, index: int) -> bool:
    """Values that both graphs just have: constants of the module and numbers fixed by tracing."""
    return joint.nodes[index].op == "get_attr" or is_literal(joint, index)


def is_view_like(joint: JointGraph, index: int) -> bool:
    """A view, or one item of an op that returns several views."""
    facts = joint.facts[index]
    if facts.is_getitem:
        return bool(joint.inputs_of[index]) and joint.facts[joint.inputs_of[index][0]].is_view
    return facts.is_view


def distances_from_backward(joint: JointGraph) -> list[int]:
    """Fewest steps from each node to one that is not needed by the forward; large where there is none."""
    far = 10**9
    distance = [0] * len(joint.nodes)
    for index in range(len(joint.nodes) - 1, -1, -1):
        if joint.in_forward[index]:
            distance[index] = min((distance[user] for user in joint.users_of[index]), default=far) + 1
    return distance


def save_costs(
    joint: JointGraph, options: PartitionOptions, recompute: list[bool], save: list[str | None]
) -> list[SaveCost]:
    """The cost of saving each node.

    Args:
        recompute: nodes that a policy forbids to save.
        save: for nodes that a policy says to save, why.
    """
    distance, levels = distances_from_backward(joint), kernel_levels(joint)
    return [
        SaveCost(0.0, "computed in the backward")
        if joint.in_backward[index]
        else _save_cost(joint, index, options, distance[index], levels, recompute, save)
        for index in range(len(joint.nodes))
    ]


def _save_cost(
    joint: JointGraph,
    index: int,
    options: PartitionOptions,
    distance: int,
    levels: list[int],
    recompute: list[bool],
    save: list[str | None],
) -> SaveCost:
    value: Any = joint.value(index)
    node = joint.nodes[index]
    if recompute[index]:
        policy = node.meta.get("recompute")
        return SaveCost(UNSAVEABLE, f"policy {policy.name}" if policy is not None else "made of values to recompute")
    if isinstance(value, torch.SymInt):
        return SaveCost(SIZE_COST)
    if isinstance(value, (torch.SymFloat, torch.SymBool)):
        return SaveCost(UNSAVEABLE, "the backward takes no symbolic float or bool")
    if isinstance(value, (tuple, list)):
        return SaveCost(UNSAVEABLE, "a tuple; only its items can be saved")
    if not isinstance(value, torch.Tensor):
        if node.op == "placeholder":
            return SaveCost(0.0, "not a tensor: passed on")
        if is_script_object(value):
            if options.script_objects_are_free:
                return SaveCost(SIZE_COST, "a script object, declared free")
            return SaveCost(UNSAVEABLE, "a script object of unknown size; script_objects_are_free allows saving it")
        return SaveCost(UNSAVEABLE, f"its value is a {type(value).__name__}, not a tensor")
    if node.op == "placeholder":
        return _input_cost(joint, index, options)
    if joint.facts[index].is_collective and not (joint.in_forward[index] or waits_for_collective(node)):
        return SaveCost(UNSAVEABLE, "a collective writes to it until somebody waits; what the wait gives can be saved")
    if is_view_like(joint, index) and not save[index]:
        base = joint.inputs_of[index][0] if joint.inputs_of[index] else None
        if base is None or not recompute[base]:
            return SaveCost(UNSAVEABLE, "a view; saving its base costs the same memory")
    cost = max(float(joint.bytes_of[index]), 1.0) * options.distance_bias ** min(distance, MAX_BIASED_DISTANCE)
    if not joint.in_forward[index]:
        cost += 1.0  # at equal size rather save what the forward computes anyhow
    return SaveCost(cost if is_materialized(joint, index, levels) else cost * options.unmaterialized_factor)


def _input_cost(joint: JointGraph, index: int, options: PartitionOptions) -> SaveCost:
    if index in joint.mutated_inputs:
        return SaveCost(
            float(joint.bytes_of[index]) * options.unmaterialized_factor, "overwritten later: saved as a copy"
        )
    if index in joint.static_inputs or options.inputs_are_free:
        return SaveCost(FREE_INPUT_COST, "an input: alive anyhow")
    return SaveCost(float(joint.bytes_of[index]))


def kernel_levels(joint: JointGraph) -> list[int]:
    """How many kernels at least run one after the other before each node of the forward."""
    levels = [0] * len(joint.nodes)
    for index, inputs in enumerate(joint.inputs_of):
        if joint.in_forward[index]:
            levels[index] = max((levels[used] + (not is_fusible(joint, used, index)) for used in inputs), default=0)
    return levels


def is_materialized(joint: JointGraph, index: int, levels: list[int]) -> bool:
    """Whether the value reaches memory even if it isn't saved (F3.11): some use, or the output, can't fuse with it, or
    has to wait for another use of it, as the sum of a residual block waits for what the block makes of its input."""
    users = joint.users_of[index]
    if not all(is_fusible(joint, index, user) for user in users):
        return True
    return any(levels[user] > levels[index] for user in users if joint.in_forward[user])
