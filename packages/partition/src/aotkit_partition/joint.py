"""The joint graph as the partitioner sees it: nodes by position, with facts, sizes and sides, computed once.

Sides (F3.9): a node is *tangent-dependent* if a tangent reaches it; only the backward can compute it. It is *needed
by the forward* if a forward output (or a forward side effect) depends on it. What is left can be computed on either
side: those are the nodes that a partition decides about.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.fx
from torch.utils.checkpoint import CheckpointPolicy

from ._torch_compat import symbolic_hint
from .clean import clean_joint
from .errors import InvalidJointGraphError
from .op_facts import OpFacts, node_facts

BACKWARD_INPUT_PREFIXES = ("tangents", "bwd_seed", "bwd_base_offset", "bwd_rng")
SAVE_POLICIES = (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)
RECOMPUTE_POLICIES = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)


@dataclass(slots=True)
class JointGraph:
    """Analysed joint graph. Lists are indexed by a node's position; ``position`` maps merged nodes to their twin's."""

    module: torch.fx.GraphModule
    num_fwd_outputs: int
    nodes: list[torch.fx.Node]
    position: dict[torch.fx.Node, int]
    facts: list[OpFacts]
    inputs_of: list[list[int]]
    users_of: list[list[int]]
    outputs: list[Any]
    in_backward: list[bool] = field(default_factory=list)
    in_forward: list[bool] = field(default_factory=list)
    bytes_of: list[int] = field(default_factory=list)
    forward_inputs: list[int] = field(default_factory=list)
    backward_inputs: list[int] = field(default_factory=list)
    mutated_inputs: set[int] = field(default_factory=set)
    written_in_backward: set[int] = field(default_factory=set)
    first_write: dict[int, int] = field(default_factory=dict)  # input -> first forward node that writes to it
    static_inputs: set[int] = field(default_factory=set)
    replay_random: bool = False  # random ops may run again from a saved generator state
    steps: list[Any] = field(default_factory=list)  # for the memory timeline, made on demand
    seconds: dict[int, float] = field(default_factory=dict)  # by the one estimator in use, made on demand

    @property
    def forward_outputs(self) -> list[Any]:
        """The user's forward outputs (nodes or constants)."""
        return self.outputs[: self.num_fwd_outputs]

    @property
    def gradients(self) -> list[Any]:
        """What the backward returns (nodes, constants or None)."""
        return self.outputs[self.num_fwd_outputs :]

    def value(self, index: int) -> Any:
        """The fake value of a node, None if it has none."""
        node = self.nodes[index]
        return node.meta.get("val", node.meta.get("example_value"))


def is_backward_input(node: torch.fx.Node) -> bool:
    """Whether a placeholder belongs to the backward, by the prefix of its name."""
    return node.op == "placeholder" and str(node.target).startswith(BACKWARD_INPUT_PREFIXES)


def analyze_joint(
    module: torch.fx.GraphModule, num_fwd_outputs: int, symbol_fallback: int = 4096, cse: bool = False
) -> JointGraph:
    """Analyse a joint graph, without its dead code and (if ``cse``) its repeated computations.

    Raises:
        InvalidJointGraphError: no output, or fewer outputs than ``num_fwd_outputs``.
    """
    cleaned = clean_joint(module, cse)
    nodes, position = cleaned.nodes, cleaned.position
    known: dict[Any, OpFacts] = {}
    nothing = OpFacts("")
    joint = JointGraph(
        module=module,
        num_fwd_outputs=num_fwd_outputs,
        nodes=nodes,
        position=position,
        facts=[node_facts(node, module, known) or nothing for node in nodes],
        inputs_of=[list(dict.fromkeys(position[used] for used in node.all_input_nodes)) for node in nodes],
        users_of=[[] for _ in nodes],
        outputs=_flat_outputs(nodes, num_fwd_outputs),
    )
    for index, node in enumerate(nodes):
        for used in joint.inputs_of[index]:
            joint.users_of[used].append(index)
        if node.op == "placeholder":
            (joint.backward_inputs if is_backward_input(node) else joint.forward_inputs).append(index)
    joint.bytes_of = [value_bytes(joint.value(index), symbol_fallback) for index in range(len(nodes))]
    _find_sides(joint)
    return joint


def _flat_outputs(nodes: list[torch.fx.Node], num_fwd_outputs: int) -> list[Any]:
    last = nodes[-1] if nodes else None
    if last is None or last.op != "output":
        raise InvalidJointGraphError("the joint graph has no output node; trace it again.")
    outputs = last.args[0]
    flat = list(outputs) if isinstance(outputs, (tuple, list)) else [outputs]
    if any(isinstance(item, (tuple, list, dict)) for item in flat):
        raise InvalidJointGraphError(
            "the joint graph returns nested outputs; expected one flat list: forward outputs, then gradients."
        )
    if not 0 <= num_fwd_outputs <= len(flat):
        raise InvalidJointGraphError(
            f"num_fwd_outputs is {num_fwd_outputs}, but the joint graph returns {len(flat)} values. Give the number of "
            "leading outputs that belong to the forward."
        )
    return flat


