"""Where each temporary of a call lives in the arena: dead memory is used again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["ALIGNMENT", "place_buffers"]

ALIGNMENT = 64
_STEPS = 32  # of which buffers that live then are found together


def place_buffers(
    lifetimes: Sequence[tuple[str, int, int]], nbytes: Mapping[str, int], reuses: Mapping[str, str] | None = None
) -> tuple[dict[str, int], int]:
    """Offsets in one arena for buffers alive during ``[first, last]`` steps, and the arena's size in bytes.

    Large buffers are placed first, each at the lowest offset that is free throughout its life. ``reuses``: buffers that
    take the place of another one, of the same size.
    """
    placed: dict[int, list[tuple[int, int, int, int]]] = {}  # by part of the program: offset, end, first, last
    offsets: dict[str, int] = {}
    total = 0
    owner = _owners([name for name, *_ in lifetimes], reuses or {})
    lives: dict[str, tuple[int, int]] = {}
    for name, first, last in lifetimes:
        known = lives.get(owner[name], (first, last))
        lives[owner[name]] = (min(first, known[0]), max(last, known[1]))
    merged = [(name, first, last) for name, (first, last) in lives.items()]
    for name, first, last in sorted(merged, key=lambda entry: (-nbytes[entry[0]], entry[1])):
        size = -(-max(nbytes[name], 1) // ALIGNMENT) * ALIGNMENT
        offset, parts = 0, range(first // _STEPS, last // _STEPS + 1)
        for start, end, born, dies in sorted({each for part in parts for each in placed.get(part, ())}):
            if dies < first or born > last or end <= offset:
                continue
            if start >= offset + size:
                break
            offset = end
        for part in parts:
            placed.setdefault(part, []).append((offset, offset + size, first, last))
        offsets[name] = offset
        total = max(total, offset + size)
    return {name: offsets[owner[name]] for name in owner}, total


def _owners(names: Sequence[str], reuses: Mapping[str, str]) -> dict[str, str]:
    """The first buffer in each chain of buffers that take each other's place."""
    owner: dict[str, str] = {}
    for name in names:
        first = name
        while reuses.get(first):
            first = reuses[first]
        owner[name] = first
    return owner
