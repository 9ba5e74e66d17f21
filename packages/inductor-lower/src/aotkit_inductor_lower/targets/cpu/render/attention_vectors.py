"""Vectors of sixteen numbers, as text: what :mod:`.attention_tiles` is made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ....ir import DType
from ..tile_forms import TILE_BYTES
from .amx_pack import GROUP
from .body import out_of_sight
from .emitter import Emitter, Ssa, imm, vector_type
from .types import literal

__all__ = [
    "BITS",
    "FLOATS",
    "HALVES",
    "LONG",
    "WORDS",
    "across",
    "bytes_set",
    "first_lanes",
    "fma",
    "in_block",
    "interleaved",
    "interleaved_key",
    "kept_factor",
    "load",
    "maximum",
    "narrow",
    "number",
    "read_numbers",
    "rounded",
    "splat_of",
    "store",
    "store_all",
    "store_lanes",
    "sum_of",
    "these_lanes",
    "words",
]

FLOATS, WORDS, HALVES = vector_type("float", GROUP), vector_type("i32", GROUP), vector_type("i16", GROUP)
BITS, LONG = vector_type("i1", GROUP), vector_type("i16", 2 * GROUP)


def number(value: float) -> str:
    """A float32 in LLVM text."""
    return literal(value, DType.F32)


def splat_of(value: float) -> Ssa:
    return Ssa(f"splat (float {number(value)})", FLOATS)


def interleaved_key(half: int, lane: int) -> int:
    """Which key of 32 a lane of interleaved neighbors is."""
    return lane // 4 * 8 + half * 4 + lane % 4


# -- masks of bytes ---------------------------------------------------------------------------------------


def bytes_set(em: Emitter, place: Ssa, lanes: Ssa) -> Ssa:
    """Which of sixteen bytes are not 0, of those lanes that there are."""
    symbol, kind = f"llvm.masked.load.v{GROUP}i8.p0", vector_type("i8", GROUP)
    em.declare(symbol, kind, ["ptr", BITS, kind])
    given = f"ptr align 1 {place.text}, {lanes.typed}, {kind} zeroinitializer"
    value = em.here(kind, f"call {kind} @{symbol}({given})")
    return em.here(BITS, f"icmp ne {value.typed}, zeroinitializer")


def in_block(em: Emitter, row: Ssa, rows: Ssa, left: Ssa) -> Ssa:
    """The lanes of a row of a block that there are: none of a row too many."""
    there = em.pure("i1", f"icmp slt i64 {row.text}, {rows.text}", row)
    return first_lanes(em, em.pure("i64", f"select {there.typed}, {left.typed}, i64 0", there, left))


def kept_factor(em: Emitter, row: Ssa, key: Ssa) -> Ssa:
    """What dropout multiplies sixteen weights of a row by, from a key on."""
    line = em.element("i8", Ssa("%kept", "ptr"), em.add(em.mul(row, Ssa("%kept.step", "i64")), key))
    lanes = in_block(em, row, Ssa("%kept.rows", "i64"), em.sub(Ssa("%kept.left", "i64"), key))
    kept, much = bytes_set(em, line, lanes), em.splat(Ssa("%kept.scale", "float"), GROUP)
    return em.here(FLOATS, f"select {kept.typed}, {much.typed}, {FLOATS} zeroinitializer")


# -- vectors ----------------------------------------------------------------------------------------------


def load(em: Emitter, place: Ssa) -> Ssa:
    return em.here(FLOATS, f"load {FLOATS}, ptr {place.text}, align 64")


def store(em: Emitter, value: Ssa, place: Ssa) -> None:
    em.effect(f"store {value.typed}, ptr {place.text}, align 64")


def store_lanes(em: Emitter, place: Ssa, value: Ssa, lanes: Ssa) -> None:
    """Some of sixteen numbers, in memory of their type."""
    suffix, align = ("i16", 2) if value.type == HALVES else ("f32", 4)
    symbol = f"llvm.masked.store.v{GROUP}{suffix}.p0"
    em.declare(symbol, "void", [value.type, "ptr", BITS])
    em.effect(f"call void @{symbol}({value.typed}, ptr align {align} {place.text}, {lanes.typed})")


def store_all(em: Emitter, pieces: Sequence[Ssa], to: Ssa) -> None:
    """A row of tiles, one for each piece."""
    for piece, value in enumerate(pieces):
        store(em, value, em.element("i8", to, imm(piece * 2 * TILE_BYTES)))


def read_numbers(em: Emitter, place: Ssa, narrow: bool, lanes: Ssa | None) -> Ssa:
    """Sixteen numbers in memory as float32; 0 where there is none."""
    kind = HALVES if narrow else FLOATS
    align, suffix = (2, "i16") if narrow else (4, "f32")
    if lanes is None:
        value = em.here(kind, f"load {kind}, ptr {place.text}, align {align}")
    else:
        symbol = f"llvm.masked.load.v{GROUP}{suffix}.p0"
        em.declare(symbol, kind, ["ptr", BITS, kind])
        value = em.here(
            kind, f"call {kind} @{symbol}(ptr align {align} {place.text}, {lanes.typed}, {kind} zeroinitializer)"
        )
    if not narrow:  # see Note [Masked loads stay masked]
        return value if lanes is None else out_of_sight(em, value, "float", 32)
    wide = em.here(WORDS, f"zext {value.typed} to {WORDS}")
    bits = em.here(WORDS, f"shl {wide.typed}, splat (i32 16)")
    return em.here(FLOATS, f"bitcast {bits.typed} to {FLOATS}")


def rounded(em: Emitter, value: Ssa) -> Ssa:
    short = vector_type("bfloat", GROUP)
    rounded = em.here(short, f"fptrunc {value.typed} to {short}")
    return em.here(HALVES, f"bitcast {rounded.typed} to {HALVES}")


def narrow(em: Emitter, low: Ssa, high: Ssa) -> Ssa:
    """Two vectors as one of bfloat16."""
    short = vector_type("bfloat", 2 * GROUP)
    symbol = "llvm.x86.avx512bf16.cvtne2ps2bf16.512"
    em.declare(symbol, short, [FLOATS, FLOATS])
    rounded = em.here(short, f"call {short} @{symbol}({high.typed}, {low.typed})")
    return em.here(LONG, f"bitcast {rounded.typed} to {LONG}")


def words(em: Emitter, value: Ssa) -> Ssa:
    return em.here(WORDS, f"bitcast {value.typed} to {WORDS}")


def interleaved(em: Emitter, first: Ssa, second: Ssa, half: int) -> Ssa:
    """Pairs of two rows of bfloat16: of each eight numbers the first or the second four, see :func:`_key`."""
    picks = []
    for lane in range(GROUP):
        key = interleaved_key(half, lane)
        picks += [key, 2 * GROUP + key]
    return words(em, em.shuffle(first, second, "i16", picks))


def fma(em: Emitter, a: Ssa, b: Ssa, c: Ssa) -> Ssa:
    symbol = f"llvm.fma.v{GROUP}f32"
    em.declare(symbol, FLOATS, [FLOATS] * 3)
    return em.here(FLOATS, f"call {FLOATS} @{symbol}({a.typed}, {b.typed}, {c.typed})")


def maximum(em: Emitter, a: Ssa, b: Ssa) -> Ssa:
    """The larger one, ``b`` where one is nan: one instruction."""
    more = em.here(BITS, f"fcmp ogt {a.typed}, {b.text}")
    return em.here(FLOATS, f"select {more.typed}, {a.typed}, {b.typed}")


def sum_of(em: Emitter, a: Ssa, b: Ssa) -> Ssa:
    return em.here(FLOATS, f"fadd {a.typed}, {b.text}")


def across(em: Emitter, value: Ssa, join: Callable[[Emitter, Ssa, Ssa], Ssa]) -> Ssa:
    """All lanes joined, in every lane."""
    step = GROUP // 2
    while step:
        other = em.shuffle(value, value, "float", [lane ^ step for lane in range(GROUP)])
        value, step = join(em, value, other), step // 2
    return value


def first_lanes(em: Emitter, count: Ssa) -> Ssa:
    """The first so many lanes."""
    some = em.minimum(em.maximum(count, imm(0)), imm(GROUP))
    ones = em.pure("i64", f"shl i64 1, {some.text}", some)
    bits = em.pure("i16", f"trunc i64 {em.sub(ones, imm(1)).text} to i16", ones)
    return em.pure(BITS, f"bitcast i16 {bits.text} to {BITS}", bits)


def these_lanes(bits: Sequence[bool]) -> Ssa:
    return Ssa(f"<{', '.join(f'i1 {int(bit)}' for bit in bits)}>", BITS)
