"""What passes decided, as data, and whom a compile tells about its stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

__all__ = ["Decision", "DecisionKind", "Observer", "stage"]

DecisionKind = Literal["inline", "vertical", "horizontal", "mixed-order", "split", "concat"]


@dataclass(frozen=True, slots=True)
class Decision:
    """One decision. ``kind``: ``inline`` (a producer computed again where it is read), ``vertical`` (a producer and its
    reader in one kernel), ``horizontal`` (two kernels that read the same data), ``mixed-order`` (column sums in a
    kernel that walks over rows), ``split`` (a long reduction cut into chunks; not ``fused``) or ``concat`` (a joined
    tensor computed where it is read, not stored). ``first`` and ``second`` are nests' names. ``reason`` says why, in
    both cases."""

    kind: DecisionKind
    first: str
    second: str
    fused: bool
    reason: str

    def __str__(self) -> str:
        verb = "fused" if self.fused else "kept apart"
        return f"{self.kind}: {self.first} and {self.second} {verb}: {self.reason}"


class Observer(Protocol):
    """Told about stages and their products; what it does with them is its own business."""

    def stage(self, name: str) -> AbstractContextManager[object]:
        """Around one stage."""

    def dump(self, name: str, kind: str, text: Callable[[], str]) -> None:
        """A product (``kind`` graphs, ir or kernels); ``text`` makes its text if it is wanted."""


@contextmanager
def stage(observer: Observer | None, name: str) -> Iterator[None]:
    """Tell the observer, if there is one, about a stage."""
    if observer is None:
        yield
        return
    with observer.stage(name):
        yield
