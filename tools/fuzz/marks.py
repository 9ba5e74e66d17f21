"""A sink of a recorder that keeps which passes changed something."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

__all__ = ["Marks"]


@dataclass
class Marks:
    """``names`` of passes, each as often as it changed something."""

    names: list[str] = field(default_factory=list)
    kinds: frozenset[str] = frozenset({"passes"})

    def text(self, name: str, kind: str, text: Callable[[], str]) -> None:
        """Keep the name."""
        self.names.append(name)

    def event(self, name: str, fields: Mapping[str, object]) -> None:
        """Nothing of interest."""
