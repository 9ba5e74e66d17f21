"""The backward of attention, see Note [Attention in tile registers] in :mod:`.attention`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ....kernel_ir.attention_site import Lines
from ....symbolic import Expr, product
from ..tile_forms import PANEL
from .attention import ALIGNED, ROWS_BYTES, AttentionEmitter
from .attention_tiles import BLOCK_BYTES, Changes
from .attention_vectors import FLOATS
from .emitter import Ssa, imm

__all__ = ["AttentionBackward"]

Body = Callable[[Ssa, list[Ssa]], list[Ssa]]
KEYS = 1024  # that are packed at once
QUERIES = 128  # of a block


class AttentionBackward(AttentionEmitter):
    """Writes the backward."""

    def units(self) -> tuple[Expr, int | None]:
        """A head."""
        return product(loop.extent for loop in self.site.batch), None

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Packed operands, weights and gradients of scores of a block, and sums of all lines of a head."""
        em, step, pieces = self.em, self.step_bytes, self.form.pieces
        self.divided = len(self.site.saved) == 2
        self.kept_bytes = ROWS_BYTES // 2 * (3 if self.divided else 2)
        self.block = self.limit(self.keys, KEYS // (1 if pieces == 1 else 2), PANEL)
        self.rows = self.limit(self.queries, QUERIES, PANEL)
        keys, rows = self.block // PANEL, self.rows // PANEL
        self.line_bytes, self.key_bytes, self.row_bytes = self.depth * step, keys * step, rows * step
        sizes = dict.fromkeys(("keys", "values"), keys * self.line_bytes) | {"turned keys": self.depth * self.key_bytes}
        sizes |= dict.fromkeys(("queries", "gradients"), rows * self.line_bytes)
        sizes |= dict.fromkeys(("turned queries", "turned gradients"), self.depth * self.row_bytes)
        sizes |= dict.fromkeys(("weights", "changes"), keys * self.row_bytes) | {"left changes": self.key_bytes}
        sizes |= dict.fromkeys(("scores", "slopes"), 2 * BLOCK_BYTES) | {"rows": rows * self.kept_bytes}
        sizes |= self.note_stats(max(keys, rows))
        self.reserve(sizes)
        counts = {"of queries": self.queries, "of keys": self.keys, "of values": self.keys}
        for name, count in counts.items():
            heads = self.site.shared if name == "of queries" else 1
            lines = em.mul(self.panels(self.ctx.scalar(count)), imm(heads * self.depth * BLOCK_BYTES))
            known = lines.constant
            memory = self.memory(em.add(lines, imm(ALIGNED))) if known is None else None
            self.places[name] = em.aligned(memory, ALIGNED) if memory is not None else self.large_memory(known or 0)

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """A head."""
        em, ctx = self.em, self.ctx
        ctx.values.clear()
        self.place(self.site.batch, unit)
        self.clear_stats()
        if len(self.site.outputs) == 4 and self.checked:
            # Gradients of scores are written as they are made, maybe over a mask: what is wrong must be known before.
            em.loop(imm(0), ctx.scalar(self.keys), self.block, [], self._look, "keys")
            self.unless_wrong(self._compute, self.run)
            return []
        self._sum()
        self.unless_wrong(self._write, self.run)
        return []

    def _compute(self) -> None:
        self._sum()
        self._write()

    def _look(self, key: Ssa, _: list[Ssa]) -> list[Ssa]:
        """Note the largest numbers of a block of keys and values, and of all queries and gradients."""
        em = self.em
        count = em.minimum(em.sub(self.ctx.scalar(self.keys), key), imm(self.block))
        self.pack(1, key, count, "keys", self.line_bytes, right=True, along=True)
        self.pack(2, key, count, "values", self.line_bytes, right=True, along=True)
        starts = self.bit(f"eq i64 {key.text}, 0", key)

        def queries(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            rows = em.minimum(em.sub(self.ctx.scalar(self.queries), at), imm(self.rows))
            for which, name in ((0, "queries"), (3, "gradients")):
                self.pack(which, at, rows, name, self.line_bytes, right=False, along=True)
            return []

        def head() -> None:
            em.loop(imm(0), self.ctx.scalar(self.queries), self.rows, [], queries, "queries")

        em.choose(starts, None, lambda: self._of_heads(head), lambda: None)
        return []

    def _of_heads(self, write: Callable[[], None]) -> None:
        """For each of the heads that share keys."""

        def head(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self.shared = at
            write()
            return []

        self.em.loop(imm(0), imm(self.site.shared), 1, [], head, "head")
        self.shared = imm(0)

    def _sum(self) -> None:
        """All sums of a head."""
        if self.skips:
            self._clear("of keys", self.keys)
            self._clear("of values", self.keys)
        self.em.loop(imm(0), self.ctx.scalar(self.keys), self.block, [], self._keys, "keys")

    def _clear(self, name: str, lines: Expr) -> None:
        """Zeros to begin with: not every block of queries sees a key."""
        em = self.em

        def line(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            em.effect(f"store {FLOATS} zeroinitializer, ptr {self.at(name, at).text}, align 64")
            return []

        size = em.mul(self.panels(self.ctx.scalar(lines)), imm(self.depth * BLOCK_BYTES))
        em.loop(imm(0), size, 64, [], line, "line")

    def _keys(self, key: Ssa, _: list[Ssa]) -> list[Ssa]:
        """A block of keys."""
        em = self.em
        count = em.minimum(em.sub(self.ctx.scalar(self.keys), key), imm(self.block))
        self.pack(1, key, count, "keys", self.line_bytes, right=True, along=True)
        self.pack(2, key, count, "values", self.line_bytes, right=True, along=True)
        self.pack(1, key, count, "turned keys", self.key_bytes, right=True, along=False)
        begin = imm(0)
        if self.skips:
            begin = em.mul(em.unsigned("udiv", key, imm(self.rows)), imm(self.rows))
        block = functools.partial(self._block, key, self.panels(count))

        def head() -> None:
            em.loop(begin, self.ctx.scalar(self.queries), self.rows, [], block, "queries")

        self._of_heads(head)
        return []

    def _block(self, key: Ssa, panels: Ssa, query: Ssa, _: list[Ssa]) -> list[Ssa]:
        """A block of keys by one of queries."""
        em = self.em
        count = em.minimum(em.sub(self.ctx.scalar(self.queries), query), imm(self.rows))
        rows = self.panels(count)
        for which, plain, turned in ((0, "queries", "turned queries"), (3, "gradients", "turned gradients")):
            self.pack(which, query, count, plain, self.line_bytes, right=False, along=True)
            self.pack(which, query, count, turned, self.row_bytes, right=False, along=False)
        em.loop(imm(0), rows, 1, [], functools.partial(self._rows, key, panels, query), "rows")
        last = em.add(query, em.mul(em.sub(rows, imm(1)), imm(PANEL)))
        seen = self.below(panels, key, last)
        em.loop(imm(0), seen, 1, [], functools.partial(self._sum_over_queries, key, query, rows), "block")
        return []

    def _rows(self, key: Ssa, panels: Ssa, query: Ssa, panel: Ssa, _: list[Ssa]) -> list[Ssa]:
        """A block of keys by 32 queries."""
        em, site = self.em, self.site
        first = em.add(query, em.mul(panel, imm(PANEL)))
        count = em.minimum(em.sub(self.ctx.scalar(self.queries), first), imm(PANEL))
        kept = self.at("rows", em.mul(panel, imm(self.kept_bytes)))
        gradient, result = (self.start(site.inputs[which], first) for which in (3, 4))
        saved = [self.start(lines, first) for lines in site.saved]
        self.tiles.look_at_rows(result, gradient, saved, count, kept, self._how(first, key))
        seen = self.below(panels, key, first)

        def blocks(at: Ssa) -> tuple[Ssa, Ssa]:
            """Where the scores and slopes of a block go: two blocks take turns."""
            turn = em.mul(em.unsigned("urem", at, imm(2)), imm(BLOCK_BYTES))
            return self.at("scores", turn), self.at("slopes", turn)

        def products(at: Ssa) -> None:
            own, line = em.mul(at, imm(self.line_bytes)), em.mul(panel, imm(self.line_bytes))
            scores, slopes = blocks(at)
            for left, right, to in (("queries", "keys", scores), ("gradients", "values", slopes)):
                self.multiply(self.at(left, line), self.at(right, own), to, imm(self.depth), imm(1, "i1"))
            self.finish_scores(scores, first, em.add(key, em.mul(at, imm(PANEL))), hides=True)

        def block(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            following = em.add(at, imm(1))
            more = self.bit(f"slt i64 {following.text}, {seen.text}", following, seen)
            em.choose(more, None, lambda: products(following), lambda: None)  # while vectors work on this block
            place = em.add(em.mul(at, imm(self.row_bytes)), em.mul(panel, imm(self.step_bytes)))
            changes = self.at("changes", place), self.at("left changes", em.mul(at, imm(self.step_bytes)))
            how = self._how(first, em.add(key, em.mul(at, imm(PANEL))))
            self.tiles.gradients(*blocks(at), kept, self.at("weights", place), changes, how)
            return []

        em.choose(self.bit(f"sgt i64 {seen.text}, 0", seen), None, lambda: products(imm(0)), lambda: None)
        em.loop(imm(0), seen, 1, [], block, "block")
        starts = self.bit(f"eq i64 {key.text}, 0", key)
        number_ = em.mul(self._panel_of_queries(first), imm(self.depth))

        def multiply() -> None:
            for part in range(self.depth):
                to = self.at("of queries", em.mul(em.add(number_, imm(part)), imm(BLOCK_BYTES)))
                right = self.at("turned keys", imm(part * self.key_bytes))
                self.multiply(self.places["left changes"], right, to, seen, starts)

        if self.skips:
            em.choose(self.bit(f"sgt i64 {seen.text}, 0", seen), None, multiply, lambda: None)
        else:
            multiply()
        return []

    def _panel_of_queries(self, first: Ssa) -> Ssa:
        """The number of a panel among those of all heads that share keys."""
        em = self.em
        before = em.mul(self.shared, self.panels(self.ctx.scalar(self.queries)))
        return em.add(em.unsigned("udiv", first, imm(PANEL)), before)

    def _how(self, query: Ssa, key: Ssa) -> Changes:
        """How gradients of scores are made from a query and a key on."""
        em, site = self.em, self.site
        stored = self.start(site.outputs[3], query, key) if len(site.outputs) == 4 else None
        mask = site.mask
        hiding = mask.read[1] if mask is not None and mask.replaces else None
        seen = self.start(hiding, query, key) if hiding is not None else None
        dropped = self.dropped(query, key)
        there = (em.sub(self.ctx.scalar(self.queries), query), em.sub(self.ctx.scalar(self.keys), key))
        return Changes(self.scale, site.slope, self.divided, dropped, stored, seen, *there)

    def _sum_over_queries(self, key: Ssa, query: Ssa, rows: Ssa, at: Ssa, _: list[Ssa]) -> list[Ssa]:
        """Gradients of 32 keys, and of their values, by a block of queries."""
        em = self.em
        begin, starts = imm(0), self.bit(f"eq i64 {query.text}, 0", query)
        if self.site.shared > 1:
            head = self.bit(f"eq i64 {self.shared.text}, 0", self.shared)
            starts = em.pure("i1", f"and i1 {starts.text}, {head.text}", starts, head)
        first = em.add(key, em.mul(at, imm(PANEL)))
        if self.skips:
            begin = em.maximum(em.pure("i64", f"ashr i64 {em.sub(first, query).text}, 5", first, query), imm(0))
            starts = imm(0, "i1")
        skipped, steps = em.mul(begin, imm(self.step_bytes)), em.sub(rows, begin)
        number_ = em.mul(em.unsigned("udiv", first, imm(PANEL)), imm(self.depth))
        inside = em.add(em.mul(at, imm(self.row_bytes)), skipped)
        for left, right, to in (("turned gradients", "weights", "of values"), ("turned queries", "changes", "of keys")):
            for part in range(self.depth):
                sums = self.at(to, em.mul(em.add(number_, imm(part)), imm(BLOCK_BYTES)))
                lines = self.at(left, em.add(skipped, imm(part * self.row_bytes)))
                self.multiply(lines, self.at(right, inside), sums, steps, starts)
        return []

    def _write(self) -> None:
        """The gradients."""
        for which, (name, count) in enumerate(
            (("of queries", self.queries), ("of keys", self.keys), ("of values", self.keys))
        ):
            many = self.ctx.scalar(count)
            panel = functools.partial(self._write_panel, name, self.site.outputs[which], many)

            def head(many: Ssa = many, panel: Body = panel) -> None:
                self.em.loop(imm(0), self.panels(many), 1, [], panel, "panel")

            if which == 0:
                self._of_heads(head)
            else:
                head()

    def _write_panel(self, name: str, lines: Lines, many: Ssa, at: Ssa, _: Sequence[Ssa]) -> list[Ssa]:
        em = self.em
        first = em.mul(at, imm(PANEL))
        count = em.minimum(em.sub(many, first), imm(PANEL))
        to, step = self.start(lines, first)
        if name == "of queries":
            at = self._panel_of_queries(first)
        sums = self.at(name, em.mul(at, imm(self.depth * BLOCK_BYTES)))
        if name == "of queries":
            self.tiles.write_rows(sums, to, step, count, None)
        else:
            self.tiles.write_columns(sums, to, step, count)
        return []
