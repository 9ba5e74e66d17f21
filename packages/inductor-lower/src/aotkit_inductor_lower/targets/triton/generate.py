"""A scheduled program to a device program: a Triton kernel per nest, equal ones once, and the launch plan."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...ir import Arg, Buffer, BufferKind, BufferRef, ExternCall, Literal, LoopNest, Program
from ...kernel_ir.nodes import Kernel
from ...kernel_passes.linearize import extents_of
from ...kernel_passes.normal_form import kernel_of
from ...memory.build_plan import build_plan
from ...memory.segments import segments
from ...memory.storage import Storage, Workspace, assign_storage
from ...ops.aten import may_alias_arguments
from ...ops.dtypes import dtype_from_torch_name, torch_name
from ...symbolic import Expr, to_expr
from .autotune import Timer, candidates, choose
from .compile import compile_kernel
from .errors import TritonError
from .map_loops import TileLimits
from .program import ZERO_SLOT, DeviceKernel, DeviceLaunch, DeviceProgram
from .records import KernelArgument, KernelSource
from .render.kernel import emit_kernel
from .render.matmul import CONFIGS, emit_matmul, matmul_site
from .render.names import argument_name

__all__ = ["compile_program", "generate_device", "on_device"]

_LIMITS = TileLimits()


def on_device(program: Program, device: str) -> Program:
    """The program with all its buffers, and the devices that its ATen calls name, on ``device``."""
    buffers = tuple(replace(b, device=device) for b in program.buffers)
    steps = tuple(_call_on(s, device) if isinstance(s, ExternCall) else s for s in program.steps)
    return replace(program, buffers=buffers, steps=steps)


def _call_on(call: ExternCall, device: str) -> ExternCall:
    kwargs = tuple((name, _argument_on(value, device)) for name, value in call.kwargs)
    return replace(call, args=tuple(_argument_on(a, device) for a in call.args), kwargs=kwargs)


def _argument_on(arg: Arg, device: str) -> Arg:
    if isinstance(arg, tuple):
        return tuple(_argument_on(a, device) for a in arg)
    return Literal("device", device) if isinstance(arg, Literal) and arg.kind == "device" else arg


def generate_device(
    program: Program, limits: TileLimits = _LIMITS, *, tune: bool = False, tf32: bool = False, asserts: bool = True
) -> DeviceProgram:
    """Sources of all kernels and the plan that launches them; nothing is compiled yet.

    ``tune`` adds alternatives to each kernel, for :func:`compile_program` to choose from. ``tf32`` lets products of
    f32 matrices lose bits. ``asserts``: an index out of range stops the kernel, see :class:`~..options.LowerOptions`.

    Raises :class:`~.errors.TritonError` for kernels over buffers on several devices.
    """
    device = _single_device(program)
    storage = assign_storage(program, arena=False)  # torch's allocator is the arena on a device
    unaligned, written = _unaligned(program, storage), _written_inputs(program, storage)
    kernels = _Kernels(
        {b.name: b for b in program.buffers},
        storage,
        unaligned,
        limits,
        device,
        tune,
        tf32,
        asserts,
        extents_of(program.buffers),
    )
    launches = [(s.function, tuple(map(kernels.launch, s.nests))) for s in segments(program)]
    inputs = {b.name for b in program.buffers if b.kind is BufferKind.INPUT}
    pointers = {name for _, found in launches for launch in found for name in launch.slots if name in inputs}
    return DeviceProgram(
        build_plan(program, storage, tuple(kernels.slots), kernels.workspaces),
        tuple(DeviceKernel(*pair) for pair in zip(kernels.sources, kernels.alternatives, strict=True)),
        tuple(launches),
        tuple(kernels.counts.items()),
        tuple(name for name in program.inputs if name in pointers - unaligned),
        tuple(name for name in program.inputs if name in written),
        device,
    )


def compile_program(program: DeviceProgram, arch: int, timer: Timer | None = None) -> DeviceProgram:
    """The program with a cubin of each kernel for ``sm_<arch>``. With a ``timer`` the fastest of its alternatives is
    taken, and :attr:`~.program.DeviceKernel.choice` says why; what was compiled before stays as it is."""
    kernels = tuple(_compiled(kernel, arch, timer) for kernel in program.kernels)
    counts, segments = dict(program.counts), []
    for function, launches in program.segments:
        recounted = []
        for launch in launches:
            source, before = kernels[launch.kernel].source, program.kernels[launch.kernel].source
            if source.config.blocks != before.config.blocks:
                count = program_count_expr(source)
                launch = replace(launch, grid=f"$#programs {count}")
                counts[launch.grid] = count
            recounted.append(launch)
        segments.append((function, tuple(recounted)))
    slots = tuple(dict.fromkeys((*program.plan.slots, *counts)))
    plan = replace(program.plan, slots=slots)
    return replace(program, kernels=kernels, plan=plan, segments=tuple(segments), counts=tuple(counts.items()))


def _compiled(kernel: DeviceKernel, arch: int, timer: Timer | None) -> DeviceKernel:
    if kernel.cubin is not None:
        return kernel
    if timer is None:
        return replace(kernel, cubin=compile_kernel(kernel.source, arch), alternatives=())
    choice = choose((kernel.source, *kernel.alternatives), arch, timer)
    return DeviceKernel(choice.source, (), choice.cubin, str(choice))


def _single_device(program: Program) -> str:
    """The device of all that kernels touch; of anything on CUDA where there are no kernels."""
    touched = {n for step in program.steps if isinstance(step, LoopNest) for n in (*step.reads, *step.writes)}
    devices: dict[str, str] = {}
    for buffer in program.buffers:
        if buffer.name in touched:
            devices.setdefault(buffer.device, buffer.name)
    if len(devices) > 1:
        places = ", ".join(f"{name} on {device}" for device, name in devices.items())
        raise TritonError(
            f"the kernels of {program.name} would take tensors on several devices ({places}); lower_graph makes ATen "
            "calls of such operators"
        )
    on_cuda = [b.device for b in program.buffers if b.device.startswith("cuda")]
    return next(iter(devices), None) or next(iter(on_cuda), "cuda:0")


def _unaligned(program: Program, storage: Storage) -> frozenset[str]:
    """Memory that may begin anywhere: inputs that come back as outputs, which are not copied; and results that may be
    views."""
    found = {storage.root(o.name) for o in program.outputs if isinstance(o, BufferRef)}
    for step in program.steps:
        if isinstance(step, ExternCall) and may_alias_arguments(step.target):
            found.update(r for r in step.results if r is not None)
            found.update(storage.root(a.name) for a in step.args if isinstance(a, BufferRef))
    return frozenset(n for n in found if storage.classes.get(n) not in ("allocated", "view"))


def _written_inputs(program: Program, storage: Storage) -> set[str]:
    """Inputs whose memory the graph writes."""
    found: set[str] = set()
    for step in program.steps:
        names = step.writes if isinstance(step, LoopNest) else getattr(step, "mutates", ())
        found.update(map(storage.root, names))
    return {name for name in found if storage.classes.get(name) == "input"}


@dataclass(slots=True)
class _Kernels:
    """The kernels of a program, while they are written. ``unaligned``: memory that may begin anywhere. ``slots``: the
    frame entries that launches use."""

    buffers: Mapping[str, Buffer]
    storage: Storage
    unaligned: frozenset[str]
    limits: TileLimits
    device: str
    tune: bool
    tf32: bool
    asserts: bool
    extents: Mapping[str, Expr]
    sources: list[KernelSource] = field(default_factory=list)
    alternatives: list[tuple[KernelSource, ...]] = field(default_factory=list)
    counts: dict[str, Expr] = field(default_factory=dict)
    slots: dict[str, None] = field(default_factory=dict)
    workspaces: list[Workspace] = field(default_factory=list)
    _known: dict[str, int] = field(default_factory=dict)

    def launch(self, nest: LoopNest) -> DeviceLaunch:
        """The launch of a nest, whose kernel is written if none before is equal."""
        self._check(nest)
        kernel = kernel_of(nest, self.buffers, self.storage.placements)
        first, *others = map(self._with_alignment, self._sources(kernel))
        return self._launch(nest, first, others)

    def _with_alignment(self, source: KernelSource) -> KernelSource:
        arguments = tuple(replace(a, aligned=a.name not in self.unaligned) for a in source.arguments)
        return replace(source, arguments=arguments)

    def _sources(self, kernel: Kernel) -> tuple[KernelSource, ...]:
        """The ways to write a kernel; one, unless they are to be compared."""
        if matmul_site(kernel) is not None:
            configs = CONFIGS if self.tune else CONFIGS[:1]
            made = (
                emit_matmul(kernel, self.extents, c, tf32=self.tf32, asserts=self.asserts)
                for c in configs
            )
            return tuple({(s.text, s.config): s for s in made}.values())
        if self.tune:
            return candidates(kernel, self.extents, asserts=self.asserts)
        return (emit_kernel(kernel, self.extents, self.limits, self.asserts),)

    def _launch(self, nest: LoopNest, source: KernelSource, others: Sequence[KernelSource]) -> DeviceLaunch:
        slots = [self._argument_slot(nest, a) for a in source.arguments]
        count = program_count_expr(source)
        grid = f"$#programs {count}"
        self.counts[grid] = count
        self.slots.update(dict.fromkeys((*slots, ZERO_SLOT, grid)))
        key = _identity(source)
        known = self._known.setdefault(key, len(self.sources))
        if known == len(self.sources):
            self.sources.append(source)
            self.alternatives.append(tuple(o for o in others if o.arguments == source.arguments))
        return DeviceLaunch(nest.name, known, grid, tuple(slots), nest.origin.line)

    def _argument_slot(self, nest: LoopNest, argument: KernelArgument) -> str:
        if argument.kind == "size":
            return f"${argument.name}"
        if argument.kind == "pointer":
            return argument.name
        name = f"{nest.name}_{argument.name}_scratch"
        sizes, one = (argument.extent,), (to_expr(1),)
        buffer = Buffer(name, torch_name(argument.dtype), sizes, one, BufferKind.TEMPORARY, self.device)
        self.workspaces.append(Workspace(nest.name, buffer))
        return name

    def _check(self, nest: LoopNest) -> None:
        for name in (*nest.reads, *nest.writes):
            buffer = self.buffers[name]
            if dtype_from_torch_name(buffer.dtype) is None:
                raise TritonError(f"nest {nest.name} uses {name} of type {buffer.dtype}, which has no generated code")


def program_count_expr(source: KernelSource) -> Expr:
    """How many program instances a launch has."""
    count = to_expr(1)
    for size, block in source.grid:
        width = source.config.block(block) if block else 1
        count = count * ((size + (width - 1)) // width)
    return count


_NAME = re.compile(r"(?<![\w.])[A-Za-z_]\w*")  # not the `sin` of `libm.sin`


def _identity(source: KernelSource) -> str:
    """Equal for kernels that differ in names and comments only."""
    names: Mapping[str, str] = {argument_name(a): f"argument{k}" for k, a in enumerate(source.arguments)}
    lines = [line for line in source.text.splitlines() if not line.startswith("#")]
    text = "\n".join(lines).replace(f"def {source.name}(", "def kernel(")
    text = _NAME.sub(lambda m: names.get(m[0], m[0]), text)
    types = [(a.kind, a.dtype.value, a.aligned, str(a.extent)) for a in source.arguments]
    return f"{text}\n{types}\n{source.config}\n{[str(size) for size, _ in source.grid]}"
