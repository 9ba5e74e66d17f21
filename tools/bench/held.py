"""What is in memory at the peak of a training step: `python -m tools.bench.held resnet --backend aotkit`.

A row for each operator or kernel, with how much of what is alive at the peak was allocated while it ran, the most
first. A compiled graph's kernels have names of the graph's values; memory that is allocated for a kernel is counted
with the kernel that runs next. "before the step": what was kept from earlier steps, as arenas are.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tools.bench.memory import MARKER, MEGABYTE, profiled_step
from tools.bench.models import MODELS, MORE
from tools.bench.worker import Step, Worker


@dataclass(frozen=True, slots=True)
class Held:
    """Memory alive at the peak. ``made_by``: the operators that were running, the innermost last."""

    nbytes: int
    made_by: tuple[str, ...]
    kept: bool


@dataclass(frozen=True, slots=True)
class _Change:
    when: int
    nbytes: int
    address: int
    inside: tuple[str, ...]


def held_at_peak(step: Step, warmup: int = 2) -> list[Held]:
    """What is in memory where most is in use during a step, after some that compile it; the largest first."""
    results, begin = profiled_step(step, warmup)
    changes = sorted(_changes(results.experimental_event_tree()), key=lambda change: change.when)
    alive: dict[int, Held] = {}
    current = peak = 0
    at_peak: list[Held] = []
    for change in changes:
        current += change.nbytes
        if change.nbytes > 0:
            alive[change.address] = Held(change.nbytes, change.inside, change.when < begin)
        else:
            alive.pop(change.address, None)
        if change.when >= begin and current > peak:
            peak, at_peak = current, list(alive.values())
    return sorted(at_peak, key=lambda held: -held.nbytes)


def _changes(roots: Sequence[Any]) -> Iterator[_Change]:
    """Allocations and releases, with the names of what was running."""
    stack: list[tuple[Any, tuple[str, ...]]] = [(root, ()) for root in roots]
    while stack:
        event, inside = stack.pop()
        kind, fields = event.typed
        if kind == torch._C._profiler._EventType.Allocation:
            yield _Change(event.start_time_ns, fields.alloc_size, fields.ptr, inside)
        named = [child for child in event.children if child.name.startswith("graph")]
        for child in event.children:
            within = (*inside, event.name) if event.name != MARKER else inside
            if not child.children and child.typed[0] == torch._C._profiler._EventType.Allocation and named:
                following = (each for each in named if each.start_time_ns >= child.start_time_ns)
                within = (*within, *(each.name for each in list(following)[:1]))
            stack.append((child, within))


def table(held: Sequence[Held], rows: int) -> str:
    """Megabytes by what made them."""
    groups: dict[str, list[int]] = defaultdict(list)
    for each in held:
        name = "before the step" if each.kept else " > ".join(each.made_by[-2:])
        groups[name].append(each.nbytes)
    lines = [f"{sum(each.nbytes for each in held) / MEGABYTE:9.2f} MB at the peak"]
    for name, sizes in sorted(groups.items(), key=lambda group: -sum(group[1]))[:rows]:
        lines.append(f"{sum(sizes) / MEGABYTE:9.2f} MB in {len(sizes):3}  {name}")
    return "\n".join(lines)


def main(arguments: list[str]) -> int:
    """Print the table of one model."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.held", description=__doc__.splitlines()[0])
    parser.add_argument("model", choices=[*MODELS, *MORE])
    parser.add_argument("--backend", default="aotkit")
    parser.add_argument("--quick", action="store_true", help="short inputs")
    parser.add_argument("--rows", type=int, default=40)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    worker = Worker(chosen.model, "train", chosen.backend, chosen.quick)
    worker.prepare()
    worker.connect()
    print(table(held_at_peak(worker.run), chosen.rows))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
