"""Many samples: goals steered to what is covered least, in child processes that may die, kept in a journal."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from tools.fuzz.tally import Tally

from .cells import cells_of, next_goals
from .execute import observe
from .generate import Goal, Impossible, generate, misfit
from .program import DIRECT, Sample
from .public import public
from .recipes import targets
from .shrink import shrink
from .verdict import Outcome, check, check_many

__all__ = ["Campaign", "Settings", "quiet"]

CHUNK = 240
LAG = 6  # chunks: what the ones before these showed steers a chunk, however many run side by side
STUCK = 240.0  # seconds without a word from a child
SHRUNK = 6  # failures of one chunk that are made smaller; the others are counted


@dataclass(frozen=True, slots=True)
class Settings:
    """What is run: samples ``first`` .. ``first + samples`` of one plan. ``together``: so many in one program;
    ``fill``: how most tensors are filled."""

    samples: int
    first: int = 0
    plan: str = "mixed"
    only: str = ""
    together: int = 12
    fill: str = ""


@dataclass(slots=True)
class Campaign:
    """Runs the chunks that the journal does not hold yet. Samples depend on the settings and on what eager accepts
    only: not on the number of processes, on what is left of an earlier run, or on what compiled code does."""

    settings: Settings
    processes: int = 2
    journal: Path | None = None
    seconds: float = 0.0
    total: Tally = field(default_factory=Tally)
    done: dict[int, Tally] = field(default_factory=dict)
    steering: Tally = field(default_factory=Tally)
    taken: int = 0  # chunks that steering holds

    def run(self) -> Tally:
        """What all chunks amount to, those of earlier runs included."""
        self._earlier()
        started = time.monotonic()
        first, last = self.settings.first, self.settings.first + self.settings.samples
        waiting = [b for b in range(first, last, CHUNK) if b not in self.done]
        running: dict[Connection, _Child] = {}
        while waiting or running:
            late = self.seconds and time.monotonic() - started > self.seconds
            while waiting and len(running) < self.processes and not late and self._steered(waiting[0]):
                begin = waiting.pop(0)
                jobs = self._jobs(begin, min(begin + CHUNK, last))
                child = _Child(begin, jobs, self.settings, set(self.total.families))
                running[child.receiver] = child
            if not running:
                break
            for receiver in wait(list(running), timeout=1.0):
                running[receiver].listen()  # type: ignore[index]
            for receiver, child in list(running.items()):
                if child.finished():
                    del running[receiver]
                    self._keep(child.begin, child.tally)
                    self.done[child.begin] = child.tally
        self.total.seconds += time.monotonic() - started
        return self.total

    def again(self) -> Tally:
        """Run the samples that failed in earlier runs once more, in the present code; the journal stays as it is."""
        self._earlier()
        public(), targets()  # they register how arguments are drawn
        jobs = [(seed, tuple(goal)) for seed, *goal in self.total.failures]
        child = _Child(0, jobs, self.settings, set())
        while not child.finished():
            if wait([child.receiver], timeout=1.0):
                child.listen()
        for report in child.tally.reports:
            print(report, flush=True)
        return child.tally

    def _jobs(self, begin: int, end: int) -> list[tuple[int, Goal]]:
        """Rules are reached by every way to compile; other operators only by those that capture a function."""
        seeds = range(begin, end)
        wide = [seed for seed in seeds if _entry(seed, self.settings.plan) not in DIRECT and seed % 6 == 0]
        found: dict[int, Goal] = {}
        for chosen, ops in ((wide, public()), ([seed for seed in seeds if seed not in wide], targets())):
            named = [op for op in ops if self.settings.only in op] or [
                op for op in (*targets(), *public()) if self.settings.only in op
            ]
            goals = next_goals(self.steering, len(chosen), named, begin)
            found.update(zip(chosen, goals, strict=True))
        return [(seed, found[seed]) for seed in seeds]

    def _steered(self, begin: int) -> bool:
        """Take in what steers the chunk that begins here; whether all of that is there. Chunks ask in their order."""
        behind = range(self.settings.first, begin - LAG * CHUNK + 1, CHUNK)
        for earlier in behind[self.taken :]:
            if earlier not in self.done:
                return False
            self.steering.add(self.done[earlier])
            self.taken += 1
        return True

    def _earlier(self) -> None:
        if self.journal is None or not self.journal.exists():
            return
        header, *lines = self.journal.read_text().splitlines()
        wanted = {**json.loads(header), "samples": self.settings.samples}
        if wanted != _header(self.settings):
            raise SystemExit(f"{self.journal} belongs to a run with other settings: {header}")
        for line in lines:
            entry = json.loads(line)
            self.done[entry["begin"]] = Tally.from_json(entry)
            self.total.add(self.done[entry["begin"]])

    def _keep(self, begin: int, tally: Tally) -> None:
        self.total.add(tally)
        for report in tally.reports:
            print(report, flush=True)
        if self.journal is not None:
            self.journal.parent.mkdir(parents=True, exist_ok=True)
            with self.journal.open("a") as file:
                if not file.tell():
                    file.write(json.dumps(_header(self.settings)) + "\n")
                file.write(json.dumps({"begin": begin, **tally.to_json()}) + "\n")


def _header(settings: Settings) -> dict[str, Any]:
    return {name: getattr(settings, name) for name in Settings.__slots__}


class _Child:
    """A chunk in a process of its own, and again from behind the sample at which that one died."""

    def __init__(self, begin: int, jobs: list[tuple[int, Goal]], settings: Settings, known: set[str]) -> None:
        self.begin, self.settings, self.known = begin, settings, known
        self.tally = Tally()
        self.left = jobs
        self.started: list[int] = []
        self.spoken = time.monotonic()
        self.together = settings.together
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.receiver, sender = context.Pipe(duplex=False)
        arguments = (self.left, self.settings, self.known, sender, self.together)
        self.process = context.Process(target=_work, args=arguments, daemon=True)
        self.process.start()
        sender.close()

    def listen(self) -> None:
        """Take what the child says: the seeds it begins with, or what became of these."""
        try:
            message = self.receiver.recv()
        except (EOFError, OSError):
            return
        self.spoken = time.monotonic()
        if isinstance(message, list):
            self.started = message
        else:
            self.tally.add(Tally.from_json(message))
            self.left = [job for job in self.left if job[0] not in self.started]
            self.started = []

    def finished(self) -> bool:
        """Whether all is done; a child that died is replaced by one that goes on."""
        stuck = time.monotonic() - self.spoken > STUCK
        if self.process.is_alive() and not stuck:
            return False
        while self.receiver.poll():
            before = self.spoken
            self.listen()
            if self.spoken == before:
                break
        if stuck:
            self.process.kill()
        self.process.join()
        if not self.left:
            return True
        self._bury(stuck)
        return not self.left

    def _bury(self, stuck: bool) -> None:
        code = self.process.exitcode or 0
        how = f"no answer in {STUCK:.0f} s" if stuck else signal.Signals(-code).name if code < 0 else f"status {code}"
        lost = [job for job in self.left if job[0] in self.started]
        if len(lost) == 1 or not lost:  # the one that does it
            for seed, goal in lost or self.left[:1]:
                text = _text(seed, goal, self.settings)
                kind = "impossible" if text is None else "died"
                self.tally.kinds[kind] += 1
                self.tally.tried[goal] += 1
                if text is not None:
                    self.tally.families[f"died: {goal[0]}"] += 1
                    self.tally.reports.append(f"--- sample {seed} {goal}: died: {how}\n{text}")
            gone = {seed for seed, _ in lost or self.left[:1]}
            self.left = [job for job in self.left if job[0] not in gone]
            self.together = self.settings.together
        else:  # find it one by one
            self.left = lost + [job for job in self.left if job[0] not in self.started]
            self.together = 1
        self.started, self.spoken = [], time.monotonic()
        if self.left:
            receiver = self.receiver
            self._start()
            self.receiver = _moved(receiver, self.receiver)


def _moved(old: Connection, new: Connection) -> Connection:
    """The new pipe under the number of the old one, under which it is waited for."""
    os.dup2(new.fileno(), old.fileno())
    new.close()
    return old


def _text(seed: int, goal: Goal, settings: Settings) -> str | None:
    """The sample as a program; ``None`` if eager mode itself ends the process, which does not survive the drawing."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_write, args=(seed, goal, settings, sender), daemon=True)
    process.start()
    sender.close()
    try:
        return str(receiver.recv()) if receiver.poll(STUCK) else None
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def _write(seed: int, goal: Goal, settings: Settings, sender: Connection) -> None:
    try:
        sample = _made(seed, goal, settings)
        observe(sample, sample.function())
        sender.send(sample.script())
    except Exception as error:  # noqa: BLE001 - the sample that kills may not come to be here
        sender.send(f"{type(error).__name__}: {error}")


