"""Kernels that are written, and their calls."""

from __future__ import annotations

from dataclasses import dataclass

from ..symbolic import Expr, Symbol

__all__ = ["Combo", "KernelText", "Launch", "Region"]


@dataclass(frozen=True, slots=True)
class KernelText:
    """A generated kernel. ``body`` is the function's text without its name, the identity of equal kernels.

    ``memories`` and ``sizes``: what the slots refer to, in order. ``units``: size of the iteration space handed to
    threads; ``work``: its total cost, in about one unit per scalar operation. ``parallel``: units may run at once.
    ``reports``: its status may be an error. ``short``: what runs instead where a size expression is not negative, see
    :func:`.version_loops`.
    """

    body: str
    memories: tuple[str, ...]
    sizes: tuple[Symbol, ...]
    units: Expr
    work: Expr
    parallel: bool
    reports: bool = False
    short: tuple[KernelText, Expr] | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """One kernel call inside a segment: the function and the frame entries it uses. ``short``: the function of
    ``kernel.short``."""

    function: str
    kernel: KernelText
    slots: tuple[int, ...]
    short: str = ""


@dataclass(frozen=True, slots=True)
class Combo:
    """Launches of one function that one call runs, see Note [Combo kernels]; mostly one. ``in_order``: why not
    at once."""

    members: tuple[Launch, ...]
    in_order: str = ""


@dataclass(frozen=True, slots=True)
class Region:
    """Calls that one parallel region runs, see Note [Parallel regions]. ``waits``: whether all threads wait for each
    other before each."""

    calls: tuple[Combo, ...]
    waits: tuple[bool, ...]
