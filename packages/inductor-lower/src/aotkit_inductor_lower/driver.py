"""The whole way from a graph to a callable: every pass of every level in its order, and the functions that run them.

A graph is rewritten (:data:`WRITE_PASSES`, :data:`DEVICE_PASSES`, :data:`GRAPH_PASSES`), lowered to loop IR, which
becomes few nests in a good order (:data:`LOOP_PASSES`). A target makes kernels of these (:data:`KERNEL_PASSES`),
and code of them. What comes out is data, which is bound. Nothing here knows which target it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from ._observer import Observer
from ._torch_compat import lazy_graph_module
from .compiled import Compiled, CompiledGraph, Scheduled
from .errors import UnsupportedGraphError
from .graph_partition import CompiledParts, PartitionedGraph, compile_parts, needs_partition
from .graph_partition.split_ops import split_ops
from .graph_passes import (
    activation_gradients,
    attend_in_parts,
    attention_operands,
    bucket_collectives,
    call_custom_writers,
    channels_last,
    common_subexpressions,
    convolution_biases,
    copy_scalars_to_device,
    fold_uniform,
    fuse_attention,
    keep_pool_offsets,
    loss_gradients,
    merge_splits_and_cats,
    multiply_patches,
    pad_products,
    recognize_attention,
    reinplace,
    remove_noops,
    reuse_reductions,
    simplify,
    slice_strided_images,
    unshift_bytes,
    widen_bytes,
    widen_packed,
    write_out_attention,
)
from .graph_passes.fake_values import graph_constants, with_fake_values
from .graph_passes.rewriting import copy_graph, drop_dead_nodes, has_inner_mutation
from .ir import Program
from .ir.parse import parse_program
from .ir.print import print_program
from .ir.verify import verify_program
from .kernel_ir.nodes import KernelModule
from .kernel_ir.parse import parse_module
from .kernel_ir.print import print_module
from .kernel_ir.verify import verify_module
from .kernel_passes.linearize import linearize
from .kernel_passes.normal_form import NORMAL_FORM
from .launch_plan import CompiledProgram, compiled_from_json, compiled_to_json
from .launch_plan.program_text import program_from_json, program_to_json
from .launch_plan.store import ObjectStore, program_digest
from .loop_passes import (
    choose_contractions,
    choose_library_calls,
    compute_masks,
    drop_dead_steps,
    fission_long_rows,
    fold_identities,
    fuse_concats,
    fuse_kernels,
    fuse_mixed_order_reductions,
    gather_launches,
    generate_attention,
    generate_contractions,
    generate_sorts,
    inline_norms,
    inline_producers,
    lay_out_temporaries,
    localize_temporaries,
    order_steps,
    overlap_collectives,
    pack_constants,
    recompute_from_stored,
    reuse_call_results,
    split_loops,
    split_reductions,
    write_out_short_rows,
    write_through,
)
from .lowering.graph import lower_graph as lower_for
from .options import LowerOptions, Processor
from .passes import Decision, Fuel, Level, PassContext, check_disabled, in_order, optional, run_passes, stage
from .report import make_report, with_regions
from .runtime import ArenaPool, BoundProgram, bind_parts, bind_program
from .targets.select import capabilities_for, start_workers, target_for, target_on

__all__ = [
    "COLLECTIVE_PASSES",
    "DEVICE_PASSES",
    "GRAPH_PASSES",
    "KERNEL_LEVEL",
    "KERNEL_PASSES",
    "LOOP_LEVEL",
    "LOOP_PASSES",
]
__all__ += ["WRITE_PASSES", "compile_graph", "compile_to_program", "generate_program", "lower_graph", "make_kernels"]
__all__ += [
    "JOINT_PASSES",
    "Scheduled",
    "join_collectives",
    "pass_names",
    "prepare_joint_graph",
    "run_graph_passes",
    "schedule_graph",
]
__all__ += ["schedule_program", "start_compile_workers"]

T = TypeVar("T")

# On the whole graph, before it is taken apart.
WRITE_PASSES = in_order(
    call_custom_writers.PASS,
    call_custom_writers.LAUNCH_USER_KERNELS,
)

# On each part, whatever it writes.
DEVICE_PASSES = in_order(copy_scalars_to_device.PASS)

# On the joint graph of a forward and a backward, before it is split: what both must agree about.
JOINT_PASSES = in_order(
    channels_last.JOINT_PASS,
    recognize_attention.JOINT_PASS,
    attention_operands.JOINT_PASS,
    activation_gradients.RESULTS_PASS,
    activation_gradients.POOLED_PASS,
    keep_pool_offsets.JOINT_PASS,  # of indices as the forward gives them, which those before look for
)

# On the forward and the backward, each as a whole, before ranks compare their graphs.
COLLECTIVE_PASSES = in_order(bucket_collectives.PASS)

# On each part. (In a graph with custom writers once more before those: what they write to must be seen through views.)
GRAPH_PASSES = in_order(
    remove_noops.PASS,
    fold_uniform.PASS,
    recognize_attention.PASS,  # before a call that keeps less of what is asked for
    fuse_attention.PASS,
    write_out_attention.PASS,
    attention_operands.PASS,  # what is left of calls
    attend_in_parts.PASS,
    simplify.PASS,
    loss_gradients.PASS,
    merge_splits_and_cats.PASS,
    convolution_biases.PASS,
    pad_products.PASS,
    reuse_reductions.PASS,
    common_subexpressions.PASS,
    unshift_bytes.PASS,  # after: a weight and its sum read one view
    widen_bytes.PASS,
    widen_packed.PASS,
    channels_last.PASS,
    multiply_patches.PASS,
    slice_strided_images.PASS,  # required: a kernel of oneDNN is wrong
    reinplace.PASS,
)

LOOP_PASSES = in_order(
    drop_dead_steps.PASS,  # required: no later pass sees a step without a reader
    fold_identities.PASS,
    choose_contractions.PASS,  # required, and before fusion: our own products take what comes before and after them
    inline_producers.PASS,
    write_out_short_rows.PASS,  # with what they sum, and before it is chosen what is fused
    fuse_concats.PASS,
    split_loops.PASS,  # reshapes become loops, so that positions are plain sums
    lay_out_temporaries.PASS,  # while each operation is a nest
    fuse_kernels.PASS,  # vertical and horizontal
    fuse_mixed_order_reductions.PASS,
    recompute_from_stored.PASS,
    generate_contractions.PASS,  # required: products in tiles, which take in what is made of them
    write_through.PASS,
    localize_temporaries.PASS,
    inline_norms.PASS,  # which store nothing but what products read, by now
    order_steps.PASS,
    overlap_collectives.PASS,
    fission_long_rows.PASS,  # when the machine is known, as the next
    split_reductions.PASS,  # and outer reductions
    gather_launches.PASS,  # when the last kernels are there
    generate_attention.PASS,  # after all that fuses: it takes nothing in
    compute_masks.PASS,  # but, on a device, what makes its masks
    generate_sorts.PASS,  # which takes nothing in either
    choose_library_calls.PASS,
    pack_constants.PASS,
    reuse_call_results.PASS,  # last: no pass looks through the aliases that it adds
)

KERNEL_PASSES = NORMAL_FORM  # what only one target does to its kernels comes after these, in the target


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: LowerOptions | None = None,
    observer: Observer | None = None,
    object_store: ObjectStore | None = None,
    arenas: ArenaPool | None = None,
) -> CompiledGraph | PartitionedGraph:
    """Compile a functional ATen graph, in one piece if it can be (see :mod:`.graph_partition`): for the CPU, or with
    Triton for the CUDA device that (most of) its tensors are on.

    Nodes need fake values in ``meta["val"]``, as ``make_fx`` leaves them; where they lack, they are computed from
    ``example_inputs``. Graphs that never run at once may share the memory of their temporaries: ``arenas``. Works as
    ``fw_compiler`` of torch's ``aot_function``. Raises
    :class:`~.errors.UnsupportedGraphError` for what can be neither generated nor called.
    """
    options, arenas = options or LowerOptions(), arenas or ArenaPool()
    compiled = compile_to_program(
        gm, example_inputs, options=options, observer=observer, object_store=object_store, arenas=arenas
    )
    with stage(observer, "bind"):
        return _bound(compiled, options, arenas)


def _bound(
    compiled: Compiled | CompiledParts, options: LowerOptions, arenas: ArenaPool
) -> CompiledGraph | PartitionedGraph:
    if isinstance(compiled, Compiled):
        bound = bind_program(compiled.program, compiled.constants, arenas, redzones=options.redzones)
        return CompiledGraph(
            bound, compiled.constants, compiled.scheduled, compiled.records, compiled.report, options.check_inputs
        )
    call = compiled.live
    if compiled.program is not None:
        checked = options.check_inputs
        call = bind_parts(compiled.program, compiled.constants, arenas, redzones=options.redzones, check_inputs=checked)
    assert call is not None
    return PartitionedGraph(call, compiled)


def compile_to_program(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: LowerOptions | None = None,
    observer: Observer | None = None,
    object_store: ObjectStore | None = None,
    arenas: ArenaPool | None = None,
) -> Compiled | CompiledParts:
    """Compile a functional ATen graph as :func:`compile_graph` does, without binding it: what comes out is data.

    A graph that no launch plan can hold is compiled in parts. Where these are called by what has no text, it is bound,
    with ``arenas``.
    """
    options = options or LowerOptions()
    gm = with_fake_values(gm, example_inputs)
    ctx = _context(gm, options, observer, object_store)
    graph = call_writers(gm, ctx)
    if needs_partition(graph):
        return _compile_in_parts(graph, options, observer, object_store, arenas or ArenaPool())
    return _compile_whole(graph, ctx, object_store)


def start_compile_workers(devices: Iterable[torch.device], options: LowerOptions | None = None) -> None:
    """Start the processes that compile kernels for one of these devices, if any do, without waiting for them: to be
    called some time before a graph of tensors there is compiled with the same options. They are started then if nobody
    did."""
    for device in devices:
        start_workers(device, options or LowerOptions())


def schedule_graph(
    gm: GraphModule, options: LowerOptions | None = None, *, observer: Observer | None = None
) -> Scheduled:
    """The first half of :func:`compile_to_program`: loop IR that is fused and in order, and what became of the graph.

    Raises :class:`~.errors.UnsupportedGraphError` for what can be neither generated nor called, and for a graph that no
    launch plan can hold.
    """
    options = options or LowerOptions()
    ctx = _context(gm, options, observer)
    graph = call_writers(gm, ctx)
    if needs_partition(graph):
        staying = "; ".join(f"{node.name} {reason}" for node, reason in split_ops(graph).items())
        raise UnsupportedGraphError(
            "a graph that is compiled in pieces",
            f"it has calls that no launch plan can hold ({staying})",
            todo="compile it with compile_graph or torch.compile",
        )
    return _scheduled(graph, ctx)


def prepare_joint_graph(
    gm: GraphModule,
    options: LowerOptions | None = None,
    *,
    where_faster: bool = False,
    observer: Observer | None = None,
) -> GraphModule:
    """A joint graph of a forward and a backward after :data:`JOINT_PASSES`, with the same inputs and outputs: to be
    split, and each part compiled with the same options. ``gm`` itself stays as it is, and is returned where no pass
    changes anything. Nodes need fake values in ``meta["val"]``. ``where_faster``: images are left as they are where
    little is gained by it (:func:`.gains_in_training`).
    """
    options = options or LowerOptions()
    check_disabled(options.disable, pass_names())
    tests = (
        channels_last.has_convolutions,
        recognize_attention.has_attention,
        attention_operands.calls_attention,
        keep_pool_offsets.has_max_pools,
        activation_gradients.has_activation_gradients,
    )
    known = any(test(gm.graph) for test in tests)
    if has_inner_mutation(gm) or not known:
        return gm
    ctx = PassContext.of(options, observer, target_for(gm, options))
    passes = JOINT_PASSES
    if where_faster and not channels_last.gains_in_training(gm.graph, ctx.target.capabilities):
        passes = tuple(each for each in passes if each is not channels_last.JOINT_PASS)
    graph = run_passes(passes, copy_graph(gm), ctx, _GRAPH_LEVEL)
    return lazy_graph_module(gm, graph) if ctx.fuel.used else gm


def join_collectives(
    gm: GraphModule, options: LowerOptions | None = None, *, observer: Observer | None = None
) -> GraphModule:
    """A graph after :data:`COLLECTIVE_PASSES`, with the same inputs and outputs: to be compiled with the same options.

    ``gm`` itself stays as it is, and is returned where no pass changes anything. Nodes need fake values in
    ``meta["val"]``. What comes out depends on the graph and the options, so ranks that agree about these start the same
    collectives.
    """
    options = options or LowerOptions()
    check_disabled(options.disable, pass_names())
    if has_inner_mutation(gm) or not bucket_collectives.has_buckets(gm.graph):
        return gm
    ctx = PassContext.of(options, observer, target_for(gm, options))
    graph = run_passes(COLLECTIVE_PASSES, copy_graph(gm), ctx, _GRAPH_LEVEL)
    return lazy_graph_module(gm, graph) if ctx.fuel.used else gm


def generate_program(
    scheduled: Scheduled, options: LowerOptions | None = None, *, observer: Observer | None = None
) -> CompiledProgram:
    """The second half: code for ``scheduled``. With the same options it is what :func:`compile_to_program` makes.

    Raises :class:`~.errors.CodegenError` where this process can't generate for the options' processor.
    """
    options = options or LowerOptions()
    target = target_on(torch.device(scheduled.device), options)
    ctx = replace(PassContext.of(options, observer, target), fuel=Fuel(scheduled.fuel))
    with stage(observer, "codegen"):
        return _generate(scheduled.program, ctx, None)


def lower_graph(gm: GraphModule, options: LowerOptions | None = None, name: str = "graph") -> Program:
    """The loop IR of a graph for the target that it would be compiled for: one step per node, views as index maps,
    nothing fused.

    Every tensor node needs its fake value in ``meta["val"]``. Nodes without a rule become ATen calls. Raises
    :class:`~.errors.UnsupportedGraphError` for what can be neither generated nor called.
    """
    options = options or LowerOptions()
    return lower_for(gm, options, name, capabilities_for(gm, options))


def _context(
    gm: GraphModule, options: LowerOptions, observer: Observer | None, store: ObjectStore | None = None
) -> PassContext:
    target = target_for(gm, options)
    ctx = PassContext.of(options, observer, target)
    if options.tune:
        compile_call, compile_part = partial(_compile_call, options.processor), partial(_compile_fragment, ctx)
        race = target.race(compile_part, options, store)
        ctx = replace(ctx, measure=target.measure(compile_call), race=race)
    released = (node.name for node in gm.graph.find_nodes(op="placeholder") if node.meta.get("released"))
    return replace(ctx, released=frozenset(released))


def _compile_fragment(
    ctx: PassContext, program: Program, constants: Mapping[str, torch.Tensor], behind: str
) -> BoundProgram:
    """A part of a program as the pass ``behind`` leaves it, compiled as the whole is: what is measured."""
    options = replace(ctx.options, tune=False, verify=False, redzones=False, fuel=None)
    own = replace(PassContext.of(options, None, ctx.target), constants=dict(constants))
    left = [each.name for each in LOOP_PASSES].index(behind) + 1
    scheduled = run_passes(LOOP_PASSES[left:], program, own, LOOP_LEVEL)
    return bind_program(_generate(scheduled, own, None), own.constants)


def _compile_call(
    processor: Processor, op: Callable[..., Any], tensors: list[torch.Tensor]
) -> CompiledGraph | PartitionedGraph:
    """The call of an operator, with the products in it generated: what is measured against ATen's."""
    gm = make_fx(lambda *args: (op(*args),), tracing_mode="fake")(*tensors)
    options = LowerOptions(tune=True, contractions="generated", check_inputs=False, processor=processor)
    return compile_graph(gm, options=options)


