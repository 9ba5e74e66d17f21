"""Second derivatives of a graph that was loaded: what its compile knew is put together again from its artifact."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from aotkit_aot_trace import AutocastState, FunctionalLayer, GraphFunction, Origin, saved_values
from aotkit_functionalize import GraphMetadata
from aotkit_partition import load_graph
from aotkit_runtime_wrappers import GradientRequest, InputPlan, PreparedFunction

from ..artifact.records import Artifact
from .compile import CompileContext, gradient_compiler, own_stages

__all__ = ["stored_gradient_compiler"]

Boxed = Callable[[list[Any]], Sequence[Any]]


def stored_gradient_compiler(
    graph: torch.fx.GraphModule, artifact: Artifact, ctx: CompileContext
) -> Callable[[GradientRequest], Boxed]:
    """Compiles the gradients of ``graph``, the frontend's, of which ``artifact`` was made."""
    described = artifact.origin
    assert described is not None
    function: Any = GraphFunction(graph)
    if described["inputs"] is not None:
        function = PreparedFunction(function, InputPlan.from_json(described["inputs"]))
    devices, cache_enabled, nesting = described["autocast"]
    autocast = AutocastState(
        tuple((device, enabled, getattr(torch, dtype.removeprefix("torch."))) for device, enabled, dtype in devices),
        cache_enabled,
        nesting,
    )
    origin = Origin(function, FunctionalLayer(described["layer"]), autocast)
    metadata = GraphMetadata.from_json(artifact.metadata)
    forward = load_graph(artifact.text("forward"), describe_missing=True)
    saved = saved_values(forward, metadata.num_forward_outputs, described["saved_tensors"])
    return gradient_compiler(origin, metadata, saved, ctx, own_stages())
