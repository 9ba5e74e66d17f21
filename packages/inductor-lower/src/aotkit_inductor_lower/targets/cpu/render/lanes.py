"""Vectors of float32 of any length, as text: what attention on vectors is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....ir import DType
from ..machine import Machine
from .arithmetic import Ops
from .body import out_of_sight
from .casts import emit_cast
from .context import ramp_literal
from .emitter import Carried, Emitter, Ssa, imm, vector_type
from .tile import PAIRS
from .types import literal, memory_type

__all__ = ["POLYNOMIALS", "Lanes"]

#: Coefficients of ``2**r`` for ``-0.5 <= r <= 0.5``, from the constant on (relative error 3e-6, 8e-8 and 2e-9).
POLYNOMIALS = {
    1: (0.999999261442165, 0.6931218147436676, 0.24024744839646142, 0.05591786028196552, 0.009570101434038926),
    2: (
        1.0,
        0.6931469670638644,
        0.24022119723933916,
        0.055507132749604664,
        0.009675541330686679,
        0.0013276471519845145,
    ),
    3: (
        *(1.0, 0.6931472057372567, 0.2402264689061239, 0.055503287769803046),
        *(0.009618488959438844, 0.0013399931214362543, 0.0001534581137940519),
    ),
}

_LEAST = -125.0  # of powers: the result of a smaller one is 0, not subnormal
_MOST = 129.0  # of powers: the result is infinite


class Lanes:
    """Writes operations on vectors of ``count`` numbers into a function. ``pieces``: how exact powers are, see
    :data:`POLYNOMIALS`."""

    def __init__(self, em: Emitter, machine: Machine, count: int, pieces: int = 3) -> None:
        self.em, self.machine, self.count, self.pieces = em, machine, count, pieces
        self.floats, self.bits, self.words = (vector_type(kind, count) for kind in ("float", "i1", "i32"))
        self.short, self.pairs = vector_type("i16", count), vector_type("bfloat", 2 * count)
        self.ops = Ops(em, machine)
        self._one = self._these(1)
        self.wide = count == 16 and machine.has("avx512f")

    # -- numbers -------------------------------------------------------------------------------------------

    def number(self, value: float) -> Ssa:
        """The same in each lane."""
        return Ssa(f"splat (float {literal(value, DType.F32)})", self.floats)

    def all(self, value: Ssa) -> Ssa:
        """A number of this function in each lane."""
        return self.em.splat(value, self.count)

    def op(self, name: str, a: Ssa, b: Ssa) -> Ssa:
        """``fadd``, ``fsub``, ``fmul``, ``fdiv``."""
        return self.em.here(a.type, f"{name} {a.typed}, {b.text}")

    def fma(self, a: Ssa, b: Ssa, c: Ssa) -> Ssa:
        """``a * b + c``, rounded once."""
        symbol = f"llvm.fma.v{self.count}f32"
        self.em.declare(symbol, self.floats, [self.floats] * 3)
        return self.em.here(self.floats, f"call {self.floats} @{symbol}({a.typed}, {b.typed}, {c.typed})")

    def select(self, lanes: Ssa, a: Ssa, b: Ssa) -> Ssa:
        """``a`` in these lanes, ``b`` in the others."""
        return self.em.here(a.type, f"select {lanes.typed}, {a.typed}, {b.typed}")

    def maximum(self, a: Ssa, b: Ssa) -> Ssa:
        """The larger one, ``b`` where one is nan."""
        return self.select(self.em.here(self.bits, f"fcmp ogt {a.typed}, {b.text}"), a, b)

    def add(self, a: Ssa, b: Ssa) -> Ssa:
        """The sum."""
        return self.op("fadd", a, b)

    def across(self, value: Ssa, join: Callable[[Ssa, Ssa], Ssa]) -> Ssa:
        """All lanes joined, in every lane."""
        step = self.count // 2
        while step:
            other = self.em.shuffle(value, value, "float", [lane ^ step for lane in range(self.count)])
            value, step = join(value, other), step // 2
        return value

    def first(self, count: Ssa) -> Ssa:
        """The first so many lanes."""
        narrow = self.em.pure("i32", f"trunc i64 {count.text} to i32", count)
        ramp = ramp_literal(range(self.count), "i32")
        return self.em.here(self.bits, f"icmp slt {ramp.typed}, {self.all(narrow).text}")

    def these(self, count: int) -> Ssa | None:
        """The first so many lanes; ``None`` for all."""
        if count >= self.count:
            return None
        return Ssa(self._these(count), self.bits)

    def _these(self, count: int) -> str:
        return f"<{', '.join(f'i1 {int(lane < count)}' for lane in range(self.count))}>"

    def power(self, exponent: Ssa) -> Ssa:
        """Two to the power of it: a polynomial of what it is away from the nearest integer, scaled by that."""
        em = self.em
        some = em.here(self.bits, f"fcmp ugt {exponent.typed}, {self.number(_LEAST).text}")
        bounded = exponent
        if not self.wide:
            most = self.number(_MOST)
            bounded = self.select(em.here(self.bits, f"fcmp olt {exponent.typed}, {most.text}"), exponent, most)
        symbol = f"llvm.roundeven.v{self.count}f32"
        em.declare(symbol, self.floats, [self.floats])
        whole = em.here(self.floats, f"call {self.floats} @{symbol}({bounded.typed})")
        rest = self.op("fsub", exponent, whole)
        *others, last = POLYNOMIALS[self.pieces]
        value = self.number(last)
        for coefficient in reversed(others):
            value = self.fma(value, rest, self.number(coefficient))
        return self._scaled(value, whole, some)

    def _scaled(self, value: Ssa, whole: Ssa, some: Ssa) -> Ssa:
        """Times two to the power of a whole number, in some lanes; 0 in the others."""
        em, floats, words = self.em, self.floats, self.words
        if self.wide:
            scale = "llvm.x86.avx512.mask.scalef.ps.512"
            em.declare(scale, floats, [floats, floats, floats, "i16", "i32 immarg"])
            kept = em.here("i16", f"bitcast {some.typed} to i16")
            given = f"{value.typed}, {whole.typed}, {floats} zeroinitializer, {kept.typed}, i32 4"
            return em.here(floats, f"call {floats} @{scale}({given})")
        exponent = em.here(words, f"fptosi {whole.typed} to {words}")
        biased = em.here(words, f"add {exponent.typed}, splat (i32 126)")
        bits = em.here(words, f"shl {biased.typed}, splat (i32 23)")
        half = em.here(floats, f"bitcast {bits.typed} to {floats}")
        scaled = self.op("fmul", self.op("fadd", value, value), half)
        return self.select(some, scaled, Ssa("zeroinitializer", floats))

    # -- memory --------------------------------------------------------------------------------------------

    def load(self, place: Ssa) -> Ssa:
        """Numbers side by side."""
        return self.em.here(self.floats, f"load {self.floats}, ptr {place.text}, align 4")

    def store(self, value: Ssa, place: Ssa) -> None:
        """Numbers side by side."""
        self.em.effect(f"store {value.typed}, ptr {place.text}, align 4")

    def scalar(self, place: Ssa) -> Ssa:
        """One number."""
        return self.em.here("float", f"load float, ptr {place.text}, align 4")

    def read(self, place: Ssa, dtype: DType, lanes: Ssa | None) -> Ssa:
        """Numbers of float32 or bfloat16 as float32; 0 in other than these lanes."""
        value = self._raw(place, memory_type(dtype), lanes)
        if dtype is DType.F32:  # see Note [Masked loads stay masked]
            seen = lanes is not None and self.machine.has("avx512f")
            return out_of_sight(self.em, value, "float", 32) if seen else value
        wide = self.em.here(self.words, f"zext {value.typed} to {self.words}")
        bits = self.em.here(self.words, f"shl {wide.typed}, splat (i32 16)")
        return self.em.here(self.floats, f"bitcast {bits.typed} to {self.floats}")

    def _raw(self, place: Ssa, element: str, lanes: Ssa | None) -> Ssa:
        kind, align = vector_type(element, self.count), {"float": 4, "i16": 2, "i8": 1}[element]
        if lanes is None:
            return self.em.here(kind, f"load {kind}, ptr {place.text}, align {align}")
        symbol = f"llvm.masked.load.v{self.count}{'f32' if element == 'float' else element}.p0"
        self.em.declare(symbol, kind, ["ptr", self.bits, kind])
        given = f"ptr align {align} {place.text}, {lanes.typed}, {kind} zeroinitializer"
        return self.em.here(kind, f"call {kind} @{symbol}({given})")

    def bytes_set(self, place: Ssa, lanes: Ssa | None) -> Ssa:
        """Which bytes are not 0, of those lanes that there are."""
        value = self._raw(place, "i8", lanes)
        return self.em.here(self.bits, f"icmp ne {value.typed}, zeroinitializer")

    def write(self, value: Ssa, place: Ssa, dtype: DType, lanes: Ssa | None) -> None:
        """Numbers in memory of their type, in these lanes."""
        element, align = memory_type(dtype), 4 if dtype is DType.F32 else 2
        value = emit_cast(self.ops, value, DType.F32, dtype)
        if lanes is None:
            self.em.effect(f"store {value.typed}, ptr {place.text}, align {align}")
            return
        if lanes.text == self._one:  # LLVM 22 stores four bytes where one of these is rounded to two
            self.em.effect(f"store {self.em.lane(value, 0, element).typed}, ptr {place.text}, align {align}")
            return
        symbol = f"llvm.masked.store.v{self.count}{'f32' if element == 'float' else element}.p0"
        self.em.declare(symbol, "void", [value.type, "ptr", self.bits])
        self.em.effect(f"call void @{symbol}({value.typed}, ptr align {align} {place.text}, {lanes.typed})")

    # -- pairs of bfloat16, on processors that multiply them ------------------------------------------------

    def halves(self, place: Ssa, lanes: Ssa | None) -> Ssa:
        """Numbers of bfloat16 as they are; 0 in other than these lanes."""
        return self._raw(place, "i16", lanes)

    def store_halves(self, value: Ssa, place: Ssa, lanes: Ssa | None) -> None:
        """The same, in these lanes."""
        if lanes is None:
            self.em.effect(f"store {value.typed}, ptr {place.text}, align 2")
            return
        symbol = f"llvm.masked.store.v{self.count}i16.p0"
        self.em.declare(symbol, "void", [value.type, "ptr", self.bits])
        self.em.effect(f"call void @{symbol}({value.typed}, ptr align 2 {place.text}, {lanes.typed})")

    def rounded(self, value: Ssa) -> Ssa:
        """Numbers of float32 as bfloat16, by the instruction for that."""
        kind = vector_type("bfloat", self.count)
        narrow = self.em.here(kind, f"fptrunc {value.typed} to {kind}")
        return self.em.here(self.short, f"bitcast {narrow.typed} to {self.short}")

    def paired(self, low: Ssa, high: Ssa | None) -> Ssa:
        """A pair of the same lane of both; of 0, where there is no second one."""
        em, words = self.em, self.words
        both = em.here(words, f"zext {low.typed} to {words}")
        if high is not None:
            wide = em.here(words, f"zext {high.typed} to {words}")
            above = em.here(words, f"shl {wide.typed}, splat (i32 16)")
            both = em.here(words, f"or {both.typed}, {above.text}")
        return both

    def load_pairs(self, place: Ssa) -> Ssa:
        """Pairs side by side."""
        return self.em.here(self.pairs, f"load {self.pairs}, ptr {place.text}, align 4")

    def all_pairs(self, place: Ssa) -> Ssa:
        """One pair in each lane."""
        pair = self.em.here("i32", f"load i32, ptr {place.text}, align 4")
        every = self.all(pair)
        return self.em.here(self.pairs, f"bitcast {every.typed} to {self.pairs}")

    def dot(self, a: Ssa, b: Ssa, c: Ssa) -> Ssa:
        """``c`` and the products of both numbers of pairs."""
        self.em.declare(PAIRS.dot, self.floats, [self.floats, self.pairs, self.pairs])
        return self.em.here(self.floats, f"call {self.floats} @{PAIRS.dot}({c.typed}, {a.typed}, {b.typed})")

    # -- loops ---------------------------------------------------------------------------------------------

    def over(
        self, count: Ssa, carried: Sequence[Ssa], body: Callable[[Ssa, Ssa | None, list[Ssa]], list[Ssa]]
    ) -> list[Ssa]:
        """Vectors of so many numbers side by side: ``body`` gets where one begins, and its lanes if there are not all
        of them, and gives what is carried on."""
        em = self.em
        whole = em.round_down(count, self.count)
        begin = [Carried(value.type, value) for value in carried]
        now = em.loop(imm(0), whole, self.count, begin, lambda at, c: body(at, None, c), "lanes")
        rest = em.sub(count, whole)

        def tail(at: Ssa, values: list[Ssa]) -> list[Ssa]:
            return body(at, self.first(rest), values)

        # A loop of one iteration at most.
        return em.loop(whole, count, self.count, [Carried(v.type, v) for v in now], tail, "tail")

    def up(self, count: Ssa) -> Ssa:
        """The next multiple of the length of vectors."""
        return self.em.round_down(self.em.add(count, imm(self.count - 1)), self.count)
