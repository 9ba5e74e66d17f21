"""What came of each mutant, one line of JSON each; a run goes on where the last one stopped."""

from __future__ import annotations

import json
import tomllib
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from .sample import Mutant

__all__ = ["EQUIVALENT", "Journal", "Verdict", "equivalents", "report", "share_killed"]

EQUIVALENT = Path(__file__).with_name("equivalent.toml")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of a mutant. ``result`` is killed, crash, timeout, survived, not covered, or error, of the driver."""

    key: str
    result: str
    test: str = ""
    why: str = ""
    tests: int = 0  # selected
    seconds: float = 0.0  # processor time

    @property
    def is_killed(self) -> bool:
        """A process that dies, or does not end, is noticed as well."""
        return self.result in ("killed", "crash", "timeout")


class Journal:
    """The verdicts of a group in a file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.verdicts: dict[str, Verdict] = {}
        if path.exists():
            for line in path.read_text().splitlines():
                verdict = Verdict(**json.loads(line))
                self.verdicts[verdict.key] = verdict

    def add(self, verdict: Verdict) -> None:
        """Enter a verdict, in place of an older one."""
        self.verdicts[verdict.key] = verdict
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a") as file:
            file.write(json.dumps(asdict(verdict)) + "\n")


def equivalents(path: Path = EQUIVALENT) -> dict[str, str]:
    """Mutants that no test can kill: key -> reason."""
    if not path.exists():
        return {}
    return {entry["key"]: entry["reason"] for entry in tomllib.loads(path.read_text()).get("mutant", [])}


def share_killed(mutants: Iterable[Mutant], journal: Journal, reasons: dict[str, str]) -> tuple[int, int]:
    """(killed, all that are not equivalent) of the mutants with a verdict."""
    known = [journal.verdicts[m.key] for m in mutants if m.key in journal.verdicts]
    relevant = [verdict for verdict in known if verdict.is_killed or verdict.key not in reasons]
    return sum(verdict.is_killed for verdict in relevant), len(relevant)


def report(name: str, mutants: list[Mutant], journal: Journal, reasons: dict[str, str], diffs: bool) -> str:
    """Numbers of each verdict; with ``diffs`` all mutants that lived with what they change: those that a test could
    kill, then those that none can, each with the reason."""
    verdicts = {m.key: journal.verdicts[m.key] for m in mutants if m.key in journal.verdicts}
    counts = Counter("equivalent" if _is_equivalent(v, reasons) else v.result for v in verdicts.values())
    killed, relevant = share_killed(mutants, journal, reasons)
    numbers = ", ".join(f"{number} {result}" for result, number in counts.most_common())
    lines = [f"{name}: {len(verdicts)} of {len(mutants)} mutants tested: {numbers}"]
    all_killed = sum(verdict.is_killed for verdict in verdicts.values())
    if relevant:
        lines.append(
            f"{name}: {100 * all_killed / len(verdicts):.1f} % killed,"
            f" {100 * killed / relevant:.1f} % of those that are not equivalent"
        )
    lived = [(m, verdicts[m.key]) for m in mutants if m.key in verdicts and not verdicts[m.key].is_killed]
    if diffs:
        lines += [
            f"\n{mutant.key} {verdict.result} ({verdict.tests} tests)\n{mutant.diff()}"
            for mutant, verdict in lived
            if mutant.key not in reasons
        ]
        lines += [
            f"\n{mutant.key} equivalent: {reasons[mutant.key]}\n{mutant.diff()}"
            for mutant, _ in lived
            if mutant.key in reasons
        ]
    return "\n".join(lines)


def _is_equivalent(verdict: Verdict, reasons: dict[str, str]) -> bool:
    return not verdict.is_killed and verdict.key in reasons
