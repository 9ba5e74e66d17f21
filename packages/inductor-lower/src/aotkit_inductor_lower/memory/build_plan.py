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
from ..kernel_ir.nests import COUNT, FlatNest, Memory, flatten_nest
from ..kernel_passes.deduplicate import batches, shape_of, share_sizes
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
    TakeOver,
    View,
)
from ..ops.aten import addresses_storage, may_alias_arguments, out_overload
from ..ops.dtypes import bits, dtype_from_torch_name
from ..symbolic import Symbol, floordiv, product, to_expr
from ..targets.cpu import CpuTarget, ModuleText, compile_text, emit_kernel, host_target
from .reuse import find_in_place, row_major, take_over_results

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
    program, taken = take_over_results(program)
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
    """Work in progress of :func:`generate`. ``taken``: see :func:`.take_over_results`."""

    program: Program
    target: CpuTarget
    taken: frozenset[str] = frozenset()
    module: ModuleText = field(init=False)
    buffers: dict[str, Buffer] = field(init=False)
    memory: dict[str, Memory] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)
    steps: list[PlanStep] = field(default_factory=list)
    records: list[KernelRecord] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    kernels: dict[object, tuple[KernelText, str, str]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.module = ModuleText(self.program.name, self.target)
        self.buffers = {b.name: b for b in self.program.buffers}
        for step in self.program.steps:
            if isinstance(step, Alias):
                self.memory[step.result] = self._resolve(step)
        self.homes = _homes(self.program, self.memory)

    def _resolve(self, alias: Alias) -> Memory:
        """The memory an alias views, with the offset in the alias's own elements."""
        base = self.memory.get(alias.base)
        if base is None:
            return Memory(alias.base, alias.offset)
        offset = base.offset
        wide, narrow = _item_bytes(self.buffers[alias.base]), _item_bytes(self.buffers[alias.result])
        if wide != narrow:
            offset = floordiv(offset * wide, narrow)
        return Memory(base.root, alias.offset + offset)

    # -- steps -------------------------------------------------------------------------------------------

    def plan_steps(self) -> None:
        """Turn the program's steps into plan steps, nests grouped into segments."""
        needed = _tensors_needed(self.program, self.memory)
        allocated: set[str] = set()
        nests: list[LoopNest] = []
        views: list[View | TakeOver] = []
        for step in self.program.steps:
            if isinstance(step, LoopNest):
                nests.append(step)
                continue
            if isinstance(step, Alias):
                if step.result in needed:
                    taken = step.result in self.taken
                    made = TakeOver(step.result, step.base) if taken else View(step.result, step.base, step.offset)
                    views.append(made)
                continue
            self._close_segment(nests, views, allocated)
            self._extern(step)
        self._close_segment(nests, views, allocated)
        self.steps.append(Return(self.program.outputs))

    def _close_segment(self, nests: list[LoopNest], views: list[View | TakeOver], allocated: set[str]) -> None:
        if nests:
            roots = (self._root(name) for nest in nests for name in nest.writes)
            for root in dict.fromkeys(roots):
                if self.homes.get(root) == "fresh" and root not in allocated:
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
        for nest, flat in zip(nests, share_sizes([self._flat(nest) for nest in nests]), strict=True):
            kernel, name, few = self._kernel(flat, nest)
            for symbol in {*kernel.sizes, *kernel.units.symbols, *kernel.work.symbols}:
                sizes[symbol] = self._slot(f"${symbol.name}")
            slots = [self._slot(memory) for memory in kernel.memories] + [sizes[s] for s in kernel.sizes]
            launches.append(Launch(name, kernel, (*slots, *([] if flat.count is None else [flat.count])), few))
        calls = batches(launches, nests, self._root, self.homes)
        position = 0
        for call in calls:
            batch = nests[position].name if len(call.members) > 1 else ""
            for nest, launch in zip(nests[position:], call.members, strict=False):
                self.records.append(KernelRecord(nest.name, launch.function, function, nest.origin, batch))
            position += len(call.members)
        self.module.add_segment(function, calls, sizes)
        return CallSegment(function, tuple(nest.name for nest in nests))

    def _flat(self, nest: LoopNest) -> FlatNest:
        self._check(nest)
        flat = flatten_nest(nest, self.buffers, self.memory)
        return replace(flat, streamed=self._streamed(flat))

    def _kernel(self, flat: FlatNest, nest: LoopNest) -> tuple[KernelText, str, str]:
        """The kernel of a nest, and the names of its functions. Nests of one shape have one."""
        shape = shape_of(flat)
        made = self.kernels.get(shape)
        if made is None:
            kernel = emit_kernel(flat, self.target, self.module.declarations, nest.origin)
            name = self.module.add_kernel(f"kernel_{_identifier(nest.name)}", kernel)  # apart from libm's names
            few = self.module.add_kernel(f"{name}_few", kernel.few[0]) if kernel.few is not None else ""
            made = self.kernels[shape] = kernel, name, few
        kernel, name, few = made
        if flat.count is None:
            return replace(kernel, memories=flat.memories), name, few
        env = {COUNT: to_expr(flat.count)}
        units, work = kernel.units.substitute(env), kernel.work.substitute(env)
        return replace(kernel, memories=flat.memories, units=units, work=work), name, few

    def _streamed(self, nest: FlatNest) -> frozenset[str]:
        """New results too large to be still in a cache when they are read, which the nest itself does not read."""
        loads = {instr.buffer for stage in nest.stages for instr in stage.body if isinstance(instr, Load)}
        new = (self.buffers[m] for m in nest.memories if self.homes.get(m) == "fresh" and m not in loads)
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
        if len(call.results) == 1 and call.results[0] is not None and self.homes.get(call.results[0]) == "arena":
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
        lives: dict[str, tuple[int, int]] = {}  # moments
        for step, moment, name in self._uses():
            last[name] = step
            lives[name] = (lives[name][0] if name in lives else moment, moment)
        lives = {name: life for name, life in lives.items() if self.homes.get(name) == "arena"}
        over = find_in_place(self._moments(), lives, self.buffers, {n: m.root for n, m in self.memory.items()})
        arena = tuple(ArenaBuffer(name, *lives[name], over.get(name, "")) for name in self.homes if name in lives)
        planned = tuple(
            PlannedBuffer(b.name, b.dtype, b.sizes, b.strides, self.homes[b.name], b.device)
            for b in self.program.buffers
            if b.kind is not BufferKind.ROW and b.name in self.homes
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

    def _moments(self) -> dict[int, LoopNest]:
        """The nests by the moments at which they run."""
        nests = {step.name: step for step in self.program.steps if isinstance(step, LoopNest)}
        found: dict[int, LoopNest] = {}
        moment = 0
        for step in self.steps:
            launches = step.launches if isinstance(step, CallSegment) else ()
            found.update((moment + k, nests[name]) for k, name in enumerate(launches))
            moment += max(1, len(launches))
        return found

    def _uses(self) -> Iterator[tuple[int, int, str]]:
        """(step, moment, buffer) for every use, in order; using a view is using its memory."""
        nests = {step.name: step for step in self.program.steps if isinstance(step, LoopNest)}
        moment = 0
        for position, step in enumerate(self.steps):
            parts = step.launches if isinstance(step, CallSegment) else (None,)
            for launch in parts:
                nest = nests[launch] if launch is not None else None
                for name in (*nest.reads, *nest.writes) if nest is not None else _used(step):
                    yield position, moment, name
                    if name in self.memory:
                        yield position, moment, self._root(name)
                moment += 1

    def _with_frees(self, last: Mapping[str, int]) -> Iterator[PlanStep]:
        """The steps with a Free after each last use of a tensor that Python holds, and first of inputs without any."""
        unused = tuple(name for name in self.program.inputs if self.homes.get(name) == "input" and name not in last)
        if unused:
            yield Free(unused)
        dying: dict[int, list[str]] = {}
        for name, home in self.homes.items():
            if home in ("input", "fresh", "extern", "view") and name in last and last[name] < len(self.steps) - 1:
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
    elif isinstance(step, View | TakeOver):
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
    elif isinstance(step, View | TakeOver):
        yield step.result
        yield step.base
    elif isinstance(step, Return):
        yield from (o.name for o in step.outputs if isinstance(o, BufferRef))


def _tensors_needed(program: Program, memory: Mapping[str, Memory]) -> set[str]:
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


def _homes(program: Program, memory: Mapping[str, Memory]) -> dict[str, str]:
    """Where each buffer's tensor or memory comes from.

    Note [What may live in the arena]
        A temporary on the CPU, written by generated kernels or by an ATen op's ``out=`` overload, that is neither
        returned (nor any view of it), nor passed to an ATen op that may hand its argument back or keep it: one whose
        schema says so, one made of other ops, or one outside aten. Nor to an op that counts elements from the start of
        the storage, which in the arena is not the buffer's.
    """
    homes: dict[str, str] = {}
    results: dict[str, Step] = {}
    for step in program.steps:
        if isinstance(step, ExternCall):
            results.update({r: step for r in step.results if r is not None})
    barred = _barred_from_arena(program, memory)
    for buffer in program.buffers:
        name = buffer.name
        if buffer.kind is BufferKind.ROW:
            continue
        if buffer.kind in (BufferKind.INPUT, BufferKind.CONSTANT):
            homes[name] = buffer.kind.value
        elif name in memory:
            homes[name] = "view"
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
                homes[name] = "arena" if planned and out_overload(call.target) is not None else "extern"
            else:
                homes[name] = "arena" if fits else "fresh"
    return homes


def _barred_from_arena(program: Program, memory: Mapping[str, Memory]) -> set[str]:
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
