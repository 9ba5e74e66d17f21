"""Amounts as people write them."""

from __future__ import annotations

__all__ = ["format_bytes"]


def format_bytes(count: float) -> str:
    """``1536``: ``1.5 KiB``."""
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