def _compile_in_parts(
    graph: GraphModule,
    options: LowerOptions,
    observer: Observer | None,
    object_store: ObjectStore | None,
    arenas: ArenaPool,
) -> CompiledParts:
    def compile_one(part: GraphModule) -> Compiled | CompiledParts:
        return compile_to_program(part, options=options, observer=observer, object_store=object_store, arenas=arenas)

    compiled = compile_parts(graph, compile_one, lambda part: _bound(part, options, arenas))
    program = compiled.program
    if options.verify and program is not None:
        text = program_to_json(program)
        if program_to_json(program_from_json(text)) != text:
            raise AssertionError(f"the program in parts {program.name} changed when it was written and read back")
    return compiled


def _compile_whole(gm: GraphModule, ctx: PassContext, object_store: ObjectStore | None) -> Compiled:
    if ctx.options.redzones and not ctx.target.capabilities.arena:
        raise UnsupportedGraphError(
            "a graph for CUDA with redzones", "only memory of the CPU is watched", todo="leave the option redzones out"
        )
    scheduled = _scheduled(gm, ctx)
    with stage(ctx.observer, "codegen"):
        compiled = _generate(scheduled.program, ctx, object_store)
    report = with_regions(scheduled.report, compiled.binary)
    return Compiled(compiled, scheduled.constants, report, scheduled.program, scheduled.records)


