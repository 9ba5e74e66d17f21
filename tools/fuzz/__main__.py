"""`python -m tools.fuzz`: run many programs, count outcomes, print each new kind of failure, shrunk."""

from __future__ import annotations

import argparse
import logging
import time
import warnings
from collections import Counter

import torch

from .execute import Outcome, check, shrink
from .generate import generate
from .program import Program


def main() -> int:
    """Returns 1 if a program mismatched or crashed."""
    chosen = _arguments()
    torch.set_num_threads(1)
    logging.getLogger("torch").setLevel(logging.CRITICAL)  # torch logs what a program is refused for
    warnings.simplefilter("ignore")  # eager warns about much of what is tried here
    counts: Counter[str] = Counter()
    families: Counter[str] = Counter()
    started = time.monotonic()
    for seed in range(chosen.seed, chosen.seed + chosen.programs):
        if chosen.seconds and time.monotonic() - started > chosen.seconds:
            break
        program = generate(seed)
        dynamo = chosen.dynamo_every > 0 and seed % chosen.dynamo_every == 0
        for training in (True, False) if not dynamo else (True,):
            counts["runs"] += 1
            outcome = check(program, lowering=chosen.lowering, training=training, dynamo=dynamo)
            counts[outcome.kind] += 1
            if outcome.kind == "equal":
                continue
            families[outcome.family] += 1
            if outcome.failed and families[outcome.family] <= chosen.shown:
                _report(seed, program, outcome, training, dynamo, chosen.lowering)
    _table(counts, families, time.monotonic() - started)
    return 1 if counts["mismatch"] + counts["crash"] else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tools.fuzz", description=__doc__)
    parser.add_argument("--programs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0, help="number of the first program")
    parser.add_argument("--lowering", choices=("none", "kernels"), default="none")
    parser.add_argument(
        "--dynamo-every", type=int, default=20, help="every how many-th program the frontend sees; 0: none"
    )
    parser.add_argument("--seconds", type=float, default=0, help="stop after so long; 0: run all programs")
    parser.add_argument("--shown", type=int, default=1, help="failures printed of each kind")
    return parser.parse_args()


def _report(seed: int, program: Program, outcome: Outcome, training: bool, dynamo: bool, lowering: str) -> None:
    def same(smaller: Program) -> bool:
        return check(smaller, lowering=lowering, training=training, dynamo=dynamo).family == outcome.family

    smallest = shrink(program, same, tries=40 if dynamo else 150)
    final = check(smallest, lowering=lowering, training=training, dynamo=dynamo)
    where = f"{'training' if training else 'inference'}{', through the frontend' if dynamo else ''}"
    print(f"--- program {seed}, {where}: {final.kind}: {final.detail}\n{smallest.script()}\n", flush=True)


def _table(counts: Counter[str], families: Counter[str], seconds: float) -> None:
    print(
        f"{counts.pop('runs')} runs in {seconds:.0f} s: " + ", ".join(f"{n} {kind}" for kind, n in counts.most_common())
    )
    for family, number in families.most_common():
        print(f"{number:6d}  {family}")


if __name__ == "__main__":
    raise SystemExit(main())
