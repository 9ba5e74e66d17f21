"""The whole way from a graph to a callable, as one flat list of stages."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule

from .graph_partition import PartitionedGraph, compile_parts, needs_partition
from .graph_passes.fake_values import graph_constants, with_fake_values
from .ir import Program
from .ir.print import print_program
from .launch_plan import CompiledProgram, compiled_from_json, compiled_to_json
from .launch_plan.store import ObjectStore, generator_digest
from .lowering.graph import lower_graph as lower_for
from .options import LowerOptions
from .pass_lists import call_writers, checked_program, rewrite_graph, schedule
from .passes import Decision, Observer, PassContext, stage
from .report import LoweringReport, make_report
from .runtime import ArenaPool, BoundProgram, bind
from .runtime.input_checks import input_check
from .targets.cpu.generate import generate
from .targets.cpu.target import CpuTarget
from .targets.select import capabilities_for, target_for

if TYPE_CHECKING:
    from .targets.triton import DeviceGraph, DeviceProgram

__all__ = ["Compiled", "CompiledGraph", "compile_graph", "compile_to_program", "lower_graph"]


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled graph as data: :func:`.bind_program` makes a callable of ``program`` and ``constants``.

    ``scheduled`` is the loop IR that the program was generated from, ``records`` every fusion decision.
    """

    program: CompiledProgram | DeviceProgram
    constants: Mapping[str, torch.Tensor]
    report: LoweringReport
    scheduled: Program
    records: tuple[Decision, ...]


class CompiledGraph:
    """A compiled graph in the boxed convention: takes one list, empties it, returns a list.

    ``checked``: a call raises :class:`~.errors.InputMismatchError` for tensors that it was not compiled for.

    ``compiled`` is the whole result as data, which with the tensors of ``constants`` can be bound again
    (:func:`.bind_program`); ``program`` is the scheduled loop IR, ``records`` every fusion decision.
    """

    _boxed_call = True

    def __init__(
        self,
        bound: BoundProgram[CompiledProgram],
        constants: Mapping[str, torch.Tensor],
        program: Program,
        records: Sequence[Decision],
        report: LoweringReport,
        checked: bool = False,
    ) -> None:
        self.compiled: CompiledProgram = bound.compiled
        self.constants = constants
        self.program = program
        self.records = tuple(records)
        self._bound = bound
        self._check = input_check(bound.compiled) if checked else None
        self._report = report

    def __call__(self, args: list[Any]) -> list[Any]:
        if self._check is not None:
            self._check(args)
        return self._bound(args)

    def report(self) -> LoweringReport:
        """Kernels, fusion groups, ATen calls with reasons; ``str()`` of it is readable."""
        return self._report


def compile_graph(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: LowerOptions | None = None,
    observer: Observer | None = None,
    object_store: ObjectStore | None = None,
    arenas: ArenaPool | None = None,
) -> CompiledGraph | DeviceGraph | PartitionedGraph:
    """Compile a functional ATen graph, in one piece if it can be (see :mod:`.graph_partition`): for the CPU, or with
    Triton for the CUDA device that (most of) its tensors are on.

    Nodes need fake values in ``meta["val"]``, as ``make_fx`` leaves them; where they lack, they are computed from
    ``example_inputs``. Graphs that never run at once may share the memory of their temporaries: ``arenas``. Works as
    ``fw_compiler`` of torch's ``aot_function``. Raises
    :class:`~.errors.UnsupportedGraphError` for what can be neither generated nor called.
    """
    options, arenas = options or LowerOptions(), arenas or ArenaPool()
    gm = with_fake_values(gm, example_inputs)
    ctx = PassContext.of(options, observer, target_for(gm, options))
    graph = call_writers(gm, ctx)
    if needs_partition(graph):
        return _compile_in_parts(graph, options, observer, object_store, arenas)
    if not isinstance(ctx.target, CpuTarget):
        from .targets.triton import compile_device_graph

        return compile_device_graph(graph, options=options, observer=observer, object_store=object_store)
    compiled = _compile_whole(graph, ctx, object_store)
    with stage(observer, "bind"):
        assert isinstance(compiled.program, CompiledProgram)
        bound = bind(compiled.program, compiled.constants, arenas, redzones=options.redzones)
    return CompiledGraph(
        bound, compiled.constants, compiled.scheduled, compiled.records, compiled.report, options.check_inputs
    )