def _scheduled(gm: GraphModule, ctx: PassContext) -> Scheduled:
    observer = ctx.observer
    with stage(observer, "graph-passes"):
        graph = rewrite_graph(gm, ctx)
    with stage(observer, "lowering"):
        lowered = lower_for(graph, ctx.options, capabilities=ctx.target.capabilities)
        lowered = checked_program(lowered) if ctx.options.verify else lowered
    _dump(observer, "lowered", "ir", lowered)
    ctx = replace(ctx, constants=graph_constants(graph))
    with stage(observer, "schedule"):
        scheduled = schedule(lowered, ctx)
    _dump(observer, "scheduled", "ir", scheduled)
    report = make_report(graph, lowered, scheduled, ctx.decisions)
    fuel = None if ctx.options.fuel is None else ctx.fuel.left
    device = ctx.target.capabilities.device
    return Scheduled(scheduled, ctx.constants, report, tuple(ctx.decisions), device, fuel)


def _generate(program: Program, ctx: PassContext, store: ObjectStore | None) -> CompiledProgram:
    digest = ""
    if store is not None:
        digest = program_digest(f"{ctx.target.key(ctx.options)}{_kernel_choices(ctx)}", print_program(program))
        found = store.get(digest)
        if found is not None:
            return compiled_from_json(found.decode())
    kernels = make_kernels(program, ctx)
    compiled = ctx.target.generate(program, kernels, ctx.options, ctx.observer)
    if ctx.options.verify and compiled_from_json(compiled_to_json(compiled)) != compiled:
        raise AssertionError(f"the compiled program {program.name} changed when it was written and read back")
    if store is not None:
        store.put(digest, compiled_to_json(replace(compiled, text="")).encode())
    return compiled


