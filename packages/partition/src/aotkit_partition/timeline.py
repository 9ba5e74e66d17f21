"""Memory of one training step over time: forward, loss, backward, as an interpreter runs the two graphs.

Time is counted in steps: one per node of the forward graph, one for the loss (the tangents come into being), one per
node of the backward graph. A value is there from the step that makes it to the last one that uses it or a view of it;
a step's memory is everything there while it runs, its arguments and its results included. The caller holds the inputs
(they were there before, and count nothing), the forward's outputs and the gradients.

Storages, not tensors, take memory: what shares a storage in the graph's metadata counts once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
import torch.fx

from ._records import Format
from ._torch_compat import symbolic_hint
from .errors import GraphFormatError

__all__ = ["Allocation", "MemoryTimeline", "simulate_modules"]


@dataclass(frozen=True, slots=True)
class Allocation:
    """One piece of memory. ``kind``: output, saved, activation (gone before the backward), gradient, tangent,
    recomputed or temporary (in the backward)."""

    name: str
    bytes: int
    first: int
    last: int
    kind: str


@dataclass(frozen=True)
class MemoryTimeline:
    """What is in memory at each step.

    Attributes:
        steps: the name of each step; the loss is called "loss".
        loss: position of the loss step: forward before, backward after.
        allocations: everything that took memory.
    """

    steps: tuple[str, ...]
    loss: int
    allocations: tuple[Allocation, ...]

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes in use at each step."""
        change = [0] * (len(self.steps) + 1)
        for piece in self.allocations:
            change[piece.first] += piece.bytes
            change[piece.last + 1] -= piece.bytes
        return tuple(accumulate(change[:-1]))

    @property
    def peak_bytes(self) -> int:
        """The most bytes in use at once."""
        return max(self.live_bytes, default=0)

    @property
    def peak_step(self) -> int:
        """The first step at which the peak is reached."""
        return self.live_bytes.index(self.peak_bytes) if self.steps else 0

    def live_at(self, step: int) -> tuple[Allocation, ...]:
        """What is in memory at one step, the largest first."""
        alive = [piece for piece in self.allocations if piece.first <= step <= piece.last]
        return tuple(sorted(alive, key=lambda piece: (-piece.bytes, piece.first, piece.name)))

    def to_json(self) -> str:
        """The timeline as JSON text."""
        return _FORMAT.to_text(self)

    @staticmethod
    def from_json(text: str) -> MemoryTimeline:
        """The timeline that :meth:`to_json` wrote. Raises :class:`GraphFormatError` for another text."""
        return _FORMAT.from_text(text)


_FORMAT = Format(MemoryTimeline, "aotkit memory timeline", 2, error=GraphFormatError)


@dataclass(slots=True)
class Step:
    """One node to run: its key, the keys of its arguments, and the (storage, bytes) pairs of its result.

    ``waits``: for a collective, and its result is what it waited for, though fake values know of no such thing.
    """

    key: Hashable
    name: str
    inputs: Sequence[Hashable]
    storages: Sequence[tuple[Hashable, int]]
    waits: bool = False


@dataclass(slots=True)
class Program:
    """Both graphs as steps; every field in the order of the graphs. Keys of the two sides may coincide."""

    forward_inputs: Sequence[Step]
    forward: Sequence[Step]
    outputs: Sequence[Hashable]
    saved: Sequence[tuple[Hashable, Hashable]]  # key in the forward, key in the backward
    tangents: Sequence[Step]
    backward: Sequence[Step]
    gradients: Sequence[Hashable]


