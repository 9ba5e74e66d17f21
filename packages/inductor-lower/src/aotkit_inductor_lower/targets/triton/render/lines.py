"""Lines of a kernel's source while it is written: nesting, values by name, equal values once, barriers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ....ir import DType
from .indices import identifier

__all__ = ["Scope", "Value"]


@dataclass(frozen=True, slots=True)
class Value:
    """A name or expression in the source, and the axes along which it varies."""

    text: str
    dims: frozenset[int]


@dataclass(slots=True)
class Scope:
    """``values``: IR names to source names. ``row_block``: the block of the present stage's own axis."""

    lines: list[tuple[int, str, str]] = field(default_factory=list)
    depth: int = 0
    values: dict[str, Value] = field(default_factory=dict)
    row_block: str = "1"
    in_stage: bool = False
    _known: dict[tuple[str, object], Value] = field(default_factory=dict)
    _versions: dict[str, int] = field(default_factory=dict)
    _memory: dict[tuple[str, str, DType], Value] = field(default_factory=dict)
    _dirty: set[str] = field(default_factory=set)
    _read: dict[str, set[tuple[str, str]]] = field(default_factory=dict)  # places, and the values loaded there
    _count: int = 0

    # -- text ----------------------------------------------------------------------------------------------

    def line(self, text: str, tag: str = "") -> None:
        """One line; lines with a tag may be dropped in the end."""
        self.lines.append((self.depth, text, tag))

    def open(self, text: str) -> None:
        """A line that begins a block."""
        self.line(text)
        self.depth += 1

    def finish(self, drop: set[str]) -> list[str]:
        """The lines, indented, without those of certain tags and barriers that guard nothing then."""
        kept = [(depth, text) for depth, text, tag in self.lines if not (tag and tag in drop)]
        return ["    " * depth + text for depth, text in kept] or ["pass"]

    def fresh(self, prefix: str) -> str:
        """A name not used before."""
        self._count += 1
        return f"{prefix}_{self._count}"

    # -- values --------------------------------------------------------------------------------------------

    def define(self, result: str, text: str, dims: frozenset[int], key: object = None, index: bool = False) -> Value:
        """``result`` is the value of ``text``, written down unless an equal one is in scope. ``index``: it is no value
        of the IR but a position."""
        known = self._known.get((text, key))
        if known is None:
            name = identifier(result) if result[:1] == "v" or index else f"v_{identifier(result)}"
            self.line(f"{name} = {text}")
            known = self._known[text, key] = Value(name, dims)
        self.values[result] = known
        return known

    def enter_loop(self, text: str) -> tuple[dict[tuple[str, object], Value], dict[tuple[str, str, DType], Value]]:
        """Open a loop; what is made inside is unknown after :meth:`leave_loop`."""
        saved = dict(self._known), dict(self._memory)
        self.open(text)
        return saved

    def leave_loop(self, saved: tuple[dict[tuple[str, object], Value], dict[tuple[str, str, DType], Value]]) -> None:
        """Close the loop that :meth:`enter_loop` opened."""
        self.depth -= 1
        self._known, memory = saved
        self._memory = {k: v for k, v in memory.items() if self._memory.get(k) == v}

    # -- memory --------------------------------------------------------------------------------------------

    def version(self, buffer: str) -> tuple[str, int]:
        """Changes with each store to the buffer, so that loads before and after are no equal values."""
        return buffer, self._versions.get(buffer, 0)

    def stored(self, buffer: str, place: str, dtype: DType) -> Value | None:
        """The value that the buffer is known to hold at ``place``."""
        return self._memory.get((buffer, place, dtype))

    def remember(self, buffer: str, place: str, value: Value, dtype: DType, certain: bool) -> None:
        """A store happened; ``certain``: it was not masked, so a load at the same place gives ``value``."""
        self.forget(buffer)
        if certain:
            self._memory[buffer, place, dtype] = value
        self._dirty.add(buffer)

    def forget(self, buffer: str) -> None:
        """What the buffer holds is unknown."""
        self._versions[buffer] = self._versions.get(buffer, 0) + 1
        self._memory = {k: v for k, v in self._memory.items() if k[0] != buffer}

    def before_load(self, buffer: str) -> None:
        """A barrier if this program instance has written to the buffer."""
        if buffer in self._dirty:
            self.barrier()

    def was_read(self, buffer: str, place: str, value: Value) -> None:
        """``value`` is what was loaded there."""
        self._read.setdefault(buffer, set()).add((place, value.text))

    def before_store(self, buffer: str, place: str, own: frozenset[str]) -> None:
        """A barrier if other threads may be about to read this place: where anything was loaded from the buffer but the
        values that are each thread's ``own``, of this place."""
        if any(at != place or value not in own for at, value in self._read.get(buffer, ())):
            self.barrier()

    def enter_loop_of(self, reads: set[str], writes: set[str]) -> None:
        """Before a loop over a stage: what it reads and was written, or writes and was read, waits."""
        if reads & self._dirty or writes & self._read.keys():
            self.barrier()

    def barrier(self) -> None:
        """All threads of the program instance have done what is written above."""
        self.line("tl.debug_barrier()")
        self._dirty.clear()
        self._read.clear()
