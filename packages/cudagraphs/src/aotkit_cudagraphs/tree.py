"""The tree as data: recordings, what they read, what they leave, and how they follow each other."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import Any

import torch

from .liveness import Slot
from .placement import Key, Place
from .pool import Pool


@dataclass(frozen=True, slots=True)
class NodeInput:
    """One input of a recording.

    Attributes:
        place: see `Place`.
        tensor: what the recorded work reads, where that is fixed: the buffer of a copied input; None otherwise.
        dims: expanded dimensions of a copied input.
        address: of a static input.
    """

    place: Place
    tensor: torch.Tensor | None = None
    dims: tuple[int, ...] = ()
    address: int = 0


@enum.unique
class Source(enum.Enum):
    """Where a result's memory comes from."""

    VALUE = "not a tensor"
    NEW = "made by this recording, in a slot of its own"
    PATH = "memory of an earlier recording of the path"
    INPUT = "memory of a static or copied input"
    OUTSIDE = "memory that the callable holds"
    EMPTY = "no memory at all"


@dataclass(frozen=True, slots=True)
class NodeOutput:
    """One result (a leaf of the returned structure).

    Attributes:
        source: see `Source`.
        value: VALUE: itself. OUTSIDE, EMPTY: the tensor. PATH: a `PathTensor`. Others: the tensor's `Layout`.
        slot: NEW and PATH: whose memory it is.
        index: INPUT: which input it is a view of.
        distance: INPUT: bytes from the input's first element to the result's.
        whole: INPUT: all of the input was returned, as it lies.
    """

    source: Source
    value: Any
    slot: Slot | None = None
    index: int = -1
    distance: int = 0
    whole: bool = False


@dataclass(slots=True, eq=False, repr=False)
class Node:
    """A recording in its place in the tree.

    Attributes:
        function: the recorded callable's record.
        key: which inputs it is for (`Placement.key`).
        parent: the recording that ran before it; None for the first of a step.
        inputs: how to call it.
        outputs: what to return.
        structure: how that is put together: `list` or `tuple` of the results, or a pytree.
        slots: memory of its new results.
        survivors: slots of the path that were in use, beside as its inputs, while it was recorded. It may only run
            while no others are: it was free to use their memory.
        state: the pool's allocation state at its end.
        graph: the device's recording.
        pool: its memory.
        added_bytes: how much the pool grew for it.
        label: readable inputs.
        copies: what is copied into which buffer before a replay: index, buffer, expanded dimensions.
        addresses: of static inputs, in order.
        handed: the slots that results of a replay are in.
        kept_bases: per result the tensor whose alias it is, or None where that takes more (see `bases`).
    """

    function: Any
    key: Key
    parent: Node | None
    inputs: tuple[NodeInput, ...]
    outputs: tuple[NodeOutput, ...]
    structure: Any
    slots: tuple[Slot, ...]
    survivors: frozenset[Slot]
    state: Any
    graph: Any
    pool: Pool
    added_bytes: int = 0
    label: str = ""
    replays: int = 0
    last_use: int = 0
    children: dict[tuple[Any, Key], list[Node]] = field(default_factory=dict)
    copies: tuple[tuple[int, torch.Tensor, tuple[int, ...]], ...] = ()
    addresses: tuple[int, ...] = ()
    handed: dict[Slot, None] = field(default_factory=dict)
    kept_bases: list[torch.Tensor | None] | None = None

    def __post_init__(self) -> None:
        indexed = list(enumerate(self.inputs))
        self.copies = tuple(
            (i, x.tensor, x.dims) for i, x in indexed if x.place is Place.COPIED and x.tensor is not None
        )
        self.addresses = tuple(x.address for x in self.inputs if x.place is Place.STATIC)
        self.handed = dict.fromkeys(x.slot for x in self.outputs if x.slot is not None)

    def __repr__(self) -> str:
        return f"Node({' > '.join(node.function.name for node in self.path())} {self.label})"

    def is_in_place(self, addresses: tuple[int, ...]) -> bool:
        """Whether static inputs at these addresses are where they were when it was recorded."""
        return addresses == self.addresses

    def bases(self) -> list[torch.Tensor | None]:
        """Per result the tensor in a slot whose alias is handed out. To be asked for anew (`kept_bases`) when a slot
        gets another storage, or its results become copies."""
        if self.kept_bases is None:
            news = [x.slot if x.source is Source.NEW else None for x in self.outputs]
            self.kept_bases = [
                None if slot is None or slot.copied else slot.bases[leaf] for leaf, slot in enumerate(news)
            ]
        return self.kept_bases

    def path(self) -> list[Node]:
        """The recordings from the first of the step to this one."""
        before = self.parent.path() if self.parent is not None else []
        return [*before, self]

    def subtree(self) -> list[Node]:
        """It and all that follow it."""
        return [self, *(node for group in self.children.values() for child in group for node in child.subtree())]