def _kernel_choices(ctx: PassContext) -> str:
    """What is left out of the kernel passes, of which a scheduled program says nothing; ``""`` for nothing."""
    disabled = [name for name in optional(KERNEL_PASSES) if name in ctx.options.disable]
    fuel = "" if ctx.options.fuel is None else f" fuel={ctx.fuel.left}"
    separate = " separate" * ctx.options.separate_kernels
    arena = "" if ctx.options.arena_bytes is None else f" arena={ctx.options.arena_bytes}"
    return fuel + f" without={','.join(disabled)}" * bool(disabled) + separate + arena


def _dump(observer: Observer | None, name: str, kind: str, program: Program) -> None:
    if observer is not None:
        observer.dump(name, kind, lambda: print_program(program))


_ON_GRAPHS = (
    *optional(WRITE_PASSES),
    *optional(COLLECTIVE_PASSES),
    *optional(JOINT_PASSES),
    *optional(GRAPH_PASSES),
)
_NAMES: dict[str, tuple[str, ...]] = {
    "graph": tuple(dict.fromkeys(_ON_GRAPHS)),
    "loop": optional(LOOP_PASSES),
    "kernel": optional(KERNEL_PASSES),
}


def pass_names(level: Literal["graph", "loop", "kernel"] | None = None) -> tuple[str, ...]:
    """The names that ``LowerOptions.disable`` knows, in the order in which the passes run: of one level, or of all."""
    return _NAMES[level] if level is not None else tuple(name for names in _NAMES.values() for name in names)


