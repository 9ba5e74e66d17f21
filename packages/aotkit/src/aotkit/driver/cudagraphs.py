"""Around the stage ``lower`` of a compile: which parts of a graph become CUDA graph recordings when it is bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from aotkit_cudagraphs.plan import attributes_of, plan_graph
from aotkit_functionalize import GraphMetadata
from aotkit_runtime_wrappers import InputPlan

from ..artifact.collectives import collectives_of
from ..artifact.records import CompiledGraph, RecordedGraph
from .bound_recordings import tell_of_the_cpu
from .context import CompileContext, Kind

__all__ = ["CudagraphStages", "record_backward", "record_graphs"]


def record_graphs(ctx: CompileContext) -> CompileContext:
    """``ctx`` for one compile, whose graphs are put into a tree of recordings."""
    return replace(ctx, recordings=CudagraphStages())


def record_backward(ctx: CompileContext, forward: RecordedGraph) -> CompileContext:
    """``ctx`` for the backward of what was compiled before, here or elsewhere."""
    return replace(ctx, recordings=CudagraphStages(forward))


class CudagraphStages:
    """Wraps the stage ``lower`` of one compile: what it makes of each graph is recorded, around what can't be.

    A graph on the CPU is compiled as ever, with one notice.

    Args:
        forward: of the backward that is lowered, which is recorded only where its forward is.
    """

    def __init__(self, forward: RecordedGraph | None = None) -> None:
        self._static: tuple[int, ...] = ()
        self._forward = forward

    def note_static(self, metadata: GraphMetadata, inputs: InputPlan, static_inputs: frozenset[int]) -> None:
        """Look which inputs of the graph (parameters, buffers) stay where they are."""
        static = {info.index for info in metadata.inputs if info.is_static}
        if metadata.subclasses is None and not inputs.symbols:
            first = len(inputs.bases)
            static |= {first + position for position, index in enumerate(inputs.others) if index in static_inputs}
        self._static = tuple(sorted(static))

    def lower(self, graph: torch.fx.GraphModule, kind: Kind, name: str, ctx: CompileContext) -> CompiledGraph:
        """Compile the parts of one graph by ``ctx.stages``, and say how they are recorded."""
        static: Sequence[int] = self._static
        if kind == "backward":
            if self._forward is None or not self._forward.plan.records:
                return ctx.stages.lower(graph, kind, name, ctx)
            static = _named(graph, set(self._forward.static))
        device = recorded_device(graph, ctx)
        if device is None:
            tell_of_the_cpu(name)
            return ctx.stages.lower(graph, kind, name, ctx)
        plan, graphs = plan_graph(graph, device=device, static_input_indices=static, name=kind)
        names = [f"{name}{part.name.removeprefix(kind)}" for part in plan.parts]
        parts = [ctx.stages.lower(part, kind, its, ctx) for part, its in zip(graphs, names, strict=True)]
        placeholders = graph.graph.find_nodes(op="placeholder")
        names_of_static = tuple(placeholders[index].name for index in static if index < len(placeholders))
        code = RecordedGraph(plan, parts, ctx.options.cudagraph_outputs, str(device), names_of_static)
        return CompiledGraph(code, attributes_of(graph, plan), collectives=collectives_of(graph))


def _named(graph: torch.fx.GraphModule, names: set[str]) -> Sequence[int]:
    """Positions of inputs by name: what a forward saved of its inputs goes by their names."""
    return [i for i, node in enumerate(graph.graph.find_nodes(op="placeholder")) if node.name in names]


def recorded_device(graph: torch.fx.GraphModule, ctx: CompileContext) -> torch.device | None:
    """The CUDA device of the graph, or that of the trees that were given; ``None`` for a graph on the CPU."""
    if ctx.trees is not None:
        return None if ctx.trees.driver is None else ctx.trees.driver.device
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cuda" and torch.cuda.is_available():
            return value.device
    return None