def compile_to_program(
    gm: GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    options: LowerOptions | None = None,
    observer: Observer | None = None,
    object_store: ObjectStore | None = None,
    arenas: ArenaPool | None = None,
) -> Compiled | PartitionedGraph:
    """Compile a functional ATen graph as :func:`compile_graph` does, without binding it: what comes out is data.

    A graph that no launch plan can hold is compiled in parts, and these are bound, with ``arenas``.
    """
    options = options or LowerOptions()
    gm = with_fake_values(gm, example_inputs)
    ctx = PassContext.of(options, observer, target_for(gm, options))
    graph = call_writers(gm, ctx)
    if needs_partition(graph):
        return _compile_in_parts(graph, options, observer, object_store, arenas or ArenaPool())
    if not isinstance(ctx.target, CpuTarget):
        from .targets.triton import compile_device_program

        program, lowered = compile_device_program(graph, options=options, observer=observer, object_store=object_store)
        return Compiled(program, lowered.constants, lowered.report, lowered.scheduled, lowered.records)
    return _compile_whole(graph, ctx, object_store)


def lower_graph(gm: GraphModule, options: LowerOptions | None = None, name: str = "graph") -> Program:
    """The loop IR of a graph for the target that it would be compiled for: one step per node, views as index maps,
    nothing fused.

    Every tensor node needs its fake value in ``meta["val"]``. Nodes without a rule become ATen calls. Raises
    :class:`~.errors.UnsupportedGraphError` for what can be neither generated nor called.
    """
    options = options or LowerOptions()
    return lower_for(gm, options, name, capabilities_for(gm, options))


def _compile_in_parts(
    graph: GraphModule,
    options: LowerOptions,
    observer: Observer | None,
    object_store: ObjectStore | None,
    arenas: ArenaPool,
) -> PartitionedGraph:
    def compile_one(part: GraphModule) -> CompiledGraph | DeviceGraph | PartitionedGraph:
        return compile_graph(part, options=options, observer=observer, object_store=object_store, arenas=arenas)

    return compile_parts(graph, compile_one)


def _compile_whole(gm: GraphModule, ctx: PassContext, object_store: ObjectStore | None) -> Compiled:
    observer = ctx.observer
    with stage(observer, "graph-passes"):
        graph = rewrite_graph(gm, ctx)
    with stage(observer, "lowering"):
        lowered = lower_for(graph, ctx.options, capabilities=ctx.target.capabilities)
        lowered = checked_program(lowered) if ctx.options.verify else lowered
    _dump(observer, "lowered", "ir", lowered)
    with stage(observer, "schedule"):
        scheduled = schedule(lowered, ctx)
    _dump(observer, "scheduled", "ir", scheduled)
    with stage(observer, "codegen"):
        compiled = _generate(scheduled, ctx, object_store)
    report = make_report(graph, lowered, scheduled, ctx.decisions)
    return Compiled(compiled, graph_constants(graph), report, scheduled, tuple(ctx.decisions))


def _generate(program: Program, ctx: PassContext, store: ObjectStore | None) -> CompiledProgram:
    assert isinstance(ctx.target, CpuTarget)
    machine, observer = ctx.target.machine, ctx.observer
    digest = ""
    if store is not None:
        text = f"{generator_digest()}\n{torch.__version__}\n{machine}\n{print_program(program)}"
        digest = hashlib.sha256(text.encode()).hexdigest()
        found = store.get(digest)
        if found is not None:
            return compiled_from_json(found.decode())
    around_llvm = stage(observer, "llvm")
    compiled = generate(program, machine, keep_text=observer is not None, around_llvm=around_llvm)
    if observer is not None:
        observer.dump(program.name, "kernels", lambda: compiled.llvm_text)
    if ctx.options.verify:
        compiled = compiled_from_json(compiled_to_json(compiled))
    if store is not None:
        store.put(digest, compiled_to_json(replace(compiled, llvm_text="")).encode())
    return compiled


def _dump(observer: Observer | None, name: str, kind: str, program: Program) -> None:
    if observer is not None:
        observer.dump(name, kind, lambda: print_program(program))
