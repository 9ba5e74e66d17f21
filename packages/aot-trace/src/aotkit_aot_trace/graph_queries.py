"""Nodes of a described graph by their meaning; see ``descriptors``. Names are those of torch's queries."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import Graph, Node

from .descriptors import (
    AOTInput,
    AOTOutput,
    BufferAOTInput,
    GradAOTOutput,
    ParamAOTInput,
    PlainAOTInput,
    PlainAOTOutput,
    SubclassGetAttrAOTInput,
    SubclassGetAttrAOTOutput,
    TangentAOTInput,
)

__all__ = [
    "get_all_input_and_grad_nodes",
    "get_all_output_and_tangent_nodes",
    "get_buffer_nodes",
    "get_named_buffer_nodes",
    "get_named_param_nodes",
    "get_param_and_grad_nodes",
    "get_param_nodes",
    "get_plain_input_and_grad_nodes",
    "get_plain_output_and_tangent_nodes",
]

_SUBCLASS = (SubclassGetAttrAOTInput, SubclassGetAttrAOTOutput)


def get_all_input_and_grad_nodes(graph: Graph) -> dict[AOTInput, tuple[Node, Node | None]]:
    """Every input but tangents, with the node that computes its gradient, ``None`` if there is none."""
    gradients = {d.grad_of: node for d, node in _results(graph) if isinstance(d, GradAOTOutput)}
    return {desc: (node, gradients.get(desc)) for desc, node in _inputs(graph) if not isinstance(desc, TangentAOTInput)}


def get_all_output_and_tangent_nodes(graph: Graph) -> dict[AOTOutput, tuple[Node | None, Node | None]]:
    """Every forward output (``None`` for a constant) with the placeholder of its tangent, ``None`` if there is none."""
    tangents = {d.output: node for d, node in _inputs(graph) if isinstance(d, TangentAOTInput)}
    return {desc: (node, tangents.get(desc)) for desc, node in _results(graph) if not isinstance(desc, GradAOTOutput)}


def get_param_and_grad_nodes(graph: Graph) -> dict[ParamAOTInput, tuple[Node, Node | None]]:
    """:func:`get_all_input_and_grad_nodes` of the parameters."""
    return {d: pair for d, pair in get_all_input_and_grad_nodes(graph).items() if isinstance(d, ParamAOTInput)}


def get_plain_input_and_grad_nodes(graph: Graph) -> dict[int, tuple[Node, Node | None]]:
    """:func:`get_all_input_and_grad_nodes` of the function's own arguments, by their number."""
    return {d.idx: pair for d, pair in get_all_input_and_grad_nodes(graph).items() if isinstance(d, PlainAOTInput)}


def get_plain_output_and_tangent_nodes(graph: Graph) -> dict[int, tuple[Node | None, Node | None]]:
    """:func:`get_all_output_and_tangent_nodes` of the function's own results, by their number."""
    found = get_all_output_and_tangent_nodes(graph)
    return {d.idx: pair for d, pair in found.items() if isinstance(d, PlainAOTOutput)}


def get_named_param_nodes(graph: Graph) -> dict[str, Node]:
    """Placeholders of the parameters by their full names."""
    return {d.target: node for d, node in _inputs(graph) if isinstance(d, ParamAOTInput)}


def get_named_buffer_nodes(graph: Graph) -> dict[str, Node]:
    """Placeholders of the buffers by their full names."""
    return {d.target: node for d, node in _inputs(graph) if isinstance(d, BufferAOTInput)}


def get_param_nodes(graph: Graph) -> list[Node]:
    """Placeholders of the parameters in order."""
    return list(get_named_param_nodes(graph).values())


def get_buffer_nodes(graph: Graph) -> list[Node]:
    """Placeholders of the buffers in order."""
    return list(get_named_buffer_nodes(graph).values())


def _inputs(graph: Graph) -> Iterator[tuple[AOTInput, Node]]:
    for node in graph.find_nodes(op="placeholder"):
        yield _checked(node.meta.get("desc"), node), node


def _results(graph: Graph) -> Iterator[tuple[AOTOutput, Any]]:
    (output,) = graph.find_nodes(op="output")
    descriptors = output.meta.get("desc") or [None] * len(output.args[0])
    for descriptor, value in zip(descriptors, output.args[0], strict=True):
        yield _checked(descriptor, output), value if isinstance(value, torch.fx.Node) else None


def _checked(descriptor: Any, node: Node) -> Any:
    if descriptor is None:
        raise RuntimeError(f"{node.name} has no descriptor: this graph was not exported with descriptors")
    if isinstance(descriptor, _SUBCLASS):
        raise RuntimeError(
            f"{descriptor.expr()} is a part of a tensor subclass, which has no node of its own; read "
            'node.meta["desc"] instead, or pass plain tensors'
        )
    return descriptor
