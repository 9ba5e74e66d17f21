"""A scheduled program to a launch plan and one object file.

Consecutive loop nests become one native segment: a function that runs their kernels. Nests of one shape share a kernel.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace

from ...ir import Buffer, LoopNest, Program
from ...kernel_ir.launches import Combo, KernelText, Launch, Region
from ...kernel_ir.nodes import LENGTH, Kernel, KernelModule
from ...kernel_ir.walk import memories
from ...kernel_passes.deduplicate import canonical, combine_launches, generalize_lengths
from ...kernel_passes.linearize import linearize
from ...kernel_passes.mark_nontemporal import mark_nontemporal
from ...kernel_passes.normal_form import normalize
from ...launch_plan.records import Binary, CompiledProgram, KernelRecord
from ...memory.build_plan import build_plan
from ...memory.segments import Segment, segments
from ...memory.storage import assign_storage, check_on_cpu
from ...symbolic import Symbol, to_expr
from .machine import Machine, host_machine
from .module import ModuleText
from .object import compile_text
from .parallel_regions import Lives, with_regions
from .render.amx_tiles import uses_tiles
from .ways import way_of

__all__ = ["generate"]


def generate(
    program: Program,
    target: Machine | None = None,
    kernels: KernelModule | None = None,
    *,
    keep_text: bool = False,
    around_llvm: AbstractContextManager[object] | None = None,
    separate: bool = False,
    arena_bytes: int | None = None,
) -> CompiledProgram:
    """Compile ``program`` for ``target`` (the host), with ``kernels`` of its nests (in their normal form).
    ``keep_text`` keeps the LLVM text in the result; LLVM runs inside of ``around_llvm``.
    ``separate``: each kernel is a segment. ``arena_bytes``: as of :class:`.LowerOptions`.

    Raises :class:`~.errors.CodegenError` for a nest over buffers that are not on the CPU or have no generated type.
    """
    target = target or host_machine()
    made = normalize(linearize(program)) if kernels is None else kernels
    check_on_cpu(program)
    storage = assign_storage(program, arena_bytes=arena_bytes)
    module = ModuleText(program.name, target)
    by_nest = {kernel.name: kernel for kernel in made.kernels}
    written = _Kernels({b.name: b for b in program.buffers}, by_nest, Lives.of(program, storage), target, module)
    for segment in itertools.chain(*segments(program, storage, separate)):
        written.add_segment(segment)
    plan = build_plan(program, storage, tuple(written.slots), separate=separate)
    text = module.render()
    with around_llvm or nullcontext():
        code = compile_text(text, target) if written.records else b""
    machine = [target.triple, target.cpu, target.vector_bits]
    facts: dict[str, object] = {"machine": machine, "imports": list(module.imports())}
    if written.regions:
        facts["regions"] = written.regions
    if uses_tiles(module.declarations):
        facts["tiles"] = True
    binary = Binary.of("cpu", facts, (("kernels", code),) if written.records else ())
    return CompiledProgram(plan, tuple(written.records), binary, text if keep_text else "")


@dataclass(slots=True)
class _Kernels:
    """The kernels of a program, while they are written. ``of``: by the names of their nests; ``slots``: position of
    each frame entry that they use; ``regions``: the first and last nest of each parallel region, how many nests it has,
    and how often threads wait in it."""

    buffers: Mapping[str, Buffer]
    of: Mapping[str, Kernel]
    lives: Lives
    target: Machine
    module: ModuleText
    records: list[KernelRecord] = field(default_factory=list)
    slots: dict[str, int] = field(default_factory=dict)
    known: dict[Kernel, tuple[KernelText, str, str]] = field(default_factory=dict)
    regions: list[list[str | int]] = field(default_factory=list)

    def add_segment(self, segment: Segment) -> None:
        """Write the segment's function, and the kernels that are new in it."""
        launches = []
        sizes: dict[Symbol, int] = {}
        nests = segment.nests
        for own, length in generalize_lengths(list(map(self._own, nests))):
            kernel, name, short = self._text(own, length)
            for symbol in {*kernel.sizes, *kernel.units.symbols, *kernel.work.symbols}:
                sizes[symbol] = self._slot(f"${symbol.name}")
            slots = [self._slot(memory) for memory in kernel.memories] + [sizes[s] for s in kernel.sizes]
            launches.append(Launch(name, kernel, (*slots, *([] if length is None else [length])), short))
        calls = combine_launches(launches, nests, self.lives.storage.root, self.lives.kinds)
        position = 0
        for call in calls:
            combo = nests[position].name if len(call.members) > 1 else ""
            for nest, launch in zip(nests[position:], call.members, strict=False):
                self.records.append(KernelRecord(nest.name, launch.function, segment.function, nest.origin, combo))
            position += len(call.members)
        made = with_regions(calls, nests, self.lives) if self.target.threads else calls
        self.module.add_segment(segment.function, made, sizes)
        self._note(made, nests)

    def _note(self, made: Sequence[Combo | Region], nests: Sequence[LoopNest]) -> None:
        """Which nests each region has, and how often threads wait in it."""
        start = 0
        for call in made:
            end = start + sum(len(c.members) for c in (call.calls if isinstance(call, Region) else (call,)))
            if isinstance(call, Region):
                self.regions.append([nests[start].name, nests[end - 1].name, end - start, sum(call.waits)])
            start = end

    def _own(self, nest: LoopNest) -> Kernel:
        return mark_nontemporal(self.of[nest.name], self.buffers, self.lives.kinds)

    def _text(self, kernel: Kernel, length: int | None) -> tuple[KernelText, str, str]:
        """The text of a kernel, and the names of its functions. Kernels of one shape have one."""
        shape = canonical(kernel)
        made = self.known.get(shape)
        if made is None:
            _, write = way_of(kernel, self.target, self.module.declarations)
            text = write()
            name = self.module.add_kernel(f"kernel_{_identifier(kernel.name)}", text)  # apart from libm's names
            short = self.module.add_kernel(f"{name}_short", text.short[0]) if text.short is not None else ""
            made = self.known[shape] = text, name, short
        text, name, short = made
        text = replace(text, memories=tuple(param.name for param in memories(kernel)))
        if length is None:
            return text, name, short
        env = {LENGTH: to_expr(length)}
        return replace(text, units=text.units.substitute(env), work=text.work.substitute(env)), name, short

    def _slot(self, name: str) -> int:
        return self.slots.setdefault(name, len(self.slots))


def _identifier(name: str) -> str:
    return "".join(c if c.isalnum() or c == "_" else "_" for c in name)
