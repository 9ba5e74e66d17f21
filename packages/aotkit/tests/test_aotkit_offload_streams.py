"""Saved activations that leave for the host and come back on a stream of their own, over simulated streams.

Memory is given away at its last use and written to again at once, as a plan of memory does: no allocator waits.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from aotkit_cudagraphs.simulated_streams import SimulatedEvent, StreamClocks, StreamOrderError
from aotkit_partition import Partition, PartitionOptions, partition
from aotkit_partition.activation_offload import offload_activations
from aotkit_partition.runtime_estimate import RooflineEstimator
from aotkit_partition.transfers import OFFLOAD, OFFLOADED, RELOAD, RELOADED, Transfers

ROWS, WIDTH, DEPTH = 64, 16, 6
VALUE_BYTES = ROWS * WIDTH * 4


class Device:
    """Two streams, and a log of what was issued on which. ``without``: a wait that is left out."""

    def __init__(self, without: str = "") -> None:
        self.without, self.log = without, list[str]()
        self.clocks = StreamClocks(lambda _: True)
        self.computes, self.transfers = self.clocks.current, self.clocks.new_stream()

    @contextmanager
    def transferring(self) -> Iterator[None]:
        if self.without != "transferring":
            self.clocks.wait(self.transfers, self.clocks.record(self.computes))
        self.clocks.current = self.transfers
        yield
        self.clocks.current = self.computes

    def issued(self) -> SimulatedEvent:
        return self.clocks.record(self.transfers)

    def computation_waits(self, event: SimulatedEvent | None) -> None:
        assert event is not None
        self.clocks.wait(self.computes, event)

    def hold(self, memory: Tensor, by_transfers: bool) -> None:
        """Nothing: what uses memory must be ordered by the graph alone."""

    def issue(self, what: str, reads: list[Any], writes: list[Any]) -> None:
        self.log.append(f"{self.clocks.current.number}:{what}")
        self.clocks.access(reads, writes, what)


class Watch(TorchDispatchMode):
    """Each operator is a piece of work on the current stream."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        self._device = device

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.data_ptr(): t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        made = [t.untyped_storage() for t in tree_leaves(result) if isinstance(t, Tensor)]
        if func._schema.is_mutable:
            self._device.issue(str(func), list(given.values())[1:], [args[0].untyped_storage()])
        elif "empty" not in str(func) and not any(alias.alias_info for alias in func._schema.returns):
            self._device.issue(str(func), list(given.values()), made)
        return result


class Runner(torch.fx.Interpreter):
    """Runs a graph on the simulated device."""

    def __init__(self, module: torch.fx.GraphModule, device: Device) -> None:
        super().__init__(module)
        self._device, transfers = device, Transfers(lambda _: device)
        self._ops: dict[Any, Any] = {
            OFFLOAD: transfers.offload,
            RELOAD: transfers.reload,
            OFFLOADED: transfers.offloaded if device.without != "offloaded" else lambda made, _: made,
            RELOADED: transfers.reloaded if device.without != "reloaded" else lambda made, _: made,
        }

    def run_node(self, n: torch.fx.Node) -> Any:
        with Watch(self._device):
            if n.target not in self._ops:
                return super().run_node(n)
            args, _ = self.fetch_args_kwargs_from_env(n)
            result = self._ops[n.target](*args)
        self._give_away(n)
        return result

    def _give_away(self, n: torch.fx.Node) -> None:
        """Whatever dies here is written to at once."""
        dying = self.user_to_last_uses.get(n, [])
        alive = [v for node, v in self.env.items() if node not in dying and isinstance(v, Tensor)]
        kept = {value.untyped_storage().data_ptr() for value in alive} | {0}
        for node in dying:
            storage = self.env[node].untyped_storage()
            if (
                n.target is OFFLOADED
                and node.op != "placeholder"
                and storage.data_ptr() not in kept | {self.env[n.args[0]].untyped_storage().data_ptr()}
            ):
                self._device.issue("given-away", [], [storage])


def network() -> tuple[Partition, list[Tensor]]:
    inputs = [torch.randn(ROWS, WIDTH), *(torch.randn(WIDTH, WIDTH) for _ in range(DEPTH))]

    def joint(primals: list[Tensor], tangents: list[Tensor]) -> list[Tensor]:
        wanted = [value.detach().requires_grad_() for value in primals]
        value = wanted[0]
        for weight in wanted[1:]:
            value = torch.tanh(value @ weight)
        return [value, *torch.autograd.grad([value], wanted, tangents)]

    graph = make_fx(joint, tracing_mode="fake")(inputs, [torch.ones(ROWS, WIDTH)])
    for number, node in enumerate(graph.graph.find_nodes(op="placeholder")):
        node.target = f"primals_{number + 1}" if number < len(inputs) else "tangents_1"
    return partition(graph, 1, PartitionOptions(strategy="default", chunk_loss_bytes=0)), inputs


