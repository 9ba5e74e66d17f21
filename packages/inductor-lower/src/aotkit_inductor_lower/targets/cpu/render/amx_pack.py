"""Packing factors of a product for tile registers, see Note [Packed factors] in :mod:`.amx_tiles`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ....ir import DType
from ..tile_forms import TILE_BYTES, TileForm
from .emitter import Carried, Emitter, Ssa, imm, vector_type
from .transpose import transpose

__all__ = ["GROUP", "STATS_BYTES", "Packing", "carried_stats", "look_over", "neighbors", "pack_step", "pairs_of"]
__all__ += ["room_for_squares", "store_line", "store_stats"]

GROUP = 16  # lines of a tile, and lanes of a vector of 32 bits
#: What is kept of a panel: the largest and the smallest nonzero number (as 16 bits), and bits that no piece holds.
STATS_BYTES = 3 * 64

_WORDS, _HALVES = vector_type("i32", GROUP), vector_type("i16", 2 * GROUP)


@dataclass(frozen=True, slots=True)
class Packing:
    """How a factor is packed. ``dtype``: of its numbers. ``along``: vectors of it are along the summed loop, and not
    along its lines. ``right``: which factor it is."""

    form: TileForm
    dtype: DType
    along: bool
    right: bool

    @property
    def turned(self) -> bool:
        """Whether squares must be turned over on the way."""
        return self.along == self.right

    @property
    def checked(self) -> bool:
        """Whether a panel's numbers are looked at, see Note [What tiles get wrong]."""
        return self.dtype is DType.F32 and self.form.pieces > 1

    @property
    def neighbors(self) -> bool:
        """Whether neighbors are pairs, and not numbers that are 16 apart."""
        return self.form.pieces == 1

    @property
    def count(self) -> int:
        """How many numbers are multiplied at once: pairs of bfloat16, or four bytes."""
        return self.form.depth // GROUP

    def place(self, em: Emitter, index: Ssa, half: int) -> Ssa:
        """Which number of a step a vector across lines has, for :func:`pack_step`."""
        if self.neighbors:
            return em.add(em.mul(index, imm(self.count)), imm(half))
        return em.add(index, imm(GROUP * half))


def carried_stats(em: Emitter, stats: Ssa) -> list[Carried]:
    """What a panel's numbers were so far."""
    kinds = (_HALVES, _HALVES, _WORDS)
    places = [em.element("i8", stats, imm(64 * k)) for k in range(len(kinds))]
    loaded = [em.here(kind, f"load {kind}, ptr {at.text}, align 64") for kind, at in zip(kinds, places, strict=True)]
    return [Carried(kind, value) for kind, value in zip(kinds, loaded, strict=True)]


def store_stats(em: Emitter, stats: Ssa, values: list[Ssa]) -> None:
    """Keep them for the next steps of the panel."""
    for k, value in enumerate(values):
        em.effect(f"store {value.typed}, ptr {em.element('i8', stats, imm(64 * k)).text}, align 64")


def room_for_squares(em: Emitter, packing: Packing) -> Ssa | None:
    """Memory that :func:`pack_step` needs to turn squares over."""
    kind = _WORDS if packing.neighbors else vector_type("float", GROUP)
    count = GROUP if packing.neighbors else 2 * GROUP
    return em.pure("ptr", f"alloca [{count} x {kind}], align 64 ; squares") if packing.turned else None


def pack_step(
    em: Emitter,
    packing: Packing,
    read: Callable[[Ssa, int], Ssa],
    to: Ssa,
    room: Ssa | None,
    stats: Sequence[Carried],
) -> list[Ssa]:
    """Write one step of 16 lines. ``read(index, half)``: the vector of line ``index`` and the ``half``-th 16 numbers of
    the step (of bytes there are four such); or, across lines, of number :meth:`Packing.place`. ``room``: of
    :func:`room_for_squares`, made at the function's entry. Gives the panel's stats with these numbers."""
    if packing.neighbors:
        _pack_neighbors(em, packing, read, to, room)
        return [value.initial for value in stats]
    if room is not None:
        for half in range(2):
            columns = transpose(em, [read(imm(index), half) for index in range(GROUP)], "float", 32)
            for index, column in enumerate(columns):
                em.effect(f"store {column.typed}, ptr {_square(em, room, imm(index), half).text}, align 64")

    def line(index: Ssa, now: list[Ssa]) -> list[Ssa]:
        if room is None:
            low, high = read(index, 0), read(index, 1)
        else:
            kind = vector_type("float", GROUP)
            places = [_square(em, room, index, half) for half in range(2)]
            low, high = (em.here(kind, f"load {kind}, ptr {place.text}, align 64") for place in places)
        pairs, pieces = pairs_of(em, packing.form, low, high)
        for piece, value in enumerate(pairs):
            store_line(em, value, to, piece, index)
        return _observed(em, now, pairs[0], pieces if packing.form.pieces == 3 else ()) if now else []

    return em.loop(imm(0), imm(GROUP), 1, stats, line, "line")


