"""Training steps over a slow network: does communication hide behind computation, and in how much memory?

python -m tools.bench.overlap                    2 ranks, communication takes half of the computation's time
python -m tools.bench.overlap --ranks 4 --share 0.25

Layers gather their parameters in the graph as sharded models do, and reduce their gradients in the backward. The
network is `slow_network`'s: gloo, each collective after a pause of a latency and a bandwidth, which are chosen so
that all of a step's collectives alone (with what gloo itself needs to move the bytes) take the given share of the
computation alone (the compiled step of ranks that get their own numbers in place of the others'). The compile is told
the network's speed. Steps are the median of several that take turns, each with one thread per rank.

`processor` is what all ranks' processes use in a step: on fewer cores than all their threads could fill, no step is
shorter than that divided by the cores.

Memory, for some bounds on the peak: `asked` is the peak of the program's order with the growth that was allowed,
`simulated` what the plan of the step says before it runs, `measured` what torch's allocator saw, all without the
parameters and the input, and without gloo, which has buffers of its own: ranks are not connected there. Parameters
are gathered again in the backward (`regather`), so that what is gathered ahead is what the bound is for.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tools.bench.slow_network import Network, register

__all__ = ["main"]

_BOUNDS = (None, 0.0, 0.1, 0.25, 10.0)
_ROUNDS = 9
_SIZE_OPTIONS = {"rows": "of the batch of a rank", "width": "of a layer", "layers": "how many"}
_SIDES = ("-forward", "-backward")


class Layer(nn.Module):
    """A layer of which each rank has some rows, and gathers the rest before it computes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        whole = torch.randn(width, width) / width**0.5
        self.ranks, self.group = dist.get_world_size(), _name_of_world()
        self.part = nn.Parameter(whole.chunk(self.ranks)[dist.get_rank()].clone())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """A product with the whole matrix."""
        ops = torch.ops._c10d_functional
        return torch.tanh(x @ ops.wait_tensor(ops.all_gather_into_tensor(self.part, self.ranks, self.group)))


