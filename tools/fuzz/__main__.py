"""`python -m tools.fuzz`: run many programs, count outcomes, print each new kind of failure, shrunk."""

from __future__ import annotations

import argparse
from pathlib import Path

from .campaign import Campaign, Settings
from .cells import CELLS, coverage_table
from .tally import Tally

__all__ = ["main"]


def main() -> int:
    """Returns 1 if a program mismatched or crashed, or a planted bug was not found."""
    chosen = _arguments()
    if chosen.planted:
        from .planted import find_planted

        return find_planted(chosen.programs)
    settings = Settings(
        chosen.programs, chosen.seed, chosen.lowering, chosen.dynamo_every, chosen.verify_every, chosen.shown
    )
    campaign = Campaign(settings, chosen.processes, chosen.state, chosen.seconds)
    tally = campaign.again() if chosen.again else campaign.run()
    _print(tally, chosen.table)
    return 1 if tally.failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--lowering", choices=("none", "kernels"), default="none")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--state", type=Path, help="file that holds finished batches; a later run goes on from there")
    parser.add_argument("--again", action="store_true", help="run the programs that failed, by the state, once more")
    parser.add_argument("--dynamo-every", type=int, default=0, help="every how many-th program Dynamo sees")
    parser.add_argument("--verify-every", type=int, default=10, help="every how many-th program reloads its stages")
    parser.add_argument("--seconds", type=float, default=0, help="stop after so long; 0: run all programs")
    parser.add_argument("--shown", type=int, default=1, help="failures printed of each kind")
    parser.add_argument("--table", action="store_true", help="print how often each cell was covered")
    parser.add_argument("--planted", action="store_true", help="plant bugs one by one; see whether each is found")
    return parser.parse_args()


def _print(tally: Tally, table: bool) -> None:
    if table:
        print(coverage_table(tally.cells))
    programs = sum(tally.kinds.values())
    poor = sum(tally.cells[cell] < 20 for cell in CELLS)
    lowest = min(tally.cells[cell] for cell in CELLS)
    kinds = ", ".join(f"{number} {kind}" for kind, number in tally.kinds.most_common())
    print(f"{programs} programs in {tally.seconds:.0f} s: {kinds}")
    refused = tally.kinds["refused"]
    print(f"refused: {100 * refused / max(programs, 1):.2f} %; {poor} of {len(CELLS)} cells below 20, lowest {lowest}")
    for family, number in tally.families.most_common():
        print(f"{number:6d}  {family}")


if __name__ == "__main__":
    raise SystemExit(main())
