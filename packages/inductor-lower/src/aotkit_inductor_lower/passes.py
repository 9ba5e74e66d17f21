"""What scheduling decided, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["FusionKind", "FusionRecord"]

FusionKind = Literal["inline", "vertical", "horizontal", "mixed", "split", "join"]


@dataclass(frozen=True, slots=True)
class FusionRecord:
    """One decision. ``kind``: ``inline`` (a producer computed again where it is read), ``vertical`` (a producer and its
    reader in one kernel), ``horizontal`` (two kernels that read the same data), ``mixed`` (column sums in a kernel
    that walks over rows), ``split`` (a long reduction cut into chunks; not ``fused``) or ``join`` (a joined tensor
    computed where it is read, not stored). ``first`` and ``second`` are nests' names. ``reason`` says why, in both
    cases."""

    kind: FusionKind
    first: str
    second: str
    fused: bool
    reason: str

    def __str__(self) -> str:
        verb = "fused" if self.fused else "kept apart"
        return f"{self.kind}: {self.first} and {self.second} {verb}: {self.reason}"
