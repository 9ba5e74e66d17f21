"""Which blocks of attention on vectors a mask hides whole.

Note [Blocks that are hidden]
    Documents in a row, or keys that are near: most blocks of such masks have no key that any of their queries sees.
    Their weights are 0, and nothing is computed of them, where that gives the same: 0 times an infinite number, or nan,
    is nan. So a block is left out where all numbers that would be multiplied are known to be finite, and so are their
    sums: none is above 2^50 (sums of 256 products are below 2^108 then). They are looked at once for each block of
    lines, and the mask's bytes up to the first row that has some. In the backward the saved numbers are looked at, too:
    those of a query that sees no key may be infinite, and its weights nan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from ....ir import DType
from ....kernel_ir.attention_site import AttentionSite, Lines
from .attention_blocks import AttentionBlocks
from .attention_rows import Line
from .emitter import Carried, Emitter, Ssa, imm, vector_type
from .lanes import Lanes
from .types import memory_type

__all__ = ["HiddenBlocks", "leaves_out"]

_LARGEST = 2.0**50  # numbers whose products are certainly finite
_SCALE = 1024.0  # of scores, at most
_BYTES = 32  # of a mask that are read at once


def leaves_out(site: AttentionSite) -> bool:
    """Whether blocks that a mask hides need not be computed: what is hidden has no weight, and no gradients of scores
    are kept."""
    mask = site.mask
    if mask is None or not isinstance(mask.seen, Lines) or mask.hidden != -math.inf:
        return False
    return len(site.outputs) < 4 and abs(site.scale) <= _SCALE


class HiddenBlocks:
    """Emits calls of functions that look. A flag is a byte in memory, 1 or 0."""

    def __init__(self, blocks: AttentionBlocks) -> None:
        self.blocks, self.em = blocks, blocks.em

    def set(self, flag: Ssa, value: int) -> None:
        """Make a flag 1 or 0."""
        self.em.effect(f"store i8 {value}, ptr {flag.text}, align 1")

    def where(self, flag: Ssa, write: Callable[[], None]) -> None:
        """``write``, where a flag is 1."""
        self.em.choose(_is_set(self.em, flag), None, write, lambda: None)

    def unless(self, flags: tuple[Ssa, ...], write: Callable[[], None]) -> None:
        """``write``, where not all of these flags are 1."""
        bits = [_is_set(self.em, flag) for flag in flags]
        every = functools.reduce(lambda a, b: self.em.here("i1", f"and {a.typed}, {b.text}"), bits)
        self.em.choose(every, None, lambda: None, write)

    # -- numbers -------------------------------------------------------------------------------------------

    def note_large(self, lines: Line, count: Ssa, dtype: DType, flag: Ssa, *, saved: bool = False) -> None:
        """Make a flag 0 where one of so many lines has a number that is large, infinite or nan: of the numbers of a
        head, or of one number (``saved``)."""
        name = f"note_large_{self.blocks.lanes}_{dtype.value}_{1 if saved else self.blocks.head}"
        write = functools.partial(self._write_note_large, dtype, saved)
        self.blocks.call(name, "ptr %of, i64 %step, i64 %count, ptr %flag", (*lines, count, flag), write)

    def _write_note_large(self, dtype: DType, saved: bool, em: Emitter, lanes: Lanes) -> None:
        element, head = memory_type(dtype), self.blocks.head

        def line(at: Ssa, found: list[Ssa]) -> list[Ssa]:
            start = em.element(element, Ssa("%of", "ptr"), em.mul(at, Ssa("%step", "i64")))
            if saved:
                return [_joined(em, found[0], _large(em, lanes.all(lanes.scalar(start)), lanes))]
            for first in range(0, head, lanes.count):
                place, some = em.element(element, start, imm(first)), lanes.these(head - first)
                found = [_joined(em, found[0], _large(em, lanes.read(place, dtype, some), lanes))]
            return found

        none = Carried(lanes.bits, Ssa("zeroinitializer", lanes.bits))
        (found,) = em.loop(imm(0), Ssa("%count", "i64"), 1, [none], line, "line")
        bits = em.here(f"i{lanes.count}", f"bitcast {found.typed} to i{lanes.count}")
        some = em.here("i1", f"icmp ne {bits.typed}, 0")
        em.choose(some, None, lambda: _clear(em), lambda: None)

    # -- masks ---------------------------------------------------------------------------------------------

    def note_seen(self, seen: Line, rows: Ssa, keys: Ssa, flag: Ssa) -> None:
        """Make a flag 0 where a byte of so many rows is set, among so many of each."""
        parameters = "ptr %seen, i64 %step, i64 %rows, i64 %keys, ptr %flag"
        self.blocks.call(f"note_seen_{self.blocks.lanes}", parameters, (*seen, rows, keys, flag), self._write_note_seen)

    def _write_note_seen(self, em: Emitter, lanes: Lanes) -> None:
        many, keys = vector_type("i8", _BYTES), Ssa("%keys", "i64")

        def look(row: Ssa) -> None:
            start = em.element("i8", Ssa("%seen", "ptr"), em.mul(row, Ssa("%step", "i64")))

            def some(kind: str, at: Ssa, found: list[Ssa]) -> list[Ssa]:
                value = em.here(kind, f"load {kind}, ptr {em.element('i8', start, at).text}, align 1")
                return [_joined(em, found[0], value)]

            whole = em.round_down(keys, _BYTES)
            none = Carried(many, Ssa("zeroinitializer", many))
            (wide,) = em.loop(imm(0), whole, _BYTES, [none], functools.partial(some, many), "bytes")
            one = Carried("i8", Ssa("0", "i8"))
            (rest,) = em.loop(whole, keys, 1, [one], functools.partial(some, "i8"), "byte")
            whole_bits = f"i{8 * _BYTES}"
            every = em.here(whole_bits, f"bitcast {wide.typed} to {whole_bits}")
            parts = em.here("i1", f"icmp ne {every.typed}, 0"), em.here("i1", f"icmp ne {rest.typed}, 0")
            em.choose(_joined(em, *parts), None, lambda: _clear(em), lambda: None)

        def row(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            em.choose(_is_set(em, Ssa("%flag", "ptr")), None, lambda: look(at), lambda: None)
            return []

        em.loop(imm(0), Ssa("%rows", "i64"), 1, [], row, "row")


def _is_set(em: Emitter, flag: Ssa) -> Ssa:
    value = em.here("i8", f"load i8, ptr {flag.text}, align 1")
    return em.here("i1", f"icmp ne {value.typed}, 0")


def _clear(em: Emitter) -> None:
    em.effect("store i8 0, ptr %flag, align 1")


def _joined(em: Emitter, a: Ssa, b: Ssa) -> Ssa:
    return em.here(a.type, f"or {a.typed}, {b.text}")


def _large(em: Emitter, value: Ssa, lanes: Lanes) -> Ssa:
    """Lanes whose number is large, or nan."""
    symbol = f"llvm.fabs.v{lanes.count}f32"
    em.declare(symbol, lanes.floats, [lanes.floats])
    size = em.here(lanes.floats, f"call {lanes.floats} @{symbol}({value.typed})")
    return em.here(lanes.bits, f"fcmp ugt {size.typed}, {lanes.number(_LARGEST).text}")
