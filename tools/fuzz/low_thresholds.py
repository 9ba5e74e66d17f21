"""`python -m tools.fuzz.low_thresholds`: small programs, in which passes that begin at some size take part.

Passes over loops and rules of the CPU target ask for so many bytes, elements or rows, which random programs seldom
have. Here such numbers (:mod:`.thresholds`) are small: of most modules, drawn for every program anew. Programs are
those of :mod:`.mixed_programs`, where values of one shape, reductions of them, and what reads these are mixed, and
those of :mod:`.layers`, by whose rule all are compared with eager and float64. It is counted in how many programs each
pass changed something. What fails is made smaller, and printed with the modules whose numbers it takes.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import re
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from aotkit_inductor_lower.driver import GRAPH_PASSES, JOINT_PASSES, KERNEL_PASSES, LOOP_PASSES

from . import layers
from .layer_programs import LayerProgram, make_program, without_unused
from .marks import Marks
from .mixed_programs import make_mixed_program
from .shrink import smallest
from .sizes import print_counts
from .thresholds import LOW, lowered

__all__ = ["PASSES", "UNREACHED", "Trial", "draw_trial", "judge", "main", "shrink"]

#: What is counted, in the order in which it runs.
PASSES = tuple(
    dict.fromkeys(
        name
        for passes in (JOINT_PASSES, GRAPH_PASSES, LOOP_PASSES, KERNEL_PASSES)
        for name in (each.name for each in passes)
    )
)

#: Passes that do nothing in programs for one CPU, and why.
UNREACHED: dict[str, str] = {
    "attend-in-parts": "for devices",
    "convolution-biases": "for devices",
    "choose-library-calls": "for processors of AMD with vectors of 512 bits",
    "compute-masks": "for devices",
    "gather-launches": "for devices",
    "inline-norms": "for devices",
    "lay-out-temporaries": "for devices",
    "overlap-collectives": "for several ranks",
    "pad-products": "for devices",
    "recompute-from-stored": "for devices",
    "write-out-short-rows": "for devices",
}


@dataclass(frozen=True)
class Trial:
    """A program, the modules whose thresholds are small, who computes its products, and whether stages are checked."""

    number: int
    program: LayerProgram
    groups: frozenset[str]
    contractions: str
    verify: bool

    def __str__(self) -> str:
        few = ", ".join(sorted(self.groups)) if len(self.groups) < 8 else f"{len(self.groups)} modules"
        return f"# contractions={self.contractions}, small thresholds: {few}\n{self.program}"


def draw_trial(number: int) -> Trial:
    """The trial of this number: two of three are mixed programs."""
    draw = random.Random(f"thresholds {number}")
    program = make_program(number) if number % 3 == 2 else make_mixed_program(number)
    share = draw.choice((0.5, 0.8, 0.95, 1.0))
    groups = frozenset(name for name in (*LOW, "target") if draw.random() < share)
    return Trial(number, program, groups, draw.choice(("auto", "generated")), draw.random() < 0.3)


def judge(trial: Trial, marks: Marks | None = None) -> tuple[str, str]:
    """What became of it, see :func:`.layers.outcome`."""
    with lowered(trial.groups):
        return layers.outcome(
            trial.program, trial.number, contractions=trial.contractions, verify=trial.verify, marks=marks
        )


# --- what fails, made smaller -----------------------------------------------------------------------------------


def shrink(trial: Trial, tries: int = 60) -> Trial:
    """A trial with fewer lines, results and small thresholds, of which the same becomes."""
    kind, _ = judge(trial)
    found = smallest(trial, _smaller_programs, lambda each: judge(each)[0] == kind, tries)
    return smallest(found, _smaller_groups, lambda each: judge(each)[0] == kind, tries)


def _smaller_groups(trial: Trial) -> Iterator[Trial]:
    """Halves first, so that one module of many is soon found."""
    names = sorted(trial.groups)
    parts = 1
    while parts < len(names):
        parts = min(2 * parts, len(names))
        for first in range(parts):
            yield replace(trial, groups=frozenset(names) - frozenset(names[first::parts]))


def _smaller_programs(trial: Trial) -> Iterator[Trial]:
    program = trial.program
    for lines in _fewer_lines(program.lines):
        yield replace(trial, program=without_unused(replace(program, lines=lines)))
    for mark in ("autocast", "frozen", "dynamic", "training"):
        if getattr(program, mark):
            off: dict[str, Any] = {mark: False}
            yield replace(trial, program=replace(program, **off))
    for n, each in enumerate(program.inputs):
        if each.layout != "plain":
            inputs = (*program.inputs[:n], replace(each, layout="plain"), *program.inputs[n + 1 :])
            yield replace(trial, program=replace(program, inputs=inputs))


def _fewer_lines(lines: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Without a result, or with one of the values that a line names instead of what the line makes of them."""
    *body, last = lines
    results = last.removeprefix("return [").removesuffix("]").split(", ")
    for n in range(len(results) if len(results) > 1 else 0):
        yield _used((*body, f"return [{', '.join(results[:n] + results[n + 1 :])}]"))
    for n in reversed(range(len(body))):
        name, _, text = body[n].partition(" = ")
        words = "".join(c if c.isalnum() else " " for c in text).split()
        for other in dict.fromkeys(word for word in words if word[0] in "vx" and word[1:].isdigit()):
            rest = (*body[:n], *body[n + 1 :], last)
            yield _used(tuple(_renamed(line, name, other) for line in rest))