def look_over(em: Emitter, panel: Ssa, steps: Ssa, step_bytes: int, stats: Ssa) -> None:
    """Add to a panel's stats what is in so many steps of it that were packed before, of numbers that their pieces hold
    whole: their first pieces tell."""

    def step(at: Ssa, now: list[Ssa]) -> list[Ssa]:
        own = em.element("i8", panel, em.mul(at, imm(step_bytes)))

        def line(at: Ssa, now: list[Ssa]) -> list[Ssa]:
            pairs = em.here(_WORDS, f"load {_WORDS}, ptr {em.element('i8', own, at).text}, align 64")
            return _observed(em, now, pairs, ())

        return em.loop(imm(0), imm(2 * TILE_BYTES), 64, [Carried(v.type, v) for v in now], line, "line")

    store_stats(em, stats, em.loop(imm(0), steps, 1, carried_stats(em, stats), step, "k"))


def pairs_of(em: Emitter, form: TileForm, low: Ssa, high: Ssa) -> tuple[list[Ssa], tuple[Ssa, ...]]:
    """Pairs of the numbers of two vectors of float32, a register for each of several pieces; and what was left of both
    for the last piece."""
    pieces = list(zip(*(_split(em, value, form.pieces) for value in (low, high)), strict=True))
    if form.pieces == 2:
        rounded = [_words(em, _narrow(em, half)) for half in pieces[1]]
        return [_pair(em, *pieces[0]), _or(em, rounded[0], _shift(em, "shl", rounded[1]))], pieces[-1]
    return [_pair(em, *piece) for piece in pieces], pieces[-1]


def _square(em: Emitter, room: Ssa, index: Ssa, half: int) -> Ssa:
    return em.element(vector_type("float", GROUP), room, em.add(index, imm(GROUP * half)))


def _pack_neighbors(em: Emitter, packing: Packing, read: Callable[[Ssa, int], Ssa], to: Ssa, room: Ssa | None) -> None:
    if room is not None:
        pairs = [neighbors(em, packing, functools.partial(read, imm(index))) for index in range(GROUP)]
        for index, value in enumerate(transpose(em, pairs, "i32", 32)):
            store_line(em, value, to, 0, imm(index))
        return

    def line(index: Ssa, _: list[Ssa]) -> list[Ssa]:
        store_line(em, neighbors(em, packing, functools.partial(read, index)), to, 0, index)
        return []

    em.loop(imm(0), imm(GROUP), 1, [], line, "line")


def store_line(em: Emitter, value: Ssa, to: Ssa, piece: int, line: Ssa) -> None:
    """A row of one of a step's tiles."""
    at = em.element("i8", to, em.add(em.mul(line, imm(64)), imm(piece * 2 * TILE_BYTES)))
    em.effect(f"store {value.typed}, ptr {at.text}, align 64")


def neighbors(em: Emitter, packing: Packing, read: Callable[[int], Ssa]) -> Ssa:
    """Pairs of bfloat16 that are neighbors, or four bytes."""
    if packing.dtype is DType.I8:
        return _four_bytes(em, [read(number) for number in range(packing.count)], packing.along)
    low, high = (_narrow(em, read(half)) for half in range(2))
    if packing.along:
        both = em.shuffle(low, high, "i16", range(2 * GROUP))
        return em.pure(_WORDS, f"bitcast {both.typed} to {_WORDS}", both)
    return _or(em, _words(em, low), _shift(em, "shl", _words(em, high)))


