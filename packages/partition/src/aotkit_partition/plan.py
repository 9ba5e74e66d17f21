"""What runs where, for a given set of saved values: positions in the joint graph, before any graph is built."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx

from .cost import is_free
from .errors import InfeasiblePartitionError, InvalidJointGraphError
from .joint import JointGraph, written_arguments
from .schedule import backward_order
from .timeline import MemoryTimeline, Program, Step, node_storages, simulate, waits_for_collective

NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"


@dataclass(frozen=True, slots=True)
class Plan:
    """Positions in the joint graph: what crosses, in calling order, and what each side runs, in running order."""

    tensors: tuple[int, ...]
    symints: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]

    def recomputed(self) -> list[int]:
        """What runs on both sides, in graph order."""
        return sorted(set(self.forward) & set(self.backward))


def make_plan(joint: JointGraph, saved: Iterable[int], reorder: bool = True) -> Plan:
    """Complete a choice of saved values; those that the backward turns out not to use are dropped (F3.35).

    Args:
        reorder: run recomputations just before their first use; see Note [Recompute late].

    Raises:
        InfeasiblePartitionError: the backward needs a forward input that is not among the saved values.
    """
    used, computed = _backward_closure(joint, set(saved))
    used |= _symbol_bindings(joint, used)
    used |= _symbols_that_nothing_tells(joint, used, computed)
    tensors, symints = _order_saved(joint, used)
    if reorder:
        alone = {index for index in computed if stands_alone(joint, index)}
        computed = backward_order(joint, computed, alone)
    return Plan(tuple(tensors), tuple(symints), tuple(_forward_closure(joint, [*tensors, *symints])), tuple(computed))


def _backward_roots(joint: JointGraph) -> list[int]:
    roots = [joint.position[grad] for grad in joint.gradients if isinstance(grad, torch.fx.Node)]
    for index, facts in enumerate(joint.facts):
        if not joint.in_backward[index]:
            continue
        if facts.is_mutating or facts.has_side_effects or facts.is_random:
            roots.append(index)
    return roots


def _backward_closure(joint: JointGraph, wanted: set[int]) -> tuple[set[int], list[int]]:
    """The saved values that the backward uses, and the nodes it computes, in graph order."""
    used: set[int] = set()
    computed: set[int] = set()
    backward_inputs = set(joint.backward_inputs)
    pending = _backward_roots(joint)
    while pending:
        index = pending.pop()
        if index in computed or index in used or index in backward_inputs:
            continue
        if index in wanted:
            used.add(index)
            continue
        if joint.nodes[index].op == "placeholder":
            raise InfeasiblePartitionError(
                f"the backward needs the forward input '{joint.nodes[index].name}', which is not to be saved. "
                "Add it to the saved values.",
                (joint.nodes[index].name,),
            )
        computed.add(index)
        if not stands_alone(joint, index):
            pending.extend(joint.inputs_of[index])
    return used, sorted(computed)


def stands_alone(joint: JointGraph, index: int) -> bool:
    """Whether tracing fixed the node to a number, which is written into the backward in its place."""
    return joint.nodes[index].op != "get_attr" and not joint.in_backward[index] and is_free(joint, index)


def _symbol_bindings(joint: JointGraph, used: set[int]) -> set[int]:
    """Forward inputs that are the very symbols occurring in the sizes of what the backward takes (F3.36)."""
    binds: dict[Any, int] = {}
    for index in joint.forward_inputs:
        value = joint.value(index)
        if isinstance(value, torch.SymInt) and isinstance(value.node.expr, sympy.Symbol):
            binds.setdefault(value.node.expr, index)
    if not binds:
        return set()
    bound = {value.node.expr for index in used if isinstance(value := joint.value(index), torch.SymInt)}
    found = set()
    for index in [*used, *joint.backward_inputs]:
        for symbol in _free_symbols(joint.value(index)):
            if symbol in binds and symbol not in bound:
                found.add(binds[symbol])
    return found


def _symbols_that_nothing_tells(joint: JointGraph, used: set[int], computed: list[int]) -> set[int]:
    """Values of the forward that are, or have as a size, the symbols that the backward's own inputs do not tell.

    A size that depends on data may occur in a compound one alone: a tangent of ``u0 + u1`` elements tells neither.
    """
    given = [*used, *joint.backward_inputs]
    told = {symbol for index in given for symbol in _bare_symbols(joint.value(index))}
    missing = {s for index in (*given, *computed) for s in _free_symbols(joint.value(index))} - told
    found: set[int] = set()
    if not missing:
        return found
    forward = [index for index in range(len(joint.nodes)) if joint.in_forward[index] and not joint.in_backward[index]]
    integers = [index for index in forward if isinstance(joint.value(index), torch.SymInt)]
    for index in (*integers, *forward):  # an integer is cheaper to keep than a tensor of that size
        tells = missing & _bare_symbols(joint.value(index))
        if tells:
            found.add(index)
            missing -= tells
    return found


def _bare_symbols(value: Any) -> set[Any]:
    """The symbols that ``value``, or one of its sizes, is."""
    sizes = value.size() if isinstance(value, torch.Tensor) else [value]
    return {s.node.expr for s in sizes if isinstance(s, torch.SymInt) and isinstance(s.node.expr, sympy.Symbol)}


def _free_symbols(value: Any) -> set[Any]:
    if isinstance(value, torch.SymInt):
        return set(value.node.expr.free_symbols)
    if not isinstance(value, torch.Tensor):
        return set()
    symbols: set[Any] = set()
    for number in (*value.size(), *value.stride(), value.storage_offset()):
        if isinstance(number, torch.SymInt):
            symbols |= number.node.expr.free_symbols
    return symbols


def _order_saved(joint: JointGraph, used: set[int]) -> tuple[list[int], list[int]]:
    symints = [index for index in sorted(used) if isinstance(joint.value(index), torch.SymInt)]
    rest = [index for index in sorted(used) if not isinstance(joint.value(index), torch.SymInt)]
    return sorted(rest, key=lambda index: _version_check_class(joint, index)), symints


def _version_check_class(joint: JointGraph, index: int) -> int:
    value = joint.value(index)
    if value is not None and not isinstance(value, torch.Tensor):
        return 2
    return 1 if joint.nodes[index].meta.get(NO_VERSION_CHECK, False) else 0


def needs_copy(joint: JointGraph, index: int) -> bool:
    """Whether a saved input must be saved as a copy, since its memory is overwritten before the backward reads it.

    Raises:
        InvalidJointGraphError: the backward also writes to that input, so it would need both the copy and the input.
    """
    if index not in joint.mutated_inputs:
        return False
    readers = [
        user
        for user in joint.users_of[index]
        if not (joint.facts[user].is_mutating and index in written_arguments(joint, user))
        and not joint.in_forward[user]
    ]
    if index not in joint.written_in_backward:
        return True
    if readers:
        raise InvalidJointGraphError(
            f"the input '{joint.nodes[index].name}' is overwritten in the forward, and both read "
            f"('{joint.nodes[readers[0]].name}') and written in the backward; the backward would need its old and its "
            "new memory under one name. Clone the input before the forward reads it."
        )
    return False


def _forward_closure(joint: JointGraph, saved: list[int]) -> list[int]:
    roots = [joint.position[item] for item in joint.forward_outputs if isinstance(item, torch.fx.Node)]
    for index, facts in enumerate(joint.facts):
        if not joint.in_backward[index] and (facts.is_mutating or facts.has_side_effects or facts.is_random):
            roots.append(index)
    pending, keep = [*roots, *saved], set()
    while pending:
        index = pending.pop()
        if index not in keep:
            keep.add(index)
            pending.extend(joint.inputs_of[index])
    return sorted(keep)


def plan_program(joint: JointGraph, plan: Plan) -> Program:
    """The plan as steps for :func:`aotkit_partition.timeline.simulate`."""
    steps = joint_steps(joint)
    placeholders = [steps[index] for index in joint.forward_inputs]
    copied = [index for index in plan.tensors if needs_copy(joint, index)]
    copies = [
        Step(("copy", i), joint.nodes[i].name, [i], [(("copy", i), size) for _, size in steps[i].storages])
        for i in copied
    ]
    renamed: dict[int, Any] = {index: step.key for index, step in zip(copied, copies, strict=True)}
    returned = (item for item in joint.forward_outputs if isinstance(item, torch.fx.Node))
    gradients = (joint.position[item] for item in joint.gradients if isinstance(item, torch.fx.Node))
    return Program(
        forward_inputs=placeholders,
        forward=[*copies, *(steps[index] for index in plan.forward if joint.nodes[index].op != "placeholder")],
        outputs=[joint.position[item] for item in returned],
        saved=[(renamed.get(index, index), index) for index in (*plan.symints, *plan.tensors)],
        tangents=[steps[index] for index in joint.backward_inputs],
        backward=[steps[index] for index in plan.backward if not stands_alone(joint, index)],
        gradients=[index for index in gradients if not stands_alone(joint, index)],
    )


def simulate_plan(joint: JointGraph, plan: Plan) -> MemoryTimeline:
    """Memory over time for a plan; the same as simulating the graphs that it makes."""
    return simulate(plan_program(joint, plan))


def joint_steps(joint: JointGraph) -> list[Step]:
    """One step per node of the joint graph, made once."""
    if not joint.steps:
        joint.steps = [
            Step(
                index,
                node.name,
                [used for used in joint.inputs_of[index] if not stands_alone(joint, used)],
                node_storages(node, joint.value(index)),
                waits_for_collective(node),
            )
            for index, node in enumerate(joint.nodes)
        ]
    return joint.steps
