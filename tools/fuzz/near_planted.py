"""`python -m tools.fuzz.near_planted`: faults in what recognises patterns: does :mod:`.near_misses` find each?"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from aotkit_inductor_lower.graph_passes import attention_parts, attention_places

from .near_misses import draw_case, judge
from .near_seeds import SEEDS

__all__ = ["FAULTS", "Fault", "found_after", "main"]


@dataclass(frozen=True)
class Fault:
    """``place.name`` becomes ``spoiled(place.name)``; cases of the seed ``pattern`` should show it."""

    place: Any
    name: str
    spoiled: Callable[[Any], Any]
    pattern: str


def _without_sign(true: Any) -> Any:
    return lambda node: None if (number := true(node)) is None else abs(number)


def _always_infinite(true: Any) -> Any:
    def hiding(node: object) -> Any:
        found = true(node)
        return found and (found[0], found[1], -math.inf if found[2] < 0 else found[2], found[3])

    return hiding


def _any_triangle(true: Any) -> Any:
    return lambda seen, scores: true(seen, scores) or seen.target.__name__.startswith("tril")


def _strict_as_well(true: Any) -> Any:
    def comparison(node: Any, lengths: Any) -> Any:
        found = true(node, lengths)
        return (1, -1, 0) if found is not None and found[:2] == (1, -1) else found

    return comparison


def _lost_term(true: Any) -> Any:
    def add_more(self: Any, node: Any) -> Any:
        before = list(self.more)
        found = true(self, node)
        self.more = before
        return found

    return add_more


FAULTS = {
    "a scale without its sign": Fault(attention_parts, "scaled_by", _without_sign, "attention, window"),
    "negative numbers are -inf": Fault(attention_parts, "hiding", _always_infinite, "attention, filled"),
    "any triangle": Fault(attention_parts, "_is_lower_triangle", _any_triangle, "attention, triangle"),
    "a comparison off by one": Fault(attention_places, "_comparison", _strict_as_well, "attention, later keys"),
    "a second term is lost": Fault(attention_parts._Finder, "_add_more", _lost_term, "attention, two terms"),
}


def found_after(fault: Fault, cases: int) -> int | None:
    """How many cases it took to see the fault; ``None`` if it was not seen."""
    seeds = [each for each in SEEDS if each.name == fault.pattern]
    for number in range(cases):
        case = draw_case(number, seeds)
        if case is None:
            continue
        with mock.patch.object(fault.place, fault.name, fault.spoiled(getattr(fault.place, fault.name))):
            wrong = judge(case).kind == "mismatch"
        if wrong and judge(case).kind == "equal":
            return number + 1
    return None


def main(argv: Sequence[str] | None = None) -> int:
    """Print how many cases each fault took; 1 if one got away."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.near_planted", description=__doc__)
    parser.add_argument("--cases", type=int, default=150, help="look no longer for a fault")
    parser.add_argument("--only", default="", help="faults whose names have this text")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    missed = 0
    for name, fault in FAULTS.items():
        if chosen.only not in name:
            continue
        number = found_after(fault, chosen.cases)
        missed += number is None
        print(f"{name:28} {f'found by case {number}' if number else f'NOT FOUND in {chosen.cases} cases'}", flush=True)
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
