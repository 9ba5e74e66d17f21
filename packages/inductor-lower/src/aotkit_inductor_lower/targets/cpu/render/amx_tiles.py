"""Products in the tile registers of AMX: forms, layout of packed factors, and the function that sums a tile.

Note [float32 in pieces of bfloat16]
    The tile instructions multiply bfloat16 and add in float32. A float32 is the exact sum of three bfloat16 pieces:
    what it rounds to, what the rest rounds to, and what is left then, which has eight bits. Of the nine products of the
    pieces of two numbers the three smallest are below the precision of float32, so six give a product as exact as
    float32's own (``"highest"`` in :func:`torch.set_float32_matmul_precision`); two pieces and three products give 16
    bits (``"high"``), one piece is bfloat16 (``"medium"``). (Henry, Tang and Heinecke, Leveraging the bfloat16
    Artificial Intelligence Datatype For Higher-Precision Computations, 2019.)

Note [Packed factors]
    A factor is packed into panels of 32 lines (rows of the left factor, columns of the right one). A panel holds, for
    every ``depth`` numbers that are summed (a *step*), for every piece, two tiles of 1 KiB: 16 lines each. A tile
    of the left factor is 16 rows of 16 pairs, one of the right factor 16 rows of pairs by 16 columns; of bytes there
    are four where the others have a pair. Any two numbers
    of a step may be a pair, as long as both factors pair the same ones: of float32 these are numbers 16 apart, so that
    two whole registers become one by a shift; of bfloat16 they are neighbors, as they lie in memory.

Note [What tiles get wrong]
    The tile instructions take subnormal numbers for 0 and give 0 for subnormal results, and an infinity has no pieces
    (what is left of it is nan). Whether that matters is seen at the sums. A sum that is not finite is computed again:
    by an infinity, a nan, or a number so large that its first piece is infinite, every sum it takes part in is not
    finite. A sum that is tiny, compared with the error that lost subnormal numbers can make given the largest factor,
    is computed again only if its panels hold numbers that can lose something: packing keeps the smallest nonzero number
    of each panel, and the bits that no piece holds. So zeros cost nothing. What is computed again is one row of a tile,
    from the factors as they are, by fused multiply-add. Factors of bfloat16 are multiplied by these instructions in
    eager mode, too, so nothing is checked there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..tile_forms import TILE_BYTES, TileForm
from .emitter import Emitter, Ssa, imm

__all__ = ["CORNERS", "configure", "micro_function", "release", "uses_tiles"]

CORNERS = 4  # tiles of a block of sums, 32 by 32: its halves of rows by its halves of columns

# Palette 1; sixteen rows of 64 bytes in each of the eight tiles.
_CONFIG = [1, *[0] * 15, *[64, 0] * 8, *[0] * 16, *[16] * 8, *[0] * 8]


def configure(em: Emitter) -> None:
    """Give the tile registers their shapes, which must be done before the first use in a function."""
    inside = ", ".join(f"i8 {byte}" for byte in _CONFIG)
    em.define("tile_shapes", f"@tile_shapes = private constant [{len(_CONFIG)} x i8] [{inside}], align 64")
    em.declare("llvm.x86.ldtilecfg", "void", ["ptr"])
    em.effect("call void @llvm.x86.ldtilecfg(ptr @tile_shapes)")


def uses_tiles(declarations: Mapping[str, str]) -> bool:
    """Whether a module needs the tile registers."""
    return "llvm.x86.ldtilecfg" in declarations


def release(em: Emitter) -> None:
    """The tile registers as they were, for whoever uses them next."""
    em.declare("llvm.x86.tilerelease", "void", [])
    em.effect("call void @llvm.x86.tilerelease()")


def _declare_tiles(em: Emitter, multiply: str) -> None:
    tile = "i8 immarg"
    em.declare("llvm.x86.tilezero", "void", [tile])
    em.declare("llvm.x86.tileloadd64", "void", [tile, "ptr", "i64"])
    em.declare("llvm.x86.tileloaddt164", "void", [tile, "ptr", "i64"])  # past the first-level cache
    em.declare("llvm.x86.tilestored64", "void", [tile, "ptr", "i64"])
    em.declare(f"llvm.x86.{multiply}", "void", [tile, tile, tile])


def micro_function(em: Emitter, form: TileForm, by_rows: bool = False) -> str:
    """The name of the module's function that adds ``steps`` steps of two panels to a block of sums, or starts it with
    them: ``(left, right, sums, steps, first)``. Tiles 0 to 3 are the block, 4 and 5 of the left factor, 6 and 7 of the
    right one. ``by_rows``: of the right one the rows of a pair of tiles lie side by side, as in a matrix in panels."""
    name = f"tiles_{form.name.replace('-', '_')}{'_by_rows' if by_rows else ''}"
    if name in em.declarations:
        return name
    _declare_tiles(em, form.multiply)
    own = Emitter(em.declarations)
    corners = [own.element("i8", Ssa("%sums", "ptr"), imm(TILE_BYTES * k)) for k in range(CORNERS)]

    def zero() -> None:
        for k in range(CORNERS):
            own.effect(f"call void @llvm.x86.tilezero(i8 {k})")

    def load() -> None:
        for k, corner in enumerate(corners):
            own.effect(f"call void @llvm.x86.tileloadd64(i8 {k}, ptr {corner.text}, i64 64)")

    def step(k: Ssa, _: list[Ssa]) -> list[Ssa]:
        at = own.mul(k, imm(form.step_bytes))
        sides = own.element("i8", Ssa("%left", "ptr"), at), own.element("i8", Ssa("%right", "ptr"), at)
        for use in _schedule(form):
            if isinstance(use, _Take):
                apart, stride = (64, 128) if by_rows and use.side else (TILE_BYTES, 64)
                place = own.element("i8", sides[use.side], imm(use.piece * 2 * TILE_BYTES + use.half * apart))
                tile = (4, 6)[use.side] + use.half
                load_ = "tileloaddt164" if form.streams and not use.side else "tileloadd64"
                own.effect(f"call void @llvm.x86.{load_}(i8 {tile}, ptr {place.text}, i64 {stride})")
            else:
                row, column = use
                tiles = f"i8 {2 * row + column}, i8 {4 + row}, i8 {6 + column}"
                own.effect(f"call void @llvm.x86.{form.multiply}({tiles})")
        return []

    if form.apart:
        zero()
    else:
        own.choose(Ssa("%first", "i1"), None, zero, load)
    own.loop(imm(0), Ssa("%steps", "i64"), 1, [], step, "step")

    if form.apart:
        own.choose(Ssa("%first", "i1"), None, lambda: _store_block(own, corners), lambda: _add_block(own))
    else:
        _store_block(own, corners)
    header = f"define internal void @{name}(ptr %left, ptr %right, ptr %sums, i64 %steps, i1 %first) noinline {{"
    em.define(name, "\n".join([header, "entry:", *own.lines(), "  ret void", "}"]))
    return name


def _store_block(em: Emitter, to: list[Ssa]) -> None:
    for k, corner in enumerate(to):
        em.effect(f"call void @llvm.x86.tilestored64(i8 {k}, ptr {corner.text}, i64 64)")


def _add_block(em: Emitter) -> None:
    """Add the tiles to the sums in memory."""
    part = em.pure("ptr", f"alloca [{CORNERS * TILE_BYTES} x i8], align 64 ; what was summed now")
    _store_block(em, [em.element("i8", part, imm(TILE_BYTES * k)) for k in range(CORNERS)])
    vector = "<16 x float>"

    def line(at: Ssa, _: list[Ssa]) -> list[Ssa]:
        places = [em.element("i8", base, at) for base in (part, Ssa("%sums", "ptr"))]
        new, old = (em.here(vector, f"load {vector}, ptr {place.text}, align 64") for place in places)
        both = em.here(vector, f"fadd {vector} {old.text}, {new.text}")
        em.effect(f"store {both.typed}, ptr {places[1].text}, align 64")
        return []

    em.loop(imm(0), imm(CORNERS * TILE_BYTES), 64, [], line, "line")


@dataclass(frozen=True, slots=True)
class _Take:
    """A tile of a factor is loaded: of the left (0) or right (1) one, of a piece, half of a panel's lines."""

    side: int
    piece: int
    half: int


def _schedule(form: TileForm) -> list[_Take | tuple[int, int]]:
    """What a step does, in order: tiles that are loaded, and products, as halves of rows and of columns. A tile is
    loaded as soon as the one before it in its register is used for the last time, between two products (which is a
    tenth faster than loading both tiles of a side at once)."""
    (left, right), *others = form.products
    order: list[_Take | tuple[int, int]] = [_Take(0, left, 0), _Take(1, right, 0)]
    waiting: list[_Take] = [_Take(0, left, 1), _Take(1, right, 1)]  # one is needed before the second product, or third
    side = 1  # that changes next: its first tile is free after two products
    now = (left, right)
    for following in [*others, None]:
        if following is not None:
            side = 0 if following[0] != now[0] else 1
        ready = [(a, b) if side == 1 else (b, a) for b in range(2) for a in range(2)]
        for count, product in enumerate(ready):
            for take in [take for take in waiting if product[take.side] == take.half]:
                order.append(take)
                waiting.remove(take)
            order.append(product)
            if count % 2 and following is not None:
                waiting.append(_Take(side, following[side], count // 2))
                if count == 1:
                    order.append(waiting.pop())
        if following is not None:
            now = following
    return order