def _renamed(line: str, name: str, other: str) -> str:
    return re.sub(rf"\b{name}\b", other, line)


def _used(lines: tuple[str, ...]) -> tuple[str, ...]:
    """Without lines whose value no later one names."""
    kept: list[str] = []
    for line in reversed(lines):
        name = line.partition(" = ")[0]
        if line.startswith("return") or any(name in _words(each) for each in kept):
            kept.insert(0, line)
    return tuple(kept)


def _words(line: str) -> set[str]:
    return set("".join(c if c.isalnum() else " " for c in line.partition(" = ")[2] or line).split())


# --- many of them -----------------------------------------------------------------------------------------------


@dataclass
class _Tally:
    kinds: Counter[str] = field(default_factory=Counter)
    passes: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)

    def add(self, line: dict[str, Any]) -> None:
        self.kinds[line["kind"]] += 1
        self.passes.update(line["passes"])
        if line["kind"] in ("refused", "eager"):
            self.refusals[f"{line['kind']}: {line['text'].partition(chr(10))[0][:160]}"] += 1


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 1 if a program mismatched or crashed."""
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz.low_thresholds", description=__doc__)
    parser.add_argument("--programs", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--seconds", type=float, default=0, help="begin no program after so long; 0: run all")
    parser.add_argument("--journal", type=Path, help="a file of outcomes, one a line; programs in it are not run again")
    parser.add_argument("--again", action="store_true", help="run the programs that failed, by the journal, once more")
    parser.add_argument("--tries", type=int, default=60, help="programs tried to make one that fails smaller")
    chosen = parser.parse_args(argv)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    known = _known(chosen.journal)
    tally = _Tally()
    numbers: Sequence[int] = range(chosen.seed, chosen.seed + chosen.programs)
    if chosen.again:
        numbers = [n for n, line in known.items() if line["kind"] in ("mismatch", "crash")]
    begun = time.monotonic()
    for number in numbers:
        if number in known and not chosen.again:
            tally.add(known[number])
            continue
        if chosen.seconds and time.monotonic() - begun > chosen.seconds:
            break
        line = _outcome_of(number, chosen.tries)
        tally.add(line)
        if chosen.journal is not None and not chosen.again:
            with chosen.journal.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
    _print(tally)
    return print_counts(tally.kinds)


def _known(journal: Path | None) -> dict[int, dict[str, Any]]:
    if journal is None or not journal.exists():
        return {}
    return {line["number"]: line for line in map(json.loads, journal.read_text(encoding="utf-8").splitlines())}


def _outcome_of(number: int, tries: int) -> dict[str, Any]:
    """Runs a program; prints it, made smaller, if it fails."""
    trial, marks = draw_trial(number), Marks()
    kind, text = judge(trial, marks)
    if kind in ("mismatch", "crash"):
        least = shrink(trial, tries)
        print(f"-- program {number}: {kind}: {text[:1500]}\n{judge(least)[1][:1500]}\n{least}", flush=True)
    took_part = [name for name in PASSES if any(mark.endswith(f"-{name}") for mark in marks.names)]
    return {"number": number, "kind": kind, "text": text[:2000], "passes": took_part}


def _print(tally: _Tally) -> None:
    for text, count in tally.refusals.most_common(10):
        print(f"{count:5d}  {text}")
    for name in PASSES:
        reason = UNREACHED.get(name, "" if tally.passes[name] else "NOT REACHED")
        print(f"{tally.passes[name]:5d}  {name}{f' ({reason})' if reason else ''}")


if __name__ == "__main__":
    raise SystemExit(main())
