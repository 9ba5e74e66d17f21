"""The end of a language model: a linear layer and a cross-entropy loss, whole and in chunks, against eager.

python -m tools.bench.losses                                6144 rows, 32 000 words, float32
python -m tools.bench.losses --autocast                     the products in bfloat16
python -m tools.bench.losses --rows 2048 --words 128000

Of a training step each: the most tensor memory in use at once (exact, see :mod:`tools.bench.memory`; weights left out,
their gradients not), and the median of some times, the ways interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import aotkit  # noqa: F401  (registers the backend)
from tools.bench.__main__ import machine
from tools.bench.memory import peak_tensor_mb

__all__ = ["main", "steps"]

WIDTH = 512


class End(nn.Module):
    """What follows the blocks of a language model."""

    def __init__(self, words: int, autocast: bool) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, words, bias=False)
        self.words, self.autocast = words, autocast

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of the next words."""
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            logits = self.head(F.gelu(self.inner(x)))
            return F.cross_entropy(logits.view(-1, self.words), target.view(-1))


def steps(rows: int, words: int, autocast: bool) -> tuple[nn.Module, dict[str, Callable[[], None]]]:
    """A model and its training steps: in eager, with whole logits, in chunks."""
    torch.manual_seed(0)
    model = End(words, autocast)
    x, target = torch.randn(4, rows // 4, WIDTH), torch.randint(0, words, (4, rows // 4))

    def step_of(call: Callable[..., torch.Tensor]) -> Callable[[], None]:
        def step() -> None:
            model.zero_grad(set_to_none=True)
            call(x, target).backward()

        return step

    made = {"eager": step_of(model)}
    for way, least in (("whole", 0), ("chunks", 1 << 20)):
        options: dict[str, Any] = {"fallback": "error", "cache": False, "chunk_loss_bytes": least}
        made[way] = step_of(torch.compile(model, backend="aotkit", options=options))
    return model, made


def main() -> int:
    """Returns 1 if chunks take more memory than eager."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.losses", description=__doc__)
    parser.add_argument("--rows", type=int, default=6144)
    parser.add_argument("--words", type=int, default=32000)
    parser.add_argument("--autocast", action="store_true")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    torch.set_num_threads(chosen.threads)
    print(f"{machine()}; threads: {chosen.threads}; products in {'bfloat16' if chosen.autocast else 'float32'}\n")
    print("| rows, words | logits MiB | way | peak MiB | of eager | seconds | x eager |")
    print("|---|---:|---|---:|---:|---:|---:|")
    model, ways = steps(chosen.rows, chosen.words, chosen.autocast)
    peaks = {}
    for way, step in ways.items():
        model.zero_grad(set_to_none=True)  # of the way before: their release would count for this one
        peaks[way] = peak_tensor_mb(step, 1)
    seconds = _interleaved(ways, chosen.rounds)
    logits = chosen.rows * chosen.words * 4 / 2**20
    for way in ways:
        share, speed = peaks[way] / peaks["eager"], seconds["eager"] / seconds[way]
        where = f"| {chosen.rows}, {chosen.words} | {logits:.0f} | {way} "
        print(f"{where}| {peaks[way]:.0f} | {share:.2f} | {seconds[way]:.2f} | {speed:.2f} |")
    return int(peaks["chunks"] > peaks["eager"])


def _interleaved(ways: dict[str, Callable[[], None]], rounds: int) -> dict[str, float]:
    times: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way, step in ways.items():
            start = time.perf_counter()
            step()
            times[way].append(time.perf_counter() - start)
    return {way: statistics.median(found) for way, found in times.items()}


if __name__ == "__main__":
    raise SystemExit(main())
