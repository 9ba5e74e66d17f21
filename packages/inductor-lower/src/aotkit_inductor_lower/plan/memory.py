"""Where each temporary of a call lives in the arena: dead memory is used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["ALIGNMENT", "place_buffers"]

ALIGNMENT = 64


def place_buffers(lifetimes: Sequence[tuple[str, int, int]], nbytes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Offsets in one arena for buffers alive during ``[first, last]`` steps, and the arena's size in bytes.

    Large buffers are placed first, each at the lowest offset that is free throughout its life.
    """
    placed: list[tuple[int, int, int, int]] = []  # offset, end, first, last
    offsets: dict[str, int] = {}
    total = 0
    for name, first, last in sorted(lifetimes, key=lambda entry: (-nbytes[entry[0]], entry[1])):
        size = -(-max(nbytes[name], 1) // ALIGNMENT) * ALIGNMENT
        offset = 0
        for start, end, born, dies in sorted(placed):
            if dies < first or born > last or end <= offset:
                continue
            if start >= offset + size:
                break
            offset = end
        placed.append((offset, offset + size, first, last))
        offsets[name] = offset
        total = max(total, offset + size)
    return offsets, total
