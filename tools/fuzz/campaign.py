"""Many programs: batches steered to what is least covered, over processes, kept in a state file to resume from."""

from __future__ import annotations

import json
import logging
import multiprocessing
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from .cells import Cell, poorest
from .execute import check
from .generate import generate
from .program import Program
from .shrink import shrink
from .tally import Tally

__all__ = ["Campaign", "Settings", "quiet"]

BATCH = 250
GOALS = 4  # cells that each program tries to cover


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run: programs ``first`` .. ``first + programs``; see the options of ``python -m tools.fuzz``."""

    programs: int
    first: int = 0
    lowering: str = "none"
    dynamo_every: int = 0
    verify_every: int = 10
    shown: int = 1


@dataclass(slots=True)
class Campaign:
    """Runs the batches that the state file does not hold yet."""

    settings: Settings
    processes: int = 1
    state: Path | None = None
    seconds: float = 0.0

    def run(self) -> Tally:
        """Returns what all batches amount to, those of earlier runs included."""
        total, done = self._earlier()
        started = time.monotonic()
        first, last = self.settings.first, self.settings.first + self.settings.programs
        with _workers(self.processes) as pool:
            for begin in range(first + done * BATCH, last, BATCH):
                if self.seconds and time.monotonic() - started > self.seconds:
                    break
                batch = self._batch(pool, range(begin, min(begin + BATCH, last)), total)
                total.add(batch)
                self._keep(batch)
        total.seconds = time.monotonic() - started
        return total

    def again(self) -> Tally:
        """Runs the programs that failed in earlier runs once more, in the present code; the state stays as it is."""
        quiet()
        assert self.state is not None
        so_far, result = Tally(), Tally()
        for number, line in enumerate(self.state.read_text().splitlines()[1:]):
            batch = Tally.from_json(json.loads(line))
            first = self.settings.first + number * BATCH
            seeds = range(first, min(first + BATCH, self.settings.first + self.settings.programs))
            jobs = [job for job in self._jobs(seeds, so_far) if job[0] in batch.failures]
            result.add(_run_part(jobs))
            so_far.add(batch)
        for report in result.reports:
            print(report.partition("\n")[2], flush=True)
        return result

    def _jobs(self, seeds: range, so_far: Tally) -> list[tuple[int, Sequence[Cell], Settings]]:
        """Each program has some of the poorest cells for goals, all of one kind of caller.

        The poorest of all, which are hard to reach and much alike, are goals of different programs.
        """
        wanted = poorest(so_far.cells, so_far.tried, GOALS * len(seeds))
        goals: list[list[Cell]] = []
        for off in (False, True):
            alike = [cell for cell in wanted if (cell.mode == "inference") is off]
            programs = -(-len(alike) // GOALS)
            goals += [alike[first::programs] for first in range(programs)]
        return [(seed, cells, self.settings) for seed, cells in zip(seeds, goals, strict=False)]

    def _batch(self, pool: Any, seeds: range, so_far: Tally) -> Tally:
        jobs = self._jobs(seeds, so_far)
        size = -(-len(jobs) // (4 * self.processes))
        parts = [jobs[i : i + size] for i in range(0, len(jobs), size)]
        batch = Tally(tried=Counter(goal for _, goals, _ in jobs for goal in goals))
        for tally in pool.map(_run_part, parts):
            batch.add(tally)
        known = Counter(so_far.families)
        batch.reports = [text for text in batch.reports if _within(known, text.partition("\n")[0], self.settings.shown)]
        for report in batch.reports:
            print(report.partition("\n")[2], flush=True)
        return batch

    def _earlier(self) -> tuple[Tally, int]:
        if self.state is None or not self.state.exists():
            return Tally(), 0
        header, *lines = self.state.read_text().splitlines()
        expected = {**json.loads(header), "programs": self.settings.programs}
        if expected != json.loads(json.dumps(_settings_json(self.settings))):
            raise SystemExit(f"{self.state} belongs to a run with other settings: {header}")
        total = Tally()
        for line in lines:
            total.add(Tally.from_json(json.loads(line)))
        return total, len(lines)

    def _keep(self, batch: Tally) -> None:
        if self.state is None:
            return
        with self.state.open("a") as file:
            if not file.tell():
                file.write(json.dumps(_settings_json(self.settings)) + "\n")
            file.write(json.dumps(batch.to_json()) + "\n")


def _settings_json(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in Settings.__slots__}


def _within(known: Counter[str], family: str, limit: int) -> bool:
    known[family] += 1
    return known[family] <= limit


class _Here:
    """A pool of this very process."""

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def map(self, function: Any, parts: Sequence[Any]) -> Iterator[Any]:
        return map(function, parts)


def _workers(processes: int) -> Any:
    if processes == 1:
        quiet()
        return _Here()
    return ProcessPoolExecutor(processes, multiprocessing.get_context("spawn"), initializer=quiet)


def quiet() -> None:
    """One thread, no warnings of eager, no logs of refusals, no cache of fake operations, of which few recur."""
    torch._dynamo.config.fake_tensor_cache_enabled = False
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _run_part(jobs: Sequence[tuple[int, Sequence[Cell], Settings]]) -> Tally:
    tally = Tally()
    for seed, goals, settings in jobs:
        made = generate(seed, goals)
        program = made.program
        if settings.dynamo_every and seed % settings.dynamo_every == 0:
            program = replace(program, entry="dynamo")
        verify = bool(settings.verify_every) and seed % settings.verify_every == 0
        outcome = check(program, lowering=settings.lowering, verify=verify)
        tally.kinds[outcome.kind] += 1
        if outcome.kind == "equal":
            tally.cells.update(made.cells)
            continue
        tally.families[outcome.family] += 1
        if outcome.failed:
            tally.failures.append(seed)
        if outcome.failed and tally.families[outcome.family] <= settings.shown:
            tally.reports.append(f"{outcome.family}\n{_report(seed, program, settings, verify)}")
    return tally


def _report(seed: int, program: Program, settings: Settings, verify: bool) -> str:
    family = check(program, lowering=settings.lowering, verify=verify).family

    def same(smaller: Program) -> bool:
        return check(smaller, lowering=settings.lowering, verify=verify).family == family

    smallest = shrink(program, same, tries=40 if program.entry == "dynamo" else 150)
    final = check(smallest, lowering=settings.lowering, verify=verify)
    return f"--- program {seed}: {final.kind}: {final.detail}\n{smallest.script()}\n"