def quiet() -> None:
    """One thread, no warnings of eager, no logs of refusals, no cache of fake operations, of which few recur."""
    torch._dynamo.config.fake_tensor_cache_enabled = False
    torch.set_num_threads(1)
    torch.set_warn_always(False)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _work(
    jobs: Sequence[tuple[int, Goal]], settings: Settings, known: set[str], sender: Connection, together: int
) -> None:
    quiet()
    shrunk = 0
    for part in _parts(jobs, together):
        sender.send([seed for seed, _ in part])
        tally = Tally()
        by_entry: dict[str, list[Sample]] = {}
        for seed, goal in part:
            try:
                sample = _made(seed, goal, settings)
            except Impossible:
                tally.kinds["impossible"] += 1
                tally.tried[goal] += 1
                continue
            by_entry.setdefault(sample.entry, []).append(sample)
        for group in by_entry.values():
            for sample, outcome in check_many(group):
                _count(tally, sample, outcome)
                family = f"{outcome.family} [{sample.entry} {sample.goal[0]}]"
                if outcome.failed and family not in known and shrunk < SHRUNK:
                    known.add(family)
                    shrunk += 1
                    tally.reports.append(_report(sample, outcome))
        sender.send(tally.to_json())
    sender.close()


def _parts(jobs: Sequence[tuple[int, Goal]], size: int) -> Iterator[Sequence[tuple[int, Goal]]]:
    return (jobs[i : i + size] for i in range(0, len(jobs), size))


