"""Which gradients of a joint graph depend on which of the caller's tangents."""

from __future__ import annotations

from dataclasses import replace

import torch

from aotkit_functionalize import GraphMetadata

__all__ = ["with_reach"]


def with_reach(graph: torch.fx.Graph, metadata: GraphMetadata) -> GraphMetadata:
    """``metadata`` with, per argument, the tangents of subclasses that reach its gradient.

    Whether the gradient of an argument is a subclass depends on the tangents that there are: with ``x * y`` of a
    subclass ``x`` and a plain ``y``, and ``y.sin()``, that of ``y`` is one only if the loss depends on the product.
    """
    boundary = metadata.subclasses
    if boundary is None or len(boundary.tangents) < 2:
        return metadata
    reached: dict[torch.fx.Node, frozenset[int]] = {}
    tangents = iter(n for n in graph.nodes if n.op == "placeholder" and str(n.target).startswith("tangents_"))
    for number, subclass in enumerate(boundary.tangents):
        for _ in range(1 if subclass is None else len(subclass.leaves)):
            reached[next(tangents)] = frozenset() if subclass is None else frozenset({number})
    nothing: frozenset[int] = frozenset()
    for node in graph.nodes:
        if node not in reached:
            reached[node] = nothing.union(*(reached[n] for n in node.all_input_nodes))
    (output,) = graph.find_nodes(op="output")
    gradients = output.args[0][metadata.num_forward_outputs :]
    found = []
    for made in boundary.gradients:
        nodes = [] if made is None else [gradients[part.index] for part in made.parts]
        found.append(tuple(sorted(nothing.union(*(reached[n] for n in nodes if isinstance(n, torch.fx.Node))))))
    return replace(metadata, subclasses=replace(boundary, reached_by=tuple(found)))
