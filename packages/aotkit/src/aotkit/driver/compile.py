"""From one captured Python function to one callable: the stages in order, each the public API of a package.

prepare -> capture -> partition -> lower (kernels) -> bind -> prologue and epilogue. The product of every stage is
data. With ``verify`` each product is serialized, reloaded and the reloaded one used, so nothing can hide in a closure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

import torch

from aotkit_aot_trace import (
    Capture,
    GradientInputs,
    GraphFunction,
    Origin,
    SavedValues,
    TraceOptions,
    capture,
    capture_gradients,
    mutations_in_graph,
    saved_values,
)
from aotkit_functionalize import GraphMetadata, OverlappingMutation
from aotkit_inductor_lower import ArenaPool, LowerOptions, compile_graph, decompositions
from aotkit_partition import (
    Partition,
    PartitionOptions,
    dump_graph,
    graph_constants,
    load_graph,
    partition,
    without_tangents,
)
from aotkit_runtime_wrappers import (
    GradientRequest,
    Gradients,
    InputPlan,
    PreparedFunction,
    WrapperOptions,
    WrapperPlan,
    bind,
    build_plan,
    compile_wrapped,
    graph_inputs,
    plan_donated,
    plan_synthetic_bases,
    prepare_inputs,
    unboxed,
)

from ..errors import notify_eager
from ..frontend.fake_calls import with_fake_results
from ..frontend.torch_logs import publish_graph
from ..frontend.tracing_context import publish_metadata, publish_strides
from ..options import Options
from ..recorder import GraphRecord, Recorder
from .alias_specializations import addressed_inputs
from .around import WithoutHistory
from .bugs import first_line, is_bug, is_refusal, note_bug
from .collect import Collector
from .custom_ops import CheckedAtFirstCall
from .donated import donated_tensors, mark_donated
from .freezing import FrozenArguments

if TYPE_CHECKING:
    from torch._subclasses import FakeTensorMode

    from aotkit_cudagraphs import CudagraphTrees

__all__ = ["Boxed", "Captured", "CompileContext", "Split", "Stages", "WithoutHistory"]
__all__ += ["backward_in_spite_of", "capture_flat", "compile_captured", "compile_flat", "gradient_compiler"]
__all__ += ["own_stages"]

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class CompileContext:
    """What every stage of one compile shares: options, the recorder, a name for dumps, where objects are kept.

    ``num_static``: so many leading arguments (parameters and buffers) are in the same memory at every call.
    ``keep_input_mutations``: the graph of an inference writes to its inputs itself, where that can be.
    ``fixed_arguments``: positions of arguments that the frontend knows to keep their address, mostly.
    ``frozen``: arguments that become constants of an inference.
    ``trees``: where recordings of CUDA graphs go, if not to those that all compiled graphs of a device share.
    ``arenas``: where temporaries live, those of a forward and its backward in turn.
    ``collector``: keeps the products, to be written to the cache.
    ``publish``: graphs go to torch's own log artifacts (``TORCH_LOGS``, structured traces) too.
    ``fake_mode``: the mode of the fake arguments, which tells where symbols live if no argument is a tensor.
    """

    options: Options
    recorder: Recorder
    name: str = "graph"
    object_store: Any = None
    num_static: int = 0
    keep_input_mutations: bool = False
    publish: bool = True
    fixed_arguments: frozenset[int] = frozenset()
    frozen: FrozenArguments | None = None
    trees: CudagraphTrees | None = None
    arenas: ArenaPool = field(default_factory=ArenaPool)
    collector: Collector | None = None
    fake_mode: FakeTensorMode | None = None

    def dump_graph(self, name: str, graph: torch.fx.GraphModule) -> None:
        """Show ``graph`` to whoever watches."""
        self.recorder.dump(name, "graphs", lambda: _readable(graph))
        if self.publish:
            publish_graph(name, graph)


@dataclass(frozen=True, slots=True)
class Captured:
    """The product of the first half of a compile: a functional graph, its contract, how arguments become its inputs."""

    graph: torch.fx.GraphModule
    metadata: GraphMetadata
    inputs: InputPlan
    origin: Origin | None


@dataclass(frozen=True, slots=True)
class Split:
    """A partitioned joint graph, and how many tensors and integers the forward hands to the backward."""

    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule
    num_saved_tensors: int
    num_saved_symints: int


@dataclass(frozen=True, slots=True)
class Stages:
    """The exchangeable stages of a compile; :func:`own_stages` are ours.

    ``reuses_donated``: the compiled backward writes into saved tensors whose memory is marked to be its own.
    ``specializes``: a backward may be compiled for calls in which tangents are missing.
    """

    decompositions: Mapping[Any, Callable[..., Any]]
    split: Callable[[torch.fx.GraphModule, GraphMetadata, CompileContext], Split]
    inference: Callable[[torch.fx.GraphModule, str, CompileContext], Boxed]
    forward: Callable[[torch.fx.GraphModule, str, CompileContext], Boxed]
    backward: Callable[[torch.fx.GraphModule, str, CompileContext], Boxed]
    reuses_donated: bool = False
    specializes: bool = False


def with_cudagraphs(stages: Stages, metadata: GraphMetadata, inputs: InputPlan, ctx: CompileContext) -> Stages:
    """These stages with their graphs put into a tree of recordings; see `CudagraphStages`."""
    from .cudagraphs import CudagraphStages

    static = {info.index for info in metadata.inputs if info.is_static}
    if metadata.subclasses is None and not inputs.symbols:
        first = len(inputs.bases)
        static |= {first + position for position, index in enumerate(inputs.others) if index in ctx.fixed_arguments}
    added = CudagraphStages(sorted(static), ctx.options.cudagraph_outputs, ctx.trees)
    return replace(
        stages,
        inference=added.inference(stages.inference),
        forward=added.forward(stages.forward),
        backward=added.backward(stages.backward),
    )


_OVERWRITTEN = ("data", "data_and_metadata", "storage")


def own_stages() -> Stages:
    """Our decompositions, partitioner and code generation."""
    return Stages(decompositions(), _partition, _compile_boxed, _compile_boxed, _compile_boxed, specializes=True)


def compile_flat(
    fn: Callable[..., Any], fakes: Sequence[Any], examples: Sequence[Any], ctx: CompileContext, stages: Stages
) -> Callable[..., Any]:
    """Compile ``fn`` of flat arguments. Returns a callable of the same flat arguments giving a list.

    ``fakes`` are fake versions of ``examples``. Raises the packages' typed refusals; see ``backend`` for what
    becomes of them.
    """
    return unboxed(_compile(capture_flat(fn, fakes, examples, ctx, stages), ctx, stages))


def capture_flat(
    fn: Callable[..., Any], fakes: Sequence[Any], examples: Sequence[Any], ctx: CompileContext, stages: Stages
) -> Captured:
    """The first half of :func:`compile_flat`. The graph may be changed before :func:`compile_captured` gets it."""
    captured, inputs = _capture(fn, fakes, examples, ctx, stages)
    metadata = _with_static_inputs(captured.metadata, inputs, ctx.num_static)
    graph = captured.graph
    if ctx.keep_input_mutations and not metadata.is_training and metadata.subclasses is None:
        graph, metadata = mutations_in_graph(graph, metadata)
    return _shown(Captured(graph, metadata, inputs, captured.origin), ctx)


def _shown(captured: Captured, ctx: CompileContext) -> Captured:
    ctx.recorder.dump(f"{ctx.name}-captured", "graphs", lambda: _readable(captured.graph))
    if ctx.publish and captured.metadata.is_training:
        publish_graph(f"{ctx.name}-joint", captured.graph)
    ctx.recorder.dump(f"{ctx.name}-metadata", "graphs", lambda: str(captured.metadata))
    publish_metadata(captured.metadata)
    return captured


def compile_captured(captured: Captured, ctx: CompileContext, stages: Stages) -> Callable[..., Any]:
    """The second half of :func:`compile_flat`. Second derivatives are refused: the graph may have been changed."""
    return unboxed(_compile(replace(captured, origin=None), ctx, stages))


def _compile(captured: Captured, ctx: CompileContext, stages: Stages) -> Boxed:
    metadata = _reload_metadata(captured.metadata, ctx)
    if ctx.options.cudagraphs:
        stages = with_cudagraphs(stages, metadata, captured.inputs, ctx)
    if metadata.is_training:
        return _compile_training(captured, metadata, ctx, stages)
    graph = _reload_graph(captured.graph, ctx)
    if ctx.frozen is not None:
        with ctx.recorder.stage("freeze"):
            graph = ctx.frozen.freeze(graph, metadata, captured.inputs)
    forward = stages.inference(graph, f"{ctx.name}-inference", ctx)
    with ctx.recorder.stage("bind"):
        addressed = addressed_inputs(captured.graph, len(metadata.inputs))
        plan = build_plan(metadata, input_plan=captured.inputs, addressed=addressed)
        plan = with_fake_results(plan, metadata, graph, forward)
        plan = _reload_plan(plan, ctx)
        if ctx.collector is not None:
            ctx.collector.add_inference(plan, metadata)
        return bind(plan, forward, observer=ctx.recorder)


def _with_static_inputs(metadata: GraphMetadata, inputs: InputPlan, num_static: int) -> GraphMetadata:
    if not num_static:
        return metadata
    first = len(inputs.bases)
    static = {first + position for position, index in enumerate(inputs.others) if index < num_static}
    if metadata.subclasses is not None:  # each stands for the tensors inside of it
        static = {dense for index in static for dense in metadata.subclasses.dense_positions(index)}
    infos = tuple(replace(i, is_static=True) if i.index in static else i for i in metadata.inputs)
    return replace(metadata, inputs=infos)


def _compile_training(captured: Captured, metadata: GraphMetadata, ctx: CompileContext, stages: Stages) -> Boxed:
    with ctx.recorder.stage("partition"):
        parts = stages.split(captured.graph, metadata, ctx)
    forward = stages.forward(parts.forward, f"{ctx.name}-forward", ctx)

    def finished(graph: torch.fx.GraphModule, missing: tuple[bool, ...]) -> Boxed:
        backward = stages.backward(graph, f"{ctx.name}-backward", ctx)
        if ctx.collector is not None:
            ctx.collector.add_training(plan, metadata, captured, parts, missing)
        ctx.recorder.dump(f"{ctx.name} seconds per stage, backward included", "timing", ctx.recorder.table)
        return backward

    def whole_backward() -> Boxed:
        return backward_in_spite_of(lambda: finished(parts.backward, ()), parts.backward, ctx.options, ctx.recorder)

    def special_backward(missing: tuple[bool, ...]) -> Boxed | None:
        first = parts.num_saved_symints + parts.num_saved_tensors
        positions = [first + i for i, is_missing in enumerate(missing) if is_missing]
        try:
            graph = without_tangents(parts.backward, positions, plan.call.unreached(missing))
            return None if graph is None else finished(graph, missing)
        except Exception as error:
            if not (is_bug(error) or is_refusal(error)) or ctx.options.fallback == "error":
                raise
            return None  # the whole one is tried, which tells what is wrong

    with ctx.recorder.stage("bind"):
        # The gradients of subclasses would have to be captured as functions of subclasses.
        origin = captured.origin if metadata.subclasses is None else None
        saved = saved_values(parts.forward, metadata.num_forward_outputs, parts.num_saved_tensors)
        plan = build_plan(
            metadata,
            input_plan=captured.inputs,
            num_saved_tensors=parts.num_saved_tensors,
            num_saved_symints=parts.num_saved_symints,
            saved_inputs=saved.inputs,
            options=WrapperOptions(keep_inputs=origin is not None and origin.is_gradient),
            addressed=addressed_inputs(captured.graph, len(metadata.inputs)),
        )
        if stages.reuses_donated and metadata.subclasses is None and not ctx.options.cudagraphs:
            plan = _with_donated(plan, parts, metadata)
        plan = _reload_plan(with_fake_results(plan, metadata, parts.forward, forward), ctx)
        gradients = None
        if origin is not None:
            gradients = Gradients(metadata, gradient_compiler(origin, metadata, saved, ctx, stages))
        return bind(
            plan,
            forward,
            lambda: whole_backward(),
            observer=ctx.recorder,
            gradients=gradients,
            backward_graph=parts.backward,
            specialize=special_backward if stages.specializes and not ctx.options.cudagraphs else None,
        )


def backward_in_spite_of(
    compile_backward: Callable[[], Boxed], graph: torch.fx.GraphModule, options: Options, recorder: Recorder
) -> Boxed:
    """What ``compile_backward`` makes of ``graph``; if it fails, the graph run with ATen, after one notice."""
    try:
        return compile_backward()
    except Exception as error:
        if options.fallback == "error" or not (is_bug(error) or is_refusal(error)):
            raise
        if is_refusal(error):
            recorder.add_fallback(str(error))
            notify_eager(f"(its backward) {error}")
        else:
            note_bug(error, first_line(graph), recorder)
        return _run_with_aten(graph)


def _with_donated(plan: WrapperPlan, parts: Split, metadata: GraphMetadata) -> WrapperPlan:
    donated = donated_tensors(parts.forward, metadata.num_forward_outputs, parts.num_saved_tensors)
    mark_donated(parts.backward, parts.num_saved_symints, donated)
    return plan_donated(plan, donated)


def gradient_compiler(
    origin: Origin, metadata: GraphMetadata, saved: SavedValues, ctx: CompileContext, stages: Stages
) -> Callable[[GradientRequest], Boxed]:
    """Compiles the gradients of a graph like any other graph, when somebody asks for a second derivative."""
    ctx = replace(ctx, name=f"{ctx.name}-gradients", collector=None)

    def compile_gradients(request: GradientRequest) -> Boxed:
        values = GradientInputs(**{f.name: getattr(request, f.name) for f in fields(request)})
        with ctx.recorder.stage("capture"):
            found = capture_gradients(
                origin, metadata, saved, values, decompositions=stages.decompositions, observer=ctx.recorder
            )
        inputs = InputPlan.one_to_one(len(found.metadata.inputs))
        return _compile(_shown(Captured(found.graph, found.metadata, inputs, found.origin), ctx), ctx, stages)

    return compile_gradients


def _capture(
    fn: Callable[..., Any], fakes: Sequence[Any], examples: Sequence[Any], ctx: CompileContext, stages: Stages
) -> tuple[Capture, InputPlan]:
    """Capture over distinct inputs; over a common base only if overlapping inputs prove mutated."""
    with ctx.recorder.stage("prepare"):
        inputs = prepare_inputs(examples)
    table = stages.decompositions
    with ctx.recorder.stage("capture"):
        if not inputs.overlaps and len(inputs.kept) == len(fakes):
            mode = None if any(isinstance(fake, torch.Tensor) for fake in fakes) else ctx.fake_mode
            how = TraceOptions(random_by_memory=ctx.options.rng == "eager")
            taken = capture(fn, fakes, decompositions=table, fake_mode=mode, options=how, observer=ctx.recorder)
            return taken, inputs
        run = GraphFunction(fn) if isinstance(fn, torch.fx.GraphModule) else fn
        layer = run.preferred_layer() if hasattr(run, "preferred_layer") else None
        how = TraceOptions(random_by_memory=ctx.options.rng == "eager", layer=layer)
        settings: dict[str, Any] = {"decompositions": table, "options": how, "observer": ctx.recorder}
        prepared = PreparedFunction(run, inputs)
        try:
            captured = capture(prepared, graph_inputs(inputs, fakes), **settings)
        except OverlappingMutation as overlap:
            prepared = PreparedFunction(run, plan_synthetic_bases(inputs, fakes, overlap.groups))
            distinct = graph_inputs(prepared.input_plan, fakes)
            captured = capture(prepared, distinct, **settings)
        return captured, prepared.finish()


def _partition(joint: torch.fx.GraphModule, metadata: GraphMetadata, ctx: CompileContext) -> Split:
    options = PartitionOptions(
        strategy=ctx.options.partitioner.replace("_", "-"),
        memory_budget=ctx.options.memory_budget,
        static_inputs=tuple(i.index for i in metadata.inputs if i.is_static),
        mutated_inputs=tuple(i.index for i in metadata.inputs if i.mutation.value in _OVERWRITTEN),
        details="decisions",
    )
    parts = partition(joint, metadata.num_forward_outputs, options, observer=ctx.recorder)
    ctx.recorder.dump(f"{ctx.name}-partition", "graphs", lambda: str(parts.report))
    if ctx.options.verify:
        parts = Partition.from_json(parts.to_json(), fake_mode=_fake_mode(joint), constants=graph_constants(joint))
    tensors = len(parts.saved_names) - parts.num_saved_symints
    return Split(parts.forward, parts.backward, tensors, parts.num_saved_symints)


def _compile_boxed(graph: torch.fx.GraphModule, name: str, ctx: CompileContext) -> Boxed:
    """One functional graph to one boxed callable: generated kernels, or ATen as it stands."""
    ctx.dump_graph(name, graph)

    def compiler(graph: torch.fx.GraphModule, _: list[Any]) -> Boxed:
        return _run_with_aten(graph) if ctx.options.lowering == "none" else _lowered(graph, name, ctx)

    return compile_wrapped(compiler, graph, (), (CheckedAtFirstCall(), WithoutHistory()))


def _lowered(graph: torch.fx.GraphModule, name: str, ctx: CompileContext) -> Boxed:
    chosen = ctx.options
    options = LowerOptions(
        numerics=chosen.numerics,
        rng=chosen.rng,
        verify=chosen.verify,
        redzones=chosen.redzones,
        tune=chosen.tune,
        index_asserts=chosen.index_asserts,
        check_inputs=False,  # the frontend's guards do
        processor=chosen.processor,
        fuel=chosen.fuel,
        disable=tuple(sorted(chosen.disable)),
    )
    with ctx.recorder.stage("lower"):
        store, arenas = ctx.object_store, ctx.arenas
        compiled = compile_graph(graph, options=options, observer=ctx.recorder, object_store=store, arenas=arenas)
    if not name.endswith("-backward"):
        publish_strides(graph)
    if ctx.collector is not None:
        ctx.collector.add_graph(name, graph, compiled)
    ctx.recorder.add_graph(GraphRecord(name, compiled.report()))
    return compiled


def _run_with_aten(graph: torch.fx.GraphModule) -> Boxed:
    def run(args: list[Any]) -> Sequence[Any]:
        values = list(args)
        args.clear()
        return graph(*values)

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


# -- serialize, reload, use the reloaded one -----------------------------------------------------------


def _reload_metadata(metadata: GraphMetadata, ctx: CompileContext) -> GraphMetadata:
    if not ctx.options.verify:
        return metadata
    return _same(GraphMetadata.from_json(metadata.to_json()), metadata, "graph metadata")


def _reload_plan(plan: WrapperPlan, ctx: CompileContext) -> WrapperPlan:
    if not ctx.options.verify:
        return plan
    return _same(WrapperPlan.from_json(plan.to_json()), plan, "wrapper plan")


def _reload_graph(graph: torch.fx.GraphModule, ctx: CompileContext) -> torch.fx.GraphModule:
    if not ctx.options.verify:
        return graph
    return load_graph(dump_graph(graph), fake_mode=_fake_mode(graph), constants=graph_constants(graph))


def _same(reloaded: Any, original: Any, what: str) -> Any:
    if reloaded != original:
        raise AssertionError(f"the {what} changed when it was serialized and reloaded")
    return reloaded


def _fake_mode(graph: torch.fx.GraphModule) -> Any:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
            return value.fake_mode
    return None


def _readable(graph: torch.fx.GraphModule) -> str:
    return str(graph.print_readable(print_output=False))
