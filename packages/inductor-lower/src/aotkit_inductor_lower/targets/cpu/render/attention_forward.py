"""The forward of attention, see Note [Attention in tile registers] in :mod:`.attention`."""

from __future__ import annotations

import functools

from ....ir import Compute, DType
from ....kernel_ir.attention_site import Lines
from ....symbolic import Expr, Symbol, floordiv, product
from ..tile_forms import PANEL
from .amx_pack import GROUP
from .attention import ROWS_BYTES, AttentionEmitter
from .attention_tiles import BLOCK_BYTES, LOG2E
from .attention_vectors import FLOATS, number
from .body import emit_body
from .context import Value, Vector
from .emitter import Ssa, imm

__all__ = ["AttentionForward"]

CHUNK = 512  # queries of a unit
KEYS = 512  # that are packed at once


class AttentionForward(AttentionEmitter):
    """Writes the forward."""

    def units(self) -> tuple[Expr, int | None]:
        """Some queries of a head."""
        chunks = floordiv(self.queries + (CHUNK - 1), CHUNK)
        return product(loop.extent for loop in self.site.batch) * chunks, None

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Packed operands, scores and weights of 32 queries, and sums."""
        step, self.block = self.step_bytes, self.limit(self.keys, KEYS, PANEL)
        keys, queries = self.block // PANEL, self.limit(self.queries, CHUNK, PANEL) // PANEL
        self.query_bytes, self.value_bytes = self.depth * step, keys * step
        sizes = {"keys": keys * self.query_bytes, "values": self.depth * self.value_bytes}
        sizes |= {"scores": keys * BLOCK_BYTES, "weights": self.value_bytes, "divisors": 2 * 4 * PANEL}
        sizes |= {"queries": queries * self.query_bytes, "sums": queries * self.depth * BLOCK_BYTES}
        sizes |= {"state": queries * ROWS_BYTES}
        self.reserve(sizes | self.note_stats(max(keys, queries)))

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """Some queries of a head."""
        em, ctx, site = self.em, self.ctx, self.site
        ctx.values.clear()
        chunks = ctx.scalar(floordiv(self.queries + (CHUNK - 1), CHUNK))
        first = em.mul(em.unsigned("urem", unit, chunks), imm(CHUNK))
        self.place(site.batch, em.unsigned("udiv", unit, chunks))
        count = em.minimum(em.sub(ctx.scalar(self.queries), first), imm(CHUNK))
        self.clear_stats()
        self.pack(0, first, count, "queries", self.query_bytes, right=False, along=True)
        em.loop(imm(0), self.panels(count), 1, [], self._begin, "rows")
        end = ctx.scalar(self.keys)
        if site.causal:
            end = em.minimum(end, em.add(first, count))
        em.loop(imm(0), end, self.block, [], functools.partial(self._keys, first, count, end), "keys")
        self.unless_wrong(lambda: self._write(first, count), lambda function: self._again(function, first, count))
        return []

    def _begin(self, panel: Ssa, _: list[Ssa]) -> list[Ssa]:
        """No score so far."""
        own = self.at("state", self.em.mul(panel, imm(ROWS_BYTES)))
        for k in range(2 * PANEL // GROUP):
            value = number(float("-inf") if k < PANEL // GROUP else 0.0)
            place = self.em.element("float", own, imm(GROUP * k))
            self.em.effect(f"store {FLOATS} splat (float {value}), ptr {place.text}, align 64")
        return []

    def _keys(self, first: Ssa, count: Ssa, end: Ssa, key: Ssa, _: list[Ssa]) -> list[Ssa]:
        """A block of keys."""
        em = self.em
        keys = em.minimum(em.sub(end, key), imm(self.block))
        self.pack(1, key, keys, "keys", self.query_bytes, right=True, along=True)
        self.pack(2, key, keys, "values", self.value_bytes, right=True, along=False)
        rows = functools.partial(self._rows, first, key, self.panels(keys))
        em.loop(imm(0), self.panels(count), 1, [], rows, "rows")
        return []

    def _rows(self, first: Ssa, key: Ssa, panels: Ssa, panel: Ssa, _: list[Ssa]) -> list[Ssa]:
        """32 queries of a block of keys."""
        em = self.em
        query = em.add(first, em.mul(panel, imm(PANEL)))
        seen = self.below(panels, key, query)
        starts = self.bit(f"eq i64 {key.text}, 0", key)
        left = self.at("queries", em.mul(panel, imm(self.query_bytes)))

        def block(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            right = self.at("keys", em.mul(at, imm(self.query_bytes)))
            scores = self.at("scores", em.mul(at, imm(BLOCK_BYTES)))
            self.multiply(left, right, scores, imm(self.depth), imm(1, "i1"))
            self.finish_scores(scores, query, em.add(key, em.mul(at, imm(PANEL))), hides=True)
            return []

        def some() -> None:
            em.loop(imm(0), seen, 1, [], block, "block")
            state = self.at("state", em.mul(panel, imm(ROWS_BYTES)))
            sums = self.at("sums", em.mul(panel, imm(self.depth * BLOCK_BYTES)))
            blocks = self.places["scores"], self.places["weights"], state, sums
            self.tiles.weigh(blocks, seen, starts, self.scale * LOG2E, self.dropped(query, key))
            for part in range(self.depth):
                own = em.element("i8", sums, imm(part * BLOCK_BYTES))
                values = self.at("values", imm(part * self.value_bytes))
                self.multiply(self.places["weights"], values, own, seen, starts)

        if self.site.causal:
            em.choose(self.bit(f"sgt i64 {seen.text}, 0", seen), None, some, lambda: None)
        else:
            some()
        return []

    # -- results -------------------------------------------------------------------------------------------

    def _write(self, first: Ssa, count: Ssa) -> None:
        em = self.em

        def panel(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            query = em.add(first, em.mul(at, imm(PANEL)))
            rows = em.minimum(em.sub(count, em.mul(at, imm(PANEL))), imm(PANEL))
            for half in range(PANEL // GROUP):
                self._divisors(at, half)
            for lines, slot in zip(self.site.saved, (PANEL, 0), strict=False):
                self._store_saved(lines, slot, query, rows)
            to, step = self.start(self.site.outputs[0], query)
            sums = self.at("sums", em.mul(at, imm(self.depth * BLOCK_BYTES)))
            self.tiles.write_rows(sums, to, step, rows, self.places["divisors"])
            return []

        em.loop(imm(0), self.panels(count), 1, [], panel, "rows")

    def _divisors(self, panel: Ssa, half: int) -> None:
        """What sums are divided by, and the logarithms that are kept, of 16 queries."""
        em, ctx = self.em, self.ctx
        state = self.at("state", em.mul(panel, imm(ROWS_BYTES)))
        top, total = (self._vector(state, PANEL * k + GROUP * half) for k in range(2))
        zero, one = (f"splat (float {number(x)})" for x in (0.0, 1.0))
        divisor = total
        if self.site.zero_empty:
            empty = em.here("<16 x i1>", f"fcmp oeq {total.typed}, {zero}")
            divisor = em.here(FLOATS, f"select {empty.typed}, {FLOATS} {one}, {total.typed}")
        self._keep(divisor, GROUP * half)
        if not self.site.saved:
            return
        used = top
        if self.site.zero_empty:
            none = em.here("<16 x i1>", f"fcmp oeq {top.typed}, splat (float {number(float('-inf'))})")
            used = em.here(FLOATS, f"select {none.typed}, {FLOATS} {zero}, {top.typed}")
        scaled = em.here(FLOATS, f"fmul {used.typed}, splat (float {number(self.scale)})")
        if len(self.site.saved) == 2:
            self._keep(scaled, PANEL + GROUP * half)
            return
        floor = self.go_to({}, Vector(Symbol("lane"), imm(0), GROUP, 1))
        ctx.values["total"] = Value(DType.F32, (divisor,), varying=True)
        emit_body(ctx, [Compute("logarithm", "log", ("total",), DType.F32)])
        logarithm = ctx.part("logarithm", 0, GROUP)
        self.go_back(floor)
        self._keep(em.here(FLOATS, f"fadd {scaled.typed}, {logarithm.text}"), PANEL + GROUP * half)

    def _vector(self, base: Ssa, position: int) -> Ssa:
        place = self.em.element("float", base, imm(position))
        return self.em.here(FLOATS, f"load {FLOATS}, ptr {place.text}, align 64")

    def _keep(self, value: Ssa, position: int) -> None:
        place = self.em.element("float", self.places["divisors"], imm(position))
        self.em.effect(f"store {value.typed}, ptr {place.text}, align 64")

    def _store_saved(self, lines: Lines, slot: int, query: Ssa, rows: Ssa) -> None:
        em = self.em
        to, step = self.start(lines, query)

        def row(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            kept = em.element("float", self.places["divisors"], em.add(at, imm(slot)))
            value = em.here("float", f"load float, ptr {kept.text}, align 4")
            em.effect(f"store {value.typed}, ptr {em.element('float', to, em.mul(at, step)).text}, align 4")
            return []

        em.loop(imm(0), rows, 1, [], row, "row")

    def _again(self, function: Ssa, first: Ssa, count: Ssa) -> None:
        queries = self.site.queries
        assert queries is not None

        def query(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self.ctx.symbols[Symbol(queries.symbol)] = at
            self.run(function)
            return []

        self.em.loop(first, self.em.add(first, count), 1, [], query, "query")
