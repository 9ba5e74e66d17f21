"""Packing factors of which nothing is computed, by functions that all products of a module share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from ....ir import DType
from ..tile_forms import PANEL, TILE_BYTES
from .amx_pack import (
    GROUP,
    STATS_BYTES,
    Packing,
    carried_stats,
    neighbors,
    pack_step,
    room_for_squares,
    store_line,
    store_stats,
)
from .emitter import Carried, Emitter, Ssa, imm, vector_type

__all__ = ["pack_function"]

_MEMORY: Mapping[DType, str] = {DType.F32: "float", DType.BF16: "i16", DType.I8: "i8"}
_BYTES: Mapping[str, int] = {"float": 4, "i16": 2, "i8": 1}
_GIVEN = "ptr %from, i64 %line, i64 %step, i64 %lines, i64 %count, ptr %to, i64 %panel, ptr %stats"


def pack_function(em: Emitter, packing: Packing, exact: bool) -> str:
    """The name of the module's function that packs a factor as it lies in memory: ``(from, line, step, lines, count,
    to, panel, stats)``. ``line`` and ``step``: elements from one line, or number of a line, to the next, one of them 1;
    ``lines`` lines, of which those missing to a whole panel are anything, of ``count`` numbers, whole steps if
    ``exact``; ``panel``: bytes from one panel to the next."""
    side = "right" if packing.right else "left"
    how = "along" if packing.along else "across"
    number = packing.dtype.value
    name = f"pack_{side}_{packing.form.name.replace('-', '_')}_{number}_{how}{'' if exact else '_some'}"
    if name not in em.declarations:
        em.define(name, _PlainPacking(packing, exact, em.declarations).text(name))
    return name


class _PlainPacking:
    """Writes one such function."""

    def __init__(self, packing: Packing, exact: bool, declarations: dict[str, str]) -> None:
        self.em, self.packing, self.exact = Emitter(declarations), packing, exact
        self.element = _MEMORY[packing.dtype]
        self.start, self.to, self.stats = Ssa("%from", "ptr"), Ssa("%to", "ptr"), Ssa("%stats", "ptr")
        names = ("line", "step", "lines", "count", "panel")
        self.line, self.step, self.lines, self.count, self.panel = (Ssa(f"%{name}", "i64") for name in names)
        self.room = room_for_squares(self.em, packing)

    def text(self, name: str) -> str:
        em, count = self.em, self.count
        whole = count if self.exact else em.round_down(count, self.packing.form.depth)
        if self.packing.along:
            em.loop(imm(0), self._padded(), GROUP, [], functools.partial(self._along, whole), "lines")
        else:
            half_lines = self.packing.neighbors and not self.packing.turned
            step = self._pairs if half_lines else self._across
            em.loop(imm(0), whole, self.packing.form.depth, [], functools.partial(step, True), "k")
            if not self.exact:
                em.loop(whole, count, self.packing.form.depth, [], functools.partial(step, False), "k")
        return "\n".join(
            [f"define internal void @{name}({_GIVEN}) noinline {{", "entry:", *em.lines(), "  ret void", "}"]
        )

    def _padded(self) -> Ssa:
        """The lines in whole panels."""
        em = self.em
        return em.mul(em.unsigned("udiv", em.add(self.lines, imm(PANEL - 1)), imm(PANEL)), imm(PANEL))

    # -- orders ------------------------------------------------------------------------------------------

    def _along(self, whole: Ssa, first: Ssa, _: list[Ssa]) -> list[Ssa]:
        """All steps of 16 lines, each of which is read in the order of memory."""
        em, stats = self.em, self._stats(first)
        known = carried_stats(em, stats) if self.packing.checked else []

        def steps(full: bool, k: Ssa, now: list[Ssa]) -> list[Ssa]:
            return self._pack(first, full, k, [Carried(value.type, value) for value in now])

        now = em.loop(imm(0), whole, self.packing.form.depth, known, functools.partial(steps, True), "k")
        if not self.exact:
            rest = [Carried(value.type, value) for value in now]
            now = em.loop(whole, self.count, self.packing.form.depth, rest, functools.partial(steps, False), "k")
        if self.packing.checked:
            store_stats(em, stats, now)
        return []

    def _across(self, full: bool, k: Ssa, _: list[Ssa]) -> list[Ssa]:
        """One step of all lines, which are neighbors in memory."""
        em = self.em

        def lines(first: Ssa, _: list[Ssa]) -> list[Ssa]:
            stats = self._stats(first)
            now = self._pack(first, full, k, carried_stats(em, stats) if self.packing.checked else [])
            if self.packing.checked:
                store_stats(em, stats, now)
            return []

        return em.loop(imm(0), self._padded(), GROUP, [], lines, "lines")

    def _pairs(self, full: bool, k: Ssa, _: list[Ssa]) -> list[Ssa]:
        """The same, pair by pair of each: sixteen bfloat16 are half a line of the cache, the other half of which might
        be gone when the next sixteen are read."""
        em = self.em

        def pair(index: Ssa, _: list[Ssa]) -> list[Ssa]:
            def lines(first: Ssa, _: list[Ssa]) -> list[Ssa]:
                read = functools.partial(self._read, first, full, k, index)
                store_line(em, neighbors(em, self.packing, read), self._into(first, k), 0, index)
                return []

            return em.loop(imm(0), self._padded(), GROUP, [], lines, "lines")

        return em.loop(imm(0), imm(GROUP), 1, [], pair, "pair")

    # -- one step of 16 lines ----------------------------------------------------------------------------

    def _pack(self, first: Ssa, full: bool, k: Ssa, stats: Sequence[Carried]) -> list[Ssa]:
        read: Callable[[Ssa, int], Ssa] = functools.partial(self._read, first, full, k)
        return pack_step(self.em, self.packing, read, self._into(first, k), self.room, stats)

    def _into(self, first: Ssa, k: Ssa) -> Ssa:
        """Where a step of the lines from ``first`` on goes."""
        em = self.em
        half = em.unsigned("udiv", em.unsigned("urem", first, imm(PANEL)), imm(GROUP))
        number = em.unsigned("udiv", first, imm(PANEL))
        own = em.element("i8", self.to, em.add(em.mul(number, self.panel), em.mul(half, imm(TILE_BYTES))))
        return em.element(
            "i8", own, em.mul(em.unsigned("udiv", k, imm(self.packing.form.depth)), imm(self.packing.form.step_bytes))
        )

    def _stats(self, first: Ssa) -> Ssa:
        em = self.em
        return em.element("i8", self.stats, em.mul(em.unsigned("udiv", first, imm(PANEL)), imm(STATS_BYTES)))

    def _read(self, first: Ssa, full: bool, k0: Ssa, index: Ssa, half: int) -> Ssa:
        """A vector, see :func:`.pack_step`. Where it is not ``full``, numbers after the last are 0."""
        em = self.em
        last = em.sub(self.lines, imm(1))
        if self.packing.along:
            line = em.minimum(em.add(first, index), last)  # another one where there is none
            k = em.add(k0, imm(GROUP * half))
            place = em.element(self.element, em.element(self.element, self.start, em.mul(line, self.line)), k)
            return self._load(place, None if full else self._before(k, self.count))
        k = em.add(k0, self.packing.place(em, index, half))
        mask = self._before(first, self.lines)
        if not full:
            there = em.splat(em.pure("i1", f"icmp slt i64 {k.text}, {self.count.text}", k), GROUP)
            mask = em.pure(there.type, f"and {there.typed}, {mask.text}", there, mask)
        line = em.minimum(first, last)
        place = em.element(
            self.element, em.element(self.element, self.start, em.mul(line, self.line)), em.mul(k, self.step)
        )
        return self._load(place, mask)

    def _before(self, first: Ssa, end: Ssa) -> Ssa:
        """The lanes from ``first`` on that come before ``end``."""
        em = self.em
        ramp = ", ".join(f"i64 {lane}" for lane in range(GROUP))
        left = em.splat(em.sub(end, first), GROUP)
        return em.pure(vector_type("i1", GROUP), f"icmp slt <{GROUP} x i64> <{ramp}>, {left.text}", left)

    def _load(self, pointer: Ssa, mask: Ssa | None) -> Ssa:
        em, type_, align = self.em, vector_type(self.element, GROUP), _BYTES[self.element]
        if mask is None:
            return em.here(type_, f"load {type_}, ptr {pointer.text}, align {align}")
        symbol = f"llvm.masked.load.v{GROUP}{'f32' if self.element == 'float' else self.element}.p0"
        em.declare(symbol, type_, ["ptr", mask.type, type_])
        given = f"ptr align {align} {pointer.text}, {mask.typed}, {type_} zeroinitializer"
        return em.here(type_, f"call {type_} @{symbol}({given})")