def _count(tally: Tally, sample: Sample, outcome: Outcome) -> None:
    tally.kinds[outcome.kind] += 1
    tally.entries[f"{sample.entry} {outcome.kind}"] += 1
    tally.tried[sample.goal] += 1
    if outcome.kind not in ("raises", "silent"):
        tally.reached.update({call.op for call in sample.calls})
        tally.accepted.update(cells_of(sample))
    if outcome.kind in ("equal", "known", "raises"):
        if outcome.kind != "raises":
            tally.rules.update({call.op for call in sample.calls})
            tally.cells.update(cells_of(sample))
        else:
            tally.raising[sample.goal[0]] += 1
        return
    tally.families[f"{outcome.family} [{sample.entry} {sample.goal[0]}]"] += 1
    if outcome.failed:
        tally.failures.append([sample.seed, *sample.goal])


def _made(seed: int, goal: Goal, settings: Settings) -> Sample:
    calls = 2 + seed % 5 if settings.plan == "chains" else 1
    sample = generate(seed, goal, _entry(seed, settings.plan), calls, settings.fill)
    return misfit(sample) if settings.plan == "misfits" else sample


#: Shares of the ways to compile.
_PLANS = {
    "mixed": (("direct", 55), ("function", 18), ("training", 18), ("dynamic", 8), ("dynamo", 1)),
    "misfits": (("direct", 60), ("function", 25), ("training", 15)),
    "chains": (("direct", 30), ("function", 30), ("training", 30), ("dynamic", 10)),
    **{name: ((name, 1),) for name in ("direct", "function", "training", "dynamic", "dynamo", "triton")},
}


def _entry(seed: int, plan: str) -> str:
    shares = _PLANS[plan]
    place = seed * 7919 % sum(share for _, share in shares)
    for name, share in shares:
        if place < share:
            return name
        place -= share
    raise AssertionError(plan)


def _report(sample: Sample, outcome: Outcome) -> str:
    smallest = shrink(sample, lambda smaller: _alike(check(smaller), outcome))
    final = check(smallest)
    return f"--- sample {sample.seed} {sample.goal}: {final.kind}: {final.detail}\n{smallest.script()}\n"


def _alike(one: Outcome, other: Outcome) -> bool:
    return one.kind == other.kind and one.family[:40] == other.family[:40]
