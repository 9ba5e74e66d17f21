"""A kernel and how it is launched, whoever wrote it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .traffic import Argument

__all__ = ["Choice", "Graph", "Launch", "computes"]


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to launch a kernel. ``make``: compiles it, giving (PTX, cubin, name). ``threads`` of an instance."""

    grid: tuple[int, ...]
    constants: Mapping[str, int]
    threads: int
    make: Callable[[], tuple[str, bytes, str]]


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch. ``key``: equal for launches that are alike in all that counts here; ``text``: the kernel's function;
    ``define(tl)``: it as a Python function; ``choices``: those that are compared on a device. ``line``: where the
    function begins in the text that is compiled."""

    key: str
    name: str
    text: str
    define: Callable[[Any], Callable[..., None]]
    arguments: Mapping[str, Argument | int]
    choices: tuple[Choice, ...]
    line: int = 1


@dataclass(frozen=True, slots=True)
class Graph:
    """A forward or backward: its launches in order, and the calls of ATen."""

    part: str
    launches: tuple[Launch, ...]
    calls: tuple[str, ...]


def computes(target: str) -> bool:
    """Whether a call of ATen ("aten.mm.default") is more than a view or an allocation."""
    import torch

    name = target.split(".")
    if name[0] == "prim":
        return False
    packet = getattr(torch.ops, name[0])
    overload = getattr(getattr(packet, name[1]), name[2])
    return not (overload.is_view or name[1] in ("empty", "empty_strided", "detach", "_unsafe_view", "reshape"))
