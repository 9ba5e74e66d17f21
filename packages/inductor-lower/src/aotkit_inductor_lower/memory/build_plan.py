"""A scheduled program to a launch plan and one object file.

Consecutive loop nests become one native segment. Temporaries that provably die inside the call are given to the
arena, see Note [What may live in the arena].
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from ..analysis.dependencies import buffer_args
from ..errors import CodegenError
from ..ir import (
    Alias,
    Buffer,
    BufferKind,
    BufferRef,
    ExternCall,
    Load,
    LoopNest,
    Program,
    Step,
)
from ..kernel_ir.launches import KernelText, Launch
from ..kernel_ir.nests import LENGTH, FlatNest, Placement
from ..kernel_passes.deduplicate import canonical, combine_launches, generalize_lengths
from ..kernel_passes.linearize import placements
from ..kernel_passes.normal_form import flatten_nest
from ..launch_plan.records import (
    Allocate,
    ArenaBuffer,
    CallExtern,
    CallSegment,
    CompiledProgram,
    Free,
    KernelRecord,
    LaunchPlan,
    PlannedBuffer,
    PlanStep,
    Return,
    ReuseBuffer,
    View,
)
from ..ops.aten import addresses_storage, may_alias_arguments, out_overload
from ..ops.dtypes import bits, dtype_from_torch_name
from ..symbolic import Symbol, product, to_expr
from ..targets.cpu import CpuTarget, ModuleText, compile_text, emit_kernel, host_target
from .reuse import find_in_place, reuse_call_results, row_major

__all__ = ["PlanBuild", "generate"]

STREAMED_BYTES = 24 << 20  # results of that size are written past the caches


def generate(
    program: Program,
    target: CpuTarget | None = None,
    *,
    keep_text: bool = False,
    around_llvm: AbstractContextManager[object] | None = None,
) -> CompiledProgram:
    """Compile ``program`` for ``target`` (the host). ``keep_text`` keeps the LLVM text in the result; LLVM runs inside
    of ``around_llvm``.

    Raises :class:`CodegenError` for a nest over buffers that are not on the CPU or have no generated type.
    """
    target = target or host_target()
    program, taken = reuse_call_results(program)
    build = PlanBuild(program, target, taken)
    build.plan_steps()
    plan = build.finish()
    text = build.module.render()
    with around_llvm or nullcontext():
        code = compile_text(text, target) if build.records else b""
    machine = (target.triple, target.cpu, target.vector_bits)
    digest = hashlib.sha256(code).hexdigest()
    imports = build.module.imports()
    return CompiledProgram(plan, code, tuple(build.records), machine, digest, imports, text if keep_text else "")


@dataclass(slots=True)
class PlanBuild:
    """Work in progress of :func:`generate`. ``taken``: see :func:`.reuse_call_results`."""

    program: Program
    target: CpuTarget
    taken: frozenset[str] = frozenset()
    module: ModuleText = field(init=False)
    buffers: dict[str, Buffer] = field(init=False)
    memory: dict[str, Placement] = field(default_factory=dict)
    storage: dict[str, str] = field(default_factory=dict)
    steps: list[PlanStep] = field(default_factory=list)
    records: list[KernelRecord] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    kernels: dict[object, tuple[KernelText, str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.module = ModuleText(self.program.name, self.target)
        self.buffers = {b.name: b for b in self.program.buffers}
        self.memory = placements(self.program)
        self.storage = _storage_classes(self.program, self.memory)

    # -- steps -------------------------------------------------------------------------------------------

    def plan_steps(self) -> None:
        """Turn the program's steps into plan steps, nests grouped into segments."""
        needed = _tensors_needed(self.program, self.memory)
        allocated: set[str] = set()
        nests: list[LoopNest] = []
        views: list[View | ReuseBuffer] = []
        for step in self.program.steps:
            if isinstance(step, LoopNest):
                nests.append(step)
                continue
            if isinstance(step, Alias):
                if step.result in needed:
                    taken = step.result in self.taken
                    made = ReuseBuffer(step.result, step.base) if taken else View(step.result, step.base, step.offset)
                    views.append(made)
                continue
            self._close_segment(nests, views, allocated)
            self._extern(step)
        self._close_segment(nests, views, allocated)
        self.steps.append(Return(self.program.outputs))

    def _close_segment(self, nests: list[LoopNest], views: list[View | ReuseBuffer], allocated: set[str]) -> None:
        if nests:
            roots = (self._root(name) for nest in nests for name in nest.writes)
            for root in dict.fromkeys(roots):
                if self.storage.get(root) == "allocated" and root not in allocated:
                    self.steps.append(Allocate(root))
                    allocated.add(root)
            self.steps.append(self._segment(nests))
        self.steps.extend(views)
        nests.clear()
        views.clear()

    def _segment(self, nests: list[LoopNest]) -> CallSegment:
        function = f"segment_{sum(isinstance(s, CallSegment) for s in self.steps)}"
        launches = []
        sizes: dict[Symbol, int] = {}
        for nest, flat in zip(nests, generalize_lengths([self._flat(nest) for nest in nests]), strict=True):
            kernel, name, short = self._kernel(flat, nest)
            for symbol in {*kernel.sizes, *kernel.units.symbols, *kernel.work.symbols}:
                sizes[symbol] = self._slot(f"${symbol.name}")
            slots = [self._slot(memory) for memory in kernel.memories] + [sizes[s] for s in kernel.sizes]
            launches.append(Launch(name, kernel, (*slots, *([] if flat.length is None else [flat.length])), short))
        calls = combine_launches(launches, nests, self._root, self.storage)
        position = 0
        for call in calls:
            combo = nests[position].name if len(call.members) > 1 else ""
            for nest, launch in zip(nests[position:], call.members, strict=False):
                self.records.append(KernelRecord(nest.name, launch.function, function, nest.origin, combo))
            position += len(call.members)
        self.module.add_segment(function, calls, sizes)
        return CallSegment(function, tuple(nest.name for nest in nests))

    def _flat(self, nest: LoopNest) -> FlatNest:
        self._check(nest)
        flat = flatten_nest(nest, self.buffers, self.memory)
        return replace(flat, nontemporal=self._nontemporal(flat))

    def _kernel(self, flat: FlatNest, nest: LoopNest) -> tuple[KernelText, str, str]:
        """The kernel of a nest, and the names of its functions. Nests of one shape have one."""
        shape = canonical(flat)
        made = self.kernels.get(shape)
        if made is None:
            kernel = emit_kernel(flat, self.target, self.module.declarations, nest.origin)
            name = self.module.add_kernel(f"kernel_{_identifier(nest.name)}", kernel)  # apart from libm's names
            short = self.module.add_kernel(f"{name}_short", kernel.short[0]) if kernel.short is not None else ""
            made = self.kernels[shape] = kernel, name, short
        kernel, name, short = made
        if flat.length is None:
            return replace(kernel, memories=flat.memories), name, short
        env = {LENGTH: to_expr(flat.length)}
        units, work = kernel.units.substitute(env), kernel.work.substitute(env)
        return replace(kernel, memories=flat.memories, units=units, work=work), name, short

    def _nontemporal(self, nest: FlatNest) -> frozenset[str]:
        """New results too large to be still in a cache when they are read, which the nest itself does not read."""
        loads = {instr.buffer for stage in nest.stages for instr in stage.body if isinstance(instr, Load)}
        new = (self.buffers[m] for m in nest.memories if self.storage.get(m) == "allocated" and m not in loads)
        return frozenset(b.name for b in new if (product(b.sizes).constant or 0) * _item_bytes(b) >= STREAMED_BYTES)

    def _check(self, nest: LoopNest) -> None:
        for name in (*nest.reads, *nest.writes):
            buffer = self.buffers.get(name)
            if buffer is None:
                raise CodegenError(f"nest {nest.name} uses the undeclared buffer {name!r}")
            if not buffer.device.startswith("cpu"):
                raise CodegenError(
                    f"nest {nest.name} uses {name} on {buffer.device}; only CPU kernels are generated here"
                )
            if dtype_from_torch_name(buffer.dtype) is None:
                raise CodegenError(f"nest {nest.name} uses {name} of type {buffer.dtype}, which has no generated code")

    def _extern(self, call: ExternCall) -> None:
        out = None
        if len(call.results) == 1 and call.results[0] is not None and self.storage.get(call.results[0]) == "arena":
            out = out_overload(call.target)
        self.steps.append(CallExtern(call.target, call.args, call.kwargs, call.results, out, call.reason))

    def _root(self, name: str) -> str:
        place = self.memory.get(name)
        return place.root if place else name

    def _slot(self, name: str) -> int:
        return self.slots.setdefault(name, len(self.slots))

    # -- the plan ----------------------------------------------------------------------------------------

    def finish(self) -> LaunchPlan:
        """The plan, with lifetimes and frees filled in."""
        last: dict[str, int] = {}  # step
        lives: dict[str, tuple[int, int]] = {}  # program points
        for step, point, name in self._uses():
            last[name] = step
            lives[name] = (lives[name][0] if name in lives else point, point)
        lives = {name: life for name, life in lives.items() if self.storage.get(name) == "arena"}
        reuses = find_in_place(self._program_points(), lives, self.buffers, {n: m.root for n, m in self.memory.items()})
        arena = tuple(ArenaBuffer(name, *lives[name], reuses.get(name, "")) for name in self.storage if name in lives)
        planned = tuple(
            PlannedBuffer(b.name, b.dtype, b.sizes, b.strides, self.storage[b.name], b.device)
            for b in self.program.buffers
            if b.kind is not BufferKind.SCRATCH and b.name in self.storage
        )
        steps = tuple(self._with_frees(last))
        return LaunchPlan(
            self.program.name,
            self.program.inputs,
            planned,
            tuple(self.slots),
            arena,
            steps,
            self.program.symbol_sources,
        )

    def _program_points(self) -> dict[int, LoopNest]:
        """The nests by the program points at which they run."""
        nests = {step.name: step for step in self.program.steps if isinstance(step, LoopNest)}
        found: dict[int, LoopNest] = {}
        point = 0
        for step in self.steps:
            launches = step.launches if isinstance(step, CallSegment) else ()
            found.update((point + k, nests[name]) for k, name in enumerate(launches))
            point += max(1, len(launches))
        return found

    def _uses(self) -> Iterator[tuple[int, int, str]]:
        """(step, point, buffer) for every use, in order; using a view is using its memory."""
        nests = {step.name: step for step in self.program.steps if isinstance(step, LoopNest)}
        point = 0
        for position, step in enumerate(self.steps):
            parts = step.launches if isinstance(step, CallSegment) else (None,)
            for launch in parts:
                nest = nests[launch] if launch is not None else None
                for name in (*nest.reads, *nest.writes) if nest is not None else _used(step):
                    yield position, point, name
                    if name in self.memory:
                        yield position, point, self._root(name)
                point += 1

    def _with_frees(self, last: Mapping[str, int]) -> Iterator[PlanStep]:
        """The steps with a Free after each last use of a tensor that Python holds, and first of inputs without any."""
        unused = tuple(name for name in self.program.inputs if self.storage.get(name) == "input" and name not in last)
        if unused:
            yield Free(unused)
        dying: dict[int, list[str]] = {}
        for name, storage in self.storage.items():
            if (
                storage in ("input", "allocated", "call result", "view")
                and name in last
                and last[name] < len(self.steps) - 1
            ):
                dying.setdefault(last[name], []).append(name)
        held = {n for s in self.steps for n in _held(s)} | {i for i in self.program.inputs if not i.startswith("$")}
        for position, step in enumerate(self.steps):
            yield step
            names = tuple(n for n in dying.get(position, ()) if n in held)
            if names:
                yield Free(names)


