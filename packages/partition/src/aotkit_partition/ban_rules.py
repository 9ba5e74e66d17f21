"""Which values must not be recomputed, each with its reason. A table of rules, the first that answers wins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .cost import distances_from_backward, is_literal, is_view_like
from .fusion import is_fusible
from .gathered_parameters import regathered
from .joint import JointGraph, can_replay
from .options import PartitionOptions


@dataclass(frozen=True, slots=True)
class BanContext:
    """What the rules look at. ``save`` are reasons from policies, ``recompute`` nodes a policy wants recomputed."""

    joint: JointGraph
    options: PartitionOptions
    save: list[str | None]
    recompute: list[bool]
    distance: list[int]
    far_use: list[str | None]
    gathered: list[bool]  # see :func:`regathered`
    compared: set[int]  # see :func:`_compared`


def ban_reasons(
    joint: JointGraph, options: PartitionOptions, save: list[str | None], recompute: list[bool]
) -> list[str | None]:
    """For each node why the backward must not recompute it, or None."""
    ctx = BanContext(
        joint,
        options,
        save,
        recompute,
        distances_from_backward(joint),
        _far_uses(joint, options),
        regathered(joint, options),
        _compared(joint),
    )
    reasons = [None if joint.in_backward[index] else ban_reason(ctx, index) for index in range(len(joint.nodes))]
    _break_long_chains(ctx, reasons)
    return reasons


def ban_reason(ctx: BanContext, index: int) -> str | None:
    """Why one node must not be recomputed, or None."""
    node = ctx.joint.nodes[index]
    if node.op == "placeholder":
        return "an input"
    if node.op != "call_function" or is_literal(ctx.joint, index):
        return None
    for rule in _HARD_RULES:
        reason = rule(ctx, index)
        if reason is not None:
            return reason
    if ctx.recompute[index] or ctx.gathered[index] or _never_banned(ctx, index):
        return None
    for rule in _COST_RULES:
        reason = rule(ctx, index)
        if reason is not None:
            return reason
    return None


def _never_banned(ctx: BanContext, index: int) -> bool:
    """Views, items of tuples and sizes cost nothing to make again; what only the backward needs is made once anyhow."""
    facts = ctx.joint.facts[index]
    return (
        not ctx.joint.in_forward[index]
        or is_view_like(ctx.joint, index)
        or facts.is_getitem
        or facts.is_symbolic
        or isinstance(ctx.joint.value(index), (torch.SymFloat, torch.SymBool))
    )


# Rules about correctness: they hold whatever a policy says.


def _ban_side_effects(ctx: BanContext, index: int) -> str | None:
    facts = ctx.joint.facts[index]
    if facts.is_mutating:
        return "writes to its argument"
    return "has a side effect" if facts.has_side_effects else None


def _ban_overwritten(ctx: BanContext, index: int) -> str | None:
    joint = ctx.joint
    for used in joint.inputs_of[index]:
        written = joint.first_write.get(used)
        if written is not None and (used in joint.written_in_backward or written < index):
            return f"reads '{joint.nodes[used].name}', which '{joint.nodes[written].name}' overwrites"
    return None


def _ban_random(ctx: BanContext, index: int) -> str | None:
    return "draws random numbers" if ctx.joint.facts[index].is_random and not can_replay(ctx.joint, index) else None


def _ban_collective(ctx: BanContext, index: int) -> str | None:
    """All ranks partition the same graph alike, so a policy's word is enough: eager's checkpoints communicate again.
    What only the backward needs runs once in any case, there as in eager mode."""
    if not ctx.joint.facts[index].is_collective or ctx.options.recompute_collectives or ctx.recompute[index]:
        return None
    if not ctx.joint.in_forward[index]:
        return None
    return None if ctx.gathered[index] else "communicates between processes"


def _ban_saved_by_policy(ctx: BanContext, index: int) -> str | None:
    return ctx.save[index]


# Rules about cost.


def _ban_custom_op(ctx: BanContext, index: int) -> str | None:
    facts = ctx.joint.facts[index]
    if facts.is_builtin or ctx.options.recompute_custom_ops:
        return None
    return "not an ATen op: its cost is unknown"


def _ban_expensive(ctx: BanContext, index: int) -> str | None:
    facts = ctx.joint.facts[index]
    if facts.is_compute_intensive:
        return "compute-intensive"
    if ctx.options.allowlist_only and not facts.is_recomputable and facts.is_builtin:
        return "not known to be cheap"
    return None


def _ban_inexact(ctx: BanContext, index: int) -> str | None:
    if ctx.options.bit_identical and ctx.joint.in_forward[index] and not ctx.joint.facts[index].is_exact:
        return "another fusion may give it other bits"
    return None


def _ban_compared(ctx: BanContext, index: int) -> str | None:
    if index in ctx.compared:
        return "it decides which elements are chosen, and another fusion may give it other bits"
    return None


def _ban_materialized_in_backward(ctx: BanContext, index: int) -> str | None:
    if not ctx.options.ban_materialized_in_backward:
        return None
    joint = ctx.joint
    pending, seen = [index], {index}
    while pending:
        current = pending.pop()
        for user in joint.users_of[current]:
            if user in seen or joint.nodes[user].op == "output":
                continue
            seen.add(user)
            if is_view_like(joint, user) or joint.facts[user].is_getitem:
                pending.append(user)  # the backward makes these again, whoever else uses them
            elif not joint.in_forward[user] and not is_fusible(joint, current, user):
                return f"the backward would write it to memory for '{joint.nodes[user].name}'"
    return None


def _ban_too_far(ctx: BanContext, index: int) -> str | None:
    distance = ctx.distance[index]
    if ctx.joint.in_forward[index] and ctx.options.max_distance < distance < 10**9:
        return f"{distance} steps away from the backward, more than {ctx.options.max_distance}"
    return None


def _ban_reduction(ctx: BanContext, index: int) -> str | None:
    joint = ctx.joint
    read = sum(joint.bytes_of[used] for used in joint.inputs_of[index])
    if ctx.options.ban_reductions and joint.bytes_of[index] * 4 < read:
        return f"a reduction from {read} to {joint.bytes_of[index]} bytes: cheap to save"
    return None


def _ban_far_use(ctx: BanContext, index: int) -> str | None:
    return ctx.far_use[index]


_Rule = Callable[[BanContext, int], "str | None"]
_HARD_RULES: tuple[_Rule, ...] = (
    _ban_side_effects,
    _ban_overwritten,
    _ban_random,
    _ban_collective,
    _ban_compared,
    _ban_saved_by_policy,
)
_COST_RULES: tuple[_Rule, ...] = (
    _ban_inexact,
    _ban_custom_op,
    _ban_expensive,
    _ban_materialized_in_backward,
    _ban_too_far,
    _ban_reduction,
    _ban_far_use,
)


_EQUALITIES = frozenset({"aten.eq", "aten.ne"})
_ORDERS = frozenset({"aten.lt", "aten.le", "aten.gt", "aten.ge"})
_CHOICES = frozenset({"aten.argmax", "aten.argmin", "aten.max", "aten.min"})  # of places; without a dimension of one


def _compared(joint: JointGraph) -> set[int]:
    """Nodes of the forward that decide which elements are chosen, and must not be computed anew with other last bits.

    The gradient of ``amax`` goes to the elements that equal it, divided by their number: if they were computed anew,
    and the maximum was not, that number could be 0. So sums, norms and products that the backward looks for equal
    elements in are named here, and comparisons and choices of the forward that depend on such: their results are small.
    """
    found, equalities = set[int](), list[int]()
    varies = list[bool]()  # per node, whether it may have other bits when it is computed anew
    for index, facts in enumerate(joint.facts):
        used = joint.inputs_of[index]
        depends = any(varies[other] for other in used)
        kept = joint.nodes[index].op != "call_function" or joint.in_backward[index] or facts.is_symbolic
        varies.append(not kept and (depends or _is_inexact(joint, index)))
        compares = facts.name in _EQUALITIES | _ORDERS and len(used) > 1
        if joint.in_forward[index]:
            if depends and (compares or facts.name in _CHOICES):
                found.add(index)
        elif compares and facts.name in _EQUALITIES:
            equalities += used
    seen, pending = set(equalities), equalities
    while pending:
        index = pending.pop()
        if not varies[index]:
            continue
        if _is_inexact(joint, index):
            found.add(index)
            continue
        pending += [used for used in joint.inputs_of[index] if used not in seen]
        seen.update(joint.inputs_of[index])
    return found


def _is_inexact(joint: JointGraph, index: int) -> bool:
    """Whether a node is of the forward and may round otherwise in another kernel, as sums, norms and products do."""
    facts = joint.facts[index]
    return joint.in_forward[index] and not (facts.is_exact or facts.is_getitem)


def _far_uses(joint: JointGraph, options: PartitionOptions) -> list[str | None]:
    """Fusible uses of a value after the first point where a fusion starting at the value must end (F3.21)."""
    reasons: list[str | None] = [None] * len(joint.nodes)
    if not options.ban_used_far_apart:
        return reasons
    never = len(joint.nodes)
    fusion_ends = [never] * never
    for index in range(never - 1, -1, -1):
        if not joint.in_forward[index]:
            continue
        users = [user for user in joint.users_of[index] if joint.in_forward[user]]
        fusible = [user for user in users if is_fusible(joint, index, user)]
        ends = [user for user in users if user not in fusible] + [fusion_ends[user] for user in fusible]
        fusion_ends[index] = min(ends, default=never)
        for user in fusible:
            if user > fusion_ends[index]:
                reasons[user] = (
                    f"uses '{joint.nodes[index].name}' after '{joint.nodes[fusion_ends[index]].name}' ended its fusion"
                )
    return reasons


def _break_long_chains(ctx: BanContext, reasons: list[str | None]) -> None:
    """Ban every n-th node of a long chain of recomputable fusible ops (F3.22)."""
    limit = ctx.options.max_fusible_chain
    if limit == 0:
        return
    joint = ctx.joint
    length = [0] * len(joint.nodes)
    for index, reason in enumerate(reasons):
        if reason is not None or joint.in_backward[index] or not joint.facts[index].is_recomputable:
            continue
        length[index] = 1 + max((length[used] for used in joint.inputs_of[index]), default=0)
        if length[index] > limit and not _never_banned(ctx, index) and not ctx.recompute[index]:
            reasons[index] = f"the {limit}th op of a chain that would be recomputed whole"
            length[index] = 0
