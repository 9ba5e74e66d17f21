"""Random contractions: affine operands, some of them windows with padding as convolutions have, in one dimension or in
two, some in a matrix that is chosen by a number in memory, and an epilogue of arithmetic.

See Note [Comparable results] in :mod:`.random_programs`: factors are small multiples of 1/4, so that sums are exact.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Protocol

from ..ops.dtypes import is_half
from ..symbolic import Expr, product, sym, to_expr
from .builder import NestBuilder, Value, loops
from .nodes import Buffer, Contraction, DType, Operand
from .random_bodies import BodyWriter, Known
from .walk import definitions, rename

__all__ = ["random_contraction"]

Loops = dict[str, Expr]


class Memory(Protocol):
    """What the program generator is asked for."""

    rng: random.Random

    def loops(self, letter: str, fewest: int, most: int) -> Loops:
        """So many loops, by name."""

    def input(self, prefix: str, dtype: DType, sizes: Sequence[Expr]) -> Buffer:
        """A new input buffer."""

    def body(self, name: str, outer: Loops) -> BodyWriter:
        """A writer of a body inside of such loops."""

    def store_output(self, body: BodyWriter, known: Known | None = None) -> None:
        """Store a value over all loops into a new output."""


def random_contraction(name: str, memory: Memory, ops: int, dtypes: Sequence[DType]) -> Contraction:
    """One contraction over new inputs. ``ops``: of its epilogue; ``dtypes``: what its factors may be."""
    rng = memory.rng
    counts = (("b", 0, 1), ("i", 0, 2), ("j", 0, 2), ("r", 1, 3))
    batch, rows, columns, reduced = [memory.loops(letter, few, many) for letter, few, many in counts]
    dtype = rng.choice([d for d in (DType.F32, DType.F64, DType.F16, DType.BF16) if d in dtypes] or [DType.F32])
    accumulate = DType.F64 if dtype is DType.F64 or rng.random() < 0.2 else DType.F32
    left = _operand(memory, "l", batch, rows, reduced, dtype)
    right = _operand(memory, "m", batch, columns, reduced, dtype)
    body = memory.body(name, {**batch, **rows, **columns})
    body.stage({})
    terms = (product(reduced.values()).constant or 1 << 12).bit_length()
    total = Known(Value("total", accumulate), high=8 + terms, low=6, loose=True)
    body.pool.append(total)
    indices, sizes = body.access()
    added = Known(body.builder.load_from(memory.input("in", accumulate, sizes), indices))
    body.pool.append(body.earlier_result() or added)
    body.compute(ops // 2)
    memory.store_output(body, total)
    if rng.random() < 0.5:
        memory.store_output(body)
    (stage,) = body.builder.finish().stages
    ranges = loops(batch), loops(rows), loops(columns), loops(reduced)
    return Contraction(name, *ranges, left, right, accumulate, "highest", "total", stage.body)


def _operand(memory: Memory, prefix: str, batch: Loops, free: Loops, reduced: Loops, dtype: DType) -> Operand:
    """An element for each iteration of the loops, half of the time scaled or negated."""
    rng = memory.rng
    builder = NestBuilder(prefix, loops({**batch, **free, **reduced}), share=False)
    indices, sizes, mask = _place(builder, rng, batch, free, reduced)
    if rng.random() < 0.25:
        _choose(memory, builder, batch, indices, sizes)
    buffer = memory.input("factor", dtype, sizes)
    value = builder.load_from(buffer, indices, mask, 0.0)
    if not is_half(dtype) and rng.random() < 0.5:
        value = builder.op("neg", value) if rng.random() < 0.5 else builder.op("mul", value, builder.const(0.5, dtype))
    (stage,) = builder.finish().stages
    names = {name: f"{prefix}_{name}" for name in definitions(stage.body)}
    return Operand(tuple(rename(instr, names) for instr in stage.body), names[value.name])


def _place(
    builder: NestBuilder, rng: random.Random, batch: Loops, free: Loops, reduced: Loops
) -> tuple[list[Expr], list[Expr], Value | None]:
    """Indices along the loops, the sizes of the buffer they fit into, and where they are inside of it. Now and then
    free loops and summed ones, the first with the first, are windows that slide over a dimension each, as in a
    convolution."""
    both = {**free, **reduced}
    windows = [pair for pair in zip(free, reduced, strict=False) if all(both[name].constant for name in pair)]
    windows = windows[: rng.choice((0, 1, 2, 2))]
    slid = {name for pair in windows for name in pair}
    own = {n: s for n, s in {**batch, **both}.items() if n not in slid}
    places = [_own_dimension(sym(name), size, rng) for name, size in own.items()]
    mask = None
    for pair in windows:
        index, size, inside = _window(builder, rng, pair, both)
        places.append((index, size))
        mask = inside if mask is None else builder.op("logical_and", mask, inside)
    rng.shuffle(places)
    return [index for index, _ in places], [size for _, size in places], mask


def _choose(memory: Memory, builder: NestBuilder, batch: Loops, indices: list[Expr], sizes: list[Expr]) -> None:
    """One dimension more, where the place of each product of the batch is loaded."""
    count = memory.rng.choice((2, 3, 7))
    chosen = memory.input("index", DType.I64, list(batch.values()))
    place = builder.load_from(chosen, [sym(name) for name in batch])
    at = memory.rng.randrange(len(indices) + 1)
    indices.insert(at, builder.check_index(place, count))
    sizes.insert(at, to_expr(count))


def _own_dimension(index: Expr, size: Expr, rng: random.Random) -> tuple[Expr, Expr]:
    way = rng.random()
    if way < 0.1:
        return size - 1 - index, size
    if way < 0.2:
        return 2 * index + 1, 2 * size + 1
    return index, size


def _window(
    builder: NestBuilder, rng: random.Random, names: Sequence[str], sizes: Mapping[str, Expr]
) -> tuple[Expr, Expr, Value]:
    place, tap = map(sym, names)
    stride, dilation, pad = rng.choice((1, 2)), rng.choice((1, 3)), rng.choice((0, 1, 2))
    whole = (sizes[names[0]] - 1) * stride + (sizes[names[1]] - 1) * dilation + 1
    size = whole - pad if (whole.constant or 0) > pad else whole
    index = place * stride + tap * dilation - pad
    number = builder.index_value(index)
    inside = builder.op("lt", number, builder.index_value(size))
    return index, size, builder.op("logical_and", inside, builder.op("ge", number, builder.const(0, DType.I64)))
