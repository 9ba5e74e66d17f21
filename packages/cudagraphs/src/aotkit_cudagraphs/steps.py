"""When one step ends and the next begins."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .functions import Function
from .liveness import Slot
from .tree import Node


@dataclass(slots=True)
class Path:
    """The recordings that ran in this step, in order, and their results' memory.

    Note [Steps]
    A step is one run through the program: a forward and its backward, a pass over the layers, a generated token. Each
    step starts at the top of the tree and goes down a path of recordings. Where steps begin only decides how
    often recordings match; results are safe wherever it is. A step begins where the caller says (`mark_step`), or,
    if the caller never does, where a callable comes around again that already ran, unless the backward of a forward of
    this step is still to come.

    Attributes:
        nodes: in order.
        members: memory of their results.
        ran: callables that ran, recorded or not.
        forwards: forwards without their backward so far, and whether that can still come.
        settling: something ran uncaptured that will be recorded later, so that recordings made now, after it, would
            not be used again.
    """

    nodes: list[Node] = field(default_factory=list)
    members: set[Slot] = field(default_factory=set)
    ran: set[Function] = field(default_factory=set)
    forwards: list[tuple[Function, Callable[[], bool]]] = field(default_factory=list)
    settling: bool = False

    @property
    def last(self) -> Node | None:
        """The recording that ran last."""
        return self.nodes[-1] if self.nodes else None

    def append(self, node: Node) -> None:
        """A recording ran."""
        self.nodes.append(node)
        self.members.update(node.slots)

    def slots(self) -> dict[int, Slot]:
        """Memory of the path's results, by the identity (`_cdata`) of the storage."""
        return {slot.storage._cdata: slot for node in self.nodes for slot in node.slots}

    def ran_once(self, function: Function, can_go_backward: Callable[[], bool]) -> None:
        """A callable ran; `can_go_backward` tells whether a result of it is still in use."""
        self.ran.add(function)
        if function.role == "forward":
            self.forwards.append((function, can_go_backward))
        elif function.role == "backward":
            for position in range(len(self.forwards) - 1, -1, -1):
                if self.forwards[position][0] is function.partner:
                    del self.forwards[position]
                    break

    def awaits_backward(self) -> bool:
        """Whether a forward's backward has not run and still can."""
        self.forwards = [entry for entry in self.forwards if entry[1]()]
        return bool(self.forwards)


def any_live(references: list[Any]) -> Callable[[], bool]:
    """Whether one of these storages (held weakly) still exists."""
    return lambda: not all(reference.expired() for reference in references)


def any_slot_live(node: Node) -> Callable[[], bool]:
    """Whether a result of this recording is in use."""
    return lambda: any(slot.is_live() for slot in node.slots)
