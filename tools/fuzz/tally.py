"""What became of many programs, for both fuzzers: counts that add up over batches, processes and runs."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

__all__ = ["FAILURES", "Tally"]

#: Kinds of outcomes that have to be looked at.
FAILURES = ("mismatch", "different", "crash", "silent", "died")

_COUNTS = ("kinds", "entries", "families", "rules", "raising", "reached")
_OF_CELLS = ("cells", "tried", "accepted")

#: Each fuzzer's own tuple of strings.
Cell = Any


@dataclass(slots=True)
class Tally:
    """Outcomes so far: of each kind, entry, family; equal programs per cell and operator; tries per goal; failures by
    what makes them again. ``raising``: how often eager raises, by operator. ``reached``, ``accepted``: programs that
    eager runs, whatever became of them here, per operator and cell."""

    kinds: Counter[str] = field(default_factory=Counter)
    entries: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    rules: Counter[str] = field(default_factory=Counter)
    raising: Counter[str] = field(default_factory=Counter)
    reached: Counter[str] = field(default_factory=Counter)
    cells: Counter[Cell] = field(default_factory=Counter)
    tried: Counter[Cell] = field(default_factory=Counter)
    accepted: Counter[Cell] = field(default_factory=Counter)
    reports: list[str] = field(default_factory=list)
    failures: list[Any] = field(default_factory=list)
    seconds: float = 0.0

    def add(self, other: Tally) -> None:
        """Take another tally into this one."""
        for name in (*_COUNTS, *_OF_CELLS):
            getattr(self, name).update(getattr(other, name))
        self.reports += other.reports
        self.failures += other.failures

    @property
    def failed(self) -> int:
        """How many programs have to be looked at."""
        return sum(self.kinds[kind] for kind in FAILURES)

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        plain = {name: dict(getattr(self, name)) for name in _COUNTS}
        cells = {name: {"|".join(cell): n for cell, n in getattr(self, name).items()} for name in _OF_CELLS}
        return {**plain, **cells, "reports": self.reports, "failures": self.failures}

    @staticmethod
    def from_json(raw: dict[str, Any]) -> Tally:
        """The inverse of :meth:`to_json`."""
        tally = Tally(reports=list(raw["reports"]), failures=list(raw["failures"]))
        for name in _COUNTS:
            getattr(tally, name).update(raw.get(name, {}))
        for name in _OF_CELLS:
            getattr(tally, name).update({tuple(key.split("|")): n for key, n in raw.get(name, {}).items()})
        return tally
