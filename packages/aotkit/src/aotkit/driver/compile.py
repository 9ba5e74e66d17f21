"""From one captured Python function to an artifact: the stages in order, each the public API of a package.

prepare -> capture -> partition -> lower (kernels) -> plan what stands around them. What comes out is data:
:func:`.bind.bind` makes the callable. With ``verify`` the result of each stage is written, read back, and the one that
was read is used (:mod:`..artifact.round_trip`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch

from aotkit_aot_trace import Origin, TraceOptions, Unsupported, capture, mutations_in_graph
from aotkit_aot_trace.callables import GraphFunction
from aotkit_aot_trace.gradients import GradientInputs, SavedValues, capture_gradients, saved_values
from aotkit_functionalize import GraphMetadata, OverlappingMutation
from aotkit_partition import donated_buffers
from aotkit_runtime_wrappers import InputPlan, WrapperOptions, WrapperPlan, build_plan, prepare_inputs
from aotkit_runtime_wrappers.double_backward import GradientRequest
from aotkit_runtime_wrappers.refinements import plan_donated
from aotkit_runtime_wrappers.synthetic_base import PreparedFunction, graph_inputs, plan_synthetic_bases

from ..artifact import round_trip
from ..artifact.records import Artifact, CaptureOrigin, CompiledGraph, Graphs, LiveCode
from ..frontend.fake_calls import with_fake_results
from ..frontend.inlined_regions import calls_regions, inline_regions, regions_differ_when_run_again
from ..frontend.tracing_context import publish_graph, publish_metadata
from .alias_specializations import addressed_inputs
from .context import Captured, CompileContext, Split, readable

__all__ = ["capture_function", "compile_captured", "compile_function", "compile_gradients"]
__all__ += ["inference_plan", "training_plan"]


def compile_function(
    fn: Callable[..., Any], fakes: Sequence[Any], examples: Sequence[Any], ctx: CompileContext
) -> Artifact:
    """Compile ``fn`` of flat arguments. ``fakes`` are fake versions of ``examples``.

    Raises the packages' typed refusals; see ``backend`` for what becomes of them.
    """
    return compile_captured(capture_function(fn, fakes, examples, ctx), ctx)


def capture_function(
    fn: Callable[..., Any], fakes: Sequence[Any], examples: Sequence[Any], ctx: CompileContext
) -> Captured:
    """The first half of a compile. The graph may be changed before :func:`compile_captured` gets it; second derivatives
    are right only where it is not."""
    if ctx.stages.begin is not None:
        ctx.stages.begin(fakes, ctx)
    captured = _capture_with_regions(fn, fakes, examples, ctx)
    captured = _with_static_inputs(captured, ctx.num_static)
    return _shown(_with_mutations(captured, ctx), ctx)


def compile_captured(captured: Captured, ctx: CompileContext) -> Artifact:
    """The second half of a compile. Without ``captured.origin`` second derivatives are refused."""
    if ctx.options.verify:
        captured = replace(captured, metadata=round_trip.reread_metadata(captured.metadata))
    if ctx.recordings is not None:
        ctx.recordings.note_static(captured.metadata, captured.inputs, ctx.static_inputs)
    compiled = _compile_training if captured.metadata.is_training else _compile_inference
    artifact = compiled(captured, ctx)
    return round_trip.reread_artifact(artifact) if ctx.options.verify else artifact


def compile_gradients(
    origin: Origin, metadata: GraphMetadata, saved: SavedValues, request: GradientRequest, ctx: CompileContext
) -> tuple[Artifact, Mapping[int, str]]:
    """The gradients of a graph, compiled like any other graph. ``metadata`` and ``saved`` are those of the graph.

    Also the numbers of gradients that must not be differentiated, and why.
    """
    values = GradientInputs(**{f.name: getattr(request, f.name) for f in fields(request)})
    with ctx.recorder.stage("capture"):
        found = capture_gradients(
            origin, metadata, saved, values, decompositions=ctx.stages.decompositions, observer=ctx.recorder
        )
    inputs = InputPlan.one_to_one(len(found.metadata.inputs))
    captured = _shown(Captured(found.graph, found.metadata, inputs, found.origin), ctx)
    return compile_captured(captured, ctx), found.refused


# -- the first half ------------------------------------------------------------------------------------


def _capture_with_regions(
    fn: Callable[..., Any], fakes: Sequence[Any], examples: Sequence[Any], ctx: CompileContext
) -> Captured:
    """Capture; again with nested regions inlined if they are refused, see Note [Regions that are not run again]."""
    if not isinstance(fn, torch.fx.GraphModule) or not calls_regions(fn):
        return _capture_once(fn, fakes, examples, ctx)
    try:
        captured = _capture_once(fn, fakes, examples, ctx)
        if not captured.metadata.is_training or not regions_differ_when_run_again(captured.graph):
            return captured
        reason = "a region that is run again may give other results"
    except Unsupported as refusal:
        reason = str(refusal)
    ctx.recorder.event("regions.inlined", {"graph": ctx.name, "reason": reason})
    return _capture_once(inline_regions(fn), fakes, examples, ctx)


def _capture_once(
    fn: Callable[..., Any], fakes: Sequence[Any], examples: Sequence[Any], ctx: CompileContext
) -> Captured:
    """Capture over distinct inputs; again over a common base only if overlapping inputs prove mutated."""
    with ctx.recorder.stage("prepare"):
        inputs = prepare_inputs(examples)
    settings: dict[str, Any] = {"decompositions": ctx.stages.decompositions, "observer": ctx.recorder}
    with ctx.recorder.stage("capture"):
        if not inputs.overlaps and len(inputs.kept) == len(fakes):
            mode = None if any(isinstance(fake, torch.Tensor) for fake in fakes) else ctx.fake_mode
            how = TraceOptions(random_by_memory=ctx.options.rng == "eager")
            found = capture(fn, fakes, fake_mode=mode, options=how, **settings)
            return Captured(found.graph, found.metadata, inputs, found.origin)
        run = GraphFunction(fn) if isinstance(fn, torch.fx.GraphModule) else fn
        layer = run.preferred_layer() if hasattr(run, "preferred_layer") else None
        settings["options"] = TraceOptions(random_by_memory=ctx.options.rng == "eager", layer=layer)
        prepared = PreparedFunction(run, inputs)
        try:
            found = capture(prepared, graph_inputs(inputs, fakes), **settings)
        except OverlappingMutation as overlap:
            prepared = PreparedFunction(run, plan_synthetic_bases(inputs, fakes, overlap.groups))
            found = capture(prepared, graph_inputs(prepared.input_plan, fakes), **settings)
        return Captured(found.graph, found.metadata, prepared.finish(), found.origin)


def _with_static_inputs(captured: Captured, num_static: int) -> Captured:
    if not num_static:
        return captured
    inputs, metadata = captured.inputs, captured.metadata
    first = len(inputs.bases)
    static = {first + position for position, index in enumerate(inputs.others) if index < num_static}
    if metadata.subclasses is not None:  # each stands for the tensors inside of it
        static = {dense for index in static for dense in metadata.subclasses.dense_positions(index)}
    infos = tuple(replace(i, is_static=True) if i.index in static else i for i in metadata.inputs)
    return replace(captured, metadata=replace(metadata, inputs=infos))


def _with_mutations(captured: Captured, ctx: CompileContext) -> Captured:
    metadata = captured.metadata
    if not ctx.keep_input_mutations or metadata.is_training or metadata.subclasses is not None:
        return captured
    graph, metadata = mutations_in_graph(captured.graph, metadata)
    return replace(captured, graph=graph, metadata=metadata)


def _shown(captured: Captured, ctx: CompileContext) -> Captured:
    ctx.recorder.dump("captured.py", "graphs", lambda: readable(captured.graph))
    ctx.recorder.keep("captured", captured.graph)
    if ctx.publish and captured.metadata.is_training:
        publish_graph(f"{ctx.name}-joint", captured.graph)
    ctx.recorder.dump("metadata", "graphs", lambda: str(captured.metadata))
    publish_metadata(captured.metadata)
    return captured


# -- the second half -----------------------------------------------------------------------------------


def _compile_inference(captured: Captured, ctx: CompileContext) -> Artifact:
    graph, metadata = captured.graph, captured.metadata
    if ctx.options.verify:
        graph = round_trip.reread_graph(graph)
    if ctx.frozen is not None:
        with ctx.recorder.stage("freeze"):
            graph = ctx.frozen.freeze(graph, metadata, captured.inputs)
    forward = ctx.lower(graph, "inference")
    with ctx.recorder.stage("bind"):
        plan = inference_plan(captured)
        plan = _with_fake_results(plan, metadata, graph, forward)
    return Artifact(plan, metadata, forward, frozen=() if ctx.frozen is None else sorted(ctx.frozen.used))


def _compile_training(captured: Captured, ctx: CompileContext) -> Artifact:
    metadata = captured.metadata
    with ctx.recorder.stage("partition"):
        parts = ctx.stages.split(captured.graph, metadata, ctx)
    forward = ctx.lower(parts.forward, "forward")
    with ctx.recorder.stage("bind"):
        # The gradients of subclasses would have to be captured as functions of subclasses.
        origin = captured.origin if metadata.subclasses is None else None
        saved = _saved(captured, parts)
        plan = training_plan(captured, parts, ctx, origin)
        plan = _with_fake_results(plan, metadata, parts.forward, forward)
    graphs = Graphs(parts.forward, parts.backward)
    return Artifact(
        plan, metadata, forward, graphs=graphs, origin=None if origin is None else _origin(captured, origin, saved)
    )


def inference_plan(captured: Captured) -> WrapperPlan:
    """What stands around the graph of an inference."""
    return build_plan(captured.metadata, input_plan=captured.inputs, addressed=_addressed(captured))


def training_plan(captured: Captured, parts: Split, ctx: CompileContext, origin: Origin | None = None) -> WrapperPlan:
    """What stands around a forward and a backward. ``origin``: where second derivatives may be asked for."""
    metadata, saved = captured.metadata, _saved(captured, parts)
    plan = build_plan(
        metadata,
        input_plan=captured.inputs,
        num_saved_tensors=parts.num_saved_tensors,
        num_saved_symints=parts.num_saved_symints,
        saved_inputs=saved.inputs,
        options=WrapperOptions(keep_inputs=origin is not None and origin.is_gradient),
        addressed=_addressed(captured),
    )
    if ctx.stages.reuses_donated and metadata.subclasses is None and not ctx.options.cudagraphs:
        donated = donated_buffers.donated_tensors(parts.forward, metadata.num_forward_outputs, parts.num_saved_tensors)
        donated_buffers.mark_donated(parts.backward, parts.num_saved_symints, donated)
        plan = plan_donated(plan, donated)
    return plan


def _saved(captured: Captured, parts: Split) -> SavedValues:
    return saved_values(parts.forward, captured.metadata.num_forward_outputs, parts.num_saved_tensors)


def _addressed(captured: Captured) -> dict[int, int]:
    return addressed_inputs(captured.graph, len(captured.metadata.inputs))


def _with_fake_results(
    plan: WrapperPlan, metadata: GraphMetadata, graph: torch.fx.GraphModule, forward: CompiledGraph
) -> WrapperPlan:
    strides = forward.code.result_strides if isinstance(forward.code, LiveCode) else None
    return with_fake_results(plan, metadata, graph, strides)


def _origin(captured: Captured, origin: Origin, saved: SavedValues) -> CaptureOrigin:
    autocast = origin.autocast
    return CaptureOrigin(
        origin.layer.value,
        [
            [[device, enabled, str(dtype)] for device, enabled, dtype in autocast.devices],
            autocast.cache_enabled,
            autocast.nesting,
        ],
        captured.inputs.to_json() if hasattr(origin.function, "input_plan") else None,
        len(saved.inputs),
        live=(origin, saved),
    )
