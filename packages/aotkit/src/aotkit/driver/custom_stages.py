"""Compilers and partitioners with torch's signatures as stages of the pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._guards import TracingContext

from aotkit_functionalize import GraphMetadata
from aotkit_runtime_wrappers import compile_wrapped

from ..frontend.fake_calls import keep_strides
from .boxed import compiling_graph, make_boxed_func
from .bugs import of_the_user
from .compile import Boxed, CompileContext, Split, Stages, WithoutHistory

__all__ = ["Compiler", "Partitioner", "custom_stages"]

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Partitioner = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]


def custom_stages(
    forward: Compiler,
    backward: Compiler | None,
    inference: Compiler | None,
    partition_fn: Partitioner,
    table: Mapping[Any, Callable[..., Any]] | None,
) -> Stages:
    """Stages that call the given compilers and partitioner; a missing compiler is ``forward``."""

    def split(joint: torch.fx.GraphModule, metadata: GraphMetadata, ctx: CompileContext) -> Split:
        inputs = _example_inputs(joint)
        count = len(metadata.tangents) + len(metadata.backward_writes)
        primals, tangents = (inputs[:-count], inputs[-count:]) if count else (inputs, [])
        with compiling_graph(ctx.name, "joint", 0), of_the_user():
            parts = partition_fn(joint, (primals, tangents), num_fwd_outputs=metadata.num_forward_outputs)
        saved = _outputs(parts[0])[metadata.num_forward_outputs :]
        symints = sum(not isinstance(node.meta.get("val"), torch.Tensor) for node in saved)
        return Split(parts[0], parts[1], len(saved) - symints, symints)

    return Stages(
        dict(table or {}),
        split,
        _stage(inference or forward, "inference"),
        _stage(forward, "forward"),
        _stage(backward or forward, "backward"),
        reuses_donated=getattr(backward or forward, "reuses_donated", False),
    )


def _stage(compiler: Compiler, kind: str) -> Callable[[torch.fx.GraphModule, str, CompileContext], Boxed]:
    numbers = itertools.count()

    def compile_one(graph: torch.fx.GraphModule, name: str, ctx: CompileContext) -> Boxed:
        ctx.dump_graph(name, graph)
        said: list[Any] = []

        def compile_boxed(graph: torch.fx.GraphModule, inputs: list[Any]) -> Boxed:
            named = compiling_graph(ctx.name, kind, next(numbers))
            with named, TracingContext.report_output_strides() as strides, of_the_user():
                compiled = compiler(graph, inputs)
            said.extend(strides or ())
            return compiled if getattr(compiled, "_boxed_call", False) else make_boxed_func(compiled)

        wrapped = compile_wrapped(compile_boxed, graph, _example_inputs(graph), (WithoutHistory(),))
        keep_strides(wrapped, graph, said)
        return wrapped

    return compile_one


def _example_inputs(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]


def _outputs(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])