def _held(step: PlanStep) -> Iterator[str]:
    """Tensors a step creates in Python."""
    if isinstance(step, Allocate):
        yield step.buffer
    elif isinstance(step, CallExtern) and step.out is None:
        yield from (r for r in step.results if r is not None)
    elif isinstance(step, View | ReuseBuffer):
        yield step.result


def _used(step: PlanStep) -> Iterator[str]:
    """Buffers that a step uses by itself; a segment's kernels are asked instead."""
    if isinstance(step, Allocate):
        yield step.buffer
    elif isinstance(step, CallExtern):
        yield from buffer_args(step.args)
        for _, value in step.kwargs:
            yield from buffer_args((value,))
        yield from (r for r in step.results if r is not None)
    elif isinstance(step, View | ReuseBuffer):
        yield step.result
        yield step.base
    elif isinstance(step, Return):
        yield from (o.name for o in step.outputs if isinstance(o, BufferRef))


def _tensors_needed(program: Program, memory: Mapping[str, Placement]) -> set[str]:
    """Aliases that must exist as tensors: used by an ATen call, returned, or the base of such a view."""
    needed = {o.name for o in program.outputs if isinstance(o, BufferRef)}
    for step in program.steps:
        if isinstance(step, ExternCall):
            needed.update(buffer_args(step.args))
            needed.update(buffer_args(tuple(value for _, value in step.kwargs)))
    for step in reversed(program.steps):
        if isinstance(step, Alias) and step.result in needed:
            needed.add(step.base)
    return needed


