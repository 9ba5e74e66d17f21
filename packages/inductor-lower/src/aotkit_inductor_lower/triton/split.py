"""Long reductions with few results become two kernels, as loop IR: the interpreter checks it like any other pass.

Note [Split reductions]
    A sum over a million elements, or the gradient of a norm's weight (a sum over all rows, per column), has too few
    results to keep a device busy. The reduced loop ``r < n`` becomes ``k * c + r`` with ``k`` an outer loop: a first
    kernel writes partial results ``[.., k]``, a second reduces them and goes on. The order of additions is fixed, so
    results repeat; nothing is added atomically. Where ``c`` does not divide ``n``, the last chunk is masked.

    A length that is known at run time only is taken for a long one: its number of chunks is fixed, and ``c`` is that
    part of it, rounded up. An argmax keeps the extreme and its place in the chunk; the second kernel picks the first
    chunk that holds the extreme, and reads the place there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from ..ir import (
    Buffer,
    BufferKind,
    CheckIndex,
    Compute,
    Const,
    DType,
    IndexValue,
    Instr,
    Load,
    LoopNest,
    Program,
    Range,
    Reduce,
    Stage,
    Step,
    Store,
)
from ..ir.dtypes import int_bounds, is_float, torch_name
from ..symbolic import Expr, Symbol, floordiv, sym, to_expr
from .tiles import next_power_of_two, size_hint

__all__ = ["SplitLimits", "split_reductions"]

_CHUNK = "k_chunk"
_KINDS = ("sum", "prod", "min", "max", "any", "all")
_ARGS = ("argmin", "argmax")
_UNKNOWN_LENGTH = 1 << 14  # what a length that is not known counts as


@dataclass(frozen=True, slots=True)
class SplitLimits:
    """``programs``: so many instances keep a device busy. ``length``: shorter reductions stay whole. ``shortest``: the
    least a first kernel's instance reduces. ``columns``: results that one instance of an unsplit kernel computes where
    they lie side by side."""

    programs: int = 256
    length: int = 1024
    shortest: int = 128
    columns: int = 64


_LIMITS = SplitLimits()


def split_reductions(program: Program, limits: SplitLimits = _LIMITS) -> Program:
    """The program with long reductions of few results in two steps each."""
    buffers = list(program.buffers)
    names = {b.name for b in buffers}
    declared = {b.name: b for b in buffers}
    steps: list[Step] = []
    for step in program.steps:
        parts = _split(step, declared, names, limits) if isinstance(step, LoopNest) else None
        if parts is None:
            steps.append(step)
            continue
        steps += parts[0]
        buffers += parts[1]
    return replace(program, steps=tuple(steps), buffers=tuple(buffers))


def _split(
    nest: LoopNest, declared: Mapping[str, Buffer], names: set[str], limits: SplitLimits
) -> tuple[list[Step], list[Buffer]] | None:
    found = _candidate(nest, declared)
    if found is None:
        return None
    position, loop = found
    chunks = _chunks(nest, declared, position, loop, limits)
    if chunks is None:
        return None
    cut = _Cut(loop, chunks, floordiv(loop.size + (chunks - 1), chunks))
    types = _types(nest)
    device = next(declared[name].device for name in nest.reads)
    partial: dict[str, Buffer] = {}
    kept = [(i.result, i.dtype) for i in nest.stages[position].body if isinstance(i, Reduce)]
    kept += [(_extreme(i), types[i.value]) for i in _arg_reduces(nest.stages[position])]
    for number, (result, dtype) in enumerate(kept):
        name = f"{nest.name}_partial{number}"
        while name in names:
            name += "_"
        names.add(name)
        sizes = (*(r.size for r in nest.outer), to_expr(chunks))
        partial[result] = Buffer(name, torch_name(dtype), sizes, _dense(sizes), BufferKind.TEMPORARY, device)
    steps: list[Step] = [_first(nest, position, cut, partial), _second(nest, position, cut, partial)]
    return steps, list(partial.values())


@dataclass(frozen=True, slots=True)
class _Cut:
    """``loop`` becomes ``chunks`` pieces of ``length``."""

    loop: Range
    chunks: int
    length: Expr


def _types(nest: LoopNest) -> dict[str, DType]:
    return {i.result: i.dtype for s in nest.stages for i in s.body if not isinstance(i, CheckIndex | Store)}


def _arg_reduces(stage: Stage) -> list[Reduce]:
    return [i for i in stage.body if isinstance(i, Reduce) and i.kind in _ARGS]


def _extreme(reduce: Reduce) -> str:
    """The value at the place that an argmin or argmax gives."""
    return f"{reduce.result}_extreme"


def _candidate(nest: LoopNest, declared: Mapping[str, Buffer]) -> tuple[int, Range] | None:
    """The only stage with loops, and the loop to cut: the longest; for places in it the outermost, whose chunks are in
    the order of places."""
    ranged = [k for k, stage in enumerate(nest.stages) if stage.ranges]
    if len(ranged) != 1 or not nest.reads:
        return None
    stage = nest.stages[ranged[0]]
    reduces = [i for i in stage.body if isinstance(i, Reduce)]
    if not reduces or any(i.running or i.kind not in (*_KINDS, *_ARGS) for i in reduces):
        return None
    before = [i for s in nest.stages[: ranged[0]] for i in s.body]
    stores = [i for s in nest.stages for i in s.body if isinstance(i, Store)]
    if any(isinstance(i, Store) for i in before) or any(i.accumulates for i in stores):
        return None
    if any(isinstance(i, CheckIndex) for i in (*before, *stage.body)):
        return None
    if any(declared[name].kind is BufferKind.ROW for name in (*nest.reads, *nest.writes)):
        return None
    if set(nest.reads) & set(nest.writes):
        return None
    return ranged[0], stage.ranges[0] if _arg_reduces(stage) else max(stage.ranges, key=_length)


def _length(loop: Range) -> int:
    """How long a reduced loop is, or is taken to be."""
    return loop.size.constant if loop.size.constant is not None else _UNKNOWN_LENGTH


def _chunks(
    nest: LoopNest, declared: Mapping[str, Buffer], position: int, loop: Range, limits: SplitLimits
) -> int | None:
    results = reduced = 1
    for r in nest.outer:
        results *= size_hint(r.size)
    for r in nest.stages[position].ranges:
        reduced *= _length(r)
    if reduced < limits.length or not results:
        return None
    programs = results if _moves_along(nest, declared, position) else -(-results // limits.columns)
    wanted = min(next_power_of_two(limits.programs // programs), _length(loop), reduced // limits.shortest)
    return wanted if wanted > 1 else None


def _moves_along(nest: LoopNest, declared: Mapping[str, Buffer], position: int) -> bool:
    """Whether the reduced elements lie side by side in what is read."""
    inner = {Symbol(r.symbol) for r in nest.stages[position].ranges}
    for instr in nest.stages[position].body:
        if isinstance(instr, Load):
            for index, stride in zip(instr.indices, declared[instr.buffer].strides, strict=True):
                if stride == 1 and not inner.isdisjoint(index.symbols):
                    return True
    return False


def _dense(sizes: tuple[Expr, ...]) -> tuple[Expr, ...]:
    strides: list[Expr] = []
    step = to_expr(1)
    for size in reversed(sizes):
        strides.insert(0, step)
        step = step * size
    return tuple(strides)


# -- the two nests ---------------------------------------------------------------------------------------------


def _first(nest: LoopNest, position: int, cut: _Cut, partial: Mapping[str, Buffer]) -> LoopNest:
    """Partial results of each chunk."""
    loop, chunks, length = cut.loop, cut.chunks, cut.length
    outer = (*nest.outer, Range(_CHUNK, to_expr(chunks)))
    stage = nest.stages[position]
    at = sym(_CHUNK) * length + sym(loop.symbol)
    env = {Symbol(loop.symbol): at}
    body: list[Instr] = []
    mask = None
    if length * chunks != loop.size:
        mask = "in_chunk"
        body += [
            IndexValue("chunk_at", at, DType.I64),
            IndexValue("chunk_end", loop.size, DType.I64),
            Compute(mask, "lt", ("chunk_at", "chunk_end"), DType.BOOL),
        ]
    types = _types(nest)
    for instr in stage.body:
        body += _in_chunk(instr, env, mask, types)
    ranges = tuple(Range(r.symbol, length) if r is loop else r for r in stage.ranges)
    index = tuple(sym(r.symbol) for r in outer)
    stores: tuple[Instr, ...] = tuple(Store(buffer.name, index, result) for result, buffer in partial.items())
    stages = (*nest.stages[:position], Stage(ranges, tuple(body)), Stage((), stores))
    return LoopNest(f"{nest.name}_partial", outer, stages, nest.origin)


def _in_chunk(
    instr: Instr, env: Mapping[Symbol, Expr], mask: str | None, types: Mapping[str, DType]
) -> Iterator[Instr]:
    """An instruction of the cut stage, for a place that may lie past the end."""
    if isinstance(instr, IndexValue):
        yield replace(instr, expr=instr.expr.substitute(env))
    elif isinstance(instr, Load | Store):
        indices = tuple(i.substitute(env) for i in instr.indices)
        own = instr.mask
        if mask is not None and own is not None:
            own = f"{instr.mask}_{instr.result if isinstance(instr, Load) else instr.buffer}_in_chunk"
            yield Compute(own, "logical_and", (mask, instr.mask or mask), DType.BOOL)
        yield replace(instr, indices=indices, mask=own or mask)
    elif isinstance(instr, Reduce):
        dtype, chosen = types[instr.value], instr.value
        if mask is not None:
            yield Const(f"{instr.result}_nothing", _identity(instr.kind, dtype), dtype)
            chosen = f"{instr.result}_chosen"
            yield Compute(chosen, "where", (mask, instr.value, f"{instr.result}_nothing"), dtype)
        yield replace(instr, value=chosen)
        if instr.kind in _ARGS:
            yield Reduce(_extreme(instr), instr.kind.removeprefix("arg"), chosen, dtype)
    else:
        yield instr


def _identity(kind: str, dtype: DType) -> float | int | bool:
    if kind in ("any", "all"):
        return kind == "all"
    if kind in ("sum", "prod"):
        return (0.0 if kind == "sum" else 1.0) if is_float(dtype) else int(kind == "prod")
    if is_float(dtype):
        return float("inf") if kind.endswith("min") else float("-inf")
    low, high = int_bounds(dtype)
    found = high if kind.endswith("min") else low
    return bool(found) if dtype is DType.BOOL else found


def _second(nest: LoopNest, position: int, cut: _Cut, partial: Mapping[str, Buffer]) -> LoopNest:
    """The partial results reduced, and what comes after."""
    types, old = _types(nest), nest.stages[position]
    loops = (Range(_CHUNK, to_expr(cut.chunks)),)
    index = (*(sym(r.symbol) for r in nest.outer), sym(_CHUNK))
    body: list[Instr] = []
    for reduce in old.body:
        if not isinstance(reduce, Reduce):
            continue
        loaded = f"{reduce.result}_partial"
        if reduce.kind in _ARGS:
            kept = partial[_extreme(reduce)].name
            chunk = replace(reduce, result=f"{reduce.result}_chunk", value=loaded)
            body += [Load(loaded, kept, index, types[reduce.value]), chunk]
        else:
            body += [Load(loaded, partial[reduce.result].name, index, reduce.dtype), replace(reduce, value=loaded)]
    stages = [Stage(loops, tuple(body))]
    places = _arg_reduces(old)
    if places:
        inner = to_expr(1)
        for r in old.ranges[1:]:
            inner = inner * r.size
        stages.append(Stage(loops, tuple(i for r in places for i in _place_in_chunk(r, partial, index))))
        stages.append(Stage((), tuple(i for r in places for i in _place(r, cut.length * inner))))
    return replace(nest, stages=(*nest.stages[:position], *stages, *nest.stages[position + 1 :]))


def _place_in_chunk(reduce: Reduce, partial: Mapping[str, Buffer], index: tuple[Expr, ...]) -> Iterator[Instr]:
    """The place that the chosen chunk holds: a sum in which all others are 0."""
    name, kind = reduce.result, DType.I64
    yield IndexValue(f"{name}_number", sym(_CHUNK), kind)
    yield Load(f"{name}_held", partial[name].name, index, kind)
    yield Compute(f"{name}_is_it", "eq", (f"{name}_number", f"{name}_chunk"), DType.BOOL)
    yield Const(f"{name}_none", 0, kind)
    yield Compute(f"{name}_picked", "where", (f"{name}_is_it", f"{name}_held", f"{name}_none"), kind)
    yield Reduce(f"{name}_within", "sum", f"{name}_picked", kind)


def _place(reduce: Reduce, length: Expr) -> Iterator[Instr]:
    """The place in the whole: chunks before it, and the place in its own."""
    name = reduce.result
    yield IndexValue(f"{name}_length", length, DType.I64)
    yield Compute(f"{name}_before", "mul", (f"{name}_chunk", f"{name}_length"), DType.I64)
    yield Compute(name, "add", (f"{name}_before", f"{name}_within"), DType.I64)
