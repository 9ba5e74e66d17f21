"""What a compiled graph does when called, as data: allocate, call native segments, call ATen, view, free, return.

Note [The frame]
    All native code of a call reads one array of 64-bit entries, the frame: the address of every buffer that
    kernels touch, then the values of the size symbols. A segment is one native function called with the frame's
    address. An entry is written once per call (inputs, fresh results) or once per frame (arena, constants).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ..ir.arguments import Arg, BufferRef, Origin, SymInput
from ..symbolic import Expr

__all__ = [
    "Allocate",
    "ArenaBuffer",
    "Binary",
    "CallExtern",
    "CallSegment",
    "CompiledProgram",
    "Free",
    "KernelRecord",
    "LaunchPlan",
    "PlanStep",
    "PlannedBuffer",
    "Return",
    "ReuseBuffer",
    "StorageClass",
    "View",
]

#: Where a buffer's memory comes from: the caller, the graph's attributes, the arena, an Allocate step, the ATen call
#: whose result it is, or the buffer that a View (or ReuseBuffer) step makes it of.
StorageClass = Literal["input", "constant", "arena", "allocated", "call result", "view"]


@dataclass(frozen=True, slots=True)
class PlannedBuffer:
    """A buffer as the plan sees it. ``dtype`` is torch's name, ``storage`` where its memory comes from."""

    name: str
    dtype: str
    sizes: tuple[Expr, ...]
    strides: tuple[Expr, ...]
    storage: StorageClass
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class ArenaBuffer:
    """A temporary that lives in the arena from program point ``first`` to ``last``. Every step of the plan but ``Free``
    is one program point, a segment as many as it has kernels: they run one after the other. ``reuses``: the buffer
    whose memory it takes at ``first``, which is that one's last point; both are of one size."""

    buffer: str
    first: int
    last: int
    reuses: str = ""


@dataclass(frozen=True, slots=True)
class Allocate:
    """A new tensor for ``buffer`` with its declared sizes and strides."""

    buffer: str


@dataclass(frozen=True, slots=True)
class CallSegment:
    """One native call: kernels in order. ``launches`` names their kernel records."""

    function: str
    launches: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class CallExtern:
    """``results = target(*args, **kwargs)`` through ATen. With ``out``, that overload writes into the (planned)
    memory of the only result instead."""

    target: str
    args: tuple[Arg, ...]
    kwargs: tuple[tuple[str, Arg], ...]
    results: tuple[str | None, ...]
    out: str | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True)
class View:
    """``result`` is a view of ``base``: its declared sizes and strides, ``offset`` elements (of its dtype) further."""

    result: str
    base: str
    offset: Expr


@dataclass(frozen=True, slots=True)
class ReuseBuffer:
    """``result`` is the tensor ``base``, which a kernel writes over, or has written over, with ``result``'s sizes.
    Nothing but that kernel uses what was in it any more."""

    result: str
    base: str


@dataclass(frozen=True, slots=True)
class Free:
    """The tensors are not used any more."""

    buffers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Return:
    """The graph's results, in order."""

    outputs: tuple[BufferRef | SymInput | None, ...]


PlanStep = Allocate | CallSegment | CallExtern | View | ReuseBuffer | Free | Return


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    """Everything a call does. ``slots``: frame entries in order, buffer names or ``$symbol``. ``symbol_sources`` and
    ``computed_sizes``: as of a :class:`..ir.Program`. ``wide_sizes``: what is looked at before a call with new sizes,
    see Note [Sizes beyond 64 bits]."""

    name: str
    inputs: tuple[str, ...]
    buffers: tuple[PlannedBuffer, ...]
    slots: tuple[str, ...]
    arena: tuple[ArenaBuffer, ...]
    steps: tuple[PlanStep, ...]
    symbol_sources: tuple[tuple[str, int, str, int], ...] = ()
    computed_sizes: tuple[tuple[str, str], ...] = ()
    wide_sizes: tuple[Expr, ...] = ()

    @property
    def size_symbols(self) -> tuple[str, ...]:
        """The names of all SIZE symbols, in the order in which they get their values."""
        return (*(source[0] for source in self.symbol_sources), *(name for name, _ in self.computed_sizes))

    def buffer(self, name: str) -> PlannedBuffer:
        """The declaration of a buffer. Raises ``KeyError`` if there is none."""
        for planned in self.buffers:
            if planned.name == name:
                return planned
        raise KeyError(f"plan {self.name} has no buffer named {name!r}")


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """One launch of a generated kernel: the nest's name, the function that computes it, where it came from. ``combo``:
    the first of the kernels that one native call runs together, if there are several."""

    name: str
    function: str
    segment: str
    origin: Origin = field(default=Origin())
    combo: str = ""


@dataclass(frozen=True, slots=True)
class Binary:
    """What a target made of the kernels. ``target`` names it, in :data:`~..targets.LOADERS`; ``facts`` are plain JSON
    that its ``load`` reads, ``sections`` the code by name. ``digest``: of these, checked before they are loaded."""

    target: str
    facts: Mapping[str, Any]
    sections: tuple[tuple[str, bytes], ...]
    digest: str

    @staticmethod
    def of(target: str, facts: Mapping[str, Any], sections: tuple[tuple[str, bytes], ...]) -> Binary:
        """The binary, with its digest."""
        return Binary(target, facts, sections, _digest(sections))

    @property
    def damaged(self) -> bool:
        """Whether the code is not the one that was made."""
        return _digest(self.sections) != self.digest


def _digest(sections: tuple[tuple[str, bytes], ...]) -> str:
    """SHA-256 of all sections."""
    digest = hashlib.sha256()
    for _, code in sections:
        digest.update(code)
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class CompiledProgram:
    """A graph compiled for one target: plan, records of the kernels' launches in order, and their code.

    ``text``: of the kernels, as they were written; kept only on request.
    """

    plan: LaunchPlan
    kernels: tuple[KernelRecord, ...]
    binary: Binary
    text: str = ""