def value_bytes(value: Any, symbol_fallback: int = 4096) -> int:
    """Bytes of memory that a value of this description occupies; 0 for numbers and None, the sum for tuples."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return _number(value.numel(), symbol_fallback) * value.element_size()
        elements = 1
        for size, stride in zip(value.size(), value.stride(), strict=True):
            # Expanded dimensions repeat the same memory.
            if not (type(stride) is int and stride == 0):
                elements *= _number(size, symbol_fallback)
        return elements * value.element_size()
    if isinstance(value, (tuple, list)):
        return sum(value_bytes(item, symbol_fallback) for item in value)
    return 0


def _number(size: Any, symbol_fallback: int) -> int:
    if type(size) is int:
        return size
    hint = symbolic_hint(size)
    return symbol_fallback if hint is None else int(hint)


def _find_sides(joint: JointGraph) -> None:
    """Fill ``in_backward`` and ``in_forward``; see the module docstring."""
    count = len(joint.nodes)
    in_backward = [False] * count
    backward_inputs = set(joint.backward_inputs)
    for index, node in enumerate(joint.nodes):
        if node.op == "output":
            continue
        facts = joint.facts[index]
        unrepeatable = facts.is_random or facts.is_mutating or facts.has_side_effects
        tag = node.meta.get("partitioner_tag")
        in_backward[index] = (
            index in backward_inputs
            or tag == "must_be_in_backward"
            or (tag == "is_backward" and unrepeatable)
            or any(in_backward[used] for used in joint.inputs_of[index])
        )
    in_forward = [False] * count
    for output in joint.forward_outputs:
        if isinstance(output, torch.fx.Node):
            index = joint.position[output]
            if in_backward[index]:
                raise InvalidJointGraphError(
                    f"forward output '{output.name}' depends on a tangent, so the forward can't return it. Check "
                    f"num_fwd_outputs={joint.num_fwd_outputs} and the names of the tangent inputs."
                )
            in_forward[index] = True
    for index in reversed(range(count)):
        facts = joint.facts[index]
        if not in_backward[index] and (facts.is_mutating or facts.has_side_effects):
            in_forward[index] = True
        if in_forward[index]:
            for used in joint.inputs_of[index]:
                in_forward[used] = True
    for index in joint.forward_inputs:
        in_forward[index] = True
    joint.in_backward = in_backward
    joint.in_forward = in_forward
    _find_mutated_inputs(joint)


def _find_mutated_inputs(joint: JointGraph) -> None:
    """Inputs that the graph itself writes to, on each side; refuses writes to anything else."""
    for index, facts in enumerate(joint.facts):
        if not facts.is_mutating:
            continue
        for target in written_arguments(joint, index):
            while joint.facts[target].is_view:
                target = joint.inputs_of[target][0]
            if joint.nodes[target].op != "placeholder":
                raise InvalidJointGraphError(
                    f"the joint graph is not functional: '{joint.nodes[index].name}' ({facts.name}) writes to the "
                    f"intermediate value '{joint.nodes[target].name}', so running it again would not give the same "
                    "values. Functionalize the function before tracing it."
                )
            if joint.in_backward[index]:
                joint.written_in_backward.add(target)
            else:
                joint.mutated_inputs.add(target)
                joint.first_write.setdefault(target, index)


def described_mutations(joint: JointGraph) -> set[int]:
    """Inputs that the caller overwrites with a forward output after the graph ran.

    torch's joint graphs say so in the descriptions of their outputs (``meta["desc"]``): an output described with a
    ``mutated_input`` becomes the new value of the input with that description.
    """
    described = joint.nodes[-1].meta.get("desc")
    if not isinstance(described, (list, tuple)):
        return set()
    mutated = [getattr(item, "mutated_input", None) for item in described]
    wanted = [item for item in mutated if item is not None]
    return {index for index in joint.forward_inputs if wanted and joint.nodes[index].meta.get("desc") in wanted}


def written_arguments(joint: JointGraph, index: int) -> list[int]:
    """The arguments that the node's operator declares to write."""
    node = joint.nodes[index]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    written: list[int] = []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        items = given if isinstance(given, (list, tuple)) else [given]
        written.extend(joint.position[item] for item in items if isinstance(item, torch.fx.Node))
    return written


def _has_generator(node: torch.fx.Node) -> bool:
    """Whether a random op is given its generator."""
    schema = getattr(node.target, "_schema", None)
    for position, argument in enumerate(() if schema is None else schema.arguments):
        given = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        if argument.name == "generator" and given is not None:
            return True
    return False


def _is_on_one_device(module: torch.fx.GraphModule, device: torch.device) -> bool:
    """Whether no input of the graph is on another CUDA device."""
    values = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    return all(value.device in (device, torch.device("cpu")) for value in values if isinstance(value, torch.Tensor))


def can_replay(joint: JointGraph, index: int) -> bool:
    """Whether a random op may run again, on a generator state that the forward saves (CPU and CUDA).

    The state is that of the default generator, on CUDA of the device that is the present one: an op that is given a
    generator has another one, and so have those of graphs on several devices.
    """
    if not (joint.replay_random and joint.facts[index].is_random) or _has_generator(joint.nodes[index]):
        return False
    value = joint.value(index)
    first = (
        next((item for item in value if isinstance(item, torch.Tensor)), None) if isinstance(value, tuple) else value
    )
    plain = isinstance(joint.nodes[index].target, torch._ops.OpOverload)
    facts = joint.facts[index]
    known = isinstance(first, torch.Tensor) and (
        first.device.type == "cpu" or (first.device.type == "cuda" and _is_on_one_device(joint.module, first.device))
    )
    return plain and known and not (facts.is_mutating or facts.has_side_effects)
