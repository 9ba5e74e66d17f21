"""Sampling the next word: transformers' warpers over the logits of a large vocabulary, and sorts alone.

python -m tools.bench.sampling                  eager, Inductor and aotkit, 128 000 words
python -m tools.bench.sampling --rows 4 --threads 2
python -m tools.bench.sampling --sorts          ATen's sorts and ours, by type and length

Medians of rounds in which the ways take turns; ratios within rounds. Words drawn are compared with eager's.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor

import aotkit  # noqa: F401  (registers the backend)
from tools.bench.__main__ import machine
from tools.bench.turns import begin, compared

__all__ = ["CHAINS", "main", "sampler"]

Function = Callable[[Tensor], Tensor]
CHAINS = ("top-k", "top-p", "top-k, top-p", "min-p")
LENGTHS = (64, 96, 128, 192, 256, 1000, 4096, 32_000, 128_000)
TYPES = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "uint8")


def sampler(chain: str, draws: bool) -> Function:
    """What becomes of logits: the probabilities that are left, or the word that is drawn."""
    from transformers.generation import logits_process as warpers

    made: dict[str, Any] = {
        "top-k": warpers.TopKLogitsWarper(50),
        "top-p": warpers.TopPLogitsWarper(0.9),
        "min-p": warpers.MinPLogitsWarper(0.05),
    }
    used = [made[name] for name in chain.split(", ")]

    def sample(scores: Tensor) -> Tensor:
        for warper in used:
            scores = warper(None, scores)
        probabilities = scores.softmax(-1)
        return torch.multinomial(probabilities, 1) if draws else probabilities

    return sample


def _compiled(function: Callable[..., Any], backend: str, **options: Any) -> Callable[..., Any]:
    torch._dynamo.reset()
    extra = {"options": {"fallback": "error", "cache": False, **options}} if backend == "aotkit" else {}
    return torch.compile(function, backend=backend, **extra)  # type: ignore[call-overload, no-any-return]


@torch.no_grad()
def _chains(chosen: argparse.Namespace) -> None:
    clock = begin(chosen.threads)
    scores = torch.randn(chosen.rows, chosen.words) * 3
    kinds = {"float32": scores, "bfloat16, widened": scores.bfloat16().float()}
    print("| logits | chain | eager ms | Inductor, x eager | aotkit, x eager | fast, x eager | as eager's |")
    print("|---|---|---:|---:|---:|---:|---|")
    for (kind, logits), chain, draws in product(kinds.items(), CHAINS, (False, True)):
        name = f"{chain}, a word" if draws else chain
        row = _row(logits, chain, draws, chosen.rounds, clock)
        print(f"| {kind} | {name} | {' | '.join(row)} |", flush=True)


def _row(logits: Tensor, chain: str, draws: bool, rounds: int, clock: Callable[[], float]) -> list[str]:
    """Eager's milliseconds, speeds of the other ways over it, and whether ours gives the same."""
    eager = sampler(chain, draws)
    ways = {
        "inductor": _compiled(sampler(chain, draws), "inductor"),
        "aotkit": _compiled(sampler(chain, draws), "aotkit"),
        "fast": _compiled(sampler(chain, draws), "aotkit", numerics="fast"),
    }
    same, ratios, first = _same(eager, ways["aotkit"], logits, draws), [], 0.0
    for way in ways.values():
        way(logits)
        first, _, ratio = compared(lambda: eager(logits), functools.partial(way, logits), rounds, clock)
        ratios.append(f"{ratio:.2f}")
    return [f"{first:.2f}", *ratios, same]


def _same(eager: Function, own: Function, logits: Tensor, draws: bool) -> str:
    found = []
    for function in (eager, own):
        torch.manual_seed(1)
        found.append(function(logits))
    kept = torch.equal(*found) if draws else torch.equal(*(each > 0 for each in found))
    return "yes" if kept else "NO"


@torch.no_grad()
def _sorts(chosen: argparse.Namespace) -> None:
    clock = begin(chosen.threads)
    print("| type | rows, elements | ATen, stable ms | aotkit ms | x stable | x unstable |")
    print("|---|---|---:|---:|---:|---:|")
    for name, count in product(chosen.types, chosen.lengths):
        rows = max(1, min(256, 64_000 // count))
        x = (torch.randn(rows, count, dtype=torch.float64) * 1000).to(getattr(torch, name))
        own = functools.partial(_compiled(_stable, "aotkit"), x)
        if not all(map(torch.equal, own(), _stable(x))):
            raise AssertionError(f"{name} {count}: another order than ATen's")
        first, second, ratio = compared(functools.partial(_stable, x), own, chosen.rounds, clock)
        _, _, unstable = compared(functools.partial(torch.sort, x), own, chosen.rounds, clock)
        print(f"| {name} | {rows}, {count} | {first:.3f} | {second:.3f} | {ratio:.2f} | {unstable:.2f} |", flush=True)


def _stable(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.sort(x, stable=True, dim=-1)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a table in Markdown."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.sampling", description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--words", type=int, default=128_000)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sorts", action="store_true", help="sorts alone")
    parser.add_argument("--types", nargs="+", default=list(TYPES))
    parser.add_argument("--lengths", type=int, nargs="+", default=list(LENGTHS))
    chosen = parser.parse_args(argv)
    print(f"{machine()}; threads: {chosen.threads}\n")
    (_sorts if chosen.sorts else _chains)(chosen)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
