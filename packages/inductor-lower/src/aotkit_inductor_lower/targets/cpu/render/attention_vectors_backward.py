"""The backward of attention on vectors, see Note [Attention on vectors] in :mod:`.attention_on_vectors`."""

from __future__ import annotations

import functools
from collections.abc import Callable

from ....kernel_ir.attention_site import Lines
from ....symbolic import Expr, product
from .attention_blocks import FLOAT, ROWS
from .attention_on_vectors import GROUP, AttentionOnVectors
from .attention_writer import ALIGNED
from .emitter import Ssa, imm

__all__ = ["VectorAttentionBackward"]

KEYS = 384  # of a block: a multiple of the width of panels, and of the lines of a product
KEYS_OF_MASKS = 192  # the same where a mask may hide blocks whole
QUERIES = 4 * GROUP  # of a block


class VectorAttentionBackward(AttentionOnVectors):
    """Writes the backward."""

    def units(self) -> tuple[Expr, int | None]:
        """A head of keys."""
        return product(loop.extent for loop in self.site.batch), None

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Copies of lines, weights and gradients of scores of a block, and sums of all lines of a head."""
        em = self.em
        block = KEYS_OF_MASKS if self.hidden else KEYS
        self.set_block(self.limit(self.keys, block, 3 * self.blocks.width))
        self.room = self.limit(self.queries, QUERIES, GROUP)
        sizes = self.copies(self.block, ("keys", "values"), ("keys",))
        sizes |= dict.fromkeys(("turned keys", "turned values"), self.turned_bytes(self.block))
        sizes |= self.copies(self.room, ("queries", "gradients"), ("queries", "gradients"))
        sizes |= dict.fromkeys(("weights", "changes"), self.room * self.stride * FLOAT)
        if self.blocks.group == 2:
            pairs = ("pairs of weights", "pairs of changes")
            sizes |= dict.fromkeys(pairs, self.room // 2 * self.stride * FLOAT)
        self.reserve(sizes | self.flags("small queries", "small keys", "no key"))
        self.sizes: dict[str, Ssa] = {}
        for name, count in (("of queries", self.queries), ("of keys", self.keys), ("of values", self.keys)):
            heads = self.site.shared if name == "of queries" else 1
            lines = em.mul(self.round_up(self.ctx.scalar(count), ROWS), imm(heads))
            size = self.sizes[name] = em.mul(lines, imm(self.blocks.line * FLOAT))
            known = size.constant
            memory = self.memory(em.add(size, imm(ALIGNED))) if known is None else None
            self.places[name] = em.aligned(memory, ALIGNED) if memory is not None else self.large_memory(known or 0)

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """A head."""
        self.ctx.values.clear()
        self.place(self.site.batch, unit)
        for name, size in self.sizes.items():
            self.clear(name, size)
        self.em.loop(imm(0), self.ctx.scalar(self.keys), self.block, [], self._keys, "keys")
        self._write()
        return []

    def _of_heads(self, write: Callable[[], None]) -> None:
        """For each of the heads that share keys."""

        def head(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            self.shared = at
            write()
            return []

        self.em.loop(imm(0), imm(self.site.shared), 1, [], head, "head")
        self.shared = imm(0)

    def _keys(self, key: Ssa, _: list[Ssa]) -> list[Ssa]:
        """A block of keys."""
        em = self.em
        keys = em.minimum(em.sub(self.ctx.scalar(self.keys), key), imm(self.block))
        for which, name in ((1, "keys"), (2, "values")):
            self.copy(which, key, keys, name, self.block, self.blocks.width)
            self.blocks.turn(self.places[name], self.block, keys, self.places[f"turned {name}"])
        self.note("small keys", (1, 2), key, keys)
        begin = em.round_down(key, QUERIES) if self.skips else imm(0)
        block = functools.partial(self._block, key, keys)

        def head() -> None:
            em.loop(begin, self.ctx.scalar(self.queries), self.room, [], block, "queries")

        self._of_heads(head)
        return []

    def _block(self, key: Ssa, keys: Ssa, query: Ssa, _: list[Ssa]) -> list[Ssa]:
        """A block of keys by one of queries."""
        em = self.em
        count = em.minimum(em.sub(self.ctx.scalar(self.queries), query), imm(self.room))

        def some() -> None:
            for which, name in ((0, "queries"), (3, "gradients")):
                self.copy(which, query, count, name, self.room, ROWS)
            em.loop(imm(0), count, GROUP, [], functools.partial(self._group, key, keys, query, count), "group")
            seen = self.seen(keys, key, em.sub(em.add(query, count), imm(1)))
            lines = functools.partial(self._sum_over_queries, key, query, count)
            em.loop(imm(0), seen, ROWS, [], lines, "lines")

        note = functools.partial(self.note, "small queries", (0, 3, 4), query, count)
        self.unless_hidden(("small queries", "small keys"), (query, count), (key, keys), some, note)
        return []

    def _group(self, key: Ssa, keys: Ssa, query: Ssa, count: Ssa, at: Ssa, _: list[Ssa]) -> list[Ssa]:
        """Some queries of a block: weights, gradients of scores, and what they add to those of queries."""
        em, blocks, site = self.em, self.blocks, self.site
        rows, first = em.minimum(em.sub(count, at), imm(GROUP)), em.add(query, at)
        seen = self.seen(keys, key, em.add(first, em.sub(rows, imm(1))))
        place, line = em.mul(at, imm(self.stride)), em.mul(at, imm(blocks.left_line))

        def some() -> None:
            for left, right, to in (("queries", "turned keys", "weights"), ("gradients", "turned values", "changes")):
                lines, sums = self.number_at(left, line), self.number_at(to, place)
                blocks.scores((lines, self.room), self.places[right], rows, seen, (sums, self.stride))
            filled = em.add(seen, imm(ROWS))  # whole sixes of keys are read, and pairs of them
            scores = self.scores("weights", place, rows, keys, first, key, filled)
            changes = self.number_at("changes", place)
            lines_of = self.start(site.inputs[4], first), self.start(site.inputs[3], first)
            saved = [self.start(lines, first) for lines in site.saved]
            stored = self.start(site.outputs[3], first, key) if len(site.outputs) == 4 else None
            numbers = self.scale, site.slope
            self.rows_of.change(scores, self.masks(first, key), changes, lines_of, saved, numbers, stored)
            of_queries = self.number_at("of queries", em.mul(self._line_of(first), imm(blocks.line)))
            factor = changes, self.stride, 1
            blocks.add_lines(factor, self.places[self.right("keys")], self.block, rows, (imm(0), seen), of_queries)
            if blocks.group == 2:
                half = em.mul(em.unsigned("udiv", at, imm(2)), imm(self.stride))
                for name in ("weights", "changes"):
                    pairs = self.number_at(self.right(name), half)
                    blocks.pair_rows(self.number_at(name, place), self.stride, rows, filled, pairs)

        self.if_any(seen, some)
        return []

    def _line_of(self, query: Ssa) -> Ssa:
        """The number of a query among those of all heads that share keys."""
        em = self.em
        return em.add(em.mul(self.shared, self.round_up(self.ctx.scalar(self.queries), ROWS)), query)

    def _sum_over_queries(self, key: Ssa, query: Ssa, count: Ssa, at: Ssa, _: list[Ssa]) -> list[Ssa]:
        """Gradients of six keys, and of their values, by a block of queries."""
        em, blocks = self.em, self.blocks
        begin = em.maximum(em.sub(em.add(key, at), query), imm(0)) if self.skips else imm(0)
        line = em.mul(em.add(key, at), imm(blocks.line))
        for name, right, to in (("weights", "gradients", "of values"), ("changes", "queries", "of keys")):
            factor = self.number_at(self.right(name), at), 1, self.stride
            sums = self.number_at(to, line)
            blocks.add_lines(factor, self.places[self.right(right)], self.room, imm(ROWS), (begin, count), sums)
        return []

    def _write(self) -> None:
        """The gradients."""
        for which, (name, count) in enumerate(
            (("of queries", self.queries), ("of keys", self.keys), ("of values", self.keys))
        ):
            write = functools.partial(self._write_lines, name, self.site.outputs[which], self.ctx.scalar(count))
            if which == 0:
                self._of_heads(write)
            else:
                write()

    def _write_lines(self, name: str, lines: Lines, count: Ssa) -> None:
        line = self._line_of(imm(0)) if name == "of queries" else imm(0)
        sums = self.number_at(name, self.em.mul(line, imm(self.blocks.line)))
        self.rows_of.write(sums, self.start(lines, imm(0)), count, None)
