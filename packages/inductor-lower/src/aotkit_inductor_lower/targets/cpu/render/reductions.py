"""Accumulators of reductions: identities, steps, and the final tree.

Note [Order of a reduction]
    A sum runs in ``interleave * lanes`` independent partial sums; long ones also restart every ``CHUNK`` steps and add
    the partial results up in a second level, so that rounding errors grow with the square root of the length at
    most twice. Over several loops it restarts in every iteration of a loop, too, unless it is known to be short up
    to there. Partial results are combined in a fixed tree. The order depends on sizes and vector width only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ....ir import DType, Reduce
from ....ops.expansions import Write
from ....ops.reductions import REDUCTIONS, identity, is_positional
from .arithmetic import Ops
from .emitter import Carried, Ssa, vector_type
from .ops import emit_body
from .types import FLOAT_TYPES, literal, register_type, width

__all__ = ["CHUNK", "Accumulator", "Block", "make_accumulator"]

CHUNK = 64  # steps after which a partial float sum moves to the second level


@dataclass(frozen=True, slots=True)
class Accumulator:
    """One reduction of a stage. ``value_dtype``: what is compared or added; ``position``: type of the running index
    of argmin/argmax, else ``None``. ``in_order``: positions only grow in the order values are taken in."""

    reduce: Reduce
    value_dtype: DType
    position: DType | None
    in_order: bool = True

    @property
    def cascades(self) -> bool:
        """Whether a second level keeps the rounding error down."""
        return self.reduce.kind == "sum" and self.value_dtype in FLOAT_TYPES and not self.reduce.running

    @property
    def width(self) -> int:
        """Number of carried values: two for argmin/argmax."""
        return 1 if self.position is None else 2

    def start(self, lanes: int) -> list[Carried]:
        """Identity element in every lane."""
        scalar = register_type(self.value_dtype)
        value = literal(identity(self.reduce.kind, self.value_dtype), self.value_dtype)
        carried = [Carried(vector_type(scalar, lanes), _constant(value, scalar, lanes))]
        if self.position is not None:
            scalar = register_type(self.position)
            carried.append(Carried(vector_type(scalar, lanes), _constant("0", scalar, lanes)))
        return carried

    def step(self, ops: Ops, state: Sequence[Ssa], value: Ssa, position: Ssa | None) -> list[Ssa]:
        """Take in one value (per lane)."""
        if self.position is None:
            return [self._merge(ops, state[0], value)]
        assert position is not None
        if not self.in_order:
            return self.combine(ops, state, [value, position])
        better = self._better(ops, value, state[0])
        return [ops.select(better, value, state[0]), ops.select(better, position, state[1])]

    def combine(self, ops: Ops, a: Sequence[Ssa], b: Sequence[Ssa]) -> list[Ssa]:
        """Join two partial results."""
        if self.position is None:
            return [self._merge(ops, a[0], b[0])]
        earlier = ops.op("and", self._same(ops, b[0], a[0]), ops.compare("icmp slt", b[1], a[1]))
        better = ops.op("or", self._better(ops, b[0], a[0]), earlier)
        return [ops.select(better, b[0], a[0]), ops.select(better, b[1], a[1])]

    def across_lanes(self, ops: Ops, state: list[Ssa]) -> list[Ssa]:
        """One result from all lanes, halving."""
        lanes = ops.lanes(state[0])
        scalars = [register_type(self.value_dtype), register_type(self.position) if self.position else ""]
        while lanes > 1:
            half = lanes // 2
            low = [ops.em.shuffle(s, s, t, range(half)) for s, t in zip(state, scalars, strict=False)]
            high = [ops.em.shuffle(s, s, t, range(half, lanes)) for s, t in zip(state, scalars, strict=False)]
            state, lanes = self.combine(ops, low, high), half
        return state

    def result(self, ops: Ops, state: Sequence[Ssa]) -> Ssa:
        """The IR value: for argmin/argmax the index as i64."""
        return state[0] if self.position is None else ops.convert("sext", state[1], "i64")

    def _merge(self, ops: Ops, a: Ssa, b: Ssa) -> Ssa:
        # operands swapped so that min and max keep the new value's nan without a second test of the running one
        def join(write: Write[Ssa], x: Ssa, y: Ssa) -> Ssa:
            return REDUCTIONS[self.reduce.kind].join(write, x, y, self.value_dtype)

        return emit_body(ops, join, [b, a], self.value_dtype)

    def _better(self, ops: Ops, x: Ssa, best: Ssa) -> Ssa:
        less = REDUCTIONS[self.reduce.kind].position_of == "min"
        if self.value_dtype not in FLOAT_TYPES:
            unsigned = self.value_dtype in (DType.U8, DType.BOOL)
            return ops.compare(f"icmp {'u' if unsigned else 's'}{'lt' if less else 'gt'}", x, best)
        # (x < best or unordered) and best is not nan: a first nan replaces a number, nothing replaces a nan
        return ops.op(
            "and", ops.compare(f"fcmp {'ult' if less else 'ugt'}", x, best), ops.compare("fcmp ord", best, best)
        )

    def _same(self, ops: Ops, x: Ssa, y: Ssa) -> Ssa:
        if self.value_dtype not in FLOAT_TYPES:
            return ops.compare("icmp eq", x, y)
        both = ops.op("and", ops.compare("fcmp uno", x, x), ops.compare("fcmp uno", y, y))
        return ops.op("or", ops.compare("fcmp oeq", x, y), both)


@dataclass(frozen=True, slots=True)
class Block:
    """One way of stepping through a loop: ``vectors`` vectors of ``lanes`` elements. With ``tail``: only so many lanes
    exist, see Note [Masked tails]."""

    step: int
    lanes: int
    vectors: int
    tail: int = 0

    def start(self, acc: Accumulator) -> list[Carried]:
        """The accumulators of a reduction before the first step."""
        return acc.start(self.lanes) * self.vectors

    def width(self, acc: Accumulator) -> int:
        """How many values the accumulators are."""
        return acc.width * self.vectors


def make_accumulator(reduce: Reduce, value_dtype: DType, positions: int | None, in_order: bool) -> Accumulator:
    """``positions``: how many there are if known, which decides the width of running indices."""
    if not is_positional(reduce.kind):
        return Accumulator(reduce, value_dtype, None)
    narrow = positions is not None and positions < 2**31 and width(value_dtype) <= 32
    return Accumulator(reduce, value_dtype, DType.I32 if narrow else DType.I64, in_order)


def _constant(text: str, scalar: str, lanes: int) -> Ssa:
    return Ssa(text, scalar) if lanes == 1 else Ssa(f"splat ({scalar} {text})", vector_type(scalar, lanes))
