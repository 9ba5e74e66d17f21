"""What the manager knows about one callable."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from dataclasses import dataclass, field
from typing import Any, Literal

from .expected import ExpectedCall
from .liveness import Slot
from .placement import Key, StaticInputs
from .reasons import SkipReason
from .tree import Node

Role = Literal["inference", "forward", "backward"]


@dataclass(slots=True, eq=False, repr=False)
class Function:
    """One callable under one manager.

    Attributes:
        name: for reports and messages.
        call: runs the callable on a list of inputs, which it may empty.
        static: inputs that keep their address.
        mutated: indices of inputs known to be written; warm-up adds what it sees, with the user's line.
        role: "forward" if a backward is to follow.
        partner: of a backward, its forward.
        passed: keys of calls that may be recorded.
        warm: layouts that have run once.
        unrecordable: layouts that can't be recorded, with the reasons.
        recorded: recordings made per layout, moved static inputs aside.
        kept: results that were still in use when a later step needed their memory.
        wasted_variants: recordings for static inputs that moved on without having been replayed.
        nodes: its recordings.
        expected: the call that replayed last after each recording.
        unlike: how often a call was not as expected.
    """

    name: str
    call: Callable[[list[Any]], Any]
    static: StaticInputs
    mutated: dict[int, str | None]
    role: Role = "inference"
    partner: Function | None = None
    passed: set[Key] = field(default_factory=set)
    warm: set[tuple[object, ...]] = field(default_factory=set)
    unrecordable: dict[tuple[object, ...], tuple[SkipReason, ...]] = field(default_factory=dict)
    recorded: Counter[tuple[object, ...]] = field(default_factory=Counter)
    kept: set[int] = field(default_factory=set)
    wasted_variants: int = 0
    nodes: list[Node] = field(default_factory=list)
    expected: dict[Node | None, ExpectedCall] = field(default_factory=dict)
    unlike: int = 0
    skips: dict[SkipReason, None] = field(default_factory=dict)
    replays: int = 0
    warm_ups: int = 0
    blocked: int = 0
    uncaptured: int = 0

    def __repr__(self) -> str:
        return f"Function({self.name})"

    def keep(self, leaves: tuple[int, ...]) -> None:
        """From now on hand these results out as copies."""
        self.kept.update(leaves)
        for node in self.nodes:
            node.kept_bases = None
            for slot in node.slots:
                slot.copied = slot.copied or not self.kept.isdisjoint(slot.leaves)

    def forget(self, dropped: Container[Node | None]) -> None:
        """These recordings are gone."""
        self.nodes = [node for node in self.nodes if node not in dropped]
        kept = {last: call for last, call in self.expected.items() if not (last in dropped or call.node in dropped)}
        self.expected = kept

    def wants_copy(self, slot: Slot) -> bool:
        """Whether results like the slot's were kept before."""
        return not self.kept.isdisjoint(slot.leaves)