def call_writers(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """Operators that write, and kernels of the user's, as calls that a launch plan can hold."""
    check_disabled(ctx.options.disable, pass_names())
    if call_custom_writers.has_custom_writers(gm):
        gm = rewrite_graph(gm, ctx)
    return run_passes(WRITE_PASSES, gm, ctx, _MODULE_LEVEL)


def rewrite_graph(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """The graph after :data:`GRAPH_PASSES`. ``gm`` itself stays as it is.

    Raises :class:`~.errors.UnknownPassError` for a disabled name that is no optional pass.
    """
    check_disabled(ctx.options.disable, pass_names())
    gm = run_passes(DEVICE_PASSES, gm, ctx, _MODULE_LEVEL)
    if has_inner_mutation(gm) or all(each.name in ctx.options.disable for each in GRAPH_PASSES):
        return gm
    graph = run_passes(GRAPH_PASSES, copy_graph(gm), ctx, _GRAPH_LEVEL)
    drop_dead_nodes(graph)
    return lazy_graph_module(gm, graph)


def schedule(program: Program, ctx: PassContext) -> Program:
    """The program after :data:`LOOP_PASSES`: with as few kernels as its data allows."""
    check_disabled(ctx.options.disable, pass_names())
    return run_passes(LOOP_PASSES, program, ctx, LOOP_LEVEL)


def make_kernels(program: Program, ctx: PassContext) -> KernelModule:
    """The kernels of a scheduled program after :data:`KERNEL_PASSES`: what every target starts from."""
    with stage(ctx.observer, "linearize"):
        module = linearize(program)
    module = run_passes(KERNEL_PASSES, module, ctx, KERNEL_LEVEL)
    if ctx.observer is not None:
        ctx.observer.dump("kernels", "ir", lambda: print_module(module))
    return module


def run_graph_passes(gm: GraphModule, options: LowerOptions) -> GraphModule:
    """:func:`rewrite_graph` by itself."""
    return rewrite_graph(gm, PassContext.of(options))


def schedule_program(program: Program, options: LowerOptions | None = None) -> tuple[Program, tuple[Decision, ...]]:
    """The program with as few kernels as its data allows, and a record of every decision."""
    ctx = PassContext.of(options)
    program = schedule(program, ctx)
    return program, tuple(ctx.decisions)


def _checked_graph(graph: Graph) -> Graph:
    graph.lint()
    return graph


def _checked_module(gm: GraphModule) -> GraphModule:
    gm.graph.lint()
    return gm


def checked_program(program: Program) -> Program:
    """The program as it reads back from its own text, once the verifier has nothing against it."""
    verify_program(program)
    return _same(program, parse_program(print_program(program)), program.name)


def _checked_kernels(module: KernelModule) -> KernelModule:
    verify_module(module)
    return _same(module, parse_module(print_module(module)), f"kernels of {module.name}")


def _same(written: T, reread: T, name: str) -> T:
    # From Python 3.13 on records with a nan in them are unequal even to themselves.
    if reread != written and repr(reread) != repr(written):
        raise AssertionError(f"program {name} changed when it was printed and read back")
    return reread


_MODULE_LEVEL: Level[GraphModule] = Level(lambda gm: str(gm.graph), _checked_module)
_GRAPH_LEVEL: Level[Graph] = Level(str, _checked_graph)
LOOP_LEVEL: Level[Program] = Level(print_program, checked_program)
KERNEL_LEVEL: Level[KernelModule] = Level(print_module, _checked_kernels)
