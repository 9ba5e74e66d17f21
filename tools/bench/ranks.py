"""Several ranks on this machine: what overlaps with a slow network, and what the first call costs all of them.

python -m tools.bench.ranks                      both, with 2 ranks
python -m tools.bench.ranks --ranks 4            and with 4
python -m tools.bench.ranks --share 0.25         communication takes a quarter of the time of the computation

Layers gather their parameters as sharded models do. The network is a group of gloo's whose collectives run one after
the other on a thread of their own, each after a pause of the given latency and bandwidth; the bandwidth is chosen
so that communication takes the given share of the computation's time. Each step is wall time, the least of several, on
one thread per rank; `first call` is processor time of all ranks, with and without `share_compiles`.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

__all__ = ["Network", "SlowGroup", "main", "register"]

_C10D: Any = torch._C._distributed_c10d  # its stubs lack names


@dataclass
class Network:
    """``latency`` in seconds and ``bandwidth`` in bytes per second; ``log`` gets a row for each collective that starts
    and ends."""

    latency: float = 0.0
    bandwidth: float = float("inf")
    log: list[tuple[str, int]] | None = None

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes take."""
        return self.latency + nbytes / self.bandwidth


class SlowGroup(dist.ProcessGroup):
    """A group whose collectives are those of ``inner``, in the order in which they were started, each after a pause."""

    def __init__(self, inner: Any, network: Network) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # the stubs know one of two
        self._inner, self._network = inner, network
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        self._number = 0
        threading.Thread(target=self._run, daemon=True).start()

    def getBackendName(self) -> str:  # torch's name
        """As `register` names it."""
        return "slow"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]  # as C++ calls it
        """Sum or the like, in place."""
        return self._start(tensors, tensors, self._inner.allreduce, [(tensors,)], opts or dist.AllreduceOptions())

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Each of several, in place."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        return self._start(tensors, tensors, self._inner.allreduce, [([t],) for t in tensors], options)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]  # as C++ calls it
        """From one rank to all."""
        return self._start(tensors, tensors, self._inner.broadcast, [(tensors,)], opts or dist.BroadcastOptions())

    def allgather_into_tensor_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Parts of all ranks, of each of several."""
        calls, options = list(zip(outputs, given, strict=True)), opts or _C10D.AllgatherOptions()
        return self._start(outputs, outputs, self._inner._allgather_base, calls, options)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """A part of the sum, of each of several."""
        calls, options = list(zip(outputs, given, strict=True)), opts or dist.ReduceScatterOptions()
        return self._start(given, outputs, self._inner._reduce_scatter_base, calls, options)

    def barrier(self, opts: Any = None) -> Any:
        """Without a pause."""
        return self._inner.barrier(opts or dist.BarrierOptions())

    def _start(
        self,
        moved: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        call: Callable[..., Any],
        arguments: Sequence[tuple[Any, ...]],
        options: Any,
    ) -> Any:
        """``call`` with each of the ``arguments``, after one pause."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._number += 1
        number, nbytes, given = self._number, sum(t.nbytes for t in moved), list(results)

        def run() -> None:
            time.sleep(self._network.seconds(nbytes))
            try:
                for each in arguments:
                    call(*each, options).wait()
            except Exception as error:  # noqa: BLE001  # whoever waits gets it
                future.set_exception(error)
                return
            self._note("end", number)
            future.set_result(given)

        self._note("start", number)
        self._work.put(run)
        return _C10D._create_work_from_future(future)

    def _note(self, event: str, number: int) -> None:
        if self._network.log is not None:
            self._network.log.append((event, number))

    def _run(self) -> None:
        while True:
            self._work.get()()


def register(network: Network) -> None:
    """Make it the backend ``"slow"`` of ``dist.init_process_group``."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> SlowGroup:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo beneath", store), rank, size, timeout)
        return SlowGroup(gloo, network)

    dist.Backend.register_backend("slow", make, devices=["cpu"])


def _name_of_world() -> str:
    """What collectives call the group of all ranks."""
    world = dist.group.WORLD
    assert world is not None
    return str(dist.distributed_c10d._world.pg_names[world])


class Gathered(nn.Module):
    """Layers of which each rank has some rows of the parameters, and gathers the rest before it computes."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        ranks, rank = dist.get_world_size(), dist.get_rank()
        whole = [torch.randn(width, width) / width**0.5 for _ in range(layers)]
        self.group = _name_of_world()
        self.shards = nn.ParameterList(w.chunk(ranks)[rank].clone() for w in whole)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """All layers."""
        ops, ranks = torch.ops._c10d_functional, dist.get_world_size()
        for shard in self.shards:
            weight = ops.wait_tensor(ops.all_gather_into_tensor(shard, ranks, self.group))
            x = torch.tanh(x @ weight)
        return x


