"""Between lowering and binding: compiled graphs become nodes of a tree of CUDA graph recordings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch

from aotkit_cudagraphs import (
    CudagraphNotice,
    CudagraphTrees,
    SkipKind,
    SkipReason,
    TreeFunction,
    TreeOptions,
    shared_trees,
    wrap_graph,
)
from aotkit_functionalize import GraphMetadata
from aotkit_runtime_wrappers import InputPlan

from .._notices import warn_user
from ..artifact.collectives import collectives_of
from ..artifact.records import CompiledGraph, LiveCode
from .bind import bind_graph
from .context import Boxed, CompileContext, Kind

__all__ = ["CudagraphStages", "record_graphs"]

Wrap = Callable[..., Callable[..., Any]]


def record_graphs(ctx: CompileContext) -> CompileContext:
    """``ctx`` for one compile, whose graphs are put into a tree of recordings."""
    return replace(ctx, recordings=CudagraphStages(ctx.options.cudagraph_outputs, ctx.trees))


class CudagraphStages:
    """Wraps the stage ``lower`` of one compile: what it makes of each graph is recorded, around what can't be.

    A graph on the CPU is compiled as ever, with one notice. A backward is recorded only where its forward is.

    Args:
        outputs: see ``Options.cudagraph_outputs``.
        trees: where recordings go; by default those that all compiled graphs of the device share.
    """

    def __init__(self, outputs: Literal["survive", "copy", "overwrite"], trees: CudagraphTrees | None) -> None:
        self._static: tuple[int, ...] = ()
        self._options = TreeOptions(outputs=outputs, check_static_layouts=False)  # Dynamo guards layouts
        self._trees = trees
        self._static_names: set[str] = set()
        self._forwards: list[TreeFunction] = []

    def note_static(self, metadata: GraphMetadata, inputs: InputPlan, static_inputs: frozenset[int]) -> None:
        """Look which inputs of the graph (parameters, buffers) stay where they are."""
        static = {info.index for info in metadata.inputs if info.is_static}
        if metadata.subclasses is None and not inputs.symbols:
            first = len(inputs.bases)
            static |= {first + position for position, index in enumerate(inputs.others) if index in static_inputs}
        self._static = tuple(sorted(static))

    def lower(self, graph: torch.fx.GraphModule, kind: Kind, name: str, ctx: CompileContext) -> CompiledGraph:
        """Compile one graph by ``ctx.stages`` and record it."""
        stage = {"inference": self._inference, "forward": self._forward, "backward": self._backward}[kind]
        found = stage(graph, name)
        if found is None:
            return ctx.stages.lower(graph, kind, name, ctx)
        static, wrap = found
        assert self._trees is not None

        def compile_part(part: torch.fx.GraphModule, part_name: str) -> Boxed:
            return bind_graph(ctx.stages.lower(part, kind, part_name, ctx), ctx.arenas, None, ctx.options.redzones)

        call = wrap_graph(graph, compile_part, self._trees, static_input_indices=static, name=name, wrap=wrap)
        why = "recordings of CUDA graphs belong to one process"
        return CompiledGraph(LiveCode(call, why), collectives=collectives_of(graph))

    def _inference(self, graph: torch.fx.GraphModule, name: str) -> tuple[Sequence[int], Wrap] | None:
        trees = self._trees = self._trees_for(graph, name)
        return None if trees is None else (self._static, trees.wrap)

    def _forward(self, graph: torch.fx.GraphModule, name: str) -> tuple[Sequence[int], Wrap] | None:
        trees = self._trees = self._trees_for(graph, name)
        if trees is None:
            return None
        placeholders = graph.graph.find_nodes(op="placeholder")
        self._static_names = {placeholders[index].name for index in self._static if index < len(placeholders)}

        def wrap(call: Boxed, **settings: Any) -> Callable[..., Any]:
            # The backward of several segments is awaited by the first.
            wrapped = trees.wrap(call, training=not self._forwards, **settings)
            if isinstance(wrapped, TreeFunction):
                self._forwards.append(wrapped)
            return wrapped

        return self._static, wrap

    def _backward(self, graph: torch.fx.GraphModule, name: str) -> tuple[Sequence[int], Wrap] | None:
        if self._trees is None or not self._forwards:
            return None
        placeholders = graph.graph.find_nodes(op="placeholder")
        # What the forward saved of its inputs goes by their names.
        static = [index for index, node in enumerate(placeholders) if node.name in self._static_names]
        return static, self._forwards[0].backward

    def _trees_for(self, graph: torch.fx.GraphModule, name: str) -> CudagraphTrees | None:
        if self._trees is not None:
            return self._trees
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.device.type == "cuda" and torch.cuda.is_available():
                return shared_trees(value.device, self._options)
        reason = SkipReason(SkipKind.CPU_DEVICE, f"{name} runs on the CPU")
        warn_user(f"runs without a CUDA graph: {reason}", CudagraphNotice)
        return None