def _storage_classes(program: Program, memory: Mapping[str, Placement]) -> dict[str, str]:
    """Where each buffer's tensor or memory comes from.

    Note [What may live in the arena]
        A temporary on the CPU, written by generated kernels or by an ATen op's ``out=`` overload, that is neither
        returned (nor any view of it), nor passed to an ATen op that may hand its argument back or keep it: one whose
        schema says so, one made of other ops, or one outside aten. Nor to an op that counts elements from the start of
        the storage, which in the arena is not the buffer's.
    """
    storage: dict[str, str] = {}
    results: dict[str, Step] = {}
    for step in program.steps:
        if isinstance(step, ExternCall):
            results.update({r: step for r in step.results if r is not None})
    barred = _barred_from_arena(program, memory)
    for buffer in program.buffers:
        name = buffer.name
        if buffer.kind is BufferKind.SCRATCH:
            continue
        if buffer.kind in (BufferKind.INPUT, BufferKind.CONSTANT):
            storage[name] = buffer.kind.value
        elif name in memory:
            storage[name] = "view"
        else:
            fits = (
                buffer.kind is BufferKind.TEMPORARY
                and name not in barred
                and buffer.device.startswith("cpu")
                and dtype_from_torch_name(buffer.dtype) is not None
            )
            call = results.get(name)
            if isinstance(call, ExternCall):
                planned = fits and len(call.results) == 1 and not call.mutates and row_major(buffer)
                storage[name] = "arena" if planned and out_overload(call.target) is not None else "call result"
            else:
                storage[name] = "arena" if fits else "allocated"
    return storage


def _barred_from_arena(program: Program, memory: Mapping[str, Placement]) -> set[str]:
    def root(name: str) -> str:
        place = memory.get(name)
        return place.root if place else name

    barred = {root(o.name) for o in program.outputs if isinstance(o, BufferRef)}
    for step in program.steps:
        if isinstance(step, ExternCall) and (may_alias_arguments(step.target) or addresses_storage(step.target)):
            barred.update(map(root, buffer_args((*step.args, *(value for _, value in step.kwargs)))))
    return barred


def _item_bytes(buffer: Buffer) -> int:
    dtype = dtype_from_torch_name(buffer.dtype)
    return bits(dtype) // 8 if dtype is not None else 1


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)
