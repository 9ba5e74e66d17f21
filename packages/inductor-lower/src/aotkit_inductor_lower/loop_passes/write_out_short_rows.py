"""Pass: sums of a few elements that lie apart in memory become plain arithmetic.

Note [Short rows written out]
    The gradient of keys that several heads share is a sum of four numbers that lie a matrix apart from each other,
    while neighbouring results are read from neighbouring places. As a loop that is a row of four in a tile: threads
    beside each other hold parts of one sum and exchange them through shared memory. Written out it is elementwise: a
    thread loads its four numbers and adds them one after the other, sixteen bytes at once, and what comes before and
    behind is fused as with any elementwise kernel. Rows whose elements lie beside each other stay rows, also those of a
    window that moves along them, so that threads beside each other still read what lies together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..ir import Buffer, Load, LoopNest, Program, Reduce, Stage, Step
from ..ir.builder import NestBuilder, Value
from ..ir.walk import buffers_of, computes, instructions, loads, reduces
from ..ops.reductions import REDUCTIONS, identity
from ..passes import Pass, PassContext, coalesces
from ..symbolic import Expr, Symbol, SymbolKind
from .unroll_taps import iterations, taps_of

__all__ = ["PASS", "write_out_short_rows"]

_LONGEST = 16  # elements of a row
_LARGEST = 192  # instructions that a nest may become


def write_out_short_rows(program: Program, ctx: PassContext) -> Program:
    """The program with short rows written out."""
    buffers = buffers_of(program)
    steps: list[Step] = list(program.steps)
    for position, step in enumerate(steps):
        if isinstance(step, LoopNest) and _fits(step, buffers) and ctx.fuel.take():
            steps[position] = written_out(step)
    return replace(program, steps=tuple(steps))


def written_out(nest: LoopNest) -> LoopNest:
    """The nest without inner loops."""
    builder = NestBuilder(nest.name, nest.outer, nest.origin)
    names: dict[str, str] = {}
    env: dict[Symbol, Expr] = {}
    for stage in nest.stages:
        builder.begin_stage()
        if not stage.ranges:
            builder.copy(stage.body, env, names)
            continue
        totals: dict[str, Value] = {}
        for at in iterations(stage.ranges):
            own = dict(names)
            builder.copy([i for i in stage.body if not isinstance(i, Reduce)], {**env, **at}, own)
            for each in reduces(stage.body):
                value = Value(own[each.value], each.dtype)
                totals[each.result] = _joined(builder, each, totals.get(each.result), value)
        names |= {result: total.name for result, total in totals.items()}
    return builder.finish()


def _joined(builder: NestBuilder, each: Reduce, former: Value | None, value: Value) -> Value:
    kind = REDUCTIONS[each.kind]
    if former is None:
        if not kind.starts:
            return value
        former = builder.const(identity(each.kind, each.dtype), each.dtype)

    def write(op: str, *args: Value | float) -> Value:
        return builder.op(op, *(a if isinstance(a, Value) else builder.const(a, each.dtype) for a in args))

    return kind.join(write, former, value, each.dtype)


def _fits(nest: LoopNest, buffers: Mapping[str, Buffer]) -> bool:
    """Whether all rows of a nest are short, of elements that lie apart, with neighbours of theirs beside them."""
    if not set(nest.reads).isdisjoint(nest.writes):
        return False  # an element may be loaded before and after it is stored, which a builder takes for one value
    rows = [stage for stage in nest.stages if stage.ranges]
    counts = [_length(stage) for stage in rows]
    if not rows or any(count is None for count in counts):
        return False
    if sum(len(stage.body) * (count or 0) for stage, count in zip(rows, counts, strict=True)) > _LARGEST:
        return False
    body = instructions(nest.stages)
    if any(i.running or REDUCTIONS[i.kind].position_of for i in reduces(body)):
        return False
    if any(i.op.startswith("mul_contract") for i in computes(body)):
        return False  # a product, for which there are other forms
    inner = {loop.symbol for stage in rows for loop in stage.ranges}
    beside = [_beside(load, buffers[load.buffer]) for load in loads(body)]
    return any(beside) and not any(loops & inner for loops in beside)


def _length(stage: Stage) -> int | None:
    """The elements of a row, if they are known, several and few."""
    count = taps_of(stage.ranges)
    return count if count is not None and 1 < count <= _LONGEST else None


def _beside(load: Load, buffer: Buffer) -> set[str]:
    """The loops that move along the elements that lie beside each other."""
    found = set[str]()
    for index, stride in zip(load.indices, buffer.strides, strict=True):
        if stride == 1:
            found |= {symbol.name for symbol in index.symbols if symbol.kind is SymbolKind.INDEX}
    return found


PASS = Pass(
    "write-out-short-rows",
    write_out_short_rows,
    why="a thread sums a few elements that lie apart by itself",
    after=("inline-producers",),
    when=coalesces,
)
