"""Which pairs of ops a fusing compiler puts into one kernel; decides whether a value costs memory traffic at all."""

from __future__ import annotations

from typing import Any

import torch.fx
from torch._higher_order_ops.auto_functionalize import get_mutable_args

from .joint import JointGraph
from .op_facts import DRAWN, OpFacts


def is_fusible(joint: JointGraph, producer: int, consumer: int) -> bool:
    """Whether the value of ``producer`` need not be written to memory for ``consumer`` to use it."""
    to = joint.facts[consumer]
    of = joint.facts[producer]
    if to.name == "aten.cat":
        return True  # concatenation is a set of copies, which any producer can write straight into place
    if to.name.startswith("higher_order.auto_functionalized"):
        return _is_mutated_argument(joint, producer, consumer)
    if to.name == "higher_order.triton_kernel_wrapper_functional":
        given: dict[str, Any] = dict(joint.nodes[consumer].kwargs)
        cloned, kernel_args = given.get("tensors_to_clone", ()), given.get("kwargs", {})
        return any(_is(joint, kernel_args.get(name), producer) for name in cloned)  # the copy fuses with the producer
    if _in_fused_kernel(of) and producer in _taken_in(joint, consumer):
        return True
    return _in_fused_kernel(of) and _in_fused_kernel(to)


def _taken_in(joint: JointGraph, consumer: int) -> list[int]:
    """The arguments that a call's kernel computes where it needs them: the masks of an attention. Whoever writes such
    a call says so, in its ``meta``, by their numbers."""
    node = joint.nodes[consumer]
    given = [node.args[number] for number in node.meta.get("takes_in", ())]
    return [joint.position[argument] for argument in given if isinstance(argument, torch.fx.Node)]


def _in_fused_kernel(facts: OpFacts) -> bool:
    drawn = facts.is_random and (facts.name in DRAWN or not facts.is_builtin)
    return facts.is_recomputable or drawn


def _is_mutated_argument(joint: JointGraph, producer: int, consumer: int) -> bool:
    """The functional form of a mutating custom op copies its mutated arguments; that copy fuses with the producer."""
    node = joint.nodes[consumer]
    given: dict[str, Any] = dict(node.kwargs)
    operator: Any = node.args[0]
    names, _types = get_mutable_args(operator)
    candidates = [*(given.get(name) for name in names), *given.get("_all_bases", ())]
    return any(_is(joint, candidate, producer) for candidate in candidates)


def _is(joint: JointGraph, argument: Any, producer: int) -> bool:
    return isinstance(argument, torch.fx.Node) and joint.position.get(argument) == producer
