"""Selective activation checkpointing: what a node's policy tag means for the cut (F3.30, F3.31)."""

from __future__ import annotations

from .errors import InvalidJointGraphError
from .joint import RECOMPUTE_POLICIES, SAVE_POLICIES, JointGraph, can_replay


def has_policies(joint: JointGraph) -> bool:
    """Whether any node carries a recompute policy."""
    return any("recompute" in node.meta for node in joint.nodes)


def check_regions(joint: JointGraph) -> None:
    """Refuse a write inside a checkpoint region: eager would repeat it, and the backward here must not.

    Raises:
        InvalidJointGraphError: a node marked for recomputation writes to its argument.
    """
    for index, node in enumerate(joint.nodes):
        if node.meta.get("recompute") in RECOMPUTE_POLICIES and joint.facts[index].is_mutating:
            raise InvalidJointGraphError(
                f"a checkpoint region holds '{node.name}' ({joint.facts[index].name}), which writes to its argument; "
                "recomputing the region would write twice. Move the write out of the region, or functionalize it."
            )


def must_save(joint: JointGraph) -> list[str | None]:
    """For each node why its policy says to save it, or None."""
    reasons: list[str | None] = [None] * len(joint.nodes)
    for index, node in enumerate(joint.nodes):
        policy = node.meta.get("recompute")
        if joint.in_backward[index]:
            continue
        if policy in SAVE_POLICIES:
            reasons[index] = f"policy {policy.name}"
        elif policy in RECOMPUTE_POLICIES and node.meta.get("has_backward_hook"):
            reasons[index] = "its gradient has a hook, which waits for this very value"
        elif policy in RECOMPUTE_POLICIES and _crosses_regions(joint, index):
            reasons[index] = "boundary of two checkpoint regions"
    return reasons


def must_recompute(joint: JointGraph) -> list[bool]:
    """For each node whether its policy forbids saving it.

    Not so for what can't be computed twice anyhow (random draws, side effects, and the items of their results), and
    for the results of a region that untagged forward ops use: eager checkpointing saves those too. What only the
    backward makes of such a value is not saved in its place either.
    """
    result = [False] * len(joint.nodes)
    for index, node in enumerate(joint.nodes):
        if node.meta.get("has_backward_hook"):
            continue
        if not joint.in_forward[index] and not joint.in_backward[index]:
            result[index] = any(result[used] for used in joint.inputs_of[index]) and not _unrepeatable(joint, index)
            continue
        if node.meta.get("recompute") not in RECOMPUTE_POLICIES or joint.in_backward[index]:
            continue
        result[index] = not (_unrepeatable(joint, index) or _crosses_regions(joint, index) or _leaves(joint, index))
    return result


def _unrepeatable(joint: JointGraph, index: int) -> bool:
    facts = joint.facts[index]
    if facts.is_getitem or facts.is_view:
        return any(_unrepeatable(joint, used) for used in joint.inputs_of[index][:1])
    random = facts.is_random and not can_replay(joint, index)
    return random or facts.is_mutating or facts.has_side_effects


def _crosses_regions(joint: JointGraph, index: int) -> bool:
    region = joint.nodes[index].meta.get("ac_graph_id")
    if region is None:
        return False
    for user in joint.users_of[index]:
        other = joint.nodes[user].meta.get("ac_graph_id")
        if other is not None and other != region and not joint.in_backward[user]:
            return True
    return False


def _leaves(joint: JointGraph, index: int) -> bool:
    return any(
        joint.in_forward[user] and joint.nodes[user].meta.get("recompute") is None for user in joint.users_of[index]
    )
