"""Gloo over a network of a given speed: a process group whose collectives take their time on a thread of their own."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["Network", "SlowGroup", "register"]

_C10D: Any = torch._C._distributed_c10d  # its stubs lack names


@dataclass
class Network:
    """``latency`` in seconds and ``bandwidth`` in bytes per second, of each collective. ``connected``: if not, a rank
    gets its own numbers in place of the others', at once and on the thread that asks, so that a step takes what its
    computation takes. ``sent``:
    the collectives that were started, by name, with their bytes."""

    latency: float = 0.0
    bandwidth: float = float("inf")
    connected: bool = True
    sent: list[tuple[str, int]] = field(default_factory=list)

    def seconds(self, nbytes: int) -> float:
        """How long so many bytes take."""
        return self.latency + nbytes / self.bandwidth


class SlowGroup(dist.ProcessGroup):
    """A group whose collectives are those of ``inner``, in the order in which they were started, each after a pause."""

    def __init__(self, inner: Any, network: Network) -> None:
        super().__init__(inner.rank(), inner.size())  # type: ignore[call-arg]  # the stubs know one of two
        self._inner, self._network = inner, network
        self._work: queue.Queue[Callable[[], None]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def getBackendName(self) -> str:  # torch's name
        """As `register` names it."""
        return "slow"

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]  # as C++ calls it
        """Sum or the like, in place."""
        options = opts or dist.AllreduceOptions()
        return self._start("all_reduce", tensors, tensors, [(self._inner.allreduce, tensors, options)], lambda: None)

    def allreduce_coalesced(self, tensors: Any, opts: Any = None) -> Any:
        """Each of several, in place."""
        options: Any = dist.AllreduceOptions()
        options.reduceOp = opts.reduceOp if opts is not None else dist.ReduceOp.SUM
        calls = [(self._inner.allreduce, [t], options) for t in tensors]
        return self._start("all_reduce", tensors, tensors, calls, lambda: None)

    def broadcast(self, tensors: Any, opts: Any = None) -> Any:  # type: ignore[override]  # as C++ calls it
        """From one rank to all."""
        options = opts or dist.BroadcastOptions()
        return self._start("broadcast", tensors, tensors, [(self._inner.broadcast, tensors, options)], lambda: None)

    def allgather_into_tensor_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """Parts of all ranks, of each of several."""
        pairs, options = list(zip(outputs, given, strict=True)), opts or _C10D.AllgatherOptions()

        def copy() -> None:
            for whole, part in pairs:
                for place in whole.view(self.size(), -1):
                    place.copy_(part.view(-1))

        calls = [(self._inner._allgather_base, whole, part, options) for whole, part in pairs]
        return self._start("all_gather", outputs, outputs, calls, copy)

    def reduce_scatter_tensor_coalesced(self, outputs: Any, given: Any, opts: Any = None) -> Any:
        """A part of the sum, of each of several."""
        pairs, options = list(zip(outputs, given, strict=True)), opts or dist.ReduceScatterOptions()

        def copy() -> None:
            for part, whole in pairs:
                part.view(-1).copy_(whole.view(self.size(), -1)[0])

        calls = [(self._inner._reduce_scatter_base, part, whole, options) for part, whole in pairs]
        return self._start("reduce_scatter", given, outputs, calls, copy)

    def barrier(self, opts: Any = None) -> Any:
        """Without a pause."""
        return self._inner.barrier(opts or dist.BarrierOptions())

    def _start(
        self,
        name: str,
        moved: Sequence[torch.Tensor],
        results: Sequence[torch.Tensor],
        calls: Sequence[tuple[Any, ...]],
        copy: Callable[[], None],
    ) -> Any:
        """All ``calls`` after one pause, or ``copy`` where the ranks are not connected."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        nbytes, given = sum(t.nbytes for t in moved), list(results)
        self._network.sent.append((name, nbytes))

        def run() -> None:
            try:
                time.sleep(self._network.seconds(nbytes))
                for call, *arguments in calls:
                    call(*arguments).wait()
            except Exception as error:  # noqa: BLE001  # whoever waits gets it
                future.set_exception(error)
                return
            future.set_result(given)

        if self._network.connected:
            self._work.put(run)
        else:
            with torch.no_grad():
                copy()
            future.set_result(given)
        return _C10D._create_work_from_future(future)

    def _run(self) -> None:
        with torch.no_grad():  # a thread begins with gradients, and parameters are among what is sent
            while True:
                self._work.get()()


def register(network: Network) -> None:
    """Make it the backend ``"slow"`` of ``dist.init_process_group``."""

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> SlowGroup:
        gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo beneath", store), rank, size, timeout)
        return SlowGroup(gloo, network)

    dist.Backend.register_backend("slow", make, devices=["cpu"])
