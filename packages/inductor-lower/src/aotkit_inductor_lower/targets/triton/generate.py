"""A scheduled program to kernels, a Triton function per nest, equal ones once, and to the launch plan of these."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ...analysis.launch_groups import launch_groups
from ...ir import Buffer, BufferKind, BufferRef, ExternCall, LoopNest, Program
from ...kernel_ir.nodes import Kernel, KernelModule
from ...kernel_passes.linearize import linearize
from ...kernel_passes.normal_form import normalize
from ...launch_plan import CompiledProgram, KernelRecord
from ...memory.build_plan import build_plan
from ...memory.segments import segments
from ...memory.storage import Storage, Workspace, assign_storage
from ...ops.aten import may_alias_arguments
from ...ops.dtypes import bits, dtype_from_torch_name, torch_name
from ...symbolic import Expr, to_expr
from .attention import attention_form
from .autotune import LIMITS, Timer, candidates, choose
from .binary import ZERO_SLOT, Contents, Launch, to_binary
from .compile import Compiler, code_identity, compile_all, compile_kernel
from .errors import TritonError
from .few_rows import rows_site
from .map_loops import TileLimits
from .records import KernelArgument, KernelSource, KnownMemory, TritonKernel
from .render.attention_backward import gradient_sources
from .render.attention_forward import attention_sources
from .render.few_rows import emit_rows
from .render.implicit import implicit_site, implicit_sources
from .render.kernel import emit_kernel
from .render.matmul import dot_site, product_sources
from .render.names import function_name
from .render.together import SHARED_WARPS, Member, emit_together, may_join
from .walked_rows import needless_zeros

__all__ = ["Launched", "Rendered", "assemble", "render_program", "to_program"]

_LIMITS = TileLimits()
MOST_WAYS = 10  # to compute a product that are compared


@dataclass(frozen=True, slots=True)
class Launched:
    """The launch of a nest: the position of its kernel, and the frame entries that are the arguments. ``others``: nests
    that it computes, too."""

    nest: LoopNest
    kernel: int
    slots: tuple[str, ...]
    others: tuple[LoopNest, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendered:
    """A program's kernels as text, and how they are launched. ``launches``: per segment; ``workspaces``: memory that
    kernels need beside the program's buffers; ``unaligned``: memory that may begin anywhere."""

    program: Program
    device: str
    storage: Storage
    kernels: tuple[TritonKernel, ...]
    launches: tuple[tuple[str, tuple[Launched, ...]], ...]
    workspaces: tuple[Workspace, ...]
    unaligned: frozenset[str]


def render_program(
    program: Program,
    device: str = "cpu",
    kernels: KernelModule | None = None,
    limits: TileLimits = _LIMITS,
    *,
    tune: bool = False,
    tf32: bool = False,
    asserts: bool = True,
    fast: bool = False,
) -> Rendered:
    """Sources of ``kernels``, those of all nests of a program (in their normal form), for ``device``; nothing is
    compiled yet.

    ``tune`` adds alternatives to each kernel, for :func:`assemble` to choose from. ``tf32`` lets products of
    f32 matrices lose bits. ``asserts``: an index out of range stops the kernel, see :class:`~..options.LowerOptions`.
    ``fast``: see :class:`~.records.KernelSource`.

    Raises :class:`~.errors.TritonError` for kernels over buffers on several devices.
    """
    _check_devices(program)
    storage = assign_storage(program, arena=False)  # torch's allocator is the arena on a device
    if limits.together and not tune:
        storage = replace(storage, together=_together(program))
    unaligned = _unaligned(program, storage)
    of = {k.name: k for k in (normalize(linearize(program)) if kernels is None else kernels).kernels}
    needless, fresh = needless_zeros(of.values(), min(each.row for each in LIMITS) if tune else limits.row)
    memory = KnownMemory(fresh, _bytes(program))
    written = _Kernels(of, storage, unaligned, limits, device, tune, tf32, asserts, fast, needless, memory)
    parts = itertools.chain(*segments(program, storage))
    launches = tuple((s.function, tuple(written.launches(s.nests))) for s in parts)
    made = tuple(TritonKernel(*pair) for pair in zip(written.sources, written.alternatives, strict=True))
    return Rendered(program, device, storage, made, launches, tuple(written.workspaces), unaligned)


