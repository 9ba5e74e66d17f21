"""What is covered: operator x dtype x class of layout, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache

from tools.fuzz.tally import Tally

from .generate import Goal
from .program import Sample, refs_in
from .recipes import targets
from .tensors import DTYPES, LAYOUTS, layout_class

__all__ = ["Cell", "cells_of", "coverage_table", "next_goals"]

Cell = tuple[str, str, str]
WANTED = 20  # samples of each cell
WANTED_OF_RULE = 50
_IN_VAIN = 8  # tries without a sample that eager accepts, after which a cell counts as out of reach


def cells_of(sample: Sample) -> Iterable[Cell]:
    """What the sample's calls cover by the arguments that they take directly."""
    tensors = {t.name: t for t in sample.tensors}
    found = set()
    for call in sample.calls:
        given = [ref for arg in (*call.args, *(v for _, v in call.kwargs)) for ref in refs_in(arg)]
        mine = [tensors[ref.name] for ref in given if ref.name in tensors]
        found |= {(call.op, mine[0].dtype, layout_class(t.layout)) for t in mine}
        if not given:
            found.add((call.op, sample.goal[1], "dense"))
    return found


@cache
def _classes() -> dict[str, tuple[str, ...]]:
    return {kind: tuple(n for n, c in LAYOUTS.items() if c == kind) for kind in dict.fromkeys(LAYOUTS.values())}


def next_goals(total: Tally, number: int, ops: Sequence[str], begin: int) -> list[Goal]:
    """The cells of these operators covered least, those tried in vain last; a goal names one layout of the class."""
    tries: Counter[Cell] = Counter()
    for (op, dtype, layout), n in total.tried.items():
        tries[op, dtype, layout_class(layout)] += n

    def rank(cell: Cell) -> tuple[float, int]:
        covered = total.cells[cell]
        vain = max(tries[cell] - covered, 0)
        worth = covered + (4 if not covered else 0.5) * vain
        return worth, hash_of(cell, begin)

    cells = [(op, dtype, layout) for op in ops for dtype in DTYPES for layout in _classes()]
    chosen = sorted(cells, key=rank)[:number]
    chosen += [cells[hash_of(cells[i % len(cells)], begin + i) % len(cells)] for i in range(number - len(chosen))]
    chosen.sort(key=lambda cell: hash_of(cell, begin + 1))  # what is compiled together is not all of one operator
    return [_goal(cell, begin + i) for i, cell in enumerate(chosen)]


def _goal(cell: Cell, number: int) -> Goal:
    layouts = _classes()[cell[2]]
    return cell[0], cell[1], layouts[number % len(layouts)]


def hash_of(cell: Cell, salt: int) -> int:
    """A number that looks random and is the same in every process."""
    import zlib

    return zlib.crc32(f"{cell}{salt}".encode())


def coverage_table(total: Tally) -> str:
    """A line per operator: equal samples, those that raise, cells reached, the poorest of them."""
    by_op: dict[str, list[int]] = {}
    for (op, _, _), n in total.cells.items():
        by_op.setdefault(op, []).append(n)
    lines = [f"{'operator':58} samples raising cells poorest below {WANTED}"]
    for op in sorted({*targets(), *total.rules}):
        counts = by_op.get(op, [])
        below = sum(n < WANTED for n in counts)
        row = f"{total.rules[op]:7d} {total.raising[op]:7d} {len(counts):5d} {min(counts, default=0):7d} {below:5d}"
        lines.append(f"{op:58} {row}")
    few = [op for op in targets() if total.rules[op] < WANTED_OF_RULE]
    below = sum(n < WANTED for n in total.cells.values())
    lines.append(f"{len(few)} of {len(targets())} operators below {WANTED_OF_RULE} samples")
    lines.append(f"{below} of {len(total.cells)} cells that eager accepts below {WANTED} samples")
    return "\n".join(lines)
