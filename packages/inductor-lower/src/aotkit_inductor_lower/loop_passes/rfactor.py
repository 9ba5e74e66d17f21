"""The second half of a reduction in parts: partial results combined, in order, on every device."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from ..ir import (
    Buffer,
    BufferKind,
    Compute,
    Const,
    DType,
    Index,
    Instr,
    Load,
    LoopNest,
    Range,
    Reduce,
    Stage,
)
from ..ir.walk import instructions, reduces, value_types
from ..ops.dtypes import torch_name
from ..ops.reductions import REDUCTIONS, is_positional
from ..symbolic import Expr, contiguous_strides, sym, to_expr

__all__ = [
    "CHUNK",
    "ReductionSplit",
    "arg_reduces",
    "combine_partial_results",
    "extreme",
    "extreme_kind",
    "partial_buffers",
]

_T = TypeVar("_T")
CHUNK = "k_chunk"


@dataclass(frozen=True, slots=True)
class ReductionSplit:
    """``loop`` becomes ``chunks`` pieces of ``length``; the last may be shorter. ``interleaved``: piece ``k`` has every
    ``chunks``-th element from ``k`` on. ``place``: the dimension of partial results that counts the pieces, by default
    the last."""

    loop: Range
    chunks: Expr
    length: Expr
    interleaved: bool = False
    place: int | None = None

    @property
    def symbol(self) -> str:
        """The loop over the pieces. An interleaved piece may be cut once more."""
        return "k_row" if self.interleaved else CHUNK

    def at(self, piece: Expr) -> Expr:
        """Where in ``loop`` the loop of a piece is."""
        inside = sym(self.loop.symbol)
        return inside * self.chunks + piece if self.interleaved else piece * self.length + inside

    def among(self, others: Sequence[_T], own: _T) -> tuple[_T, ...]:
        """What belongs to the pieces, in its place among what belongs to the other dimensions of partial results."""
        place = len(others) if self.place is None else self.place
        return (*others[:place], own, *others[place:])


def arg_reduces(body: Iterable[Instr]) -> list[Reduce]:
    """The reductions whose result is a place."""
    return [i for i in reduces(body) if is_positional(i.kind)]


def extreme(reduce: Reduce) -> str:
    """The value at the place that an argmin or argmax gives."""
    return f"{reduce.result}_extreme"


def extreme_kind(reduce: Reduce) -> str:
    """The reduction that gives :func:`extreme`."""
    return REDUCTIONS[reduce.kind].position_of


def partial_buffers(
    nest: LoopNest, position: int, cut: ReductionSplit, names: set[str], device: str
) -> dict[str, Buffer]:
    """A temporary ``[.., chunks]`` for each reduction of a stage, and for the extreme beside each place. ``names``:
    those taken; it grows."""
    types, body = value_types(instructions(nest.stages)), nest.stages[position].body
    kept = [(i.result, i.dtype) for i in reduces(body)]
    kept += [(extreme(i), types[i.value]) for i in arg_reduces(body)]
    partial: dict[str, Buffer] = {}
    for number, (result, dtype) in enumerate(kept):
        name = f"{nest.name}_partial{number}"
        while name in names:
            name += "_"
        names.add(name)
        sizes = cut.among([r.size for r in nest.outer], cut.chunks)
        partial[result] = Buffer(
            name, torch_name(dtype), sizes, contiguous_strides(sizes), BufferKind.TEMPORARY, device
        )
    return partial


def combine_partial_results(
    nest: LoopNest, position: int, cut: ReductionSplit, partial: Mapping[str, Buffer]
) -> LoopNest:
    """The nest with the stage at ``position`` reducing partial results, and what comes after."""
    types, old = value_types(instructions(nest.stages)), nest.stages[position]
    loops = (Range(cut.symbol, cut.chunks),)
    index = cut.among([sym(r.symbol) for r in nest.outer], sym(cut.symbol))
    body: list[Instr] = []
    for reduce in reduces(old.body):
        loaded = f"{reduce.result}_partial"
        if is_positional(reduce.kind):
            kept = partial[extreme(reduce)].name
            chunk = replace(reduce, result=f"{reduce.result}_chunk", value=loaded)
            body += [Load(loaded, kept, index, types[reduce.value]), chunk]
        else:
            body += [Load(loaded, partial[reduce.result].name, index, reduce.dtype), replace(reduce, value=loaded)]
    stages = [Stage(loops, tuple(body))]
    places = arg_reduces(old.body)
    if places:
        inner = to_expr(1)
        for r in old.ranges[1:]:
            inner = inner * r.size
        stages.append(Stage(loops, tuple(i for r in places for i in _place_in_chunk(r, partial, index))))
        stages.append(Stage((), tuple(i for r in places for i in _place(r, cut.length * inner))))
    return replace(nest, stages=(*nest.stages[:position], *stages, *nest.stages[position + 1 :]))


def _place_in_chunk(reduce: Reduce, partial: Mapping[str, Buffer], index: Sequence[Expr]) -> Iterator[Instr]:
    """The place that the chosen chunk holds: a sum in which all others are 0."""
    name, kind = reduce.result, DType.I64
    yield Index(f"{name}_number", sym(CHUNK), kind)
    yield Load(f"{name}_held", partial[name].name, tuple(index), kind)
    yield Compute(f"{name}_is_it", "eq", (f"{name}_number", f"{name}_chunk"), DType.BOOL)
    yield Const(f"{name}_none", 0, kind)
    yield Compute(f"{name}_picked", "where", (f"{name}_is_it", f"{name}_held", f"{name}_none"), kind)
    yield Reduce(f"{name}_within", "sum", f"{name}_picked", kind)


def _place(reduce: Reduce, length: Expr) -> Iterator[Instr]:
    """The place in the whole: chunks before it, and the place in its own."""
    name = reduce.result
    yield Index(f"{name}_length", length, DType.I64)
    yield Compute(f"{name}_before", "mul", (f"{name}_chunk", f"{name}_length"), DType.I64)
    yield Compute(name, "add", (f"{name}_before", f"{name}_within"), DType.I64)
