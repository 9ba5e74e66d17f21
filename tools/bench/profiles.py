"""Whether a profile explains a step: what its rows add up to, for a training step of each of the five models.

python -m tools.bench.profiles                  all five, one thread
python -m tools.bench.profiles --models bert --calls 40
python -m tools.bench.profiles --kinds          what eager and our steps are made of: ms of products and convolutions,
                                                of attention, and of the rest

A profile is of steps that are watched, with each kernel as a native call of its own. The table says how much of such a
step its rows are, what watching costs in processor time of the thread (which other processes hardly change), and from
both how much of a step as it is the rows explain. Returns 1 where that is more than a tenth away from the whole.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import aotkit
from tools.bench.__main__ import machine
from tools.bench.models import MODELS

__all__ = ["eager_kinds", "kinds_of", "main", "profile_of"]

ALLOWED = 0.1
KINDS = ("products", "attention", "rest")


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
    model, batch = _made(name, quick)
    return aotkit.profile(model, batch, calls=calls)


def _made(name: str, quick: bool) -> tuple[Loss, dict[str, Any]]:
    """A model and a batch."""
    case = MODELS[name]
    torch.manual_seed(0)
    length = case.quick_length if quick else case.length
    batch = case.inputs(case.batch_size, length, torch.Generator().manual_seed(0))
    return Loss(case.build().train()), batch


def kind_of(name: str, ours: bool = False) -> str:
    """The kind of a row: a product or convolution that ATen computes, attention, or the rest. ``ours``: a kernel."""
    if "attention" in name:
        return "attention"
    operator = name.split("::")[-1].removeprefix("aten.").split(".")[0]
    calls = ("mm", "addmm", "bmm", "baddbmm")
    return "products" if not ours and (operator in calls or "conv" in operator) else "rest"


def kinds_of(found: aotkit.Profile) -> dict[str, float]:
    """Milliseconds of each kind."""
    return _summed((kind_of(row.name, bool(row.ops)), row.ms) for row in found.rows)


def eager_kinds(name: str, calls: int, quick: bool = False) -> dict[str, float]:
    """Milliseconds of each kind in eager mode, of the operators without what they call."""
    model, batch = _made(name, quick)

    def run(times: int) -> None:
        for _ in range(times):
            model.zero_grad(set_to_none=True)
            model(batch).backward()

    run(5)
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        run(calls)
    return _summed((kind_of(row.key), row.self_cpu_time_total / calls / 1e3) for row in watched.key_averages())


def _summed(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    found = dict.fromkeys(KINDS, 0.0)
    for kind, ms in parts:
        found[kind] += ms
    return found


def print_kinds(names: Sequence[str], calls: int) -> None:
    """A row for each model."""
    print("| model | eager: products, attention, rest | aotkit: products, attention, rest |\n|---|---|---|")
    for name in names:
        columns = eager_kinds(name, calls), kinds_of(profile_of(name, calls))
        cells = (", ".join(f"{column[kind]:.1f}" for kind in KINDS) for column in columns)
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


def main() -> int:
    """Returns 1 if a profile explains less than nine tenths of a step, or more than there is."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.profiles", description=__doc__)
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--kinds", action="store_true", help="what steps are made of, in eager mode and ours")
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{machine()}; threads: {chosen.threads}\n")
    if chosen.kinds:
        print_kinds(chosen.models, chosen.calls)
        return 0
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