def assemble(
    rendered: Rendered, arch: int, timer: Timer | None = None, compiler: Compiler = compile_kernel
) -> Rendered:
    """With a cubin of each kernel for ``sm_<arch>``, which ``compiler`` makes. With a ``timer`` the fastest of its
    alternatives is taken, and :attr:`~.records.TritonKernel.choice` says why."""
    if timer is not None:
        tuned = tuple(_tuned(kernel, arch, timer, compiler) for kernel in rendered.kernels)
        return replace(rendered, kernels=tuned)
    kernels = []
    compiled = compile_all([k.source for k in rendered.kernels], arch, compiler)
    for kernel, cubin in zip(rendered.kernels, compiled, strict=True):
        if isinstance(cubin, TritonError):
            raise cubin
        kernels.append(replace(kernel, cubin=cubin, alternatives=()))
    return replace(rendered, kernels=tuple(kernels))


def _tuned(kernel: TritonKernel, arch: int, timer: Timer, compiler: Compiler) -> TritonKernel:
    choice = choose((kernel.source, *kernel.alternatives), arch, timer, compiler)
    return TritonKernel(choice.source, (), choice.cubin, str(choice))


def to_program(rendered: Rendered) -> CompiledProgram:
    """The plan that launches the kernels, with these."""
    program, storage = rendered.program, rendered.storage
    slots: dict[str, None] = {}
    counts: dict[str, Expr] = {}
    records: list[KernelRecord] = []
    launches: list[tuple[str, tuple[Launch, ...]]] = []
    for function, launched in rendered.launches:
        own = []
        for each in launched:
            source = rendered.kernels[each.kernel].source
            count = program_count_expr(source)
            own.append(Launch(each.kernel, f"$#programs {count}", each.slots))
            counts[own[-1].grid] = count
            slots.update(dict.fromkeys((*each.slots, ZERO_SLOT, own[-1].grid)))
            combo = each.nest.name if each.others else ""
            for nest in (each.nest, *each.others):
                records.append(KernelRecord(nest.name, source.name, function, nest.origin, combo))
        launches.append((function, tuple(own)))
    written = _written_inputs(program, storage)
    taken = {name for _, own in launches for launch in own for name in launch.slots} - rendered.unaligned
    inputs = {b.name for b in program.buffers if b.kind is BufferKind.INPUT}
    contents = Contents(
        rendered.kernels,
        tuple(launches),
        tuple(counts.items()),
        tuple(name for name in program.inputs if name in taken & inputs),
        tuple(name for name in program.inputs if name in written),
        rendered.device,
    )
    plan = build_plan(program, storage, tuple(slots), rendered.workspaces)
    return CompiledProgram(plan, tuple(records), to_binary(contents))


def _check_devices(program: Program) -> None:
    """All that kernels touch is on one device."""
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


def _unaligned(program: Program, storage: Storage) -> frozenset[str]:
    """Memory that may begin anywhere, because it can't be copied where it does: results that may be views, and inputs
    that may be seen through them; constants that come back as outputs, and inputs that come back as another type (other
    inputs that come back are put in the place of their copies, see ``runtime.bind``)."""
    views: set[str] = set()
    found: set[str] = set()
    for step in program.steps:
        if isinstance(step, ExternCall) and may_alias_arguments(step.target):
            views.update(r for r in step.results if r is not None)
            found.update(storage.root(a.name) for a in step.args if isinstance(a, BufferRef))
    buffers = {b.name: b for b in program.buffers}
    for output in program.outputs:
        if isinstance(output, BufferRef):
            root = buffers[storage.root(output.name)]
            if root.kind is BufferKind.CONSTANT or root.dtype != buffers[output.name].dtype:
                found.add(root.name)
    found = {n for n in found if storage.classes.get(n) != "call result"} | views
    return frozenset(n for n in found if storage.classes.get(n) not in ("allocated", "view"))