class Layers(nn.Module):
    """Several, with a loss."""

    def __init__(self, width: int, count: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The loss."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def _name_of_world() -> str:
    """What collectives call the group of all ranks."""
    world = dist.group.WORLD
    assert world is not None
    return str(dist.distributed_c10d._world.pg_names[world])


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the model that is trained."""

    rows: int = 1024
    width: int = 768
    layers: int = 12


Step = Callable[[], Any]


@dataclass
class Bench:
    """A rank with its model and data."""

    network: Network
    model: Layers
    x: torch.Tensor
    share: float

    def step(self, run: Callable[[torch.Tensor], torch.Tensor]) -> None:
        """Forward and backward; gradients go."""
        run(self.x).backward()
        for parameter in self.model.parameters():
            parameter.grad = None

    def compiled(self, bound: float | None, **more: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        """The model with that ``overlap_memory``, and more options."""
        torch._dynamo.reset()
        link = {"link_latency": max(self.network.latency, 1e-6), "link_bandwidth": min(self.network.bandwidth, 1e12)}
        options: dict[str, Any] = {"cache": False, "overlap_memory": bound, **link, **more}
        return torch.compile(self.model, backend="aotkit", options=options)

    def times(self) -> dict[str, float]:
        """Seconds of each kind of step."""
        in_order = partial(self.step, self.compiled(None))
        in_order()
        alone = partial(self._unconnected, in_order)
        self._choose_network(seconds({"": alone})[""])
        overlapped = partial(self.step, self.compiled(10.0))
        overlapped()
        self._same_gradients()
        ways: dict[str, Step] = {"computation": alone, "communication": self._collectives}
        ways |= {"eager": partial(self.step, self.model), "program's order": in_order, "overlapped": overlapped}
        for run in ways.values():  # what was compiled before the last one is compiled again
            run()
        found = seconds(ways)
        pauses = sum(self.network.seconds(nbytes) for nbytes in self._per_step())
        found["gloo's own"] = found["communication"] - pauses
        return {**found, "processor": self._processor(overlapped)}

    def _unconnected(self, step: Step) -> None:
        self.network.connected = False
        step()
        self.network.connected = True

    def _choose_network(self, computation: float) -> None:
        """So that all collectives of a step take the share of the computation, a fifth of it by latency."""
        own = seconds({"": self._collectives})[""]
        pause = max(computation * self.share - own, 0.0)
        sent = self._per_step()
        self.network.latency = 0.2 * pause / len(sent)
        self.network.bandwidth = sum(sent) / (0.8 * pause) if pause else float("inf")

    def _per_step(self) -> list[int]:
        """Bytes of the collectives of a step."""
        self.network.sent.clear()
        self.step(self.model)
        return [nbytes for _, nbytes in self.network.sent]

    def _collectives(self) -> None:
        """Those of a step, without its computation."""
        ops, ranks, group = torch.ops._c10d_functional, dist.get_world_size(), _name_of_world()
        with torch.no_grad():
            whole = [ops.wait_tensor(ops.all_gather_into_tensor(layer.part, ranks, group)) for layer in self._layers()]
            for each in reversed(whole):
                ops.wait_tensor(ops.reduce_scatter_tensor(each, "sum", ranks, group))

    def _layers(self) -> Sequence[Layer]:
        return list(self.model.layers)  # type: ignore[arg-type]

    def _same_gradients(self) -> None:
        """Raises AssertionError if the compiled step's numbers are not eager mode's."""
        found = []
        for run in (self.model, self.compiled(10.0)):
            run(self.x).backward()
            found.append([parameter.grad for parameter in self.model.parameters()])
            for parameter in self.model.parameters():
                parameter.grad = None
        torch.testing.assert_close(found[1], found[0], rtol=1e-3, atol=1e-6)

    def _processor(self, step: Step) -> float:
        """Seconds of processor time that all ranks use in a step."""
        began = time.process_time()
        for _ in range(_ROUNDS):
            dist.barrier()
            step()
        mine = torch.tensor([(time.process_time() - began) / _ROUNDS], dtype=torch.float64)
        every = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
        for rank, each in enumerate(every):
            if rank == dist.get_rank():
                each.copy_(mine)
            dist.broadcast(each, rank)
        return float(sum(every))

    def memory(self) -> dict[str, list[int]]:
        """For each bound, bytes: asked, simulated, measured."""
        from aotkit.reports.page.watch import Watcher
        from aotkit_inductor_lower.launch_plan.facts import memory_of
        from tools.bench.memory import MEGABYTE, peak_tensor_mb

        found: dict[str, list[int]] = {}
        self.network.connected = False  # so that all that is allocated and released is this thread's
        for bound in _BOUNDS:
            watcher = Watcher()
            run = self.compiled(bound, observer=watcher, regather=True)
            gc.collect()
            measured = int(peak_tensor_mb(partial(self.step, run)) * MEGABYTE)
            (report,), programs = watcher.partitions.values(), watcher.programs
            forward, backward = (next(p for n, p in programs.items() if n.endswith(side)) for side in _SIDES)
            saved = [None if each.is_input else each.name for each in report.saved]
            simulated = memory_of(forward, backward, saved).peak.total
            given = found["None"][2] if found else measured
            found[str(bound)] = [int(given * (1 + (bound or 0.0))), simulated, measured]
        return found


def seconds(ways: Mapping[str, Step]) -> dict[str, float]:
    """The median of several runs of each, which take turns."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_ROUNDS):
        for name, run in ways.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            taken[name].append(time.perf_counter() - began)
    return {name: statistics.median(each) for name, each in taken.items()}


def _rank(chosen: argparse.Namespace) -> None:
    import aotkit  # noqa: F401  # registers the backend

    torch.set_num_threads(1)
    network = Network()
    register(network)
    store = dist.FileStore(str(chosen.folder / "store"), chosen.ranks)
    dist.init_process_group("slow", store=store, rank=chosen.rank, world_size=chosen.ranks)
    sizes = Sizes(**{name: getattr(chosen, name) for name in _SIZE_OPTIONS})
    bench = Bench(network, Layers(sizes.width, sizes.layers), torch.randn(sizes.rows, sizes.width), chosen.share)
    times, memory = bench.times(), bench.memory()
    if chosen.rank == 0:
        _show(times, memory)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # the network's thread never ends


def _show(times: Mapping[str, float], memory: Mapping[str, Sequence[int]]) -> None:
    print(f"{dist.get_world_size()} ranks, {len(os.sched_getaffinity(0))} cores, milliseconds of a training step:")
    for name, value in times.items():
        print(f"  {name:20} {1e3 * value:8.1f}")
    longer = max(times["computation"], times["communication"])
    for name in ("eager", "program's order", "overlapped"):
        print(f"  {name + ' / longer of both':35} {times[name] / longer:5.2f}")
    print("MiB at the peak, by the growth that is allowed:")
    print("  allowed      asked  simulated   measured  simulated / measured")
    for bound, row in memory.items():
        shown = "".join(f"{nbytes / 2**20:11.2f}" for nbytes in row)
        print(f"  {bound:7}{shown} {row[1] / row[2]:10.4f}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.overlap", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.5)
    for name, help_text in _SIZE_OPTIONS.items():
        parser.add_argument(f"--{name}", type=int, default=getattr(Sizes(), name), help=help_text)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.rank is not None:
        _rank(chosen)
    folder = Path(tempfile.mkdtemp())
    try:
        command = [sys.executable, "-m", "tools.bench.overlap", "--folder", str(folder)]
        for name in ("ranks", "share", *_SIZE_OPTIONS):
            command += [f"--{name}", str(getattr(chosen, name))]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "AOTKIT_CACHE_DIR": str(folder / "cache")}
        children = [subprocess.Popen([*command, "--rank", str(rank)], env=env) for rank in range(chosen.ranks)]
        codes = [child.wait() for child in children]
        return int(any(codes))
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    raise SystemExit(main())
