"""What the first call costs all ranks of a group, on this machine, in processor time.

python -m tools.bench.ranks                      2 ranks
python -m tools.bench.ranks --ranks 4 --rounds 3

A first training step beyond a second one: Dynamo's trace, the compile of forward and backward, or their load, what is
waited for (which asks a store again and again) and compared. Divided by what one rank needs that compiles alone, in a
group of its own, while nothing else of the bench runs. `warm`: Dynamo and the compiler have been imported; `fresh`
processes have imported torch, and begin with the step, so imports count too (of byte code, as an installation has it).
`eager` compiles nothing: Dynamo alone. The least of the rounds counts.

What overlaps with a slow network: `python -m tools.bench.overlap`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tools.bench.starts import write_bytecode

__all__ = ["main"]


class Block(nn.Module):
    """Two layers and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 256), nn.LayerNorm(256), nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """With a residual."""
        return x + self.last(torch.nn.functional.gelu(self.norm(self.first(x))))


class Blocks(nn.Module):
    """Several, one after the other."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All of them."""
        for block in self.blocks:
            x = block(x)
        return x


#: What the ranks do for their first call. ``for ranks``: `aotkit.saved.compile_for_ranks`.
FIRST_CALLS = ("eager", "apart", "share_compiles", "for ranks")


def first_call(rank: int, folder: Path, how: str, model: nn.Module, x: torch.Tensor) -> float:
    """Seconds of processor time of a first step, beyond those of a second one. ``how``: see `FIRST_CALLS`."""
    os.environ["AOTKIT_CACHE_DIR"] = str(folder / f"cache{rank}-{how}")
    seconds = []
    step: Callable[..., Any] | None = None
    for _ in range(2):
        dist.barrier()
        began = time.process_time()
        if step is None:
            step = _compiled(how, model, x)
        step(x).square().mean().backward()
        seconds.append(time.process_time() - began)
    return seconds[0] - seconds[1]


def _compiled(how: str, model: nn.Module, x: torch.Tensor) -> Callable[..., Any]:
    if how == "eager":
        return torch.compile(model, backend="eager")
    if how == "for ranks":
        import aotkit.saved

        return partial(aotkit.saved.compile_for_ranks(model, (x,)), model)
    import aotkit  # registers the backend

    options: dict[str, Any] = {"share_compiles": how == "share_compiles"}
    return torch.compile(model, backend="aotkit", options=options)


def one_rank(folder: Path, rank: int, ranks: int, ways: Sequence[str], blocks: int) -> None:
    """What a rank does. With a single way its first step is the first thing that is done; before several, Dynamo and
    the compiler are imported and loaded."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), ranks), rank=rank, world_size=ranks)
    x = torch.randn(8, 64)
    os.environ["AOTKIT_CACHE_DIR"] = str(folder / f"cache{rank}")
    if len(ways) > 1:
        for how in ("apart", "for ranks"):
            _compiled(how, Blocks(1), x)(x).sum().backward()
    answer = {}
    for how in ways:
        if len(ways) > 1:
            torch._dynamo.reset()
        answer[how] = first_call(rank, folder, how, Blocks(blocks), x)
    (folder / f"answer{rank}").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)  # gloo's threads are not always joined when a process ends by itself


def run_all(ranks: int, ways: Sequence[str], blocks: int) -> dict[str, list[float]]:
    """Seconds of each rank, by way, of that many processes that run this module."""
    folder = Path(tempfile.mkdtemp())
    try:
        command = [sys.executable, "-m", "tools.bench.ranks", "--folder", str(folder), "--ranks", str(ranks)]
        command += ["--blocks", str(blocks), "--ways", *ways]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "AOTKIT_CACHE_KEY": "one secret of all ranks"}
        env["PYTHONDONTWRITEBYTECODE"] = ""
        children = [subprocess.Popen([*command, "--rank", str(rank)], env=env) for rank in range(ranks)]
        codes = [child.wait() for child in children]
        if any(codes):
            raise RuntimeError(f"{' '.join(command)} ended with {codes}")
        answers = [json.loads((folder / f"answer{rank}").read_text()) for rank in range(ranks)]
        return {how: [answer[how] for answer in answers] for how in ways}
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show(title: str, alone: float, found: Mapping[str, Sequence[float]]) -> None:
    """A line for each way: all ranks, as a share of the compile of one."""
    print(f"{title}: one rank alone compiles in {alone:.2f} s")
    for how, each in found.items():
        dearest = max(each)
        others = (sum(each) - dearest) / max(len(each) - 1, 1)
        rest = f"the dearest {dearest:.2f}, each other {others:.2f}"
        print(f"  {how:15} {sum(each):6.2f} s of all ranks ({rest}), {sum(each) / alone:.2f} of the compile of one")


def _least(rounds: Sequence[dict[str, list[float]]]) -> dict[str, list[float]]:
    """Of each way the round with the least sum."""
    return {how: min((each[how] for each in rounds), key=sum) for how in rounds[0]}


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.ranks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=8, help="of the model whose first call is measured")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--ways", nargs="+", choices=FIRST_CALLS, default=FIRST_CALLS)
    chosen = parser.parse_args(arguments)
    if chosen.rank is not None:
        one_rank(chosen.folder, chosen.rank, chosen.ranks, chosen.ways, chosen.blocks)
    write_bytecode()
    warm, fresh, alone = [], [], []
    for _ in range(chosen.rounds):
        ones = {"warm": run_all(1, FIRST_CALLS, chosen.blocks), "fresh": run_all(1, ["apart"], chosen.blocks)}
        alone.append({name: found["apart"] for name, found in ones.items()})
        warm.append(run_all(chosen.ranks, FIRST_CALLS, chosen.blocks))
        fresh.append({how: run_all(chosen.ranks, [how], chosen.blocks)[how] for how in chosen.ways})
    least = _least(alone)
    show("warm", least["warm"][0], _least(warm))
    show("fresh processes", least["fresh"][0], _least(fresh))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
