"""What is covered: operator x class of types x class of layouts, and how often."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from functools import cache
from itertools import product

from tools.fuzz.tally import Tally

from .generate import Goal
from .program import Sample, refs_in
from .recipes import targets
from .tensors import DTYPES, LAYOUTS, dtype_class, layout_class

__all__ = ["Cell", "cells_of", "coverage_table", "next_goals"]

Cell = tuple[str, str, str]
WANTED = 20  # samples of each cell
WANTED_OF_RULE = 50


def cells_of(sample: Sample) -> Iterable[Cell]:
    """What the sample's calls cover by the arguments that they take directly."""
    tensors = {t.name: t for t in sample.tensors}
    goal = sample.goal[1]
    found = set()
    for call in sample.calls:
        given = [ref for arg in (*call.args, *(v for _, v in call.kwargs)) for ref in refs_in(arg)]
        mine = [tensors[ref.name] for ref in given if ref.name in tensors]
        of_goal = call.op == sample.goal[0] and any(t.dtype == goal for t in mine)
        found |= {(call.op, dtype_class(goal if of_goal else mine[0].dtype), layout_class(t.layout)) for t in mine}
        if not given:
            found.add((call.op, dtype_class(goal), "dense"))
    return found


@cache
def _classes() -> dict[tuple[str, str], tuple[tuple[str, str], ...]]:
    """The types and layouts of each class of types and of layouts."""
    found: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for dtype, layout in product(DTYPES, LAYOUTS):
        found.setdefault((dtype_class(dtype), layout_class(layout)), []).append((dtype, layout))
    return {kind: tuple(members) for kind, members in found.items()}


def next_goals(total: Tally, number: int, ops: Sequence[str], begin: int) -> list[Goal]:
    """The cells of these operators covered least, those tried in vain last, as members of the cell's classes.

    What compiled code made of the samples does not count, so that a run draws the same ones when that is corrected.
    """
    tries: Counter[Cell] = Counter()
    for (op, dtype, layout), n in total.tried.items():
        tries[op, dtype_class(dtype), layout_class(layout)] += n

    def rank(cell: Cell) -> tuple[float, int]:
        covered = total.accepted[cell]
        vain = max(tries[cell] - covered, 0)
        enough = 2 * WANTED if covered >= WANTED and total.reached[cell[0]] >= WANTED_OF_RULE else 0
        return enough + covered + (0.05 if covered else 4) * vain, hash_of(cell, begin)

    cells = [(op, *kind) for op in ops for kind in _classes()]
    chosen = sorted(cells, key=rank)[:number]
    chosen += [cells[hash_of(cells[i % len(cells)], begin + i) % len(cells)] for i in range(number - len(chosen))]
    chosen.sort(key=lambda cell: hash_of(cell, begin + 1))  # what is compiled together is not all of one operator
    return [_goal(cell, begin + i) for i, cell in enumerate(chosen)]


def _goal(cell: Cell, number: int) -> Goal:
    members = _classes()[cell[1], cell[2]]
    return (cell[0], *members[hash_of(cell, number) % len(members)])


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
    lines.append(f"{len(few)} of {len(targets())} rules below {WANTED_OF_RULE} samples")
    rules = frozenset(targets())
    for whose, here in (("rules", True), ("other operators", False)):
        counts = [n for (op, _, _), n in total.accepted.items() if (op in rules) is here]
        below = sum(n < WANTED for n in counts)
        lines.append(f"{below} of {len(counts)} cells of {whose} below {WANTED} samples that eager accepts")
    return "\n".join(lines)
