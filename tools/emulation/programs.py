"""Programs whose kernels run in an emulated process, while their plans run in this one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from aotkit_inductor_lower.ir import Program
from aotkit_inductor_lower.kernel_passes.linearize import memory_extents, memory_starts
from aotkit_inductor_lower.launch_plan import CompiledProgram
from aotkit_inductor_lower.launch_plan.loaded import Loaded
from aotkit_inductor_lower.launch_plan.records import CallSegment
from aotkit_inductor_lower.launch_plan.status import failure
from aotkit_inductor_lower.symbolic import Expr, Symbol
from aotkit_inductor_lower.targets.cpu.generate import generate

from .processors import Emulated
from .server import Patch, Region, Server

__all__ = ["emulated_loader", "generate_for"]

#: Of each memory of a program how many bytes kernels may use, from its address on and before it.
Extents = Mapping[str, tuple[Expr, Expr | None]]
Load = Callable[[CompiledProgram], Loaded]


def generate_for(processor: Emulated, program: Program) -> CompiledProgram:
    """A scheduled program, compiled for the processor."""
    return generate(program, processor.machine())


def emulated_loader(server: Server, program: Program) -> Load:
    """What :func:`bind_program` may be given as ``load``, for what was generated of ``program``."""
    starts = memory_starts(program)
    extents = {name: (extent, starts.get(name)) for name, extent in memory_extents(program).items()}

    def load(compiled: CompiledProgram) -> Loaded:
        called = [step.function for step in compiled.plan.steps if isinstance(step, CallSegment)]
        env: dict[Symbol, int] = {}

        def remember(sizes: Mapping[Symbol, int]) -> Mapping[str, int]:
            env.update(sizes)
            return {}

        segments = {}
        if called:
            ((_, code),) = compiled.binary.sections
            frame = _Frame(compiled.plan.slots, extents, env)
            number = server.load(code)
            segments = {name: _segment(server, number, name, frame) for name in called}
        lines, names = ("n = threads()",), {"threads": torch.get_num_threads}
        empty = torch.empty_strided
        return Loaded(
            compiled.plan, segments, lines, names, failure(compiled),
            lambda sizes, strides, dtype: empty(sizes, strides, dtype=dtype), remember,
        )  # fmt: skip

    return load


def _segment(server: Server, library: int, name: str, frame: _Frame) -> Callable[[int, int], int]:
    def segment(address: int, threads: int) -> int:
        slots, regions, patches = frame.read(address)
        status, left = server.call(library, name, threads, slots, regions, patches)
        for region, content in zip(regions, left, strict=True):
            ctypes.memmove(region.address, content, len(content))
        return status

    return segment


@dataclass(frozen=True)
class _Frame:
    """The layout of a program's frame, with the sizes of the present call."""

    slots: Sequence[str]
    extents: Extents
    env: Mapping[Symbol, int]

    def read(self, address: int) -> tuple[list[int], list[Region], list[Patch]]:
        """The entries, the memory that those of them which are addresses stand for, and where in it they point."""
        entries = list((ctypes.c_int64 * len(self.slots)).from_address(address))
        known = self._sizes(entries)
        used: dict[int, tuple[int, int]] = {}
        for slot, (name, entry) in enumerate(zip(self.slots, entries, strict=True)):
            if not name.startswith("$"):
                extent, start = self.extents[name]
                before = 0 if start is None else start.evaluate(known)
                used[slot] = entry - before, entry + extent.evaluate(known)
        spans = _merged(span for span in used.values() if span[0] < span[1])
        patches = []
        for slot, (low, high) in used.items():
            if low < high:
                region = next(k for k, (first, last) in enumerate(spans) if first <= low and high <= last)
                patches.append(Patch(slot, region, entries[slot] - spans[region][0]))
        regions = [Region(first, ctypes.string_at(first, last - first)) for first, last in spans]
        return entries, regions, patches

    def _sizes(self, entries: Sequence[int]) -> Mapping[Symbol, int]:
        names = {name[1:]: entry for name, entry in zip(self.slots, entries, strict=True) if name.startswith("$")}
        wanted = {s for extent, start in self.extents.values() for s in (*extent.symbols, *(start.symbols if start else ()))}
        return {**self.env, **{symbol: names[symbol.name] for symbol in wanted if symbol.name in names}}


def _merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of addresses, with those that overlap made one."""
    merged: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if merged and low < merged[-1][1]:
            merged[-1] = merged[-1][0], max(high, merged[-1][1])
        else:
            merged.append((low, high))
    return merged