def _bytes(program: Program) -> dict[str, int]:
    """How much memory each buffer reaches over, where that is known and elements lie ahead of each other."""
    found: dict[str, int] = {}
    for buffer in program.buffers:
        dtype = dtype_from_torch_name(buffer.dtype)
        size = to_expr(1)
        for n, stride in zip(buffer.sizes, buffer.strides, strict=True):
            size = size + (n - 1) * stride
        if dtype is not None and size.constant is not None and all(n.constant for n in buffer.sizes):
            found[buffer.name] = size.constant * max(8, bits(dtype)) // 8
    return found


def _written_inputs(program: Program, storage: Storage) -> set[str]:
    """Inputs whose memory the graph writes."""
    found: set[str] = set()
    for step in program.steps:
        names = step.writes if isinstance(step, LoopNest) else getattr(step, "mutates", ())
        found.update(map(storage.root, names))
    return {name for name in found if storage.classes.get(name) == "input"}


@dataclass(slots=True)
class _Kernels:
    """The kernels of a program, while they are written. ``of``: by the names of their nests; ``unaligned``: memory that
    may begin anywhere. ``needless``: nests that are not launched, which would store zeros."""

    of: Mapping[str, Kernel]
    storage: Storage
    unaligned: frozenset[str]
    limits: TileLimits
    device: str
    tune: bool
    tf32: bool
    asserts: bool
    fast: bool
    needless: frozenset[str]
    memory: KnownMemory
    sources: list[KernelSource] = field(default_factory=list)
    alternatives: list[tuple[KernelSource, ...]] = field(default_factory=list)
    workspaces: list[Workspace] = field(default_factory=list)
    _known: dict[str, int] = field(default_factory=dict)
    _members: dict[str, KernelSource] = field(default_factory=dict)

    def launches(self, nests: Sequence[LoopNest]) -> Iterator[Launched]:
        """Those of nests that follow each other, in order."""
        together: Mapping[str, int | str] = self.storage.together
        nests = [nest for nest in nests if nest.name not in self.needless]
        for _, group in itertools.groupby(nests, lambda nest: together.get(nest.name, nest.name)):
            yield from self._shared(tuple(group))

    def _shared(self, nests: tuple[LoopNest, ...]) -> Iterator[Launched]:
        """One launch of all, if their kernels allow it."""
        members: list[Member] = []
        warps = SHARED_WARPS
        for nest in nests if len(nests) > 1 else ():
            (source,) = map(self._with_alignment, self._sources(self.of[nest.name]))
            if rows_site(self.of[nest.name]) is not None:  # which is read by as many threads as it was cut up for
                warps = max(warps, source.config.num_warps)
            if may_join(source):
                slots = tuple(self._argument_slot(nest, a) for a in source.arguments)
                members.append((self._named(source), slots, _count(source)))
        name = f"{function_name(nests[0].name)}_and_more"
        made = emit_together(name, members, warps) if len(members) == len(nests) else None
        if made is None or not members:
            for nest in nests:
                yield from self._each(nest)
            return
        source, slots = made
        yield Launched(nests[0], self._number(source, ()), slots, nests[1:])

    def _named(self, source: KernelSource) -> KernelSource:
        """Equal kernels get one name, that of the first."""
        return self._members.setdefault(_identity(source), source)

    def _each(self, nest: LoopNest) -> Iterator[Launched]:
        """The launches of a nest: one, but those of an attention may be several kernels, one after the other."""
        kernel = self.of[nest.name]
        site = attention_form(kernel)
        if site is None:
            yield self.launch(nest)
            return
        written = gradient_sources if site.backward else attention_sources
        sources = written(kernel, site, gpu=self.limits.gpu, tf32=self.tf32, fast=self.fast)
        for source in sources:
            yield self._launch(nest, self._with_alignment(source), ())

    def launch(self, nest: LoopNest) -> Launched:
        """The launch of a nest, whose kernel is written if none before is equal."""
        first, *others = map(self._with_alignment, self._sources(self.of[nest.name]))
        return self._launch(nest, first, others)

    def _with_alignment(self, source: KernelSource) -> KernelSource:
        arguments = tuple(replace(a, aligned=a.name not in self.unaligned) for a in source.arguments)
        return replace(source, arguments=arguments)

    def _sources(self, kernel: Kernel) -> tuple[KernelSource, ...]:
        """The ways to write a kernel; one, unless they are to be compared."""
        rows = rows_site(kernel)
        if rows is not None:
            return (emit_rows(kernel, rows, self.asserts, self.fast, self.memory),)
        if implicit_site(kernel) is not None:
            most = MOST_WAYS if self.tune else 1
            own = {"tf32": self.tf32, "asserts": self.asserts, "fast": self.fast}
            return implicit_sources(kernel, self.limits.gpu, most=most, **own)
        if dot_site(kernel) is not None:
            return product_sources(
                kernel,
                self.limits.gpu,
                most=MOST_WAYS if self.tune else 1,
                unaligned=self.unaligned,
                tf32=self.tf32,
                asserts=self.asserts,
                fast=self.fast,
            )
        if self.tune:
            return candidates(kernel, asserts=self.asserts, fast=self.fast, memory=self.memory)
        return (emit_kernel(kernel, self.limits, self.asserts, self.fast, self.memory),)

    def _launch(self, nest: LoopNest, source: KernelSource, others: Sequence[KernelSource]) -> Launched:
        slots = [self._argument_slot(nest, a) for a in source.arguments]
        return Launched(nest, self._number(source, others), tuple(slots))

    def _number(self, source: KernelSource, others: Sequence[KernelSource]) -> int:
        """Which kernel this is: an equal one that is there, or a new one."""
        known = self._known.setdefault(_identity(source), len(self.sources))
        if known == len(self.sources):
            self.sources.append(source)
            self.alternatives.append(tuple(o for o in others if o.arguments == source.arguments))
        return known

    def _argument_slot(self, nest: LoopNest, argument: KernelArgument) -> str:
        if argument.kind == "size":
            return f"${argument.name}"
        if argument.kind == "pointer":
            return argument.name
        name = f"{nest.name}_{argument.name}_scratch"
        sizes, one = (argument.extent,), (to_expr(1),)
        buffer = Buffer(name, torch_name(argument.dtype), sizes, one, BufferKind.TEMPORARY, self.device)
        if all(each.buffer.name != name for each in self.workspaces):  # kernels of one nest share theirs
            self.workspaces.append(Workspace(nest.name, buffer))
        return name


def _together(program: Program) -> dict[str, int]:
    """The nests whose kernels share a launch, with its number."""
    return {name: number for number, group in enumerate(launch_groups(program)) for name in group}


def _count(source: KernelSource) -> int:
    count = program_count_expr(source).constant
    assert count is not None  # nests whose launches are shared have known sizes
    return count


def program_count_expr(source: KernelSource) -> Expr:
    """How many program instances a launch has."""
    count = to_expr(1)
    for size, block in source.grid:
        width = source.config.block(block) if block else 1
        count = count * ((size + (width - 1)) // width)
    return count


def _identity(source: KernelSource) -> str:
    """Equal for kernels that differ in names and comments only."""
    extents = [str(a.extent) for a in source.arguments]
    return f"{code_identity(source)}\n{extents}\n{[str(size) for size, _ in source.grid]}"
