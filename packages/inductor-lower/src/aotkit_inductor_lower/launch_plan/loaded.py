"""A program's kernels in this process: what the module ``load`` of a target gives, and what binding needs to know."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from ..symbolic import Symbol
from .records import LaunchPlan

__all__ = ["NO_ALIGNMENT", "Alignment", "Loaded"]


@dataclass(frozen=True, slots=True)
class Alignment:
    """What kernels take to begin at a multiple of ``nbytes``. ``inputs`` are copied if they do not, those that are
    ``written`` back behind the call; ``buffers``: all memory that some kernel takes so."""

    nbytes: int = 1
    inputs: tuple[str, ...] = ()
    written: tuple[str, ...] = ()
    buffers: frozenset[str] = frozenset()


NO_ALIGNMENT = Alignment()


def _no_entries(_env: Mapping[Symbol, int]) -> Mapping[str, int]:
    return {}


@dataclass(frozen=True, slots=True)
class Loaded:
    """``plan``: the plan for this process. ``segments``: per segment a function of the frame's address and ``n``, which
    gives a status; ``context`` are the lines of the emitted function that set ``n``, with ``names`` in scope; ``fail``
    raises what a status stands for. ``entries``: of the sizes of a call, the frame entries that are computed from them.
    ``empty`` allocates on the program's device, ``empty_large`` what may be large. ``guard``: what to enter around a
    call, if anything."""

    plan: LaunchPlan
    segments: Mapping[str, Callable[[int, int], int]]
    context: tuple[str, ...]
    names: Mapping[str, Any]
    fail: Callable[[int, Sequence[str]], None]
    empty: Callable[..., torch.Tensor]
    entries: Callable[[Mapping[Symbol, int]], Mapping[str, int]] = _no_entries
    alignment: Alignment = field(default=NO_ALIGNMENT)
    guard: Callable[[], AbstractContextManager[object] | None] | None = None
    empty_large: Callable[..., torch.Tensor] | None = None
