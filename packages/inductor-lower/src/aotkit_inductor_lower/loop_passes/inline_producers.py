"""Pass: compute cheap or once-read elementwise producers where they are read.

Note [When a producer is computed again]
    With one reader nothing is computed twice, unless the reader has several passes over its rows or reads fewer
    elements many times. With several readers a producer is inlined if that costs no more than loading its
    result would: few plain instructions and at most one load of full size. A device has arithmetic to spare (an erf
    for each element that is read), so there a dear one with few readers is inlined, too, or with many of which each
    takes a part (the steps of a recurrence). What is copied into an input of the graph, a state that is kept, is not
    inlined if others read it, too: it is written there, in the kernel that makes it. Every other value is stored
    once; the fusion pass then tries to bring its readers into the same kernel. The size of a nest is bounded, so that
    a graph of diamonds stays linear.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from ..analysis.dependencies import Dependencies
from ..analysis.nests import (
    body_size,
    buffer_bytes,
    full_instructions,
    has_division,
    heavy_count,
    hint,
    identity_store,
    iteration_count,
    traps,
)
from ..ir import CONTRACTIONS, Buffer, BufferKind, DType, Load, LoopNest, Origin, Program, Step
from ..ir.builder import NestBuilder
from ..ir.inlining import Inlinable
from ..ir.walk import buffers_of, computes, instructions, loads, stores, value_types
from ..ops.dtypes import FLOAT8_NAMES, bits
from ..ops.scalar import WORK
from ..options import LowerOptions
from ..passes import NO_FUEL, Decision, Pass, PassContext, fuses
from .drop_dead_steps import drop_dead_steps
from .write_through import copied, same_memory

__all__ = ["PASS", "expand", "inline_producers", "join_origins"]

_PART = 12  # instructions of what many readers take parts of
_READERS = 3  # of what is dear, where a target computes it again; some of them come together
_SMALL = 4  # times that memory is smaller than what is made of it, from which it is read again rather
_TIMES = 8  # that an element is computed rather than waited for, of
_FEW_ELEMENTS = 1 << 13
_WEIGHED = 8  # times the work that is done again elsewhere may be done on what is small, by all readers together


def inline_producers(program: Program, ctx: PassContext) -> Program:
    """The program with producers inlined, without those that are no longer needed."""
    dependencies = Dependencies.of(program)
    buffers = buffers_of(program)
    steps: list[Step | None] = list(program.steps)
    inlinable: dict[str, Inlinable] = {}
    for position, step in enumerate(program.steps):
        if not isinstance(step, LoopNest):
            continue
        if inlinable and not inlinable.keys().isdisjoint(step.reads):
            step = expand(step, buffers, inlinable)
            steps[position] = step
        symbols = identity_store(step, buffers)
        if symbols is None or buffers[step.writes[0]].kind is not BufferKind.TEMPORARY:
            continue
        buffer = step.writes[0]
        reason, verdict = _verdict(step, buffer, program.steps, dependencies, buffers, ctx)
        if verdict and not ctx.fuel.take():
            reason, verdict = NO_FUEL, False
        readers = dependencies.readers.get(buffer, [])
        if readers:
            second = ", ".join(program.steps[r].name for r in readers[:4])
            ctx.decisions.append(Decision("inline", step.name, second, verdict, reason))
        if verdict:
            inlinable[buffer] = Inlinable(step, symbols)
            steps[position] = None
    return drop_dead_steps(replace(program, steps=tuple(s for s in steps if s is not None)))


def expand(nest: LoopNest, buffers: Mapping[str, Buffer], inlinable: Mapping[str, Inlinable]) -> LoopNest:
    """A nest with loads of ``inlinable`` buffers replaced by what computes them."""
    origins = [inlinable[b].nest.origin for b in nest.reads if b in inlinable]
    builder = NestBuilder(nest.name, nest.outer, join_origins([*origins, nest.origin]), buffers, inlinable)
    builder.copy_stages(nest.stages, {})
    return builder.finish()


def join_origins(origins: Sequence[Origin]) -> Origin:
    """The origin of a fused kernel; the line is the last one known, where the result is made."""
    nodes = tuple(dict.fromkeys(n for o in origins for n in o.nodes))
    ops = tuple(dict.fromkeys(op for o in origins for op in o.ops))
    lines = [o.line for o in origins if o.line]
    return Origin(nodes, ops, lines[-1] if lines else "")


def _verdict(
    nest: LoopNest,
    buffer: str,
    steps: Sequence[Step],
    dependencies: Dependencies,
    buffers: Mapping[str, Buffer],
    ctx: PassContext,
) -> tuple[str, bool]:
    """(reason, whether to inline)."""
    options = ctx.options
    if buffer in dependencies.escapes:
        return "it is needed in memory by an ATen call or the caller", False
    if len(dependencies.writers[buffer]) > 1:
        return "several kernels write parts of it", False
    if any(dependencies.root[name] in dependencies.unstable for name in nest.reads):
        return "it reads memory that the graph overwrites", False
    readers = [steps[position] for position in dependencies.readers.get(buffer, [])]
    nests = [reader for reader in readers if isinstance(reader, LoopNest)]
    if not nests:
        return "nothing reads it", True
    if ctx.target.capabilities.float8_products and all(
        _multiplies_bytes(reader, steps, dependencies, buffers) for reader in nests
    ):
        return "the product takes 8-bit floats as they are", True
    if len(nests) > 1 and any(_keeps(reader, buffer, buffers) for reader in nests):
        return "it is the new value of an input, and is written there", False
    divides = has_division(nest)
    if divides and any(_reads_masked(reader, buffer) for reader in nests):
        return "it may report an error in lanes that its reader masks off", False
    body = instructions(nest.stages)
    size = body_size(nest)
    elements = iteration_count(nest.outer)
    heavy = heavy_count(nest)
    work = sum(i.op in WORK for i in computes(body))
    if not loads(body) and heavy == 0 and size <= 12:
        return "it is a constant or a position", True
    passes = sum(_passes(reader, buffer) for reader in nests)
    widest = max(_iterations(reader, buffer) for reader in nests)
    repeated = widest > 2 * elements
    if heavy and any(_scans(reader, buffer) for reader in nests):
        return "its reader takes one element at a time, and it is dear", False
    if passes == 1 and not repeated:
        if size + body_size(nests[0]) > options.max_fusion_instructions:
            return "the kernel would get too large", False
        return "it has one reader", True
    wide = _wide_loads(nest, elements)
    device = ctx.target.capabilities.recomputes
    if device and not divides and size <= _PART and _in_parts(nest, buffer, nests, elements, wide):
        return "each of its readers takes a part of it", True
    again = device if passes <= _READERS and not repeated and _reads_no_wider(nest, buffer) else 0
    cheap = heavy <= again and work - heavy <= options.max_recompute
    little = wide <= 1 or (device > 0 and _reads_no_more(nest, buffer, elements))
    if cheap and not divides and little and size <= 40:
        return "computing it again costs no more than loading it", True
    if device and not repeated and _from_little(nest, buffers[buffer], nests, passes, buffers, options):
        return "what it is computed from is much smaller and lies in a cache", True
    launches = ctx.target.capabilities.shares_launches and not (heavy or divides)
    if launches and passes == 1 and widest <= min(_TIMES * elements, _FEW_ELEMENTS) and size <= 40:
        return "computing so few elements several times takes less than a launch", True
    if passes == 1:
        return "its reader would compute each element many times", False
    return f"it has {passes} readers and is dear to compute again", False


def _multiplies_bytes(
    reader: LoopNest, steps: Sequence[Step], dependencies: Dependencies, buffers: Mapping[str, Buffer]
) -> bool:
    """Whether a nest is a product of 8-bit floats alone, which other nests convert."""
    summed = [stage for stage in reader.stages if any(i.op in CONTRACTIONS.values() for i in computes(stage.body))]
    read = {load.buffer for stage in summed for load in loads(stage.body)}
    makers = [[steps[k] for k in dependencies.writers.get(name, ())] for name in sorted(read)]
    return bool(read) and all(len(each) == 1 and _converts_bytes(each[0], buffers) for each in makers)


def _converts_bytes(step: Step, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a nest makes wider floats of 8-bit ones, and nothing else."""
    if not isinstance(step, LoopNest) or any(stage.ranges for stage in step.stages) or len(step.writes) != 1:
        return False
    wider = buffers[step.writes[0]].dtype not in FLOAT8_NAMES
    return wider and len(step.reads) == 1 and buffers[step.reads[0]].dtype in FLOAT8_NAMES


