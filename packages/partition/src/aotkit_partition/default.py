"""The partition without rematerialization: the forward is what ran first, the backward gets what it uses."""

from __future__ import annotations

import torch

from .cost import is_free, is_view_like
from .errors import InfeasiblePartitionError
from .joint import JointGraph, can_replay
from .min_cut import needed_by_backward


def forward_part(joint: JointGraph) -> list[bool]:
    """Nodes up to the last one of the forward (by tag, else by need), as far as no tangent reaches them."""
    tagged = [node.meta.get("partitioner_tag") for node in joint.nodes]
    last = max(
        (
            index
            for index, node in enumerate(joint.nodes)
            if not joint.in_backward[index]
            and node.op not in ("placeholder", "output")
            and (joint.in_forward[index] or tagged[index] in ("is_forward", "must_be_in_forward"))
        ),
        default=-1,
    )
    return [
        not joint.in_backward[index] and (index <= last or joint.in_forward[index]) for index in range(len(joint.nodes))
    ]


def default_saved_values(joint: JointGraph) -> list[int]:
    """What crosses from the forward part to the rest.

    A tensor of which only sizes are used does not cross; the sizes do (F3.2). Tuples, symbolic floats and bools do not
    cross; what they are made of does.

    Raises:
        InfeasiblePartitionError: a value must cross that is neither saveable nor made of saveable values.
    """
    in_forward = forward_part(joint)
    saved: set[int] = set()
    seen: set[int] = set()
    pending = [index for index, needed in enumerate(needed_by_backward(joint)) if needed]
    while pending:
        index = pending.pop()
        if index in seen or joint.in_backward[index] or is_free(joint, index):
            continue
        seen.add(index)
        if joint.nodes[index].op == "placeholder" or (
            _belongs_to_forward(joint, index, in_forward) and _crosses(joint, index)
        ):
            saved.add(index)
            continue
        facts = joint.facts[index]
        if (facts.is_random and not can_replay(joint, index)) or facts.is_mutating or facts.has_side_effects:
            raise InfeasiblePartitionError(
                f"the backward needs '{joint.nodes[index].name}' ({facts.name}), which can't run twice, and whose "
                f"result is a {type(joint.value(index)).__name__} that can't be saved.",
                (joint.nodes[index].name,),
            )
        pending.extend(joint.inputs_of[index])
    return sorted(saved)


def _belongs_to_forward(joint: JointGraph, index: int, in_forward: list[bool]) -> bool:
    """Also sizes and tuple items of forward values, wherever the trace put them."""
    if in_forward[index]:
        return True
    facts = joint.facts[index]
    return (facts.is_getitem or facts.is_symbolic) and all(
        in_forward[used] or joint.nodes[used].op == "placeholder" for used in joint.inputs_of[index]
    )


def _crosses(joint: JointGraph, index: int) -> bool:
    value = joint.value(index)
    if isinstance(value, torch.Tensor):
        return not (_is_unchanged_view(joint, index))
    return isinstance(value, torch.SymInt)


def _is_unchanged_view(joint: JointGraph, index: int) -> bool:
    """detach/alias of a value: the value itself crosses instead, so that it is not saved twice."""
    return joint.facts[index].name in ("aten.detach", "aten.alias") and is_view_like(joint, index)
