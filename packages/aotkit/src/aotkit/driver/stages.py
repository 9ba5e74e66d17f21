"""The exchangeable stages of a compile: ours, or a caller's compilers and partitioner with torch's signatures."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch._guards import TracingContext

from aotkit_functionalize import GraphMetadata
from aotkit_inductor_lower import decompositions
from aotkit_inductor_lower.driver import prepare_joint_graph
from aotkit_partition import Partition, PartitionOptions, partition
from aotkit_partition.donated_buffers import donated_tensors, mark_released

from .._observer import Observer
from ..artifact import round_trip
from ..artifact.records import CompiledGraph
from ..frontend.fake_calls import strides_asked_for
from ..options import Options
from .boxed import compiling_graph, make_boxed_func
from .bugs import of_the_user
from .context import CompileContext, Kind, Split, Stages
from .lower import live_graph, lower_graph, lower_options, start_compilers, with_joined_collectives

__all__ = ["Compiler", "Partitioner", "custom_stages", "own_stages", "partition_options", "prepared_joint", "split_of"]

Compiler = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[..., Any]]
Partitioner = Callable[..., tuple[torch.fx.GraphModule, torch.fx.GraphModule]]

_OVERWRITTEN = ("data", "data_and_metadata", "storage")


def own_stages() -> Stages:
    """Our decompositions, partitioner and code generation."""
    return Stages(decompositions(), _partition, lower_graph, specializes=True, begin=start_compilers)


def _partition(joint: torch.fx.GraphModule, metadata: GraphMetadata, ctx: CompileContext) -> Split:
    options = partition_options(metadata, ctx.options)
    joint = prepared_joint(joint, ctx.options, ctx.recorder)
    parts = partition(joint, metadata.num_forward_outputs, options, observer=ctx.recorder)
    ctx.recorder.keep("partition", parts.report)
    split = split_of(round_trip.reread_partition(parts, joint) if ctx.options.verify else parts)
    forward, backward = (with_joined_collectives(g, ctx.options, ctx.recorder) for g in (split.forward, split.backward))
    released = donated_tensors(forward, metadata.num_forward_outputs, split.num_saved_tensors)
    mark_released(backward, split.num_saved_symints, released)
    return replace(split, forward=forward, backward=backward)


def prepared_joint(
    joint: torch.fx.GraphModule, options: Options, observer: Observer | None = None
) -> torch.fx.GraphModule:
    """The joint graph after what our code generation does to a forward and its backward together."""
    if options.lowering == "none":
        return joint
    lowering, chosen = lower_options(options), options.channels_last_training
    if chosen == "never":
        lowering = replace(lowering, disable=(*lowering.disable, "channels-last"))
    return prepare_joint_graph(joint, lowering, where_faster=chosen == "auto", observer=observer)


def partition_options(metadata: GraphMetadata, chosen: Options) -> PartitionOptions:
    """What the options of the stack, and the graph's contract, mean for the partitioner."""
    return PartitionOptions(
        strategy=chosen.partitioner,
        memory_budget=chosen.memory_budget,
        chunk_loss_bytes=chosen.chunk_loss_bytes,
        regather=chosen.regather,
        regather_budget=chosen.regather_budget,
        link_latency=chosen.link_latency,
        link_bandwidth=chosen.link_bandwidth,
        static_inputs=tuple(i.index for i in metadata.inputs if i.is_static),
        mutated_inputs=tuple(i.index for i in metadata.inputs if i.mutation.value in _OVERWRITTEN),
        details="decisions",
    )


def split_of(parts: Partition) -> Split:
    """A partition as the stages of a compile hand it on."""
    tensors = len(parts.saved_names) - parts.num_saved_symints
    return Split(parts.forward, parts.backward, tensors, parts.num_saved_symints)


def custom_stages(
    forward: Compiler,
    backward: Compiler | None,
    inference: Compiler | None,
    partition_fn: Partitioner,
    table: Mapping[Any, Callable[..., Any]] | None,
) -> Stages:
    """Stages that call the given compilers and partitioner; a missing compiler is ``forward``."""
    compilers = {"inference": inference or forward, "forward": forward, "backward": backward or forward}
    numbers = {kind: itertools.count() for kind in compilers}

    def lower(graph: torch.fx.GraphModule, kind: Kind, name: str, ctx: CompileContext) -> CompiledGraph:
        ctx.dump_graph(name, graph)
        inputs = _example_inputs(graph)
        named = compiling_graph(ctx.name, kind, next(numbers[kind]))
        with named, TracingContext.report_output_strides() as strides, of_the_user():
            compiled = compilers[kind](graph, inputs)
        call = compiled if getattr(compiled, "_boxed_call", False) else make_boxed_func(compiled)
        said = strides_asked_for(graph, strides)
        return live_graph(graph, call, "a compiler of the caller's made its code", result_strides=said)

    return Stages(
        dict(table or {}),
        split_by(partition_fn),
        lower,
        reuses_donated=getattr(backward or forward, "reuses_donated", False),
    )


def split_by(
    partition_fn: Partitioner,
) -> Callable[[torch.fx.GraphModule, GraphMetadata, CompileContext], Split]:
    """The stage ``split`` with a partitioner of the caller's."""

    def split(joint: torch.fx.GraphModule, metadata: GraphMetadata, ctx: CompileContext) -> Split:
        inputs = _example_inputs(joint)
        count = len(metadata.tangents) + len(metadata.backward_writes)
        primals, tangents = (inputs[:-count], inputs[-count:]) if count else (inputs, [])
        with compiling_graph(ctx.name, "joint", 0), of_the_user():
            parts = partition_fn(joint, (primals, tangents), num_fwd_outputs=metadata.num_forward_outputs)
        saved = _outputs(parts[0])[metadata.num_forward_outputs :]
        symints = sum(not isinstance(node.meta.get("val"), torch.Tensor) for node in saved)
        return Split(parts[0], parts[1], len(saved) - symints, symints)

    return split


def _example_inputs(graph: torch.fx.GraphModule) -> list[Any]:
    return [node.meta.get("val") for node in graph.graph.find_nodes(op="placeholder")]


def _outputs(graph: torch.fx.GraphModule) -> list[torch.fx.Node]:
    (output,) = graph.graph.find_nodes(op="output")
    return list(output.args[0])