class _Simulation:
    """Pieces of memory as four parallel lists; ``held`` maps a key to the pieces its value lives in."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.bytes: list[int] = []
        self.first: list[int] = []
        self.last: list[int] = []

    def run(self, steps: Iterable[Step], held: dict[Hashable, dict[Hashable, int]], clock: int, tick: int = 1) -> None:
        """Run the steps from time ``clock`` on; ``held`` is read for arguments and gains the results."""
        last = self.last
        for step in steps:
            known: dict[Hashable, int] = {}
            for key in step.inputs:
                pieces = held[key]
                known.update(pieces)
                for piece in pieces.values():
                    last[piece] = clock
            own: dict[Hashable, int] = {}
            if step.waits:
                known.update(zip((storage for storage, _ in step.storages), list(known.values()), strict=False))
            for storage, size in step.storages:
                if storage in known:
                    own[storage] = known[storage]
                elif storage not in own:
                    own[storage] = len(last)
                    self.names.append(step.name)
                    self.bytes.append(size)
                    self.first.append(clock)
                    last.append(clock)
            held[step.key] = own
            clock += tick


def simulate(program: Program) -> MemoryTimeline:
    """The timeline of a program. Takes time proportional to its size."""
    sim, held = _Simulation(), dict[Hashable, dict[Hashable, int]]()
    sim.run(program.forward_inputs, held, 0, tick=0)
    given = len(sim.names)
    sim.run(program.forward, held, 0)
    loss = len(program.forward)
    end = loss + len(program.backward) + 1
    made_forward = len(sim.names)
    outputs = {piece for key in program.outputs for piece in held[key].values()}
    backward_held: dict[Hashable, dict[Hashable, int]] = {}
    saved: set[int] = set()
    for forward_key, backward_key in program.saved:
        backward_held[backward_key] = held[forward_key]
        saved.update(held[forward_key].values())
    for piece in saved:
        sim.last[piece] = loss
    sim.run(program.tangents, backward_held, loss, tick=0)
    tangents = range(made_forward, len(sim.names))
    sim.run(program.backward, backward_held, loss + 1)
    gradients = {piece for key in program.gradients for piece in backward_held[key].values()}
    for piece in outputs | gradients:
        sim.last[piece] = end - 1
    names = (*(step.name for step in program.forward), "loss", *(step.name for step in program.backward))

    def kind(piece: int) -> str:
        if piece in outputs:
            return "output"
        if piece in gradients:
            return "gradient"
        if piece in saved:
            return "saved"
        return "activation" if piece < made_forward else "tangent" if piece in tangents else "temporary"

    rows = zip(sim.names, sim.bytes, sim.first, sim.last, strict=True)
    pieces = (Allocation(*row, kind(piece)) for piece, row in enumerate(rows) if piece >= given and row[1])
    return MemoryTimeline(names, loss, tuple(pieces))


def storages_of(value: Any, symbol_fallback: int = 4096) -> list[tuple[Hashable, int]]:
    """Storages of a fake value and their bytes; a size without example value counts as ``symbol_fallback``."""
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return [(id(value), int(value.numel()) * value.element_size())]
        storage = value.untyped_storage()
        size = storage.nbytes()
        known = size if type(size) is int else symbolic_hint(size)
        return [(storage._cdata, symbol_fallback * value.element_size() if known is None else int(known))]
    if isinstance(value, (tuple, list)):
        return [pair for item in value for pair in storages_of(item, symbol_fallback)]
    return []


def node_storages(node: torch.fx.Node, value: Any, symbol_fallback: int = 4096) -> list[tuple[Hashable, int]]:
    """Storages that a node's value lives in; what the module owns takes no memory, and a copy takes its own."""
    if node.op == "get_attr":
        return []
    found = storages_of(value, symbol_fallback)
    copied = node.op == "call_function" and node.target is torch.ops.aten.clone.default
    return [((node, storage), size) for storage, size in found] if copied else found


def waits_for_collective(node: torch.fx.Node) -> bool:
    """Whether the node gives back its argument, once a collective has written to it."""
    return node.op == "call_function" and str(node.target) == "_c10d_functional.wait_tensor.default"


def simulate_modules(
    forward: torch.fx.GraphModule, backward: torch.fx.GraphModule, num_fwd_outputs: int, device: str | None = None
) -> MemoryTimeline:
    """The timeline of any forward and backward graph in the calling convention of :class:`Partition`.

    Args:
        forward: returns the user's outputs, then saved tensors, then saved sizes; fake values in ``meta['val']``.
        backward: takes the saved sizes, the saved tensors, then the tangents.
        num_fwd_outputs: how many outputs are the user's.
        device: count the memory of devices of this type only.
    """
    first, second = _Graph(forward, device), _Graph(backward, device)
    outputs, saved = first.returned[:num_fwd_outputs], first.returned[num_fwd_outputs:]
    sizes = [node for node in saved if isinstance(_value(node), torch.SymInt)]
    tensors = [node for node in saved if not isinstance(_value(node), torch.SymInt)]
    entering = second.placeholders[: len(saved)]
    pairs = list(zip([*sizes, *tensors], entering, strict=True))
    return simulate(
        Program(
            forward_inputs=first.steps(first.placeholders),
            forward=first.steps(first.body),
            outputs=[node for node in outputs if isinstance(node, torch.fx.Node)],
            saved=[(out, into) for out, into in pairs if isinstance(out, torch.fx.Node)],
            tangents=second.steps(second.placeholders[len(saved) :]),
            backward=second.steps(second.body),
            gradients=[node for node in second.returned if isinstance(node, torch.fx.Node)],
        )
    )


class _Graph:
    """The parts of an FX graph that the simulation looks at."""

    def __init__(self, module: torch.fx.GraphModule, device: str | None) -> None:
        self.device = device
        nodes = list(module.graph.nodes)
        self.placeholders = [node for node in nodes if node.op == "placeholder"]
        self.body = [node for node in nodes if node.op not in ("placeholder", "output")]
        self.returned = list(nodes[-1].args[0])

    def steps(self, nodes: Iterable[torch.fx.Node]) -> list[Step]:
        return [Step(n, n.name, n.all_input_nodes, self._storages(n), waits_for_collective(n)) for n in nodes]

    def _storages(self, node: torch.fx.Node) -> list[tuple[Hashable, int]]:
        value = _value(node)
        elsewhere = self.device is not None and isinstance(value, torch.Tensor) and value.device.type != self.device
        return [(key, 0 if elsewhere else size) for key, size in node_storages(node, value)]


def _value(node: Any) -> Any:
    return node.meta.get("val") if isinstance(node, torch.fx.Node) else None