def _four_bytes(em: Emitter, bytes_: Sequence[Ssa], along: bool) -> Ssa:
    """Four vectors of 16 bytes as one of words: one after the other, or one byte of each side by side."""
    if along:
        halves = [em.shuffle(a, b, "i8", range(2 * GROUP)) for a, b in (bytes_[:2], bytes_[2:])]
        whole = em.shuffle(halves[0], halves[1], "i8", range(4 * GROUP))
        return em.pure(_WORDS, f"bitcast {whole.typed} to {_WORDS}", whole)
    words = [_words(em, value) for value in bytes_]
    moved = [em.pure(_WORDS, f"shl {word.typed}, splat (i32 {8 * k})", word) for k, word in enumerate(words)]
    return functools.reduce(functools.partial(_or, em), moved)


def _narrow(em: Emitter, value: Ssa) -> Ssa:
    """bfloat16 of float32, rounded to nearest; what is bfloat16 stays."""
    halves = vector_type("i16", GROUP)
    if value.type == halves:
        return value
    short = vector_type("bfloat", GROUP)
    if value.type == _WORDS:
        value = em.pure(vector_type("float", GROUP), f"bitcast {value.typed} to {vector_type('float', GROUP)}", value)
    rounded = em.pure(short, f"fptrunc {value.typed} to {short}", value)
    return em.pure(halves, f"bitcast {rounded.typed} to {halves}", rounded)


def _words(em: Emitter, value: Ssa) -> Ssa:
    return em.pure(_WORDS, f"zext {value.typed} to {_WORDS}", value)


def _shift(em: Emitter, op: str, value: Ssa) -> Ssa:
    return em.pure(_WORDS, f"{op} {value.typed}, splat (i32 16)", value)


def _or(em: Emitter, a: Ssa, b: Ssa) -> Ssa:
    return em.pure(_WORDS, f"or {a.typed}, {b.text}", a, b)


def _pair(em: Emitter, low: Ssa, high: Ssa) -> Ssa:
    """The upper halves of two vectors of words. What the lower halves hold does not count."""
    upper = em.pure(_WORDS, f"and {high.typed}, splat (i32 -65536)", high)
    return _or(em, _shift(em, "lshr", low), upper)


def _split(em: Emitter, value: Ssa, count: int) -> list[Ssa]:
    """The pieces of a float32, each in the upper half of a word; the last one is what is left, with all its bits. The
    first is rounded to nearest, which makes what is left half as large; three pieces are exact however the second is
    cut off."""
    floats, pieces, rest = vector_type("float", GROUP), [], value
    for number in range(count - 1):
        bits = em.pure(_WORDS, f"bitcast {rest.typed} to {_WORDS}", rest)
        near = em.pure(_WORDS, f"add {bits.typed}, splat (i32 32768)", bits) if number == 0 else bits
        piece = em.pure(_WORDS, f"and {near.typed}, splat (i32 -65536)", near)
        pieces.append(piece)
        part = em.pure(floats, f"bitcast {piece.typed} to {floats}", piece)
        rest = em.pure(floats, f"fsub {rest.typed}, {part.text}", rest, part)
    return [*pieces, em.pure(_WORDS, f"bitcast {rest.typed} to {_WORDS}", rest)]


def _observed(em: Emitter, stats: list[Ssa], first: Ssa, left: tuple[Ssa, ...]) -> list[Ssa]:
    """A panel's stats with the first pieces of 32 more numbers, and what was ``left`` of these for their last ones."""
    largest, smallest, lost = stats
    halves = em.pure(_HALVES, f"bitcast {first.typed} to {_HALVES}", first)
    size = em.pure(_HALVES, f"shl {halves.typed}, splat (i16 1)", halves)
    below = em.pure(_HALVES, f"add {size.typed}, splat (i16 -1)", size)  # 0 counts as the largest
    found = []
    for name, old, new in (("umax", largest, size), ("umin", smallest, below)):
        symbol = f"llvm.{name}.v{2 * GROUP}i16"
        em.declare(symbol, _HALVES, [_HALVES, _HALVES])
        found.append(em.pure(_HALVES, f"call {_HALVES} @{symbol}({old.typed}, {new.typed})", old, new))
    for value in left:
        lost = _or(em, lost, value)
    return [*found, lost]
