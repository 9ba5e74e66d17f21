"""A kernel and how it is launched, whoever wrote it; and what is left to ATen.

Note [What calls count]
    Products, attention and convolutions are ATen's calls on one side and kernels of ours on the other, and what ATen
    moves inside can't be looked at. So both count by one rule: each tensor that goes in and each that comes out, once.
    A launch with ``tl.dot`` stands for a call; where several kernels do what one call would (a backward of attention
    is two), they count what comes in once together. What they pass to each other in memory of their own counts too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from .traffic import Argument

__all__ = ["Call", "Choice", "Graph", "Launch", "computes", "distinct_bytes"]


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
    function begins in the text that is compiled. ``known``: arguments that an earlier launch in the place of the same
    call of ATen has read, see Note [What calls count]."""

    key: str
    name: str
    text: str
    define: Callable[[Any], Callable[..., None]]
    arguments: Mapping[str, Argument | int]
    choices: tuple[Choice, ...]
    line: int = 1
    known: frozenset[str] = frozenset()

    @property
    def is_call(self) -> bool:
        """Whether it stands in the place of a call of ATen."""
        return "tl.dot(" in self.text


@dataclass(frozen=True, slots=True)
class Call:
    """A call of ATen: bytes of all that goes in, and of all that comes out."""

    target: str
    read: float
    written: float


def distinct_bytes(sizes: Iterable[int], strides: Iterable[int], itemsize: int) -> int:
    """Bytes of the different elements of a tensor: an expanded one has fewer than it has places."""
    return itemsize * math.prod(n for n, stride in zip(sizes, strides, strict=True) if stride or not n)


@dataclass(frozen=True, slots=True)
class Graph:
    """A forward or backward: its launches in order, and the calls of ATen."""

    part: str
    launches: tuple[Launch, ...]
    calls: tuple[Call, ...]


def computes(target: str) -> bool:
    """Whether a call of ATen ("aten.mm.default") is more than a view or an allocation."""
    import torch

    name = target.split(".")
    if name[0] == "prim":
        return False
    packet = getattr(torch.ops, name[0])
    overload = getattr(getattr(packet, name[1]), name[2])
    return not (overload.is_view or name[1] in ("empty", "empty_strided", "detach", "_unsafe_view", "reshape"))
