"""Which loops an index tells apart, against all of their iterations."""

from __future__ import annotations

import itertools
import random

import pytest

from aotkit_inductor_lower.ir import Range
from aotkit_inductor_lower.ir.independence import tells_apart
from aotkit_inductor_lower.symbolic import Expr, Symbol, SymbolKind, smax, smin, sym, to_expr

ROW, COLUMN, V = sym("i"), sym("j"), sym("v", SymbolKind.VALUE)


def draw(rng: random.Random) -> Expr:
    """A sum of a few terms, among them ends of the range that a place is moved into."""
    total = to_expr(rng.choice([0, 0, 3, -2]))
    for _ in range(rng.randint(1, 3)):
        part = rng.choice(
            [
                ROW,
                COLUMN,
                V,
                smax(ROW - 1, 1 - ROW),
                smin(smax(COLUMN - 2, to_expr(0)), to_expr(2)),
                ROW // 2,
                COLUMN % 2,
            ]
        )
        total = total + rng.choice([1, 1, 2, 3, 4, 6, 8, 12, -1, -4]) * part
    return total


@pytest.mark.parametrize("seed", range(4))
def test_iterations_with_equal_indices_agree_on_what_is_told_apart(seed: int) -> None:
    rng, found = random.Random(seed), 0
    for _ in range(400):
        sizes = {"i": rng.randint(1, 4), "j": rng.randint(1, 4), "v": rng.randint(1, 4)}
        indices = tuple(draw(rng) for _ in range(rng.choice([1, 1, 2])))
        known = rng.random() < 0.7  # whether the computed index was checked
        values = range(sizes["v"]) if known else range(-9, 10)
        asked = rng.choice(["i", "j"])
        ranges = {name: Range(name, to_expr(sizes[name])) for name in "ij"}
        others = [loop for name, loop in ranges.items() if name != asked]
        checked = {Symbol("v", SymbolKind.VALUE): to_expr(sizes["v"])} if known else {}
        if not tells_apart(indices, [ranges[asked]], others, checked=checked):
            continue
        found += 1
        seen: dict[tuple[int, ...], int] = {}
        for i, j, v in itertools.product(range(sizes["i"]), range(sizes["j"]), values):
            env = {Symbol("i"): i, Symbol("j"): j, Symbol("v", SymbolKind.VALUE): v}
            place = tuple(index.evaluate(env) for index in indices)
            own = i if asked == "i" else j
            assert seen.setdefault(place, own) == own, f"{indices} with {sizes}"
    assert found > 60


@pytest.mark.parametrize(
    ("index", "checked", "apart"),
    [
        (96 * V + ROW, {}, True),  # by the remainder, whatever v is
        (95 * V + ROW, {}, False),
        (96 * V + 2 * ROW, {}, False),
        (1000 * COLUMN + 96 * V + ROW, {V: 10}, True),
        (900 * COLUMN + V, {V: 10}, False),  # not a word about i
        (96 * smin(COLUMN, to_expr(3)) + ROW + 5, {}, True),
    ],
)
def test_channels_are_told_apart_where_places_are_computed(index: Expr, checked: dict[Expr, int], apart: bool) -> None:
    sizes = {Symbol("v", SymbolKind.VALUE): to_expr(size) for size in checked.values()}
    loops = [Range("i", to_expr(96))], [Range("j", to_expr(7))]
    assert tells_apart([index], *loops, checked=sizes) is apart
