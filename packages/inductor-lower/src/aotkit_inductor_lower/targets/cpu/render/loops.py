"""One perfect nest, with the accumulators of its reductions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ....ir import DType, Instr, Reduce
from ....kernel_ir.known_conditions import moved, within
from ....kernel_ir.nodes import SERIAL, Loop
from ....kernel_ir.walk import PerfectNest
from ....symbolic import Symbol
from ..beside import blocks_of
from .body import emit_body
from .context import KernelContext, Value, Vector, ramp_literal
from .emitter import Carried, Ssa, imm
from .reductions import CHUNK, Accumulator, Block, make_accumulator

__all__ = ["NestEmitter"]


def _chunks(trips: int) -> int:
    """How many additions the upper level of a sum makes."""
    return trips if trips <= 2 * CHUNK else -(-trips // CHUNK)


class NestEmitter:
    """The loops of one perfect nest, with its accumulators. ``types`` of the kernel's values."""

    def __init__(self, nest: PerfectNest, ctx: KernelContext, types: Mapping[str, DType]) -> None:
        self.nest, self.ctx, self.types = nest, ctx, types
        self.em, self.ops = ctx.em, ctx.ops
        *outside, innermost = nest.loops
        self.vector_loop = innermost if innermost.map.kind == "lanes" else None
        self.loops = outside if self.vector_loop is not None else list(nest.loops)
        map_ = self.vector_loop.map if self.vector_loop is not None else SERIAL
        self.lanes, self.interleave = map_.width, map_.interleave
        self.accumulators = self._accumulators()

    def _accumulators(self) -> list[Accumulator]:
        total = self.nest.extent.constant
        return [
            make_accumulator(i, self.types.get(i.value, i.dtype), total, len(self.nest.loops) == 1)
            for i in self.nest.body
            if isinstance(i, Reduce)
        ]

    def emit(self) -> None:
        """All loops of the nest; afterwards the reductions' results are in ``ctx.values``."""
        blocks = self._blocks()
        levels = self._levels(blocks)
        state = [c for block in blocks for acc in self.accumulators for c in block.start(acc)]
        final = self._nest(list(self.loops), state, blocks, levels)
        self._finish(final, blocks)

    def _blocks(self) -> list[Block]:
        """The step sizes the innermost loop is run with, widest first."""
        if self.vector_loop is None:
            vector = self.ctx.vector
            return [Block(1, vector.lanes, vector.interleave) if vector is not None else Block(1, 1, 1)]
        size = self.vector_loop.extent.constant
        blocks = []
        for interleave in dict.fromkeys((self.interleave, 1)):
            step = self.lanes * interleave
            if size is None or size >= step:
                blocks.append(Block(step, self.lanes, interleave))
                size = None if size is None else size % step
        if size and self.vector_loop.map.tail == "masked":
            return [*blocks, Block(self.lanes, self.lanes, 1, size)]
        if size is None or size or not blocks:  # also for no elements: reductions need their start values
            blocks.append(Block(1, 1, 1))
        return blocks

    def _levels(self, blocks: list[Block]) -> dict[str, tuple[bool, bool]]:
        """For each loop around the innermost one whether sums begin anew in each of its iterations, and whether it is
        run in chunks which do: so that no sum is a long chain of additions, see Note [Order of a reduction]."""
        loops = list(self.loops)
        inner = self.vector_loop or (loops.pop() if loops else None)
        levels: dict[str, tuple[bool, bool]] = {}
        if inner is None or not any(acc.cascades for acc in self.accumulators):
            return levels
        chain, left = inner.extent.constant, inner.extent.constant
        if left is not None:
            most = 0
            for block in blocks:  # a tail under a mask is one step, and whole vectors come before it
                most, left = max(most, left // block.step), left % block.step
            chain = _chunks(most)
        for loop in reversed(loops):
            trips = loop.extent.constant
            if chain is not None and trips is not None and chain * trips <= 2 * CHUNK:
                chain *= trips
                continue
            levels[loop.symbol] = chain != 1, trips is None or trips > 2 * CHUNK
            chain = None if trips is None else _chunks(trips)
        return levels

    def _nest(
        self, loops: list[Loop], state: list[Carried], blocks: list[Block], levels: dict[str, tuple[bool, bool]]
    ) -> list[Ssa]:
        """Plain loops around the innermost one."""
        innermost = self.vector_loop
        if innermost is None and len(loops) == 1:
            innermost, loops = loops[0], []
        if not loops:
            assert innermost is not None
            if innermost.map.kind == "unroll":
                return self._beside(innermost, state, blocks[0])
            return self._innermost(innermost, state, blocks)
        loop, rest = loops[0], loops[1:]
        anew, chunked = levels.get(loop.symbol, (False, False))

        def body(index: Ssa, phis: list[Ssa]) -> list[Ssa]:
            floor = self._enter(loop, index)
            inner = [Carried(c.type, phi) for c, phi in zip(state, phis, strict=True)]
            starts = self._fresh(blocks, phis) if anew else inner
            following = self._nest(rest, starts, blocks, levels)
            self.ctx.hoist_depth = floor
            return self._second_level(blocks, phis, following) if anew else following

        size = self.ctx.scalar(loop.extent)
        if not chunked:
            return self.em.loop(imm(0), size, 1, state, body, "r")

        def chunk(first: Ssa, totals: list[Ssa]) -> list[Ssa]:
            last = self.em.minimum(self.em.add(first, imm(CHUNK)), size)
            partial = self.em.loop(first, last, 1, self._fresh(blocks, totals), body, "r")
            return self._second_level(blocks, totals, partial)

        return self.em.loop(imm(0), size, CHUNK, state, chunk, "chunk")

    def _enter(self, loop: Loop, index: Ssa) -> int:
        """Set the loop's variable. Gives the hoisting limit to restore afterwards."""
        self.ctx.symbols[Symbol(loop.symbol)] = index
        floor = self.ctx.hoist_depth
        if not (loop.extent.constant or 0):  # may be empty: loads stay inside
            self.ctx.hoist_depth = max(floor, self.em.depth)
        return floor

    def _innermost(self, loop: Loop, state: list[Carried], blocks: list[Block]) -> list[Ssa]:
        """The block loops one after the other over ``[0, size)``."""
        size, low = self.ctx.scalar(loop.extent), imm(0)
        results: list[Ssa] = []
        at = 0
        for block in blocks:
            count = sum(block.width(acc) for acc in self.accumulators)
            own = state[at : at + count]
            whole = block.step > 1 and not block.tail
            stop = self.em.add(low, self.em.round_down(self.em.sub(size, low), block.step)) if whole else size
            results += self._chunked(loop, low, stop, block, own)
            low, at = stop, at + count
        return results

    def _beside(self, loop: Loop, state: list[Carried], block: Block) -> list[Ssa]:
        """An innermost loop with iterations beside each other, see Note [Iterations beside each other]."""
        ctx, symbol, self.ctx.beside = self.ctx, Symbol(loop.symbol), True
        results = [c.initial for c in state]
        sizes = {Symbol(each.symbol): each.extent.constant for each in self.loops}
        outside = {symbol: (0, size - 1) for symbol, size in sizes.items() if size}
        for start, stop, width in blocks_of(loop.extent.constant or 0, loop.map.width):
            places = outside | {symbol: (start, stop - width)}
            bodies = [within(moved(self.nest.body, symbol, k), places) for k in range(width)]

            def body(index: Ssa, phis: list[Ssa], bodies: Sequence[Sequence[Instr]] = bodies) -> list[Ssa]:
                ctx.symbols[symbol] = index
                following = list(phis)
                for each in bodies:
                    emit_body(ctx, each, lambda r, v: self._take(r, v, block, following))
                return following

            state = [Carried(c.type, value) for c, value in zip(state, results, strict=True)]
            results = self.em.loop(imm(start), imm(stop), width, state, body, "r")
        ctx.beside = False
        return results

    def _chunked(self, loop: Loop, low: Ssa, stop: Ssa, block: Block, state: list[Carried]) -> list[Ssa]:
        """One block loop; long float sums in two levels, see Note [Order of a reduction]."""
        span = CHUNK * block.step
        trips = (stop.constant - low.constant) // block.step if None not in (stop.constant, low.constant) else None  # type: ignore[operator]
        long = trips is None or trips > 2 * CHUNK
        if block.step == 1 and self.vector_loop is not None:
            long = False  # a tail
        if not long or not any(acc.cascades for acc in self.accumulators):
            return self._block_loop(loop, low, stop, block, state)

        def chunk(first: Ssa, totals: list[Ssa]) -> list[Ssa]:
            last = self.em.minimum(self.em.add(first, imm(span)), stop)
            partial = self._block_loop(loop, first, last, block, self._fresh([block], totals))
            return self._second_level([block], totals, partial)

        return self.em.loop(low, stop, span, state, chunk, "chunk")

    def _fresh(self, blocks: list[Block], totals: list[Ssa]) -> list[Carried]:
        """Accumulators for a part of a reduction: of sums new ones, the others go on."""
        starts: list[Carried] = []
        for block in blocks:
            for acc in self.accumulators:
                fresh = block.start(acc)
                if not acc.cascades:
                    fresh = [Carried(c.type, totals[len(starts) + k]) for k, c in enumerate(fresh)]
                starts += fresh
        return starts

    def _second_level(self, blocks: list[Block], totals: list[Ssa], partial: list[Ssa]) -> list[Ssa]:
        """The accumulators after a part."""
        merged: list[Ssa] = []
        for block in blocks:
            for acc in self.accumulators:
                for _ in range(block.vectors):
                    here = slice(len(merged), len(merged) + acc.width)
                    merged += acc.combine(self.ops, totals[here], partial[here]) if acc.cascades else partial[here]
        return merged

    def _block_loop(self, loop: Loop, low: Ssa, stop: Ssa, block: Block, state: list[Carried]) -> list[Ssa]:
        ctx = self.ctx

        def body(index: Ssa, phis: list[Ssa]) -> list[Ssa]:
            floor = self._enter(loop, index)
            outer_vector = ctx.vector
            if self.vector_loop is not None and block.step > 1:
                tail = [int(lane < block.tail) for lane in range(block.lanes)]
                mask = ramp_literal(tail, "i1") if block.tail else None
                ctx.vector = Vector(Symbol(loop.symbol), index, block.lanes, block.vectors, None, mask)
            following = list(phis)
            emit_body(ctx, self.nest.body, lambda r, v: self._take(r, v, block, following))
            ctx.vector, ctx.hoist_depth = outer_vector, floor
            return following

        return self.em.loop(low, stop, block.step, state, body, "r")

    def _take(self, reduce: Reduce, value: Value, block: Block, state: list[Ssa]) -> Value | None:
        """Update the accumulators of one reduction in ``state``; the value so far of a running one."""
        at = 0
        for acc in self.accumulators:
            if acc.reduce.result == reduce.result:
                break
            at += block.width(acc)
        position = None
        if acc.position is not None and reduce.position is not None:
            position = self.ctx.index_value(reduce.position, acc.position)
        for copy in range(block.vectors):
            part = value.parts[copy] if value.varying else self.em.splat(value.parts[0], block.lanes)
            where = None
            if position is not None:
                where = position.parts[copy] if position.varying else self.em.splat(position.parts[0], block.lanes)
            if block.tail and self.ctx.vector is not None and self.ctx.vector.tail is not None:
                part = self.ops.select(
                    self.ctx.vector.tail, part, Ssa(acc.start(block.lanes)[0].initial.text, part.type)
                )
            here = slice(at + copy * acc.width, at + (copy + 1) * acc.width)
            state[here] = acc.step(self.ops, state[here], part, where)
        if not reduce.running:
            return None
        return Value(reduce.dtype, tuple(state[at : at + block.vectors]), varying=self.ctx.vector is not None)

    def _finish(self, final: list[Ssa], blocks: list[Block]) -> None:
        """Combine interleaved vectors, lanes and blocks into the results."""
        for acc in self.accumulators:
            if acc.reduce.running:
                continue
            partials: list[list[Ssa]] = []
            at = 0
            for block in blocks:
                for other in self.accumulators:
                    count = block.width(other)
                    if other is acc:
                        partials.append(final[at : at + count])
                    at += count
            self.ctx.values[acc.reduce.result] = self._join(acc, partials, blocks)

    def _join(self, acc: Accumulator, partials: list[list[Ssa]], blocks: list[Block]) -> Value:
        if self.ctx.vector is not None:  # lanes are outer iterations: nothing to combine
            states = [partials[0][k : k + acc.width] for k in range(0, len(partials[0]), acc.width)]
            return Value(acc.reduce.dtype, tuple(acc.result(self.ops, s) for s in states), varying=True)
        total: list[Ssa] | None = None
        vectors: list[list[Ssa]] = []
        scalars: list[list[Ssa]] = []
        for block, own in zip(blocks, partials, strict=True):
            states = [own[k : k + acc.width] for k in range(0, len(own), acc.width)]
            (vectors if block.lanes > 1 else scalars).extend(states)
        while len(vectors) > 1:
            pairs = zip(vectors[::2], vectors[1::2], strict=False)
            rest = vectors[-1:] if len(vectors) % 2 else []
            vectors = [acc.combine(self.ops, a, b) for a, b in pairs] + rest
        for state in [acc.across_lanes(self.ops, v) for v in vectors] + scalars:
            total = state if total is None else acc.combine(self.ops, total, state)
        assert total is not None
        return Value(acc.reduce.dtype, (acc.result(self.ops, total),))
