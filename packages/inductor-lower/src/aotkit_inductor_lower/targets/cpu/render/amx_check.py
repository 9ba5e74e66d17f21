"""Which sums tiles may have got wrong, see Note [What tiles get wrong] in :mod:`.amx_tiles`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from ....ir import DType
from ..tile_forms import TileForm
from .amx_pack import GROUP, STATS_BYTES
from .emitter import Carried, Emitter, Ssa, imm, vector_type
from .types import literal

__all__ = ["TileCheck"]

_HALVES, _WORDS, _BITS = vector_type("i16", 2 * GROUP), vector_type("i32", GROUP), vector_type("i1", GROUP)
#: The stats of no number.
_NONE = (f"{_HALVES} zeroinitializer", f"{_HALVES} splat (i16 -1)", f"{_WORDS} zeroinitializer")
_INFINITE = 0xFF000000  # bits of a float32 without its sign, shifted up by one: from here on they are not finite
_LEAST = 24  # exponent (of 2**-103) from which on the last piece of a number is not subnormal
_LEAST_SUM = 154  # of two exponents, whose product is 2**-100: what is lost of smaller ones matters
_TINY = 2.0**-100  # a subnormal number, 2**-126, relative to the 26 bits that a sum should have


class TileCheck:
    """Writes the check of a kernel's sums. ``count``: how many numbers are summed."""

    def __init__(self, em: Emitter, form: TileForm, count: int) -> None:
        self.em = em
        self.tiny = _TINY * len(form.products) * count

    def clear(self, stats: Ssa, panels: int) -> None:
        """No number yet, in so many panels."""

        def panel(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            own = self.em.element("i8", stats, at)
            for k, value in enumerate(_NONE):
                self.em.effect(f"store {value}, ptr {self.em.element('i8', own, imm(64 * k)).text}, align 64")
            return []

        self.em.loop(imm(0), imm(panels * STATS_BYTES), STATS_BYTES, [], panel, "panel")

    def limit(self, panels: Sequence[tuple[Ssa, int]]) -> Ssa:
        """The smallest sum that lost subnormal numbers cannot spoil, as bits without a sign, shifted up by one.
        ``panels``: the stats of each factor's, and how many there are."""
        em = self.em
        total = Ssa("1.0", "float")
        umax = f"llvm.umax.v{2 * GROUP}i16"
        em.declare(umax, _HALVES, [_HALVES, _HALVES])
        for stats, count in panels:

            def panel(at: Ssa, now: list[Ssa], stats: Ssa = stats) -> list[Ssa]:
                here = _load(em, _HALVES, em.element("i8", stats, at), 0)
                return [em.here(_HALVES, f"call {_HALVES} @{umax}({here.typed}, {now[0].typed})")]

            start = Carried(_HALVES, Ssa("zeroinitializer", _HALVES))
            (most,) = em.loop(imm(0), imm(count * STATS_BYTES), STATS_BYTES, [start], panel, "panel")
            half = _reduced(em, "umax", most, "i16")
            word = em.here("i32", f"zext i16 {half.text} to i32")
            bits = em.here("i32", f"shl i32 {word.text}, 15")
            number = em.here("float", f"bitcast i32 {bits.text} to float")
            total = em.here("float", f"fadd float {total.text}, {number.text}")
        scaled = em.here("float", f"fmul float {total.text}, {_float(self.tiny)}")
        em.declare("llvm.minnum.f32", "float", ["float", "float"])
        most_ = _float(2.0**127)
        finite = em.here("float", f"call float @llvm.minnum.f32(float {scaled.text}, float {most_})")
        bits = em.here("i32", f"bitcast float {finite.text} to i32")
        return em.here("i32", f"shl i32 {bits.text}, 1")

    @staticmethod
    def largest(em: Emitter, stats: Ssa, size: int) -> tuple[Ssa, Ssa]:
        """The exponent of the largest number of the panels whose stats have ``size`` bytes together, and whether any is
        not 0."""
        umax = f"llvm.umax.v{2 * GROUP}i16"
        em.declare(umax, _HALVES, [_HALVES, _HALVES])

        def panel(at: Ssa, now: list[Ssa]) -> list[Ssa]:
            own = em.element("i8", stats, at)
            most = em.here(_HALVES, f"call {_HALVES} @{umax}({_load(em, _HALVES, own, 0).typed}, {now[0].typed})")
            return [most, em.here(_WORDS, f"or {_load(em, _WORDS, own, 2).typed}, {now[1].text}")]

        start = [Carried(kind, Ssa("zeroinitializer", kind)) for kind in (_HALVES, _WORDS)]
        most, lost = em.loop(imm(0), imm(size), STATS_BYTES, start, panel, "panel")
        word = em.here("i32", f"zext i16 {_reduced(em, 'umax', most, 'i16').text} to i32")
        bits = em.here("i32", f"or i32 {word.text}, {_reduced(em, 'or', lost, 'i32').text}")
        return em.here("i32", f"lshr i32 {word.text}, 8"), em.here("i1", f"icmp ne i32 {bits.text}, 0")

    def repair(self, sums: Sequence[Ssa], limit: Ssa, stats: Sequence[Ssa], again: Callable[[], None]) -> None:
        """Let ``again`` compute the sums anew if one of them may be wrong. ``stats``: of the panels of both factors."""
        em = self.em
        wrong: Ssa | None = None
        room = em.pure("i32", f"sub i32 {_INFINITE - (1 << 32)}, {limit.text}", limit)
        sizes = [_size(em, value) for value in sums]
        for size in sizes:
            low = em.splat(limit, GROUP)
            over = em.pure(_WORDS, f"sub {size.typed}, {low.text}", size, low)
            bound = em.splat(room, GROUP)
            out = em.pure(_BITS, f"icmp uge {over.typed}, {bound.text}", over, bound)
            wrong = out if wrong is None else em.pure(_BITS, f"or {wrong.typed}, {out.text}", wrong, out)
        assert wrong is not None

        def look() -> None:
            infinite = [em.here(_BITS, f"icmp uge {s.typed}, splat (i32 {_INFINITE - (1 << 32)})") for s in sizes]
            every = [_any(em, bits) for bits in infinite]
            every.append(em.here("i1", f"call i1 @{_loses(em)}({', '.join(s.typed for s in stats)})"))
            need = functools.reduce(lambda a, b: em.here("i1", f"or i1 {a.text}, {b.text}"), every)
            em.choose(need, None, again, lambda: None)

        em.choose(_any(em, wrong), None, look, lambda: None)


def _size(em: Emitter, value: Ssa) -> Ssa:
    """Bits of floats without their signs, shifted up by one."""
    bits = em.pure(_WORDS, f"bitcast {value.typed} to {_WORDS}", value)
    return em.pure(_WORDS, f"shl {bits.typed}, splat (i32 1)", bits)


def _any(em: Emitter, bits: Ssa) -> Ssa:
    symbol = f"llvm.vector.reduce.or.v{GROUP}i1"
    em.declare(symbol, "i1", [_BITS])
    return em.here("i1", f"call i1 @{symbol}({bits.typed})")


def _load(em: Emitter, kind: str, stats: Ssa, position: int) -> Ssa:
    place = em.element("i8", stats, imm(64 * position))
    return em.here(kind, f"load {kind}, ptr {place.text}, align 64")


def _reduced(em: Emitter, op: str, value: Ssa, scalar: str) -> Ssa:
    lanes = value.type[1 : value.type.index(" ")]
    symbol = f"llvm.vector.reduce.{op}.v{lanes}{scalar}"
    em.declare(symbol, scalar, [value.type])
    return em.here(scalar, f"call {scalar} @{symbol}({value.typed})")


def _loses(em: Emitter) -> str:
    """The module's function that tells whether two panels hold numbers that can lose something."""
    name = "tiles_lose"
    if name in em.declarations:
        return name
    own = Emitter(em.declarations)
    exponents, lost = [], []
    for side in ("%left", "%right"):
        stats = Ssa(side, "ptr")
        least = _reduced(own, "umin", _load(own, _HALVES, stats, 1), "i16")
        wide = own.here("i32", f"zext i16 {least.text} to i32")
        following = own.here("i32", f"add i32 {wide.text}, 1")
        exponents.append(own.here("i32", f"lshr i32 {following.text}, 8"))
        bits = _reduced(own, "or", _load(own, _WORDS, stats, 2), "i32")
        lost.append(own.here("i32", f"and i32 {bits.text}, 65535"))
    tests = [own.here("i1", f"icmp ult i32 {exponent.text}, {_LEAST}") for exponent in exponents]
    both = own.here("i32", f"add i32 {exponents[0].text}, {exponents[1].text}")
    tests.append(own.here("i1", f"icmp ult i32 {both.text}, {_LEAST_SUM}"))
    tests += [own.here("i1", f"icmp ne i32 {value.text}, 0") for value in lost]
    found = functools.reduce(lambda a, b: own.here("i1", f"or i1 {a.text}, {b.text}"), tests)
    text = [f"define internal i1 @{name}(ptr %left, ptr %right) noinline {{", "entry:", *own.lines()]
    em.define(name, "\n".join([*text, f"  ret i1 {found.text}", "}"]))
    return name


def _float(value: float) -> str:
    return literal(value, DType.F32)
