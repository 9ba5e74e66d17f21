"""Forms of products for the tile registers of AMX, see Note [float32 in pieces of bfloat16]. Bytes are multiplied as
they are, four at a time, and summed in 32 bits."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["DEPTH", "FORMS", "PANEL", "TILE_BYTES", "TileForm"]

PANEL = 32  # lines of a panel
DEPTH = 32  # summed numbers of a step, of floats
TILE_BYTES = 1024


@dataclass(frozen=True, slots=True)
class TileForm:
    """How a product is written with tiles. ``products``: which piece of the left factor times which of the right one;
    in an order in which each shares a factor with the one before, so that its tiles are loaded once. ``steps``: how
    many are summed at once, at most: the sums go to memory and back in between. ``streams``: few enough that a panel of
    the right factor stays in the first-level cache, past which the left one is loaded then; with many products to a
    tile there is time to load both from the second-level cache. ``depth``: summed numbers of a step; ``multiply``: the
    instruction; ``sums``: LLVM's name of what it sums in."""

    name: str
    pieces: int
    products: tuple[tuple[int, int], ...]
    steps: int
    streams: bool
    apart: bool = False
    depth: int = DEPTH
    multiply: str = "tdpbf16ps"
    sums: str = "float"

    @property
    def step_bytes(self) -> int:
        """Bytes of one step of a panel."""
        return self.pieces * 2 * TILE_BYTES


#: By the precision that factors of float32 are multiplied in; ``"bf16"``, ``"int8"``: they are bfloat16, or bytes.
FORMS = {
    "highest": TileForm(
        "amx-f32x6", 3, ((0, 2), (0, 1), (1, 1), (1, 0), (0, 0), (2, 0)), steps=24, streams=False, apart=True
    ),
    "high": TileForm("amx-f32x3", 2, ((0, 1), (0, 0), (1, 0)), steps=36, streams=True),
    "medium": TileForm("amx-f32x1", 1, ((0, 0),), steps=20, streams=True),
    "bf16": TileForm("amx-bf16", 1, ((0, 0),), steps=20, streams=True),
    "int8": TileForm("amx-int8", 1, ((0, 0),), steps=20, streams=True, depth=2 * DEPTH, multiply="tdpbssd", sums="i32"),
}
