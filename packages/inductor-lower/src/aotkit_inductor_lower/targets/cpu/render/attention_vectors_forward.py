"""The forward of attention on vectors, see Note [Attention on vectors] in :mod:`.attention_on_vectors`."""

from __future__ import annotations

import functools

from ....ir import Compute, DType
from ....kernel_ir.attention_site import Lines
from ....symbolic import Expr, Symbol, floordiv, product
from .attention_blocks import FLOAT, ROWS
from .attention_on_vectors import GROUP, AttentionOnVectors
from .attention_rows import LOG2E
from .body import emit_body
from .context import Value, Vector
from .emitter import Ssa, imm
from .lanes import Lanes

__all__ = ["VectorAttentionForward"]

CHUNK = 22 * GROUP  # queries of a unit
KEYS = 512  # of a block
KEYS_OF_MASKS = 256  # the same where a mask may hide blocks whole


class VectorAttentionForward(AttentionOnVectors):
    """Writes the forward."""

    def units(self) -> tuple[Expr, int | None]:
        """Some queries of a head."""
        chunks = floordiv(self.queries + (CHUNK - 1), CHUNK)
        return product(loop.extent for loop in self.site.batch) * chunks, None

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Copies of lines, scores of some queries, and sums."""
        self.set_block(self.limit(self.keys, KEYS_OF_MASKS if self.hidden else KEYS, self.blocks.width))
        self.room = self.limit(self.queries, CHUNK, GROUP)
        sizes = self.copies(self.block, ("keys",), ("values",)) | self.copies(self.room, ("queries",), ())
        sizes |= {
            "sums": self.lines_bytes(self.room),
            "turned keys": self.turned_bytes(self.block),
            "scores": GROUP * self.stride * FLOAT,
        }
        sizes |= dict.fromkeys(("tops", "totals", "divisors", "kept"), (self.room + 16) * FLOAT)
        self.reserve(sizes | self.flags("small queries", "small keys", "no key"))

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """Some queries of a head."""
        em, ctx, site = self.em, self.ctx, self.site
        ctx.values.clear()
        chunks = ctx.scalar(floordiv(self.queries + (CHUNK - 1), CHUNK))
        first = em.mul(em.unsigned("urem", unit, chunks), imm(CHUNK))
        self.place(site.batch, em.unsigned("udiv", unit, chunks))
        count = em.minimum(em.sub(ctx.scalar(self.queries), first), imm(CHUNK))
        self.copy(0, first, count, "queries", self.room, ROWS)
        self.note("small queries", (0,), first, count)
        self._begin(count)
        end = ctx.scalar(self.keys)
        if site.causal:
            end = em.minimum(end, em.add(first, count))
        em.loop(imm(0), end, self.block, [], functools.partial(self._keys, first, count, end), "keys")
        self._write(first, count)
        return []

    def _begin(self, count: Ssa) -> None:
        """No score so far."""
        lanes = Lanes(self.em, self.target, self.blocks.lanes)
        self.clear("sums", imm(self.lines_bytes(self.room)))
        self.clear("totals", imm(self.room * FLOAT))

        def state(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            lanes.store(lanes.number(float("-inf")), self.number_at("tops", at))
            return []

        self.em.loop(imm(0), count, lanes.count, [], state, "state")

    def _keys(self, first: Ssa, count: Ssa, end: Ssa, key: Ssa, _: list[Ssa]) -> list[Ssa]:
        """A block of keys."""
        em = self.em
        keys = em.minimum(em.sub(end, key), imm(self.block))
        self.copy(1, key, keys, "keys", self.block, self.blocks.width)
        self.copy(2, key, keys, "values", self.block, 1)
        self.note("small keys", (1, 2), key, keys)
        self.blocks.turn(self.places["keys"], self.block, keys, self.places["turned keys"])
        em.loop(imm(0), count, GROUP, [], functools.partial(self._group, first, count, key, keys), "group")
        return []

    def _group(self, first: Ssa, count: Ssa, key: Ssa, keys: Ssa, at: Ssa, _: list[Ssa]) -> list[Ssa]:
        """Some queries of a block of keys."""
        em, blocks = self.em, self.blocks
        rows, query = em.minimum(em.sub(count, at), imm(GROUP)), em.add(first, at)
        seen = self.seen(keys, key, em.add(query, em.sub(rows, imm(1))))

        def some() -> None:
            left, sums = self.number_at("queries", em.mul(at, imm(blocks.left_line))), self.places["scores"]
            blocks.scores((left, self.room), self.places["turned keys"], rows, seen, (sums, self.stride))
            scores = self.scores("scores", imm(0), rows, keys, query, key, seen)
            state, totals = (self.number_at(name, at) for name in ("tops", "totals"))
            results = self.number_at("sums", em.mul(at, imm(blocks.line)))
            factor = self.scale * LOG2E
            self.rows_of.weigh(scores, self.masks(query, key), state, totals, results, factor)
            weights = sums, self.stride, 1
            blocks.add_lines(weights, self.places[self.right("values")], self.block, rows, (imm(0), seen), results)

        small = "small queries", "small keys"
        self.if_any(seen, lambda: self.unless_hidden(small, (query, rows), (key, seen), some))
        return []

    # -- results -------------------------------------------------------------------------------------------

    def _write(self, first: Ssa, count: Ssa) -> None:
        em = self.em
        em.loop(imm(0), count, self.blocks.lanes, [], self._divisors, "divisors")
        for lines, name in zip(self.site.saved, ("kept", "divisors"), strict=False):
            self._store_saved(lines, name, first, count)
        to = self.start(self.site.outputs[0], first)
        self.rows_of.write(self.places["sums"], to, count, self.places["divisors"])

    def _divisors(self, at: Ssa, _: list[Ssa]) -> list[Ssa]:
        """What sums are divided by, and the logarithms or largest scores that are kept."""
        em, ctx = self.em, self.ctx
        lanes = Lanes(em, self.target, self.blocks.lanes)
        top, total = (lanes.load(self.number_at(name, at)) for name in ("tops", "totals"))
        divisor, used = total, top
        if self.site.zero_empty:
            zero = Ssa("zeroinitializer", lanes.floats)
            empty = em.here(lanes.bits, f"fcmp oeq {total.typed}, zeroinitializer")
            divisor = lanes.select(empty, lanes.number(1.0), total)
            none = em.here(lanes.bits, f"fcmp oeq {top.typed}, {lanes.number(float('-inf')).text}")
            used = lanes.select(none, zero, top)
        lanes.store(divisor, self.number_at("divisors", at))
        if not self.site.saved:
            return []
        kept = lanes.op("fmul", used, lanes.number(self.scale))
        if len(self.site.saved) == 1:
            floor = self.go_to({}, Vector(Symbol("lane"), imm(0), lanes.count, 1))
            ctx.values["total"] = Value(DType.F32, (divisor,), varying=True)
            emit_body(ctx, [Compute("logarithm", "log", ("total",), DType.F32)])
            logarithm = ctx.part("logarithm", 0, lanes.count)
            self.go_back(floor)
            kept = lanes.add(kept, logarithm)
        lanes.store(kept, self.number_at("kept", at))
        return []

    def _store_saved(self, lines: Lines, name: str, query: Ssa, rows: Ssa) -> None:
        em = self.em
        to, step = self.start(lines, query)

        def row(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            value = em.here("float", f"load float, ptr {self.number_at(name, at).text}, align 4")
            em.effect(f"store {value.typed}, ptr {em.element('float', to, em.mul(at, step)).text}, align 4")
            return []

        em.loop(imm(0), rows, 1, [], row, "row")
