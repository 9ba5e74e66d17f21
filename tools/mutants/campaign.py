"""A run over mutants: those in functions in forks of one session, the rest each in a session of its own."""

from __future__ import annotations

import functools
import gc
import importlib
import math
import os
import re
import time
from collections.abc import Iterable
from enum import Enum
from pathlib import Path
from typing import Any

from tools.workspace import ROOT

from .groups import Group, package_files
from .journal import Journal, Verdict
from .measure import BUILD, coverage_of
from .patch import CannotPatch, import_instead, live_functions, patch_live
from .sample import Mutant, draw
from .select_tests import Selector
from .session import Items, collected, limit_of, run_in_order
from .supervise import Send, supervise

__all__ = ["Measured", "journal_of", "run"]


class Measured(Enum):
    """The tests whose coverage is measured before a run: those of files that changed, of them only those that were not
    there before, or none."""

    CHANGED = "changed"
    NEW = "new"
    NONE = "none"


RESULTS = Path(__file__).with_name("results")


def journal_of(group: Group) -> Journal:
    """The journal that runs of a group share; it is committed, for a campaign takes hours."""
    return Journal(RESULTS / f"{group.name}.jsonl")


def run(
    group: Group,
    mutants: list[Mutant],
    jobs: int,
    budget: float,
    again: bool = False,
    measured: Measured = Measured.CHANGED,
    seconds: float = math.inf,
) -> None:
    """Give each mutant a verdict that has none, with ``again`` also those that lived. None begins when ``seconds`` are
    over."""
    end = time.monotonic() + seconds
    journal = journal_of(group)
    old = journal.verdicts
    todo = [m for m in mutants if m.key not in old or (again and not old[m.key].is_killed)]
    if not todo:
        return
    import torch  # noqa: F401  # once, for all forks

    coverage = coverage_of(group.package, 0 if measured is Measured.NONE else jobs, measured is Measured.NEW)
    selector = Selector(group.package, coverage, budget)
    chosen = {m.key: selector.tests(m) for m in todo}
    for mutant in todo:
        if not chosen[mutant.key] and measured is Measured.CHANGED:  # else it may be a test that was not measured
            journal.add(Verdict(mutant.key, "not covered"))
    todo = [m for m in todo if chosen[m.key]]
    live = [m for m in todo if selector.is_live(m)]
    _remember(group, journal, selector)
    campaign = _Campaign(group, journal, selector, jobs, end)
    print(f"{group.name}: {len(live)} mutants in functions, {len(todo) - len(live)} in what is imported", flush=True)
    if live:
        campaign.run_live(live)
    journal = campaign.journal = journal_of(group)  # the other process wrote to it
    # What turned out to be imported although it looked live has the verdict that it had before, or none.
    rest = [m for m in todo if m not in live or journal.verdicts.get(m.key) == old.get(m.key)]
    campaign.run_imported(rest)