def offloaded(parts: Partition, bytes_per_second: float) -> Partition:
    return offload_activations(
        parts, device="cpu", names=names_of(parts), own_stream=True, bytes_per_second=bytes_per_second
    )


def names_of(parts: Partition) -> list[str]:
    """All but the last one, which is the user's output."""
    return [row.name for row in parts.report.saved if not row.is_input and row.name != f"tanh_{DEPTH - 1}"]


def run(parts: Partition, inputs: list[Tensor], device: Device) -> list[Tensor]:
    result, *saved = Runner(parts.forward, device).run(*inputs)
    device.log.append("-")
    return [result, *Runner(parts.backward, device).run(*saved, torch.ones_like(result))]


@pytest.mark.covers("F3.47")
def test_transfers_run_beside_the_computation_and_nothing_races() -> None:
    parts, inputs = network()
    moved = offloaded(parts, VALUE_BYTES / 1e-6)  # a microsecond each
    device = Device()
    found = run(moved, inputs, device)
    want = [*parts.forward(*inputs)]
    want = [want[0], *parts.backward(*want[1:], torch.ones_like(want[0]))]
    for one, other in zip(found, want, strict=True):
        assert torch.equal(one, other)
    forward, backward = (log.split() for log in " ".join(device.log).split(" - "))
    for log in (forward, backward):
        copies = [place for place, what in enumerate(log) if what.startswith("1:")]
        assert len(copies) == DEPTH - 1
        assert all(what.startswith("0:") for place, what in enumerate(log) if place not in copies)
        assert any(later - one > 1 for one, later in itertools.pairwise(copies)), log


@pytest.mark.parametrize("without", ["transferring", "offloaded", "reloaded"])
def test_each_wait_is_needed(without: str) -> None:
    parts, inputs = network()
    with pytest.raises(StreamOrderError):
        run(offloaded(parts, 1e12), inputs, Device(without))


def ops_between(module: torch.fx.GraphModule, first: Any, second: Any) -> list[int]:
    """Of each transfer, how many operators run until it is waited for."""
    nodes = [node for node in module.graph.nodes if node.op == "call_function"]
    own = (OFFLOAD, OFFLOADED, RELOAD, RELOADED)
    found = []
    for node in nodes:
        if node.target is second:
            begin = nodes.index(node.args[0])
            assert nodes[begin].target is first
            found.append(sum(other.target not in own for other in nodes[begin + 1 : nodes.index(node)]))
    return found


def test_the_slower_the_link_the_further_apart_are_start_and_wait() -> None:
    parts, _ = network()
    before: list[int] = []
    for seconds in (0.0, 1e-7, 1e-6, 1.0):
        moved = offloaded(parts, VALUE_BYTES / seconds if seconds else float("inf"))
        out, back = ops_between(moved.forward, OFFLOAD, OFFLOADED), ops_between(moved.backward, RELOAD, RELOADED)
        assert len(out) == len(back) == DEPTH - 1
        if not seconds:
            assert not any([*out, *back])
        assert [*out, *back] >= before
        before = [*out, *back]
    # A transfer that never ends is waited for at the end of the forward; what comes back starts at once.
    body = [node.target for node in moved.forward.graph.nodes if node.op == "call_function"]
    assert body[-(DEPTH - 1) :] == [OFFLOADED] * (DEPTH - 1)
    body = [node.target for node in moved.backward.graph.nodes if node.op == "call_function"]
    assert body[: DEPTH - 1] == [RELOAD] * (DEPTH - 1)


def test_transfers_wait_for_each_other() -> None:
    """Each takes as long as two layers and begins a layer after the one before, which it waits for."""
    parts, _ = network()
    nodes = {node.name: node for node in parts.forward.graph.nodes}
    layer = sum(RooflineEstimator().seconds(nodes[name]) for name in ("mm_1", "tanh_1"))
    moved = offloaded(parts, VALUE_BYTES / (2 * layer))
    distances = ops_between(moved.forward, OFFLOAD, OFFLOADED)
    assert distances[:3] == [4, 6, 6], distances  # the third is waited for at the end


def test_on_the_cpu_both_transfers_are_copies() -> None:
    parts, inputs = network()
    moved = offloaded(parts, 1e9)
    want = list(parts.forward(*inputs))
    got = list(moved.forward(*inputs))
    tangent = torch.ones_like(want[0])
    for one, other in zip(moved.backward(*got[1:], tangent), parts.backward(*want[1:], tangent), strict=True):
        assert torch.equal(one, other)
    assert Partition.from_json(moved.to_json()) == moved
    assert [row.op for row in moved.report.saved].count("offloaded to cpu") == DEPTH - 1
