"""Attention as one LLVM function that uses the tile registers of AMX: what forward and backward share.

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
    right. Small numbers beside larger ones lose their pieces below 2**-126, which is seen only where what is added to
    them is as small: no sum is looked at, as weights, and what is computed of them, get as small in any head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from ....ir import DType
from ....kernel_ir.attention_site import AttentionSite
from ....kernel_ir.launches import KernelText
from ....kernel_ir.nodes import Kernel
from ....symbolic import Symbol
from ..machine import Machine
from ..map_loops import map_rows
from ..tile_forms import DEPTH, FORMS, PANEL
from .amx_check import TileCheck
from .amx_pack import STATS_BYTES, Packing
from .amx_pack_plain import pack_function
from .amx_tiles import configure, micro_function, release
from .attention_tiles import AttentionTiles, Bias, Dropped
from .attention_writer import ALIGNED, AttentionWriter
from .emitter import Ssa, imm
from .kernel import KernelEmitter

__all__ = ["ALIGNED", "ROWS_BYTES", "AttentionEmitter"]

ROWS_BYTES = 2 * 4 * PANEL  # of what is kept of 32 queries: two numbers each
_LEAST, _MOST = 127 - 80, 127 + 50  # exponents of the largest number of an operand


class AttentionEmitter(AttentionWriter):
    """Writes attention in tile registers."""

    def __init__(self, kernel: Kernel, site: AttentionSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, site, target, declarations)
        self.form = FORMS["bf16" if site.dtype is DType.BF16 else site.precision]
        self.tiles = AttentionTiles(self.em, self.form, site.dtype, site.head)
        self.depth = -(-site.head // DEPTH)  # steps, and panels of a head
        self.step_bytes = self.form.step_bytes
        self.checked = site.dtype is DType.F32 and self.form.pieces > 1

    def emit(self) -> KernelText:
        """The kernel's text. Units may run at once: what is added up is memory of theirs."""
        self.micro = micro_function(self.em, self.form)
        return replace(super().emit(), parallel=True)

    def finish(self) -> None:
        """The tile registers as they were."""
        release(self.em)

    def reserve(self, sizes: dict[str, int]) -> None:
        """As for any attention, and the tile registers for it."""
        super().reserve(sizes)
        configure(self.em)

    # -- packing and products ------------------------------------------------------------------------------

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

    def below(self, end: Ssa, key: Ssa, query: Ssa) -> Ssa:
        """How many of the panels of keys from ``key`` on, which has ``end``, 32 queries see; may be negative."""
        if not self.skips:
            return end
        seen = self.em.add(self.em.sub(query, key), imm(2 * PANEL - 1))
        shifted = self.em.pure("i64", f"ashr i64 {seen.text}, 5", seen)
        return self.em.minimum(end, shifted)

    def finish_scores(self, scores: Ssa, query: Ssa, key: Ssa, *, hides: bool) -> None:
        """The mask of a block of scores. ``hides``: keys that do not exist as well."""
        em, site = self.em, self.site
        queries, keys = self.ctx.scalar(self.queries), self.ctx.scalar(self.keys)
        left = em.sub(keys, key)
        if site.mask is not None:
            rows, mask = em.minimum(em.sub(queries, query), imm(PANEL)), site.mask
            added, seen = (None if x is None else self.start(x, query, key) for x in mask.read)
            kind = mask.added.dtype if mask.added is not None else DType.F32
            self.tiles.add_bias(scores, Bias(added, kind, seen, mask.hidden, mask.replaces), rows, left, site.scale)
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

    def dropped(self, query: Ssa, key: Ssa) -> Dropped | None:
        """What dropout leaves of the weights from a query and a key on."""
        em, kept = self.em, self.site.kept
        if kept is None:
            return None
        queries, keys = self.ctx.scalar(self.queries), self.ctx.scalar(self.keys)
        return Dropped(*self.start(kept, query, key), em.sub(queries, query), em.sub(keys, key), self.site.kept_scale)

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
