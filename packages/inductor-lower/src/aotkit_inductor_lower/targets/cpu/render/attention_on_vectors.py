"""Attention as one LLVM function on vectors of float32: what forward and backward share.

Note [Attention on vectors]
    What Note [Attention as a nest] says, where there are no tile registers. As in Note [Attention in tile registers]
    keys are taken in blocks, whose copies and scores stay in the caches, by a few queries after another; the forward
    scales what it has summed down where a larger score is found, and the backward computes weights again from
    what was saved. Products are those of Note [Blocks of attention], what is between them Note [Rows of scores].

    Numbers are multiplied and added as they are, in float32, so infinities and nan become what they are in eager mode;
    bfloat16 is widened as it is copied, and weights of it are not rounded, unless it is multiplied in pairs (Note
    [Pairs of attention]). A weight of at most 2^-125 of the largest is 0. Of scores that a causal mask hides, those in
    vectors behind a row's last one are not computed.

    All results are written at the end of a unit, when nothing is read any more. No sum depends on how units are shared
    out: results are the same on one thread and on many.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ....ir import DType
from ....kernel_ir.attention_site import AttentionSite, Lines
from ....kernel_ir.launches import KernelText
from ....kernel_ir.nodes import Kernel
from ..machine import Machine
from .attention_blocks import FLOAT, ROWS, AttentionBlocks
from .attention_hidden import HiddenBlocks, leaves_out
from .attention_rows import AttentionRows, Line, Masks, Rows
from .attention_writer import ALIGNED, AttentionWriter
from .emitter import Ssa, imm
from .lanes import Lanes

__all__ = ["GROUP", "AttentionOnVectors"]

GROUP = 4 * ROWS  # queries whose scores are in memory at once, in the forward
_APART = 48  # numbers behind the scores of a row: rows lie in different sets of a cache, and vectors may reach over


class AttentionOnVectors(AttentionWriter):
    """Writes a kernel that :func:`~....kernel_ir.attention_site.attention_site` knows, in vectors."""

    def __init__(self, kernel: Kernel, site: AttentionSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, site, target, declarations)
        self.blocks = AttentionBlocks(self.em, target, site.dtype, site.head)
        self.rows_of = AttentionRows(self.blocks)
        self.hidden = HiddenBlocks(self.blocks) if leaves_out(site) else None

    def emit(self) -> KernelText:
        """The kernel's text. Units may run at once: what is added up is memory of theirs."""
        return replace(super().emit(), parallel=True)

    def set_block(self, block: int) -> None:
        """How many keys a block has."""
        self.block, self.stride = block, block + _APART

    def number_at(self, name: str, offset: Ssa) -> Ssa:
        """So many numbers into a part of the memory."""
        return self.em.element("float", self.places[name], offset)

    def lines_bytes(self, count: int) -> int:
        """Of a copy of so many lines, in whole sixes."""
        return count * self.blocks.line * FLOAT

    def copies(self, count: int, left: tuple[str, ...], right: tuple[str, ...]) -> dict[str, int]:
        """The sizes of copies of so many lines, by name, for left and for right factors."""
        group, blocks = self.blocks.group, self.blocks
        if group == 1:
            return dict.fromkeys((*left, *right), self.lines_bytes(count))
        plain = dict.fromkeys(left, count * blocks.depth * FLOAT)
        return plain | dict.fromkeys(map(self.right, right), count // group * blocks.line * FLOAT)

    def right(self, name: str) -> str:
        """Where lines are as a right factor that sums over them."""
        return name if self.blocks.group == 1 else f"pairs of {name}"

    def turned_bytes(self, count: int) -> int:
        """Of lines that are turned over."""
        return -(-count // self.blocks.width) * self.blocks.width * self.blocks.depth * FLOAT

    def copy(self, which: int, first: Ssa, count: Ssa, to: str, room: int, whole: int) -> None:
        """Copy lines of an input, with zeros up to a multiple of ``whole``, as the factors that there is room for."""
        padded, lines = self.round_up(count, whole), self.start(self.site.inputs[which], first)
        if to in self.places:
            self.blocks.copy(lines, count, padded, self.places[to], room)
        if self.blocks.group > 1 and self.right(to) in self.places:
            self.blocks.pair(lines, count, self.places[self.right(to)], room)

    def round_up(self, count: Ssa, whole: int) -> Ssa:
        """The next multiple."""
        return self.em.round_down(self.em.add(count, imm(whole - 1)), whole)

    def clear(self, name: str, size: Ssa) -> None:
        """Zeros in so many bytes of a part of the memory, whole vectors. Not by LLVM's ``memset``: that may become a
        call, and object code that is loaded without Python calls nothing that it has not asked for."""
        lanes = Lanes(self.em, self.target, self.blocks.lanes)

        def zeros(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            lanes.store(lanes.number(0.0), self.em.element("i8", self.places[name], at))
            return []

        self.em.loop(imm(0), size, self.blocks.lanes * FLOAT, [], zeros, "cleared")

    def seen(self, keys: Ssa, key: Ssa, last: Ssa) -> Ssa:
        """How many of the keys from ``key`` on, of which there are so many, query ``last`` sees; may be negative."""
        if not self.skips:
            return keys
        return self.em.minimum(keys, self.em.add(self.em.sub(last, key), imm(1)))

    def if_any(self, count: Ssa, write: Callable[[], None]) -> None:
        """``write``, where a count that may be negative is not, and not 0."""
        if not self.skips:
            write()
            return
        self.em.choose(self.bit(f"sgt i64 {count.text}, 0", count), None, write, lambda: None)

    def flags(self, *names: str) -> dict[str, int]:
        """The sizes of flags of this name, where there is a mask that may hide blocks whole."""
        return dict.fromkeys(names if self.hidden else (), ALIGNED)

    def note(self, flag: str, which: tuple[int, ...], first: Ssa, count: Ssa) -> None:
        """Let a flag be whether so many lines of some inputs have small numbers alone; in the backward of queries, also
        what is saved of them."""
        if self.hidden is None:
            return
        self.hidden.set(self.places[flag], 1)
        for one in which:
            lines = self.site.inputs[one]
            self.hidden.note_large(self.start(lines, first), count, lines.dtype, self.places[flag])
        for lines in self.site.saved if self.site.backward and 0 in which else ():
            self.hidden.note_large(self.start(lines, first), count, lines.dtype, self.places[flag], saved=True)

    def unless_hidden(
        self,
        flags: tuple[str, ...],
        rows: tuple[Ssa, Ssa],
        keys: tuple[Ssa, Ssa],
        write: Callable[[], None],
        note: Callable[[], None] = lambda: None,
    ) -> None:
        """``write``, unless a mask hides so many keys (from one on) from so many rows (from one on), where these flags
        are set; see Note [Blocks that are hidden]. ``note`` sets some of them where the mask hides all."""
        mask = self.site.mask
        if self.hidden is None or mask is None:
            write()
            return
        (first, count), (key, number), (_, seen) = rows, keys, mask.read
        assert seen is not None
        self.hidden.set(self.places["no key"], 1)
        self.hidden.note_seen(self.start(seen, first, key), count, number, self.places["no key"])
        self.hidden.where(self.places["no key"], note)
        self.hidden.unless(tuple(self.places[flag] for flag in (*flags, "no key")), write)

    def scores(self, name: str, first: Ssa, count: Ssa, keys: Ssa, query: Ssa, key: Ssa, filled: Ssa) -> Rows:
        """Rows of scores from the number ``first`` on of a part of the memory."""
        relation = self.em.sub(query, key) if self.site.causal else None
        return Rows(self.number_at(name, first), self.stride, count, keys, relation, filled)

    def masks(self, query: Ssa, key: Ssa) -> Masks:
        """What becomes of scores from a query and a key on."""
        site, mask = self.site, self.site.mask

        def begin(lines: Lines | None) -> Line | None:
            return None if lines is None else self.start(lines, query, key)

        added, seen = (None, None) if mask is None else mask.read
        kind = DType.F32 if added is None else added.dtype
        hidden, replaces = (0.0, False) if mask is None else (mask.hidden, mask.replaces)
        given = (begin(added), kind, begin(seen), hidden, replaces, site.scale, begin(site.kept), site.kept_scale)
        return Masks(*given)
