"""One functional FX graph -> a compiled graph, by inductor-lower or as it stands."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch

from aotkit_inductor_lower import LowerOptions, compile_to_program
from aotkit_inductor_lower.driver import join_collectives, start_compile_workers
from aotkit_inductor_lower.graph_partition import CompiledParts
from aotkit_inductor_lower.graph_passes.known_types import with_known_types
from aotkit_partition.chunk_losses import chunk_losses
from aotkit_partition.graph_text import graph_constants
from aotkit_runtime_wrappers import schema_checks

from .._observer import Observer
from ..artifact.collectives import collectives_of
from ..artifact.records import CompiledGraph, LiveCode
from ..artifact.torch_state import default_dtype
from ..frontend.tracing_context import publish_strides
from ..options import Options
from ..recorder import GraphRecord
from .context import Boxed, CompileContext, Kind
from .shown import show_compiled

__all__ = ["asks_for_history", "live_graph", "lower_graph", "lower_options", "run_with_aten"]
__all__ += ["start_compilers", "with_joined_collectives"]


#: Larger temporaries of a training step live no longer than they are used (Note [Large temporaries of a training step]
#: of inductor-lower). An allocation takes a microsecond, kernels over so much memory many times that.
ARENA_BYTES_IN_TRAINING = 1 << 18

#: Of more frozen weights none is packed: entries of the cache, and packages, hold packed ones, up to a size.
MOST_PACKED_BYTES = 48 << 20


def lower_graph(graph: torch.fx.GraphModule, kind: Kind, name: str, ctx: CompileContext) -> CompiledGraph:
    """Our stage ``lower``: generated kernels, or ATen as it stands."""
    if kind == "inference":  # a forward with a backward had it before it was partitioned
        graph, _ = chunk_losses(graph, ctx.options.chunk_loss_bytes)
        graph = with_joined_collectives(graph, ctx.options, ctx.recorder)
    ctx.dump_graph(name, graph)
    checked = tuple(sorted(map(str, schema_checks.operators_to_check(graph))))
    if ctx.options.lowering == "none":
        return live_graph(graph, run_with_aten(graph), "ATen runs the graph as it stands", checked)
    # Kernels that are kept have no text: whoever wants to see it has them made again.
    store = None if ctx.recorder.wants("kernels") else ctx.object_store
    with ctx.recorder.stage("lower"):
        compiled = compile_to_program(
            graph,
            options=replace(
                lower_options(ctx.options, training=kind != "inference"), pack_constants=_packs(graph, ctx.options)
            ),
            observer=ctx.recorder.part(ctx.short(name)),
            object_store=store,
            arenas=ctx.arenas,
        )
    if kind != "backward":
        publish_strides(graph)
    ctx.recorder.add_graph(GraphRecord(name, compiled.report))
    if isinstance(compiled, CompiledParts) and compiled.live is not None:
        why = f"the graph is compiled in pieces, and what stands between them is no data: {compiled.reason}"
        return live_graph(graph, compiled.live, why, checked)
    constants: dict[str, torch.Tensor | int] = dict(compiled.constants)
    if ctx.frozen is not None:
        constants.update(ctx.frozen.positions_of(compiled.constants))
    ctx.recorder.keep(ctx.short(name), compiled.program)
    history, asked = asks_for_history(graph), collectives_of(graph)
    made = CompiledGraph(compiled.program, constants, history, checked, compiled.report, asked)
    show_compiled(made, ctx.recorder.part(ctx.short(name)))
    return made


def start_compilers(arguments: Sequence[Any], ctx: CompileContext) -> None:
    """Start what compiles the kernels of a function of these arguments, so that it is ready when there are some."""
    devices = {argument.device for argument in arguments if isinstance(argument, torch.Tensor)}
    if ctx.options.lowering == "kernels":
        start_compile_workers(devices, lower_options(ctx.options))


def with_joined_collectives(
    graph: torch.fx.GraphModule, options: Options, observer: Observer | None = None
) -> torch.fx.GraphModule:
    """The graph of which ranks run, and so compare, the collectives: some of them may be one."""
    return graph if options.lowering == "none" else join_collectives(graph, lower_options(options), observer=observer)


def live_graph(
    graph: torch.fx.GraphModule,
    call: Boxed,
    reason: str,
    checked: tuple[str, ...] = (),
    result_strides: Sequence[Any] | None = None,
) -> CompiledGraph:
    """What a compiler made of ``graph`` that is no data, for this ``reason``."""
    return CompiledGraph(
        LiveCode(call, reason, result_strides),
        detaches=asks_for_history(graph),
        checked=checked,
        collectives=collectives_of(graph),
    )


def asks_for_history(graph: torch.fx.GraphModule) -> bool:
    """Whether an operator of ``graph`` asks whether its arguments require grad though autograd is off."""
    return bool(graph.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided_scatter.default))


def run_with_aten(graph: torch.fx.GraphModule) -> Boxed:
    """The graph itself, boxed. A backward may be called under another default dtype than it was captured with: see
    Note [Default types of graphs] in :mod:`aotkit_inductor_lower.graph_passes.known_types`."""
    dtype, (known, reads) = torch.get_default_dtype(), with_known_types(graph)

    def run(args: list[Any]) -> Sequence[Any]:
        values = list(args)
        args.clear()
        with default_dtype(dtype) if reads else nullcontext():
            return known(*values)  # type: ignore[no-any-return]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _packs(graph: torch.fx.GraphModule, options: Options) -> bool:
    """Whether the constants of a frozen graph may be packed: what is kept of it then holds them."""
    if not options.freezing:
        return False
    held = graph_constants(graph).values()
    return sum(tensor.numel() * tensor.element_size() for tensor in held) <= MOST_PACKED_BYTES


def lower_options(chosen: Options, training: bool = False) -> LowerOptions:
    """What the options of the stack mean for the lowering. ``training``: of a forward or backward."""
    return LowerOptions(
        numerics=chosen.numerics,
        rng=chosen.rng,
        verify=chosen.verify,
        redzones=chosen.redzones,
        tune=chosen.tune,
        contractions=chosen.contractions,
        index_asserts=chosen.index_asserts,
        compile_workers=chosen.compile_workers,
        check_inputs=False,  # Dynamo's guards do
        separate_kernels=chosen.separate_kernels,
        overlap_memory=chosen.overlap_memory,
        link_latency=chosen.link_latency,
        link_bandwidth=chosen.link_bandwidth,
        arena_bytes=ARENA_BYTES_IN_TRAINING if training else None,
        processor=chosen.processor,
        fuel=chosen.fuel,
        disable=tuple(sorted(chosen.disable)),
    )