def _from_little(
    nest: LoopNest,
    result: Buffer,
    readers: Sequence[LoopNest],
    passes: int,
    buffers: Mapping[str, Buffer],
    options: LowerOptions,
) -> bool:
    """Whether a device gets the elements faster from memory that is much smaller than all of them are."""
    body, size = full_instructions(nest), body_size(nest)
    work = sum(i.op in WORK for i in computes(body))
    read = sum(buffer_bytes(buffers[name]) for name in {load.buffer for load in loads(body)})
    small = read * _SMALL <= buffer_bytes(result) and work * passes <= _WEIGHED * options.max_recompute
    fits = all(size + body_size(reader) <= options.max_fusion_instructions for reader in readers)
    return small and fits and not traps(nest) and not heavy_count(nest)


def _keeps(reader: LoopNest, buffer: str, buffers: Mapping[str, Buffer]) -> bool:
    """Whether a nest copies the buffer into an input, which the pass ``write-through`` makes one
    memory of: a state that is made of the last one."""
    found = copied(reader)
    return found is not None and found[0] == buffer and same_memory(buffers[buffer], buffers[found[1]])


def _reads_masked(reader: LoopNest, buffer: str) -> bool:
    return any(i.mask is not None for i in loads(instructions(reader.stages), buffer))


