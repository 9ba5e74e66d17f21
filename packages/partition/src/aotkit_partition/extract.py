"""Cut the joint graph in two: forward and backward GraphModules for a given set of saved values.

Calling convention: the forward returns ``[user outputs..., saved tensors..., saved symints...]``, the backward takes
``[saved symints..., saved tensors..., tangents...]`` and returns the gradients. Among the tensors those whose version
autograd must check come first, then those stashed without a check, then opaque objects (F3.36, F3.37).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.fx

from ._torch_compat import lazy_graph_module
from .errors import InfeasiblePartitionError, InvalidJointGraphError
from .joint import JointGraph, written_arguments
from .min_cut import is_free

NO_VERSION_CHECK = "saved_tensor_with_no_vc_check"


@dataclass(frozen=True, slots=True)
class Split:
    """Two graphs and what passes between them, as positions in the joint graph."""

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    tensors: tuple[int, ...]
    symints: tuple[int, ...]
    recomputed: tuple[int, ...]


def extract(joint: JointGraph, saved: Iterable[int]) -> Split:
    """Build both graphs; saved values that the backward turns out not to use are dropped (F3.35).

    Raises:
        InfeasiblePartitionError: the backward needs a forward input that is not among the saved values.
    """
    wanted = set(saved)
    used, backward_nodes = _backward_closure(joint, wanted)
    used |= _symbol_bindings(joint, used)
    tensors, symints = _order_saved(joint, used)
    forward = _forward_graph(joint, tensors, symints)
    backward = _backward_graph(joint, tensors, symints, backward_nodes)
    recomputed = [index for index in backward_nodes if not joint.in_backward[index] and not is_free(joint, index)]
    return Split(forward, backward, tuple(tensors), tuple(symints), tuple(recomputed))


def _backward_roots(joint: JointGraph) -> list[int]:
    roots = [joint.position[grad] for grad in joint.gradients if isinstance(grad, torch.fx.Node)]
    for index, facts in enumerate(joint.facts):
        tagged = joint.nodes[index].meta.get("partitioner_tag") == "must_be_in_backward"
        effect = facts.is_mutating or facts.has_side_effects or facts.is_random
        if joint.in_backward[index] and (effect or tagged):
            roots.append(index)
    return roots


def _backward_closure(joint: JointGraph, wanted: set[int]) -> tuple[set[int], list[int]]:
    """The saved values that the backward uses, and the nodes it computes (both sorted by demand from its roots)."""
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
        if not _is_literal_node(joint, index):
            pending.extend(joint.inputs_of[index])
    return used, sorted(computed)


def _is_literal_node(joint: JointGraph, index: int) -> bool:
    return is_free(joint, index) and joint.nodes[index].op != "get_attr" and not joint.in_backward[index]


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


def _forward_graph(joint: JointGraph, tensors: list[int], symints: list[int]) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    new: dict[torch.fx.Node, Any] = {}
    keep = _forward_closure(joint, [*tensors, *symints])
    copies: dict[int, torch.fx.Node] = {}
    overwritten = {index for index in tensors if needs_copy(joint, index)}
    for index in joint.forward_inputs:
        new[joint.nodes[index]] = graph.node_copy(joint.nodes[index])
    for index in sorted(overwritten):
        # Saved before any write: see F3.58 in the tests (the input is overwritten after its use).
        source = new[joint.nodes[index]]
        copies[index] = graph.call_function(torch.ops.aten.clone.default, (source,))
        copies[index].meta = {key: source.meta[key] for key in ("val", "stack_trace") if key in source.meta}
    for index in keep:
        node = joint.nodes[index]
        if node.op != "placeholder":
            new[node] = graph.node_copy(node, lambda used: new[used])
    outputs = [new[item] if isinstance(item, torch.fx.Node) else item for item in joint.forward_outputs]
    outputs += [copies.get(index, new[joint.nodes[index]]) for index in (*tensors, *symints)]
    output = graph.output(tuple(outputs))
    _copy_descriptions(joint, output, slice(0, joint.num_fwd_outputs), len(tensors) + len(symints))
    return lazy_graph_module(joint.module, graph, "Forward")


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
        if not (joint.facts[user].is_mutating and joint.nodes[index] in written_arguments(joint.nodes[user]))
        and not (joint.in_forward[user] and not joint.in_backward[user] and joint.nodes[user].op != "output")
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


def _backward_graph(
    joint: JointGraph, tensors: list[int], symints: list[int], computed: list[int]
) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    new: dict[torch.fx.Node, Any] = {}
    for index in (*symints, *tensors):
        node = joint.nodes[index]
        placeholder = graph.create_node("placeholder", node.name, name=node.name)
        placeholder.meta = dict(node.meta)
        new[node] = placeholder
    for index in joint.backward_inputs:
        new[joint.nodes[index]] = graph.node_copy(joint.nodes[index])
    for index in computed:
        node = joint.nodes[index]
        if _is_literal_node(joint, index):
            new[node] = node.meta["val"]
        else:
            new[node] = graph.node_copy(node, lambda used: new[used])
    gradients = tuple(new[item] if isinstance(item, torch.fx.Node) else item for item in joint.gradients)
    output = graph.output(gradients)
    _copy_descriptions(joint, output, slice(joint.num_fwd_outputs, None), 0)
    return lazy_graph_module(joint.module, graph, "Backward")


def _copy_descriptions(joint: JointGraph, output: torch.fx.Node, which: slice, extra: int) -> None:
    """Metadata of the joint output; its per-output descriptions are cut like the outputs."""
    output.meta = dict(joint.nodes[-1].meta)
    described = output.meta.get("desc")
    if isinstance(described, (list, tuple)):
        output.meta["desc"] = [*described[which], *([None] * extra)]
