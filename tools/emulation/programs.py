"""Programs whose kernels run in an emulated process, while their plans run in this one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from aotkit_inductor_lower.ir import Program
from aotkit_inductor_lower.kernel_passes.linearize import memory_extents, memory_starts
from aotkit_inductor_lower.launch_plan import CompiledProgram
from aotkit_inductor_lower.launch_plan.loaded import Loaded
from aotkit_inductor_lower.launch_plan.records import Binary, CallSegment
from aotkit_inductor_lower.launch_plan.status import failure
from aotkit_inductor_lower.symbolic import Expr, Symbol
from aotkit_inductor_lower.symbolic.text import parse_expr

from .server import Patch, Region, Server

__all__ = ["load_into", "with_extents"]


def with_extents(compiled: CompiledProgram, program: Program) -> CompiledProgram:
    """The compiled program, whose facts say how many bytes of each memory kernels may use: from its address on, and
    before it. A process reads its own memory at an address; for another one it has to be copied."""
    sizes = {"bytes": memory_extents(program), "before": memory_starts(program)}
    written = {what: {name: str(size) for name, size in of.items()} for what, of in sizes.items()}
    binary = compiled.binary
    return replace(compiled, binary=Binary.of(binary.target, {**binary.facts, **written}, binary.sections))


def load_into(server: Server, compiled: CompiledProgram) -> Loaded:
    """What the CPU target's ``load`` gives, but for segments, which the server runs."""
    called = [step.function for step in compiled.plan.steps if isinstance(step, CallSegment)]
    env: dict[Symbol, int] = {}

    def remember(sizes: Mapping[Symbol, int]) -> Mapping[str, int]:
        env.update(sizes)
        return {}

    segments = {}
    if called:
        facts = compiled.binary.facts
        extents, starts = (
            {name: parse_expr(text) for name, text in facts[which].items()} for which in ("bytes", "before")
        )
        ((_, code),) = compiled.binary.sections
        number, frame = server.load(code), _Frame(compiled.plan.slots, extents, starts, env)
        segments = {name: _segment(server, number, name, frame) for name in called}
    context, names = ("n = threads()",), {"threads": torch.get_num_threads}
    return Loaded(compiled.plan, segments, context, names, failure(compiled), _empty, remember)


def _empty(sizes: Sequence[int], strides: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(sizes, strides, dtype=dtype)


def _segment(server: Server, library: int, name: str, frame: _Frame) -> Callable[[int, int], int]:
    def segment(address: int, threads: int) -> int:
        slots, regions, patches = frame.read(address)
        status, left = server.call(library, name, threads, slots, regions, patches)
        for region, content in zip(regions, left, strict=True):
            write_changes(region, content)
        return status

    return segment


def write_changes(region: Region, content: bytes) -> None:
    """Write the bytes that a segment changed, and no others: what is only read may lie in memory that cannot be
    written, and how far kernels may reach is an upper bound, behind which other memory may begin."""
    if content == region.content:
        return
    memory = np.ctypeslib.as_array((ctypes.c_uint8 * len(content)).from_address(region.address))
    before, after = (np.frombuffer(each, dtype=np.uint8) for each in (region.content, content))
    changed = before != after
    memory[changed] = after[changed]


@dataclass(frozen=True)
class _Frame:
    """The layout of a program's frame. ``env``: the sizes of the present call, beside those that are in the frame."""

    slots: Sequence[str]
    extents: Mapping[str, Expr]
    starts: Mapping[str, Expr]
    env: Mapping[Symbol, int]

    def read(self, address: int) -> tuple[list[int], list[Region], list[Patch]]:
        """The entries, the memory that those of them which are addresses stand for, and where in it they point."""
        entries = list((ctypes.c_int64 * len(self.slots)).from_address(address))
        known = self._sizes(entries)
        used: dict[int, tuple[int, int]] = {}
        for slot, (name, entry) in enumerate(zip(self.slots, entries, strict=True)):
            if not name.startswith("$"):
                before = self.starts[name].evaluate(known) if name in self.starts else 0
                used[slot] = entry - before, entry + self.extents[name].evaluate(known)
        spans = merged(span for span in used.values() if span[0] < span[1])
        patches = []
        for slot, (low, high) in used.items():
            if low < high:
                region = next(k for k, (first, last) in enumerate(spans) if first <= low and high <= last)
                patches.append(Patch(slot, region, entries[slot] - spans[region][0]))
        regions = [Region(first, ctypes.string_at(first, last - first)) for first, last in spans]
        return entries, regions, patches

    def _sizes(self, entries: Sequence[int]) -> Mapping[Symbol, int]:
        values = {name[1:]: entry for name, entry in zip(self.slots, entries, strict=True) if name.startswith("$")}
        wanted = {symbol for size in (*self.extents.values(), *self.starts.values()) for symbol in size.symbols}
        return {**self.env, **{symbol: values[symbol.name] for symbol in wanted if symbol.name in values}}


def merged(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Spans of addresses, with those that overlap made one: memory that two entries share stays shared."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(spans):
        if result and low < result[-1][1]:
            result[-1] = result[-1][0], max(high, result[-1][1])
        else:
            result.append((low, high))
    return result
