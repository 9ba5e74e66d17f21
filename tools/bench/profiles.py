"""Whether a profile explains a step: what its rows add up to, for a training step of each of the five models.

python -m tools.bench.profiles                  all five, one thread
python -m tools.bench.profiles --models bert --calls 40

A profile is of steps that are watched, with each kernel as a native call of its own. The table says how much of such a
step its rows are, what watching costs in processor time of the thread (which other processes hardly change), and from
both how much of a step as it is the rows explain. Returns 1 where that is more than a tenth away from the whole.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import aotkit
from tools.bench.__main__ import machine
from tools.bench.models import MODELS

__all__ = ["main", "profile_of"]

ALLOWED = 0.1


class Loss(nn.Module):
    """A model as it trains: its loss alone."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Any]) -> torch.Tensor:
        """The loss of a batch."""
        loss: torch.Tensor = self.model(**batch).loss
        return loss


def profile_of(name: str, calls: int, quick: bool = False) -> aotkit.Profile:
    """The profile of a model's training step; ``quick``: with short inputs."""
    case = MODELS[name]
    torch.manual_seed(0)
    length = case.quick_length if quick else case.length
    batch = case.inputs(case.batch_size, length, torch.Generator().manual_seed(0))
    return aotkit.profile(Loss(case.build().train()), batch, calls=calls)


def main() -> int:
    """Returns 1 if a profile explains less than nine tenths of a step, or more than there is."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.profiles", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{machine()}; threads: {chosen.threads}\n")
    print("| model | rows | rows add up to, ms | of a watched step | watched / not, processor time | of a step |")
    print("|---|---:|---:|---:|---:|---:|")
    missed = []
    for name in chosen.models:
        found = profile_of(name, chosen.calls)
        share = f"{found.kernels_ms / found.watched_ms:.3f} | {found.watching:.3f} | {found.explained:.3f}"
        print(f"| {name} | {len(found.rows)} | {found.kernels_ms:.1f} | {share} |", flush=True)
        if abs(found.explained - 1) > ALLOWED:
            missed.append(f"{name}: {found.explained:.3f} of a step, allowed is {1 - ALLOWED:g} to {1 + ALLOWED:g}")
    print("\n".join(missed))
    return int(bool(missed))


if __name__ == "__main__":
    raise SystemExit(main())