def _scans(reader: LoopNest, buffer: str) -> bool:
    return any(stage.scans and loads(stage.body, buffer) for stage in reader.stages)


def _passes(reader: LoopNest, buffer: str) -> int:
    """How many different places of a nest read the buffer: stages, times different indices in each."""
    return sum(len({i.indices for i in loads(stage.body, buffer)}) for stage in reader.stages)


def _in_parts(nest: LoopNest, buffer: str, readers: Sequence[LoopNest], elements: int, wide: int) -> bool:
    """Whether an element is read about once, or a few times if what it is made of is read as fast."""
    read = _elements_read(readers, buffer)
    few = read <= _READERS * elements and _reads_no_wider(nest, buffer)
    return wide <= 1 and heavy_count(nest) <= 1 and (read <= elements or few)


def _elements_read(readers: Sequence[LoopNest], buffer: str) -> int:
    """How many elements are read, in all places together."""
    total = 0
    for reader in readers:
        outer = iteration_count(reader.outer)
        for stage in reader.stages:
            total += len({i.indices for i in loads(stage.body, buffer)}) * outer * iteration_count(stage.ranges)
    return total


def _iterations(reader: LoopNest, buffer: str) -> int:
    outer = iteration_count(reader.outer)
    return max(outer * iteration_count(stage.ranges) for stage in reader.stages if loads(stage.body, buffer))


def _reads_no_wider(nest: LoopNest, buffer: str) -> bool:
    """Whether no element that is loaded takes more memory than a result."""
    body = instructions(nest.stages)
    types = value_types(body)
    stored = [types.get(i.value, DType.I64) for i in stores(body) if i.buffer == buffer]
    return all(bits(i.dtype) <= bits(dtype) for i in loads(body) for dtype in stored)


def _reads_no_more(nest: LoopNest, buffer: str, elements: int) -> bool:
    """Whether all memory that is as large as the result takes no more bytes together: what is loaded in two places of
    it lies in a cache of the device."""
    body = instructions(nest.stages)
    types = value_types(body)
    (stored,) = (types.get(i.value, DType.I64) for i in stores(body) if i.buffer == buffer)
    read = {i.buffer: bits(i.dtype) for i in _wide(nest, elements)}
    return sum(read.values()) <= bits(stored)


def _wide_loads(nest: LoopNest, elements: int) -> int:
    """Number of loads that run over most of the nest's iterations, rather than being reused by many of them."""
    return len(_wide(nest, elements))


def _wide(nest: LoopNest, elements: int) -> list[Load]:
    found = []
    sizes = {loop.symbol: hint(loop.size) for loop in nest.outer}
    for load in loads(instructions(nest.stages)):
        used = {s.name for e in load.indices for s in e.symbols}
        distinct = 1
        for name in used:
            distinct *= sizes.get(name, 64)
        if distinct * 4 > elements:
            found.append(load)
    return found


PASS = Pass(
    "inline-producers",
    inline_producers,
    why="computing a cheap value again costs less than storing it and loading it",
    after=("drop-dead-steps",),
    when=fuses,
)