class _Campaign:
    def __init__(self, group: Group, journal: Journal, selector: Selector, jobs: int, end: float) -> None:
        self.group, self.journal, self.selector, self.jobs, self.end = group, journal, selector, jobs, end
        self.chosen: dict[str, list[str]] = {}  # mutant -> its tests
        self.sound: dict[str, bool] = {}  # test -> whether it passes without a fault

    def run_live(self, mutants: list[Mutant]) -> None:
        """In a process of its own that has collected all tests."""
        pid = os.fork()
        if pid:
            _, status = os.waitpid(pid, 0)
            if status:
                raise SystemExit(f"{self.group.name}: the session failed, see {self._log()}")
            return
        status = 1
        try:
            coverage = self.selector.coverage

            def loop(items: Items) -> None:
                nonlocal status
                _warm_up(items, coverage.seconds)
                functions = live_functions(package_files(self.group.package))

                def work(mutant: Mutant, send: Send) -> None:
                    path = ROOT / mutant.file
                    original = compile(mutant.text, str(path), "exec", dont_inherit=True)
                    try:
                        patch_live(functions[str(path)], original, _code(mutant))
                    except CannotPatch as reason:
                        send(result="not live", why=str(reason))
                        return
                    tests = [t for t in self.chosen[mutant.key] if t in items]
                    run_in_order([items[t] for t in tests], send, [limit_of(coverage.seconds[t]) for t in tests])

                def unharmed(test: str, send: Send) -> None:
                    run_in_order([items[test]], send, [limit_of(coverage.seconds[test])])

                def done(mutant: Mutant, message: dict[str, Any]) -> None:
                    if message["result"] == "not live":
                        return
                    test = message["test"]
                    if message["result"] != "survived" and test not in self.sound:
                        supervise([test], unharmed, lambda t, m: self.sound.update({t: m["result"] == "survived"}))
                        if not self.sound[test]:
                            print(f"{test} fails without a fault: left out", message, flush=True)
                            coverage.seconds.pop(test)
                            supervise(self._chosen([mutant]), work, done)
                            return
                    self._enter(mutant, message)

                supervise(self._chosen(mutants), work, done, self.jobs)
                status = 0

            files = {test.partition("::")[0] for mutant in mutants for test in self.selector.tests(mutant)}
            collected(sorted(files), self._log(), loop)
        finally:
            os._exit(status)

    def run_imported(self, mutants: list[Mutant]) -> None:
        """Each in a fork of this process, which has imported third parties only."""
        for name in self.selector.coverage.modules:
            _import_if_possible(name)

        def work(mutant: Mutant, send: Send) -> None:
            import_instead(ROOT / mutant.file, _code(mutant))
            tests = self.chosen[mutant.key]
            seconds = self.selector.coverage.seconds
            send(test="import", limit=60.0)
            verdicts = []

            def recorded(**message: Any) -> None:
                verdicts.append(message)
                send(**message)

            def loop(items: Items) -> None:
                known = [t for t in tests if t in items]
                run_in_order([items[t] for t in known], recorded, [limit_of(seconds[t]) for t in known])

            files = sorted({test.partition("::")[0] for test in tests})
            collected(files, BUILD / "import.log", loop)
            if not any("result" in message for message in verdicts):
                send(result="killed", why="the tests cannot be collected")

        supervise(self._chosen(mutants), work, self._enter, self.jobs)

    def _chosen(self, mutants: Iterable[Mutant]) -> Iterable[Mutant]:
        """Just before its turn: what has killed others by then comes first."""
        for mutant in mutants:
            if time.monotonic() > self.end:
                return
            self.chosen[mutant.key] = self.selector.tests(mutant)
            yield mutant

    def _enter(self, mutant: Mutant, message: dict[str, Any]) -> None:
        if message["result"] != "survived":
            self.selector.killed(mutant, message["test"])
        self.journal.add(
            Verdict(
                mutant.key, message["result"], message["test"] if message["result"] != "survived" else "",
                _without_paths(message.get("why", "")), len(self.chosen[mutant.key]), message["seconds"],
            )
        )  # fmt: skip

    def _log(self) -> Path:
        return BUILD / f"{self.group.name}.log"


def _without_paths(text: str) -> str:
    """The text of a failure without the places of this machine."""
    return re.sub(r"/[^ '\"]*/site-packages/", "", text).replace(f"{ROOT}/", "")


def _warm_up(items: Items, seconds: dict[str, float]) -> None:
    """Import what tests import while they run, once for all forks: the fastest test of each file is run. What functions
    keep of former calls is dropped, for it may hide a fault."""
    fastest: dict[str, str] = {}
    for test in sorted(items.keys() & seconds.keys(), key=lambda test: (seconds[test], test)):
        fastest.setdefault(test.partition("::")[0], test)
    for test in fastest.values():
        run_in_order([items[test]], lambda **message: None, [math.inf])
    ours = str(ROOT / "packages")
    gc.unfreeze()  # what was set aside is not among the objects
    for thing in gc.get_objects():
        if type(thing) is functools._lru_cache_wrapper:  # isinstance asks the object, and some answer with a warning
            code = getattr(thing.__wrapped__, "__code__", None)
            if code is not None and code.co_filename.startswith(ours):
                thing.cache_clear()


def _remember(group: Group, journal: Journal, selector: Selector) -> None:
    """What killed mutants in earlier runs."""
    for mutant in draw(group):
        verdict = journal.verdicts.get(mutant.key)
        if verdict is not None and verdict.is_killed and verdict.test:
            selector.killed(mutant, verdict.test)


def _code(mutant: Mutant) -> Any:
    return compile(mutant.tree(), str(ROOT / mutant.file), "exec", dont_inherit=True)


def _import_if_possible(name: str) -> None:
    try:
        importlib.import_module(name)
    except (ImportError, AttributeError, RuntimeError):
        return  # a module that only its package can import; it is imported where it is needed
