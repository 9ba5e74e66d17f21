"""Between lowering and binding: compiled graphs become nodes of a tree of CUDA graph recordings."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
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

__all__ = ["CudagraphStages", "fixed_arguments"]

Boxed = Callable[[list[Any]], Sequence[Any]]
CompileGraph = Callable[[torch.fx.GraphModule, str, Any], Boxed]


class CudagraphStages:
    """Wraps the compile stages of one function: what they make of each graph is recorded, around what can't be.

    A graph on the CPU is compiled as ever, with one notice. A backward is recorded only where its forward is.

    Args:
        static: positions of graph inputs (parameters, buffers) that stay where they are.
        outputs: see ``Options.cudagraph_outputs``.
        trees: where recordings go; by default those that all compiled graphs of the device share.
    """

    def __init__(
        self, static: Sequence[int], outputs: Literal["survive", "copy", "overwrite"], trees: CudagraphTrees | None
    ) -> None:
        self._static = tuple(static)
        self._options = TreeOptions(outputs=outputs, check_static_layouts=False)  # the frontend guards layouts
        self._trees = trees
        self._static_names: set[str] = set()
        self._forwards: list[TreeFunction] = []

    def inference(self, compile_graph: CompileGraph) -> CompileGraph:
        """The stage that compiles a graph without a backward."""

        def run(graph: torch.fx.GraphModule, name: str, ctx: Any) -> Boxed:
            trees = self._trees_for(graph, name)
            if trees is None:
                return compile_graph(graph, name, ctx)
            return _wrap(graph, compile_graph, name, ctx, trees, self._static, trees.wrap)

        return run

    def forward(self, compile_graph: CompileGraph) -> CompileGraph:
        """The stage that compiles a forward."""

        def run(graph: torch.fx.GraphModule, name: str, ctx: Any) -> Boxed:
            trees = self._trees_for(graph, name)
            if trees is None:
                return compile_graph(graph, name, ctx)
            placeholders = graph.graph.find_nodes(op="placeholder")
            self._static_names = {placeholders[index].name for index in self._static if index < len(placeholders)}
            self._trees = trees

            def wrap(call: Boxed, **settings: Any) -> Callable[..., Any]:
                # The backward of several segments is awaited by the first.
                wrapped = trees.wrap(call, training=not self._forwards, **settings)
                if isinstance(wrapped, TreeFunction):
                    self._forwards.append(wrapped)
                return wrapped

            return _wrap(graph, compile_graph, name, ctx, trees, self._static, wrap)

        return run

    def backward(self, compile_graph: CompileGraph) -> CompileGraph:
        """The stage that compiles a backward."""

        def run(graph: torch.fx.GraphModule, name: str, ctx: Any) -> Boxed:
            if self._trees is None or not self._forwards:
                return compile_graph(graph, name, ctx)
            placeholders = graph.graph.find_nodes(op="placeholder")
            # What the forward saved of its inputs goes by their names.
            static = [index for index, node in enumerate(placeholders) if node.name in self._static_names]
            return _wrap(graph, compile_graph, name, ctx, self._trees, static, self._forwards[0].backward)

        return run

    def _trees_for(self, graph: torch.fx.GraphModule, name: str) -> CudagraphTrees | None:
        if self._trees is not None:
            return self._trees
        for node in graph.graph.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and value.device.type == "cuda" and torch.cuda.is_available():
                return shared_trees(value.device, self._options)
        reason = SkipReason(SkipKind.CPU_DEVICE, f"{name} runs on the CPU")
        warnings.warn(f"runs without a CUDA graph: {reason}", CudagraphNotice, stacklevel=4)
        return None


def fixed_arguments(example_inputs: Sequence[Any], held: Sequence[Any]) -> frozenset[int]:
    """Positions of parameters, buffers and other tensors that the frontend marked as staying at their address.

    The marks are what the frontend expects, not what it guards: recordings check addresses at each call.
    """
    marked = (
        index
        for index, value in enumerate(example_inputs)
        if isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None
    )
    return frozenset(marked) | frozenset(range(len(example_inputs), len(example_inputs) + len(held)))


def _wrap(
    graph: torch.fx.GraphModule,
    compile_graph: CompileGraph,
    name: str,
    ctx: Any,
    trees: CudagraphTrees,
    static: Sequence[int],
    wrap: Callable[..., Callable[..., Any]],
) -> Boxed:
    def compile_part(part: torch.fx.GraphModule, part_name: str) -> Boxed:
        return compile_graph(part, part_name, ctx)

    return wrap_graph(graph, compile_part, trees, static_input_indices=static, name=name, wrap=wrap)
