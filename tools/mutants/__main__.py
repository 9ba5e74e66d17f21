"""`python -m tools.mutants`: draw mutants of a group, test them, print what lived."""

from __future__ import annotations

import argparse
import math

from .campaign import Measured, journal_of, run
from .follow import follow
from .groups import GROUPS
from .journal import EQUIVALENT, equivalents, report, share_killed
from .sample import draw

__all__ = ["main"]


def main() -> int:
    """Returns 1 if a group's share of killed mutants is below ``--at-least``."""
    chosen = _arguments()
    if chosen.what == "follow":
        print(follow(chosen.commit, [journal_of(group) for group in GROUPS.values()]))
        return 0
    reasons = equivalents()
    failed = False
    unknown = set(reasons)
    for name in chosen.group or list(GROUPS):
        group = GROUPS[name]
        everything = draw(group, seed=chosen.seed, known=journal_of(group).verdicts)
        unknown -= {mutant.key for mutant in everything}
        mutants = everything[: chosen.sample]
        if chosen.only:
            mutants = [m for m in mutants if m.key.startswith(tuple(chosen.only))]
        if chosen.what == "run":
            run(group, mutants, chosen.jobs, chosen.budget, chosen.again, Measured(chosen.measure), chosen.seconds)
        journal = journal_of(group)
        print(report(name, mutants, journal, reasons, chosen.diffs), flush=True)
        killed, relevant = share_killed(mutants, journal, reasons)
        failed |= 100 * killed < chosen.at_least * relevant
    if unknown and not chosen.group:
        print(f"{EQUIVALENT.name} lists what is no mutant any more: {', '.join(sorted(unknown))}")
    return int(failed)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.mutants", description=__doc__)
    parser.add_argument("what", choices=("run", "report", "follow"))
    parser.add_argument("commit", nargs="?", default="HEAD", help="of `follow`: the state that the verdicts belong to")
    parser.add_argument("--group", action="append", choices=tuple(GROUPS), help="may be given again; default: all")
    parser.add_argument("--sample", type=int, default=300, help="mutants of each group")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="mutants tested at once")
    parser.add_argument("--budget", type=float, default=60, help="seconds of tests that a mutant may live through")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no mutant of a group later than that")
    parser.add_argument("--again", action="store_true", help="test those that lived once more")
    parser.add_argument(
        "--measure", choices=[how.value for how in Measured], default="changed", help="whose coverage to measure first"
    )
    parser.add_argument("--only", action="append", help="beginning of a mutant's key, to test it alone")
    parser.add_argument("--diffs", action="store_true", help="print the mutants that lived")
    parser.add_argument("--at-least", type=float, default=0, help="percentage that must be killed")
    return parser.parse_args()


if __name__ == "__main__":
    raise SystemExit(main())
