"""Several ranks on this machine: what overlaps with a slow network, and what the first call costs all of them.

python -m tools.bench.ranks                      both, with 2 ranks
python -m tools.bench.ranks --ranks 4            and with 4
python -m tools.bench.ranks --share 0.25         communication takes a quarter of the time of the computation
python -m tools.bench.ranks --first-call         what the first call costs, alone

Layers gather their parameters as sharded models do. The network is a group of gloo's whose collectives run one after
the other on a thread of their own, each after a pause of the given latency and bandwidth; the bandwidth is chosen
so that communication takes the given share of the computation's time. Each step is wall time, the least of several, on
one thread per rank.

`first call` is processor time of all ranks for a first training step beyond that of a second one: Dynamo's trace, the
compile of forward and backward, or their load, what is waited for (which asks a store again and again) and compared.
Divided by what one rank needs that compiles by itself, the dearest of them. Dynamo and the compiler have been imported;
`fresh` ranks have imported torch and begin with the step, so imports count too. `eager` compiles nothing: Dynamo alone.
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


def _join(folder: Path, rank: int, ranks: int, network: Network) -> None:
    torch.set_num_threads(1)
    register(network)
    store = dist.FileStore(str(folder / "store"), ranks)
    dist.init_process_group("slow", store=store, rank=rank, world_size=ranks)


def fresh_rank(folder: Path, rank: int, ranks: int, how: str, blocks: int) -> None:
    """What a rank does whose first step is the first thing that is done."""
    _join(folder, rank, ranks, Network())
    seconds = first_call(rank, folder, how, Blocks(blocks), torch.randn(8, 64))
    _answer(folder, rank, {how: seconds, "has Dynamo": "torch._dynamo" in sys.modules})


def _answer(folder: Path, rank: int, answer: Mapping[str, Any]) -> None:
    (folder / f"answer{rank}").write_text(json.dumps(answer))
    dist.barrier()
    os._exit(0)  # the network's thread never ends


def one_rank(folder: Path, rank: int, ranks: int, share: float | None, blocks: int) -> None:
    """What a rank does. ``share``: of communication; without one overlap is left out."""
    import aotkit  # noqa: F401  # registers the backend

    network = Network()
    _join(folder, rank, ranks, network)
    # Dynamo and the compiler are imported, and loaded, before anything is measured.
    torch.compile(Blocks(1), backend="aotkit", options={"cache": False})(torch.randn(8, 64)).sum().backward()
    os.environ["AOTKIT_CACHE_DIR"] = str(folder / f"cache{rank}")
    _compiled("for ranks", Blocks(1), torch.randn(8, 64))(torch.randn(8, 64)).sum().backward()
    answer: dict[str, Any] = {}
    if share is not None:
        answer["overlap"] = overlap(rank, folder, network, share)
        network.latency = 0.0
    for how in FIRST_CALLS:
        torch._dynamo.reset()
        answer[how] = first_call(rank, folder, how, Blocks(blocks), torch.randn(8, 64))
    _answer(folder, rank, answer)


def run_all(ranks: int, arguments: Sequence[str]) -> list[dict[str, Any]] | None:
    """The answers of that many processes, each of which runs this module with the ``arguments``."""
    folder = Path(tempfile.mkdtemp())
    try:
        command = [sys.executable, "-m", "tools.bench.ranks", "--folder", str(folder), "--ranks", str(ranks)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", "AOTKIT_CACHE_KEY": "one secret of all ranks"}
        children = [subprocess.Popen([*command, *arguments, "--rank", str(rank)], env=env) for rank in range(ranks)]
        codes = [child.wait() for child in children]
        if any(codes):
            return None
        return [json.loads((folder / f"answer{rank}").read_text()) for rank in range(ranks)]
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def show_first_calls(answers: Sequence[Mapping[str, Any]], title: str) -> None:
    """A line for each way: all ranks, as a share of the compile of one."""
    alone = max(answer["apart"] for answer in answers)
    for how in FIRST_CALLS:
        each = [answer[how] for answer in answers]
        per_rank = " ".join(f"{seconds:.2f}" for seconds in each)
        share = f"{sum(each) / alone:.2f} of the compile of one"
        print(f"{title}, {how}: {sum(each):.2f} s of all ranks ({per_rank}), {share}")


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m tools.bench.ranks", description=__doc__.split("\n\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--blocks", type=int, default=8, help="of the model whose first call is measured")
    parser.add_argument("--first-call", action="store_true", help="leave out overlap")
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--fresh", choices=FIRST_CALLS, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.rank is not None and chosen.fresh:
        fresh_rank(chosen.folder, chosen.rank, chosen.ranks, chosen.fresh, chosen.blocks)
    elif chosen.rank is not None:
        share = None if chosen.first_call else chosen.share
        one_rank(chosen.folder, chosen.rank, chosen.ranks, share, chosen.blocks)
    same = ["--share", str(chosen.share), "--blocks", str(chosen.blocks)]
    answers = run_all(chosen.ranks, [*same, *(["--first-call"] if chosen.first_call else [])])
    fresh = [run_all(chosen.ranks, [*same, "--fresh", how]) for how in FIRST_CALLS]
    if answers is None or any(each is None for each in fresh):
        return 1
    if not chosen.first_call:
        print(f"{chosen.ranks} ranks, milliseconds of a step of the first rank:")
        for name, value in answers[0]["overlap"].items():
            print(f"  {name:30} {value:8.2f}")
    show_first_calls(answers, "first call")
    joined = [{k: v for each in fresh for k, v in each[rank].items()} for rank in range(chosen.ranks)]  # type: ignore[index]
    show_first_calls(joined, "first call of fresh processes")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
