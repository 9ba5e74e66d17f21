"""Attention as one LLVM function that uses the tile registers of AMX.

Note [Attention in tile registers]
    What Note [Attention as a nest] says is computed block by block: 32 queries by as many keys as are packed at once,
    so that scores stay in the caches. Products are those of Note [Products in tile registers], from packed factors;
    what is between them is Note [Tiles of scores].

    The forward takes a few hundred queries of a head as a unit of work. For each block of keys, keys and values are
    packed, and then for 32 queries after another: scores, weights relative to the largest score so far, and sums of
    weighted values, which are scaled down where a larger score is found (Milakov and Gimelshein, Online normalizer
    calculation for softmax, 2018; Dao et al., FlashAttention, 2022).

    The backward takes a head. Weights are computed again, relative to the saved logarithm. For each block of keys, and
    of 128 queries, weights and gradients of scores are made once, packed for all that they are multiplied by: gradients
    of queries are summed over the keys, those of keys and values, turned over, over the queries.

    With a causal mask blocks that no query sees are not computed. All results are written at the end of a unit, when
    nothing is read any more. No sum depends on how units are shared out: results are the same on one thread and
    on many.

Note [Attention of numbers that tiles get wrong]
    Of float32 in pieces, see Note [What tiles get wrong], the largest number of each operand is noted while it is
    packed. Where one is so large that a sum could overflow between the pieces (or is not finite), or the largest so
    small that pieces of it are lost, the unit is computed by the kernel as it is written, loop by loop: slow, but
    right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from ....ir import Compute, DType
from ....kernel_ir.attention_site import AttentionSite, Lines
from ....kernel_ir.launches import KernelText
from ....kernel_ir.nodes import Kernel
from ....symbolic import Expr, Symbol, floordiv, product
from ..machine import Machine
from ..map_loops import map_rows
from ..tile_forms import DEPTH, FORMS, PANEL
from .amx_check import TileCheck
from .amx_pack import GROUP, STATS_BYTES, Packing
from .amx_pack_plain import pack_function
from .amx_tiles import configure, micro_function, release
from .attention_tiles import BLOCK_BYTES, FLOATS, LOG2E, AttentionTiles, number
from .body import emit_body
from .context import Value, Vector
from .emitter import Ssa, imm
from .kernel import KernelEmitter
from .types import memory_type

__all__ = ["AttentionBackward", "AttentionEmitter", "AttentionForward"]

CHUNK = 512  # queries of a unit of the forward
KEYS_FORWARD, KEYS_BACKWARD = 512, 1024  # keys that are packed at once
QUERIES = 128  # of a block of the backward
ROWS_BYTES = 2 * 4 * PANEL  # of what is kept of 32 queries: two numbers each
ALIGNED = 64


class AttentionEmitter(KernelEmitter):
    """Writes a kernel that :func:`~....kernel_ir.attention_site.attention_site` knows."""

    def __init__(self, kernel: Kernel, site: AttentionSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, target, declarations)
        self.site, self.target = site, target
        self.form = FORMS["bf16" if site.dtype is DType.BF16 else site.precision]
        self.tiles = AttentionTiles(self.em, self.form, site.dtype, site.head)
        self.depth = -(-site.head // DEPTH)  # steps, and panels of a head
        self.step_bytes = self.form.step_bytes
        self.checked = site.dtype is DType.F32 and self.form.pieces > 1
        self.queries, self.keys = site.counts
        self.scale = site.scale if site.mask is None else 1.0  # of scores, where that is not done with the mask
        self.places: dict[str, Ssa] = {}

    def emit(self) -> KernelText:
        """The kernel's text. Units may run at once: what is added up is memory of theirs."""
        self.micro = micro_function(self.em, self.form)
        return replace(super().emit(), parallel=True)

    def finish(self) -> None:
        """The tile registers as they were."""
        release(self.em)

    def limit(self, count: Expr, most: int) -> int:
        """``most``, or less where there are certainly fewer, in whole panels."""
        known = count.constant
        return most if known is None else min(most, -(-known // PANEL) * PANEL)

    def reserve(self, sizes: dict[str, int]) -> None:
        """Memory of known sizes, each from where a cache line begins on."""
        sizes = {name: -(-size // ALIGNED) * ALIGNED for name, size in sizes.items()}
        memory = self.large_memory(sum(sizes.values()))
        at = 0
        for name, size in sizes.items():
            self.places[name] = self.em.element("i8", memory, imm(at))
            at += size
        configure(self.em)

    def at(self, name: str, offset: Ssa) -> Ssa:
        """So many bytes into a part of the memory."""
        return self.em.element("i8", self.places[name], offset)

    # -- packing and products ------------------------------------------------------------------------------

    def start(self, lines: Lines, first: Ssa) -> tuple[Ssa, Ssa]:
        """Where lines begin in memory, from a given one on, and the step to the next."""
        em, step = self.em, self.ctx.scalar(lines.step)
        offset = em.add(self.ctx.scalar(lines.start), em.mul(first, step))
        return em.element(memory_type(lines.dtype), self.ctx.pointers[lines.buffer], offset), step

    def pack(self, which: int, first: Ssa, count: Ssa, to: str, panel: int, *, right: bool, along: bool) -> None:
        """Pack lines of an input: the head is summed over (``along``), or the lines are. ``panel``: its bytes."""
        lines = self.site.inputs[which]
        start, step = self.start(lines, first)
        packing = Packing(self.form, lines.dtype, along, right)
        head = imm(self.site.head)
        name = pack_function(self.em, packing, along and self.site.head % DEPTH == 0)
        shape = (step, imm(1), count, head) if along else (imm(1), step, head, count)
        stats = self.at("stats", imm(which * self.stats_bytes)) if self.checked else Ssa("null", "ptr")
        given = (start, *shape, self.places[to], imm(panel), stats)
        self.em.effect(f"call void @{name}({', '.join(value.typed for value in given)})")

    def multiply(self, left: Ssa, right: Ssa, sums: Ssa, steps: Ssa, first: Ssa) -> None:
        """Start a block of sums, or add to it."""
        given = ", ".join(value.typed for value in (left, right, sums, steps, first))
        self.em.effect(f"call void @{self.micro}({given})")

    def panels(self, count: Ssa) -> Ssa:
        """In how many panels so many lines are."""
        return self.em.unsigned("udiv", self.em.add(count, imm(PANEL - 1)), imm(PANEL))

    def bit(self, text: str, *operands: Ssa) -> Ssa:
        """A comparison."""
        return self.em.pure("i1", f"icmp {text}", *operands)

    def below(self, end: Ssa, key: Ssa, query: Ssa) -> Ssa:
        """How many of the panels of keys from ``key`` on, which has ``end``, 32 queries see; may be negative."""
        if not self.site.causal:
            return end
        seen = self.em.add(self.em.sub(query, key), imm(2 * PANEL - 1))
        shifted = self.em.pure("i64", f"ashr i64 {seen.text}, 5", seen)
        return self.em.minimum(end, shifted)

    def finish_scores(self, scores: Ssa, query: Ssa, key: Ssa, *, hides: bool) -> None:
        """The mask of a block of scores. ``hides``: keys that do not exist as well."""
        em, site = self.em, self.site
        queries, keys = self.ctx.scalar(self.queries), self.ctx.scalar(self.keys)
        left = em.sub(keys, key)
        mask = site.mask
        if mask is not None:
            row = self.ctx.scalar(mask.row)
            offset = em.add(em.add(self.ctx.scalar(mask.start), em.mul(query, row)), key)
            pointer = em.element(memory_type(mask.dtype), self.ctx.pointers[mask.buffer], offset)
            rows = em.minimum(em.sub(queries, query), imm(PANEL))
            self.tiles.add_mask(scores, pointer, row, rows, left, site.scale, mask.dtype)
        tests = []
        if hides and (self.keys.constant is None or self.keys.constant % PANEL):
            tests.append(self.bit(f"slt i64 {left.text}, {PANEL}", left))
        relation = imm(1 << 30)
        if site.causal:
            relation = em.sub(query, key)
            tests.append(self.bit(f"slt i64 {relation.text}, {PANEL}", relation))
        if not tests:
            return
        edge = functools.reduce(lambda a, b: em.pure("i1", f"or i1 {a.text}, {b.text}", a, b), tests)
        end = left if hides else imm(1 << 30)
        em.choose(edge, None, lambda: self.tiles.hide(scores, relation, end), lambda: None)

    # -- numbers that tiles get wrong ----------------------------------------------------------------------

    def note_stats(self, panels: int) -> dict[str, int]:
        """The memory for the largest numbers of all inputs that are packed. ``panels``: most of one."""
        self.stats_bytes = max(panels, self.depth) * STATS_BYTES
        self.packed = 4 if self.site.backward else 3
        return {"stats": self.packed * self.stats_bytes if self.checked else 0}

    def clear_stats(self) -> None:
        """No number yet."""
        if self.checked:
            TileCheck(self.em, self.form, 1).clear(self.places["stats"], self.packed * self.stats_bytes // STATS_BYTES)

    def unless_wrong(self, write: Callable[[], None], again: Callable[[Ssa], None]) -> None:
        """Let ``write`` store the results; or ``again`` compute them with the function of the kernel as it stands."""
        if not self.checked:
            write()
            return
        em = self.em
        bad = imm(0, "i1")
        for which in range(self.packed):
            exponent, some = TileCheck.largest(em, self.at("stats", imm(which * self.stats_bytes)), self.stats_bytes)
            outside = em.here("i32", f"sub i32 {exponent.text}, {_LEAST}")
            wrong = em.here("i1", f"icmp ugt i32 {outside.text}, {_MOST - _LEAST}")
            wrong = em.here("i1", f"and i1 {wrong.text}, {some.text}")
            bad = em.here("i1", f"or i1 {wrong.text}, {bad.text}")
        em.choose(bad, None, lambda: again(self._as_written()), write)

    def _as_written(self) -> Ssa:
        name = f"as_written_{''.join(c if c.isalnum() else '_' for c in self.kernel.name)}"
        if name not in self.em.declarations:
            kernel = map_rows(replace(self.kernel, ordered=False), self.target)
            text = KernelEmitter(kernel, self.target, self.em.declarations).emit()
            self.em.define(name, f"define internal i32 @{name}{text.body}")
        return Ssa(f"@{name}", "ptr")

    def run(self, function: Ssa) -> None:
        """Run the kernel as it stands for the present iteration of the grid."""
        em, unit = self.em, imm(0)
        for loop in self.kernel.grid:
            unit = em.add(em.mul(unit, self.ctx.scalar(loop.extent)), self.ctx.symbols[Symbol(loop.symbol)])
        em.here(
            "i32", f"call i32 {function.text}(ptr %frame, ptr %slots, i64 {unit.text}, i64 {em.add(unit, imm(1)).text})"
        )


_LEAST, _MOST = 127 - 80, 127 + 50  # exponents of the largest number of an operand


class AttentionForward(AttentionEmitter):
    """Writes the forward."""

    def units(self) -> tuple[Expr, int | None]:
        """Some queries of a head."""
        chunks = floordiv(self.queries + (CHUNK - 1), CHUNK)
        return product(loop.extent for loop in self.site.batch) * chunks, None

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Packed operands, scores and weights of 32 queries, and sums."""
        step, self.block = self.step_bytes, self.limit(self.keys, KEYS_FORWARD)
        keys, queries = self.block // PANEL, self.limit(self.queries, CHUNK) // PANEL
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
            factor = self.scale * LOG2E
            self.tiles.weigh(self.places["scores"], self.places["weights"], state, sums, seen, starts, factor)
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
            if self.site.logarithms is not None:
                self._store_logarithms(self.site.logarithms, query, rows)
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
        empty = em.here("<16 x i1>", f"fcmp oeq {total.typed}, {zero}")
        divisor = em.here(FLOATS, f"select {empty.typed}, {FLOATS} {one}, {total.typed}")
        self._keep(divisor, GROUP * half)
        if self.site.logarithms is None:
            return
        floor = self.go_to({}, Vector(Symbol("lane"), imm(0), GROUP, 1))
        ctx.values["total"] = Value(DType.F32, (divisor,), varying=True)
        emit_body(ctx, [Compute("logarithm", "log", ("total",), DType.F32)])
        logarithm = ctx.part("logarithm", 0, GROUP)
        self.go_back(floor)
        none = em.here("<16 x i1>", f"fcmp oeq {top.typed}, splat (float {number(float('-inf'))})")
        used = em.here(FLOATS, f"select {none.typed}, {FLOATS} {zero}, {top.typed}")
        scaled = em.here(FLOATS, f"fmul {used.typed}, splat (float {number(self.scale)})")
        self._keep(em.here(FLOATS, f"fadd {scaled.typed}, {logarithm.text}"), PANEL + GROUP * half)

    def _vector(self, base: Ssa, position: int) -> Ssa:
        place = self.em.element("float", base, imm(position))
        return self.em.here(FLOATS, f"load {FLOATS}, ptr {place.text}, align 64")

    def _keep(self, value: Ssa, position: int) -> None:
        place = self.em.element("float", self.places["divisors"], imm(position))
        self.em.effect(f"store {value.typed}, ptr {place.text}, align 64")

    def _store_logarithms(self, lines: Lines, query: Ssa, rows: Ssa) -> None:
        em = self.em
        to, step = self.start(lines, query)

        def row(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            kept = em.element("float", self.places["divisors"], em.add(at, imm(PANEL)))
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


class AttentionBackward(AttentionEmitter):
    """Writes the backward."""

    def units(self) -> tuple[Expr, int | None]:
        """A head."""
        return product(loop.extent for loop in self.site.batch), None

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Packed operands, weights and gradients of scores of a block, and sums of all lines of a head."""
        em, step, pieces = self.em, self.step_bytes, self.form.pieces
        self.block = self.limit(self.keys, KEYS_BACKWARD // (1 if pieces == 1 else 2))
        self.rows = self.limit(self.queries, QUERIES)
        keys, rows = self.block // PANEL, self.rows // PANEL
        self.line_bytes, self.key_bytes, self.row_bytes = self.depth * step, keys * step, rows * step
        sizes = dict.fromkeys(("keys", "values"), keys * self.line_bytes) | {"turned keys": self.depth * self.key_bytes}
        sizes |= dict.fromkeys(("queries", "gradients"), rows * self.line_bytes)
        sizes |= dict.fromkeys(("turned queries", "turned gradients"), self.depth * self.row_bytes)
        sizes |= dict.fromkeys(("weights", "changes"), keys * self.row_bytes) | {"left changes": self.key_bytes}
        sizes |= dict.fromkeys(("scores", "slopes"), 2 * BLOCK_BYTES) | {"rows": rows * ROWS_BYTES}
        sizes |= self.note_stats(max(keys, rows))
        self.reserve(sizes)
        counts = {"of queries": self.queries, "of keys": self.keys, "of values": self.keys}
        for name, count in counts.items():
            lines = em.mul(self.panels(self.ctx.scalar(count)), imm(self.depth * BLOCK_BYTES))
            known = lines.constant
            memory = self.memory(em.add(lines, imm(ALIGNED))) if known is None else None
            self.places[name] = em.aligned(memory, ALIGNED) if memory is not None else self.large_memory(known or 0)

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """A head."""
        em, ctx = self.em, self.ctx
        ctx.values.clear()
        self.place(self.site.batch, unit)
        self.clear_stats()
        if self.site.causal:
            self._clear("of keys", self.keys)
            self._clear("of values", self.keys)
        em.loop(imm(0), ctx.scalar(self.keys), self.block, [], self._keys, "keys")
        self.unless_wrong(self._write, self.run)
        return []

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
        if self.site.causal:
            begin = em.mul(em.unsigned("udiv", key, imm(self.rows)), imm(self.rows))
        block = functools.partial(self._block, key, self.panels(count))
        em.loop(begin, self.ctx.scalar(self.queries), self.rows, [], block, "queries")
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
        sums = site.logarithms
        assert sums is not None
        kept = self.at("rows", em.mul(panel, imm(ROWS_BYTES)))
        gradient, result = (self.start(site.inputs[which], first) for which in (3, 4))
        self.tiles.look_at_rows(result, gradient, self.start(sums, first), count, kept, (self.scale, site.scale))
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
            self.finish_scores(scores, first, em.add(key, em.mul(at, imm(PANEL))), hides=False)

        def block(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            following = em.add(at, imm(1))
            more = self.bit(f"slt i64 {following.text}, {seen.text}", following, seen)
            em.choose(more, None, lambda: products(following), lambda: None)  # while vectors work on this block
            place = em.add(em.mul(at, imm(self.row_bytes)), em.mul(panel, imm(self.step_bytes)))
            changes = self.at("changes", place), self.at("left changes", em.mul(at, imm(self.step_bytes)))
            self.tiles.gradients(*blocks(at), kept, self.at("weights", place), changes, self.scale, site.scale)
            return []

        em.choose(self.bit(f"sgt i64 {seen.text}, 0", seen), None, lambda: products(imm(0)), lambda: None)
        em.loop(imm(0), seen, 1, [], block, "block")
        starts = self.bit(f"eq i64 {key.text}, 0", key)
        number_ = em.mul(em.unsigned("udiv", first, imm(PANEL)), imm(self.depth))

        def multiply() -> None:
            for part in range(self.depth):
                to = self.at("of queries", em.mul(em.add(number_, imm(part)), imm(BLOCK_BYTES)))
                right = self.at("turned keys", imm(part * self.key_bytes))
                self.multiply(self.places["left changes"], right, to, seen, starts)

        if site.causal:
            em.choose(self.bit(f"sgt i64 {seen.text}, 0", seen), None, multiply, lambda: None)
        else:
            multiply()
        return []

    def _sum_over_queries(self, key: Ssa, query: Ssa, rows: Ssa, at: Ssa, _: list[Ssa]) -> list[Ssa]:
        """Gradients of 32 keys, and of their values, by a block of queries."""
        em = self.em
        begin, starts = imm(0), self.bit(f"eq i64 {query.text}, 0", query)
        first = em.add(key, em.mul(at, imm(PANEL)))
        if self.site.causal:
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
        outputs = zip(("of queries", "of keys", "of values"), self.site.outputs, strict=True)
        for (name, lines), count in zip(outputs, (self.queries, self.keys, self.keys), strict=True):
            many = self.ctx.scalar(count)
            panel = functools.partial(self._write_panel, name, lines, many)
            self.em.loop(imm(0), self.panels(many), 1, [], panel, "panel")

    def _write_panel(self, name: str, lines: Lines, many: Ssa, at: Ssa, _: Sequence[Ssa]) -> list[Ssa]:
        em = self.em
        first = em.mul(at, imm(PANEL))
        count = em.minimum(em.sub(many, first), imm(PANEL))
        to, step = self.start(lines, first)
        sums = self.at(name, em.mul(at, imm(self.depth * BLOCK_BYTES)))
        if name == "of queries":
            self.tiles.write_rows(sums, to, step, count, None)
        else:
            self.tiles.write_columns(sums, to, step, count)
        return []