def overlap(rank: int, _folder: Path, network: Network, share: float) -> dict[str, float]:
    """Milliseconds of a step, communication alone and computation alone among them."""
    rows, width, layers = 512, 768, 12
    model, x = Gathered(width, layers), torch.randn(rows, width)
    with torch.no_grad():
        ways: dict[str, Callable[[], Any]] = {"eager": lambda: model(x)}
        for name, allowed in (("program's order", None), ("overlapped", 10.0)):
            torch._dynamo.reset()
            options: Any = {"cache": False, "overlap_memory": allowed}
            ways[name] = partial(torch.compile(model, backend="aotkit", options=options), x)
            ways[name]()
        computing = least({"": ways["program's order"]}, network, pause=0.0)[""]
        pause = computing * share / layers
        found = {"computation": computing, "communication": pause * layers, **least(ways, network, pause)}
        torch.testing.assert_close(ways["overlapped"](), ways["eager"](), rtol=1e-4, atol=1e-4)
    found["overlapped / longer of both"] = found["overlapped"] / max(found["computation"], found["communication"])
    return {name: round(v * (1 if "/" in name else 1e3), 2) for name, v in found.items()}


def least(ways: Mapping[str, Callable[[], Any]], network: Network, pause: float, rounds: int = 15) -> dict[str, float]:
    """Seconds of the fastest of several runs of each, which take turns, with that pause of the network."""
    network.latency = pause
    seconds = dict.fromkeys(ways, float("inf"))
    for _ in range(rounds):
        for name, run in ways.items():
            dist.barrier()
            began = time.perf_counter()
            run()
            seconds[name] = min(seconds[name], time.perf_counter() - began)
    return seconds


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


def first_call(rank: int, folder: Path, share_compiles: bool, blocks: int = 8) -> float:
    """Seconds of processor time of a first step, beyond those of a second one."""
    os.environ["AOTKIT_CACHE_DIR"] = str(folder / f"cache{rank}-{share_compiles}")
    model, x = Blocks(blocks), torch.randn(8, 64)
    step = torch.compile(model, backend="aotkit", options={"share_compiles": share_compiles})
    seconds = []
    for _ in range(2):
        dist.barrier()
        began = time.process_time()
        step(x).square().mean().backward()
        seconds.append(time.process_time() - began)
    return seconds[0] - seconds[1]


def one_rank(folder: Path, rank: int, ranks: int, share: float) -> None:
    """What a rank does."""
    import aotkit  # noqa: F401  # registers the backend

    torch.set_num_threads(1)
    network = Network()
    register(network)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("slow", store=store, rank=rank, world_size=ranks)
    # Dynamo and the compiler are imported, and loaded, before anything is measured.
    torch.compile(Blocks(1), backend="aotkit", options={"cache": False})(torch.randn(8, 64)).sum().backward()
    answer: dict[str, Any] = {"overlap": overlap(rank, folder, network, share)}
    network.latency = 0.0
    for name, shares in (("apart", False), ("shared", True)):
        torch._dynamo.reset()
        answer[name] = first_call(rank, folder, shares)
    (folder / f"answer{rank}").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)  # the network's thread never ends


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.ranks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.rank is not None:
        one_rank(chosen.folder, chosen.rank, chosen.ranks, chosen.share)
    folder = Path(tempfile.mkdtemp())
    try:
        command = [sys.executable, "-m", "tools.bench.ranks", "--folder", str(folder), "--ranks", str(chosen.ranks)]
        command += ["--share", str(chosen.share), "--rank"]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "AOTKIT_CACHE_KEY": "one secret of all ranks"}
        ranks = [subprocess.Popen([*command, str(rank)], env=env) for rank in range(chosen.ranks)]
        if any(rank.wait() for rank in ranks):
            return 1
        answers = [json.loads((folder / f"answer{rank}").read_text()) for rank in range(chosen.ranks)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(f"{chosen.ranks} ranks, milliseconds of a step of the first rank:")
    for name, value in answers[0]["overlap"].items():
        print(f"  {name:30} {value:8.2f}")
    alone = max(answer["apart"] for answer in answers)
    for name in ("apart", "shared"):
        total = sum(answer[name] for answer in answers)
        print(f"first call, {name}: {total:.2f} s of all ranks, {total / alone:.2f} of the compile of one")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
