"""The text of emitted code while it is written."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .contract import Dim
from .dims import render

__all__ = ["Source", "offset_text", "tuple_text"]


@dataclass
class Source:
    """Lines of Python being written, constants they refer to, and lists of version counters by the names in them.
    ``placed``: the name of the list of arguments, where it tells the addresses of all of them. ``counts_writes``:
    compiled code moves no version counters, so that writes of its are counted beside it."""

    lines: list[str] = field(default_factory=list)
    constants: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    placed: str = ""
    counts_writes: bool = False

    def add(self, text: str, indent: int = 1) -> None:
        """Append one line."""
        self.lines.append("    " * indent + text)

    def constant(self, value: Any) -> str:
        """Name of a constant with this value."""
        for name, known in self.constants.items():
            if type(known) is type(value) and known == value:
                return name
        name = f"_k{len(self.constants)}"
        self.constants[name] = value
        return name

    def own(self, name: str, value: Any) -> str:
        """Name of a constant that no other place shares, since it remembers something."""
        name = f"{name}{len(self.constants)}"
        self.constants[name] = value
        return name

    @property
    def text(self) -> str:
        """The source so far."""
        return "\n".join(self.lines) + "\n"


def tuple_text(values: Sequence[str]) -> str:
    """A tuple of these expressions."""
    return f"({', '.join(values)}{',' if len(values) == 1 else ''})"


def offset_text(base: str, delta: Dim) -> str:
    """The storage offset ``delta`` elements behind the one of ``base``."""
    return f"{base}.storage_offset()" if delta == 0 else f"{base}.storage_offset() + {render(delta)}"
