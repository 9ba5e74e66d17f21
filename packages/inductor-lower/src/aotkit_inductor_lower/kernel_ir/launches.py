"""Kernels that are written, and their calls."""

from __future__ import annotations

from dataclasses import dataclass

from ..symbolic import Expr, Symbol

__all__ = ["Batch", "KernelText", "Launch"]


@dataclass(frozen=True, slots=True)
class KernelText:
    """A generated kernel. ``body`` is the function's text without its name, the identity of equal kernels.

    ``memories`` and ``sizes``: what the slots refer to, in order. ``units``: size of the iteration space handed to
    threads; ``work``: its total cost, in about one unit per scalar operation. ``parallel``: units may run at once.
    ``reports``: its status may be an error. ``few``: what runs instead where a size is no more than a limit, see
    :func:`.plan_for_few`.
    """

    body: str
    memories: tuple[str, ...]
    sizes: tuple[Symbol, ...]
    units: Expr
    work: Expr
    parallel: bool
    reports: bool = False
    few: tuple[KernelText, Expr, int] | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call inside a segment: the function and the frame entries it uses. ``few``: the function of
    ``kernel.few``."""

    function: str
    kernel: KernelText
    slots: tuple[int, ...]
    few: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """Launches of one function that one call runs, see Note [Batches]; mostly one. ``in_order``: why not at once."""

    members: tuple[Launch, ...]
    in_order: str = ""
