"""What the fuzzer must cover: view kind x mutation kind x grad mode x what the caller gets of the shared memory."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["ALIASES", "CELLS", "MODES", "MUTATIONS", "VIEWS", "Cell", "Event", "cells_of", "coverage_table", "poorest"]

VIEWS = (
    "flatten", "slice", "step", "select", "transpose", "size one", "expand", "diagonal", "as_strided", "multi",
    "detach", "dtype", "unfold", "lazy", "position",
)  # fmt: skip
"""Kinds of views that a program takes of a memory. ``lazy``: negated or conjugated when it is read; ``position``: where
it begins is computed from sizes, below zero mostly, and so a symbol in programs for any size."""

MUTATIONS = ("none", "whole", "through view", "detached", "shape")
"""How that memory is written to; ``shape`` changes sizes or strides in place."""

MODES = ("grad", "no_grad inside", "inference")
"""Grad mode of the view or the write: ``inference``: it was off already when the function was called."""

ALIASES = (
    "none of an input", "input", "view of input", "several of input",
    "intermediate", "view of intermediate", "several of intermediate",
)  # fmt: skip
"""What the function returns of the memory, which is an input's or an intermediate's."""


class Cell(NamedTuple):
    """One combination; a program covers it if one memory saw all four."""

    view: str
    mutation: str
    mode: str
    alias: str


CELLS = tuple(Cell(*c) for c in itertools.product(VIEWS, MUTATIONS, MODES, ALIASES))


@dataclass(frozen=True, slots=True)
class Event:
    """A view taken of memory ``storage`` or a write to it."""

    storage: int
    kind: str
    under_no_grad: bool


def cells_of(
    views: Iterable[Event], writes: Iterable[Event], aliases: Mapping[int, str], training: bool
) -> frozenset[Cell]:
    """The cells that a program covers; ``aliases`` says per storage what of it is returned."""
    writes = list(writes)
    found: set[Cell] = set()
    for view in views:
        alias = aliases.get(view.storage)
        if alias is None:
            continue
        mine = [w for w in writes if w.storage == view.storage]
        for write in mine or [Event(view.storage, "none", False)]:
            inside = view.under_no_grad or write.under_no_grad
            mode = ("no_grad inside" if inside else "grad") if training else "inference"
            found.add(Cell(view.kind, write.kind, mode, alias))
    return frozenset(found)


def poorest(counts: Mapping[Cell, int], tried: Mapping[Cell, int], number: int) -> list[Cell]:
    """The ``number`` cells with the lowest counts, the poorest first, in an order that is always the same.

    A cell that was ``tried`` in vain many times waits, so that one which cannot be reached does not use up all tries.
    """

    def rank(cell: Cell) -> tuple[float, int]:
        return counts.get(cell, 0) + 0.25 * tried.get(cell, 0), CELLS.index(cell) * 7919 % len(CELLS)

    return sorted(CELLS, key=rank)[:number]


def coverage_table(counts: Counter[Cell]) -> str:
    """How many equal programs covered each cell: a line per view and mutation, a column per mode and alias."""
    columns = list(itertools.product(MODES, ALIASES))
    lines = ["columns: " + "; ".join(f"{i}: {mode}, {alias}" for i, (mode, alias) in enumerate(columns))]
    lines.append(f"{'view':10} {'mutation':12} " + " ".join(f"{i:4d}" for i in range(len(columns))))
    for view, mutation in itertools.product(VIEWS, MUTATIONS):
        row = " ".join(f"{counts[Cell(view, mutation, *column)]:4d}" for column in columns)
        lines.append(f"{view:10} {mutation:12} {row}")
    return "\n".join(lines)
