"""Cut the joint graph in two: forward and backward GraphModules for a given set of saved values.

Calling convention: the forward returns ``[user outputs..., saved tensors..., saved symints...]``, the backward takes
``[saved symints..., saved tensors..., tangents...]`` and returns the gradients. Among the tensors those whose version
autograd must check come first, then those stashed without a check, then opaque objects (F3.36, F3.37).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.fx

from ._torch_compat import lazy_graph_module
from .joint import JointGraph
from .plan import Plan, needs_copy, stands_alone


def extract(joint: JointGraph, plan: Plan) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """The forward and the backward module of a plan."""
    return _forward_graph(joint, plan), _backward_graph(joint, plan)


def _forward_graph(joint: JointGraph, plan: Plan) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    new: dict[int, Any] = {}
    position = joint.position

    def argument(used: torch.fx.Node) -> Any:
        return new[position[used]]

    copies: dict[int, torch.fx.Node] = {}
    overwritten = {index for index in plan.tensors if needs_copy(joint, index)}
    for index in joint.forward_inputs:
        new[index] = graph.node_copy(joint.nodes[index])
    for index in sorted(overwritten):
        # Saved before any write: see F3.58 in the tests (the input is overwritten after its use).
        source = new[index]
        copies[index] = graph.call_function(torch.ops.aten.clone.default, (source,))
        copies[index].meta = {key: source.meta[key] for key in ("val", "stack_trace") if key in source.meta}
    for index in plan.forward:
        if joint.nodes[index].op != "placeholder":
            new[index] = graph.node_copy(joint.nodes[index], argument)
    outputs = [argument(item) if isinstance(item, torch.fx.Node) else item for item in joint.forward_outputs]
    outputs += [copies.get(index, new[index]) for index in (*plan.tensors, *plan.symints)]
    output = graph.output(tuple(outputs))
    _copy_descriptions(joint, output, slice(0, joint.num_fwd_outputs), len(plan.tensors) + len(plan.symints))
    return lazy_graph_module(joint.module, graph, "Forward")


def _backward_graph(joint: JointGraph, plan: Plan) -> torch.fx.GraphModule:
    graph = torch.fx.Graph()
    new: dict[int, Any] = {}
    position = joint.position

    def argument(used: torch.fx.Node) -> Any:
        return new[position[used]]

    for index in (*plan.symints, *plan.tensors):
        node = joint.nodes[index]
        new[index] = graph.create_node("placeholder", node.name, name=node.name)
        new[index].meta = dict(node.meta)
    for index in joint.backward_inputs:
        new[index] = graph.node_copy(joint.nodes[index])
    for index in plan.backward:
        node = joint.nodes[index]
        new[index] = node.meta["val"] if stands_alone(joint, index) else graph.node_copy(node, argument)
    gradients = tuple(argument(item) if isinstance(item, torch.fx.Node) else item for item in joint.gradients)
    output = graph.output(gradients)
    _copy_descriptions(joint, output, slice(joint.num_fwd_outputs, None), 0)
    return lazy_graph_module(joint.module, graph, "Backward")


def _copy_descriptions(joint: JointGraph, output: torch.fx.Node, which: slice, extra: int) -> None:
    """Metadata of the joint output; its per-output descriptions are cut like the outputs."""
    output.meta = dict(joint.nodes[-1].meta)
    described = output.meta.get("desc")
    if isinstance(described, (list, tuple)):
        output.meta["desc"] = [*described[which], *([None] * extra)]
