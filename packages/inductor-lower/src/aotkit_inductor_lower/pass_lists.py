"""Every pass of a compile, in the order in which they run.

Note [Where the lists stand]
    Below the targets: the driver of CUDA graphs (:mod:`.targets.triton`) runs the same lists as :mod:`.driver`. Once
    there is one driver for all targets, they move there.
"""

from __future__ import annotations

from typing import Literal

from torch.fx import Graph, GraphModule

from ._torch_compat import lazy_graph_module
from .graph_passes import (
    call_custom_writers,
    channels_last,
    common_subexpressions,
    copy_scalars_to_device,
    fold_uniform,
    fuse_attention,
    merge_splits_and_cats,
    reinplace,
    remove_noops,
    reuse_reductions,
    simplify,
)
from .graph_passes.rewriting import copy_graph, drop_dead_nodes, has_inner_mutation
from .ir import Program
from .ir.parse import parse_program
from .ir.print import print_program
from .ir.verify import verify_program
from .kernel_passes.normal_form import NORMAL_FORM
from .loop_passes import (
    choose_library_calls,
    drop_dead_steps,
    fission_long_rows,
    fold_identities,
    fuse_concats,
    fuse_kernels,
    fuse_mixed_order_reductions,
    inline_producers,
    localize_temporaries,
    order_steps,
    reuse_call_results,
    split_loops,
    split_reductions,
    write_through,
)
from .options import LowerOptions
from .passes import Decision, Level, PassContext, check_disabled, in_order, optional, run_passes

__all__ = ["DEVICE_PASSES", "GRAPH_PASSES", "KERNEL_PASSES", "LOOP_LEVEL", "LOOP_PASSES", "WRITE_PASSES"]
__all__ += ["call_writers", "checked_program", "pass_names", "rewrite_graph", "run_graph_passes", "schedule"]
__all__ += ["schedule_program"]

# On the whole graph, before it is taken apart.
WRITE_PASSES = in_order(
    call_custom_writers.PASS,
    call_custom_writers.LAUNCH_USER_KERNELS,
)

# On each part, whatever it writes.
DEVICE_PASSES = in_order(copy_scalars_to_device.PASS)

# On each part. (In a graph with custom writers once more before those: what they write to must be seen through views.)
GRAPH_PASSES = in_order(
    remove_noops.PASS,
    fold_uniform.PASS,
    fuse_attention.PASS,
    simplify.PASS,
    merge_splits_and_cats.PASS,
    reuse_reductions.PASS,
    common_subexpressions.PASS,
    channels_last.PASS,
    reinplace.PASS,
)

LOOP_PASSES = in_order(
    drop_dead_steps.PASS,  # required: no later pass sees a step without a reader
    fold_identities.PASS,
    inline_producers.PASS,
    fuse_concats.PASS,
    split_loops.PASS,  # reshapes become loops, so that positions are plain sums
    fuse_kernels.PASS,  # vertical and horizontal
    fuse_mixed_order_reductions.PASS,
    write_through.PASS,
    localize_temporaries.PASS,
    order_steps.PASS,
    fission_long_rows.PASS,  # when the machine is known, as the next
    split_reductions.PASS,  # and outer reductions
    choose_library_calls.PASS,
    reuse_call_results.PASS,  # last: no pass looks through the aliases that it adds
)

KERNEL_PASSES = NORMAL_FORM  # all required; run per nest, where plans are built


_NAMES: dict[str, tuple[str, ...]] = {
    "graph": (*optional(WRITE_PASSES), *optional(GRAPH_PASSES)),
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
    reread = parse_program(print_program(program))
    if reread != program:
        raise AssertionError(f"program {program.name} changed when it was printed and read back")
    return reread


_MODULE_LEVEL: Level[GraphModule] = Level(lambda gm: str(gm.graph), _checked_module)
_GRAPH_LEVEL: Level[Graph] = Level(str, _checked_graph)
LOOP_LEVEL: Level[Program] = Level(print_program, checked_program)
