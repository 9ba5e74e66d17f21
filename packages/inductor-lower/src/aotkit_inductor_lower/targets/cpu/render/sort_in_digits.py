"""Sorting rows digit by digit.

Note [Sorting in digits]
    What Note [A sort as a nest] says of a row, as a radix sort from the lowest digit up: one pass over the row makes
    the keys and counts how often each digit is there, one pass a digit moves what is sorted to its digit's turn.
    A digit that all keys share moves nothing and is passed over. Equal keys keep their order in each pass, so the sort
    is stable, and elements are fetched by the places that they had: their bits survive.

    A key of up to 32 bits and the place in the row are one number of eight bytes; these go back and forth between the
    memory that the nest has for keys and the one for ranks. Of wider keys only the places move, four bytes each, in two
    halves of the memory for ranks.

    A row is one unit of work, so results do not depend on the number of threads.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ....ir import DType
from ....kernel_ir.launches import KernelText
from ....kernel_ir.nodes import Kernel
from ....launch_plan.status import INDEX_ERROR
from ....symbolic import Expr, product
from ..machine import Machine
from ..sort_site import SortSite
from .body import emit_body
from .context import Value
from .emitter import Carried, Ssa, imm
from .kernel import STACK_ROW_BYTES, KernelEmitter

__all__ = ["SortInDigits"]

_PLACE = 32  # bits
_WORK = 64  # of an element, in the units of :func:`..map_loops.work_of`
_SHORT = 3000  # elements: shorter rows are sorted by digits of fewer bits, whose counters are sooner cleared
_SIDE = 16  # counters that are cleared at once


@dataclass(frozen=True, slots=True)
class _Digit:
    """Bits of a key: ``bits`` from ``shift`` on. ``first``: its first counter."""

    shift: int
    bits: int
    first: int


class SortInDigits(KernelEmitter):
    """Writes a kernel that :func:`~..sort_site.sort_site` knows."""

    def __init__(self, kernel: Kernel, site: SortSite, target: Machine, declarations: dict[str, str]) -> None:
        super().__init__(kernel, target, declarations)
        self.site, self.wide = site, site.bits > _PLACE
        self.digits = _digits(site.bits, site.count.constant)
        self.counters = imm(0)

    def emit(self) -> KernelText:
        """The kernel's text. Units may run at once: each has rows of its own."""
        return replace(super().emit(), parallel=True)

    def work(self) -> Expr:
        """Of a launch, which is not what the nest says."""
        return product(loop.extent for loop in self.kernel.grid) * self.site.count * _WORK

    def units(self) -> tuple[Expr, int | None]:
        """Rows."""
        return product(loop.extent for loop in self.kernel.grid), None

    def allocate(self, pointers: dict[str, Ssa]) -> None:
        """Counters of all digits, and two numbers of eight bytes an element: on the stack where these are few."""
        em, site = self.em, self.site
        counters = sum(1 << digit.bits for digit in self.digits)
        self.counters = em.pure("ptr", f"alloca [{max(counters, _SIDE)} x i32], align 64 ; counters")
        count = self.ctx.scalar(site.count)
        if count.constant is not None and count.constant * 16 <= STACK_ROW_BYTES:
            room = em.pure("ptr", f"alloca [{count.constant * 2} x i64], align 64 ; keys and ranks")
        else:
            room = self.memory(em.mul(count, imm(16)))
        pointers[site.keys], pointers[site.ranks] = room, em.element("i64", room, count)

    def unit(self, unit: Ssa, chunk: int | None) -> list[Ssa]:
        """A row."""
        em, ctx = self.em, self.ctx
        ctx.values.clear()
        self.place(self._loops(), unit)
        count = ctx.scalar(self.site.count)
        if self.site.count.constant is not None:
            self._row(count)
            return []
        below = self._bit(f"ult i64 {count.text}, {1 << _PLACE}")
        self.ops.flag(self._bit(f"uge i64 {count.text}, {1 << _PLACE}"), INDEX_ERROR)  # no place is wrong unnoticed
        self.ops.set_flags()
        some = self._bit(f"ne i64 {count.text}, 0")
        runs = em.here("i1", f"and i1 {below.text}, {some.text}")
        em.choose(runs, None, lambda: self._row(count), lambda: None)
        return []

    def _row(self, count: Ssa) -> None:
        site, em, ctx = self.site, self.em, self.ctx
        keys, ranks = ctx.pointers[site.keys], ctx.pointers[site.ranks]
        self._clear()
        if self.wide:
            source, other = ranks, em.element("i32", ranks, count)
        else:
            source, other = keys, ranks
        em.loop(imm(0), count, 1, [], lambda at, _: self._begin(at, keys, source), "key")
        ends = source, other
        for digit in self.digits:
            moved = self._pass(digit, count, keys, source, other)
            other = em.here(
                "ptr",
                f"select i1 {self._bit(f'eq ptr {moved.text}, {ends[0].text}').text}, {ends[1].typed}, {ends[0].typed}",
            )
            source = moved
        em.loop(imm(0), count, 1, [], lambda at, _: self._finish(at, source), "rank")

    # -- parts -------------------------------------------------------------------------------------------

    def _clear(self) -> None:
        count = sum(1 << digit.bits for digit in self.digits)

        def zeros(at: Ssa, _: list[Ssa]) -> list[Ssa]:
            place = self.em.element("i32", self.counters, at)
            self.em.effect(f"store <{_SIDE} x i32> zeroinitializer, ptr {place.text}, align 64")
            return []

        self.em.loop(imm(0), imm(count), _SIDE, [], zeros, "cleared")

    def _begin(self, at: Ssa, keys: Ssa, source: Ssa) -> list[Ssa]:
        """Make a key, count its digits, and put it where the first digit's pass finds it."""
        em, ctx, site = self.em, self.ctx, self.site
        floor = self.go_to({site.element: at}, None)
        emit_body(ctx, site.make)
        key = self._op("sub", ctx.values[site.key].parts[0], site.least)
        self.go_back(floor)
        key = self._op("lshr", key, site.drop) if site.drop else key
        for digit in self.digits:
            counter = self._counter(digit, key)
            self._add_one(counter)
        if self.wide:
            em.effect(f"store {key.typed}, ptr {em.element('i64', keys, at).text}, align 8")
            self._store(em.here("i32", f"trunc i64 {at.text} to i32"), source, at)
        else:
            high = self._op("shl", key, _PLACE)
            self._store(em.here("i64", f"or i64 {high.text}, {at.text}"), source, at)
        return []

    def _pass(self, digit: _Digit, count: Ssa, keys: Ssa, source: Ssa, other: Ssa) -> Ssa:
        """Order by a digit, out of ``source`` into ``other``; gives where they are then."""
        em = self.em
        first = self._counter(digit, self._key(self._load(source, imm(0)), keys))
        same = em.here("i32", f"load i32, ptr {first.text}, align 4")
        whole = em.here("i32", f"trunc i64 {count.text} to i32")

        def move() -> Ssa:
            self._sum_counters(digit)
            em.loop(imm(0), count, 1, [], lambda at, _: self._move(digit, at, keys, source, other), "moved")
            return other

        found = em.choose(self._bit(f"eq i32 {same.text}, {whole.text}"), "ptr", lambda: source, move)
        assert found is not None
        return found

    def _sum_counters(self, digit: _Digit) -> None:
        """Make of how often a digit is there where its turn begins."""
        em = self.em

        def add(at: Ssa, before: list[Ssa]) -> list[Ssa]:
            place = em.element("i32", self.counters, em.add(at, imm(digit.first)))
            here = em.here("i32", f"load i32, ptr {place.text}, align 4")
            em.effect(f"store {before[0].typed}, ptr {place.text}, align 4")
            return [em.here("i32", f"add i32 {before[0].text}, {here.text}")]

        em.loop(imm(0), imm(1 << digit.bits), 1, [Carried("i32", imm(0, "i32"))], add, "turn")

    def _move(self, digit: _Digit, at: Ssa, keys: Ssa, source: Ssa, other: Ssa) -> list[Ssa]:
        element = self._load(source, at)
        to = self._add_one(self._counter(digit, self._key(element, keys)))
        self._store(element, other, self.em.here("i64", f"zext i32 {to.text} to i64"))
        return []

    def _finish(self, at: Ssa, source: Ssa) -> list[Ssa]:
        """Store an element and its place."""
        em, ctx, site = self.em, self.ctx, self.site
        element = self._load(source, at)
        low = f"zext i32 {element.text} to i64" if self.wide else f"and i64 {element.text}, {(1 << _PLACE) - 1}"
        floor = self.go_to({site.place: em.here("i64", low)}, None)
        ctx.values[site.rank] = Value(DType.I64, (at,))
        emit_body(ctx, site.finish)
        self.go_back(floor)
        return []

    # -- elements ----------------------------------------------------------------------------------------

    @property
    def _type(self) -> tuple[str, int]:
        """Of what moves, and its bytes."""
        return ("i32", 4) if self.wide else ("i64", 8)

    def _load(self, source: Ssa, at: Ssa) -> Ssa:
        kind, align = self._type
        return self.em.here(kind, f"load {kind}, ptr {self.em.element(kind, source, at).text}, align {align}")

    def _store(self, element: Ssa, to: Ssa, at: Ssa) -> None:
        kind, align = self._type
        self.em.effect(f"store {element.typed}, ptr {self.em.element(kind, to, at).text}, align {align}")

    def _key(self, element: Ssa, keys: Ssa) -> Ssa:
        """The key of what moves."""
        em = self.em
        if not self.wide:
            return self._op("lshr", element, _PLACE)
        place = em.here("i64", f"zext i32 {element.text} to i64")
        return em.here("i64", f"load i64, ptr {em.element('i64', keys, place).text}, align 8")

    def _counter(self, digit: _Digit, key: Ssa) -> Ssa:
        """The counter of a key's digit."""
        value = self._op("lshr", key, digit.shift) if digit.shift else key
        value = self._op("and", value, (1 << digit.bits) - 1)
        return self.em.here(
            "ptr",
            f"getelementptr i32, ptr {self.em.element('i32', self.counters, imm(digit.first)).text}, i64 {value.text}",
        )

    def _add_one(self, counter: Ssa) -> Ssa:
        """What a counter was, before one more."""
        em = self.em
        old = em.here("i32", f"load i32, ptr {counter.text}, align 4")
        new = em.here("i32", f"add i32 {old.text}, 1")
        em.effect(f"store {new.typed}, ptr {counter.text}, align 4")
        return old

    def _op(self, name: str, value: Ssa, number: int) -> Ssa:
        return self.em.here("i64", f"{name} i64 {value.text}, {number}")

    def _bit(self, text: str) -> Ssa:
        return self.em.here("i1", f"icmp {text}")


def _digits(bits: int, count: int | None) -> tuple[_Digit, ...]:
    """A key's digits, the lowest first, of as many bits each as there can be."""
    most = 8 if count is not None and count < _SHORT else 11
    number = -(-bits // most)
    found, shift, first = [], 0, 0
    for left in range(number, 0, -1):
        own = -(-(bits - shift) // left)
        found.append(_Digit(shift, own, first))
        shift, first = shift + own, first + (1 << own)
    return tuple(found)
