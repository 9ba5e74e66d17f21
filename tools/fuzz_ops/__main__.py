"""`python -m tools.fuzz_ops`: run many samples, count outcomes, print each new kind of failure, shrunk."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.fuzz.tally import Tally

from .campaign import _PLANS, Campaign, Settings, quiet
from .cells import coverage_table

__all__ = ["main"]


def main() -> int:
    """Returns 1 if a sample differed, crashed or killed its process."""
    chosen = _arguments()
    quiet()
    settings = Settings(chosen.samples, chosen.seed, chosen.plan, chosen.only, chosen.together, chosen.fill)
    campaign = Campaign(settings, chosen.processes, chosen.journal, chosen.seconds)
    tally = campaign.again() if chosen.again else campaign.run()
    _print(tally, chosen.table, chosen.families)
    return 1 if tally.failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz_ops", description=__doc__)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="number of the first sample")
    parser.add_argument("--plan", choices=sorted(_PLANS), default="mixed", help="how samples are compiled")
    parser.add_argument("--only", default="", help="operators whose name holds this")
    parser.add_argument("--together", type=int, default=12, help="samples that are compiled as one program")
    parser.add_argument("--fill", default="", help="how most tensors are filled: large, special, ties, ..")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--journal", type=Path, help="file that holds finished chunks; a later run goes on from there")
    parser.add_argument("--again", action="store_true", help="run the samples that failed, by the journal, once more")
    parser.add_argument("--seconds", type=float, default=0, help="begin no chunk after so long; 0: run all samples")
    parser.add_argument("--table", action="store_true", help="print how often each operator was covered")
    parser.add_argument("--families", type=int, default=40, help="families of outcomes printed")
    return parser.parse_args()


def _print(tally: Tally, table: bool, families: int) -> None:
    if table:
        print(coverage_table(tally))
    samples = sum(tally.kinds.values())
    for entry, number in sorted(tally.entries.items()):
        print(f"{number:8d}  {entry}")
    for family, number in tally.families.most_common(families):
        print(f"{number:6d}  {family}")
    kinds = ", ".join(f"{number} {kind}" for kind, number in tally.kinds.most_common())
    print(f"{samples} samples in {tally.seconds:.0f} s: {kinds}")


if __name__ == "__main__":
    raise SystemExit(main())
