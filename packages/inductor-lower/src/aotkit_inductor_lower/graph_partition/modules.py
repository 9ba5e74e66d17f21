"""What stands in the outer graph for what was compiled: modules, bound only where no plan can hold the graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch.fx import GraphModule

from ..launch_plan import CompiledProgram
from ..launch_plan.layout import Layout
from ..launch_plan.parts import PartitionedProgram
from ..report import LoweringReport

__all__ = ["BodyModule", "Boxed", "CompiledOne", "CompiledParts", "PartModule"]

Boxed = Callable[[list[Any]], Sequence[Any]]


class CompiledOne(Protocol):
    """What compiling one part gives; without a program it has no text."""

    @property
    def program(self) -> CompiledProgram | PartitionedProgram | None:
        """The program, as data."""

    @property
    def constants(self) -> Mapping[str, torch.Tensor]:
        """The tensors of the program."""

    @property
    def report(self) -> LoweringReport:
        """Kernels, ATen calls and why."""


@dataclass(frozen=True, slots=True)
class CompiledParts:
    """A graph compiled in parts: as data, which :func:`.bind_parts` makes callable, or ``live`` for a ``reason``.

    ``constants``: the tensors of ``program`` by name. ``report``: those of all parts together; calls that stayed count
    as ATen calls, with their reasons.
    """

    program: PartitionedProgram | None
    constants: Mapping[str, torch.Tensor]
    report: LoweringReport
    live: Boxed | None = None
    reason: str = ""


class PartModule(torch.nn.Module):
    """A compiled part. Inputs that kernels did not make are checked for their strides."""

    def __init__(self, compiled: CompiledOne, layouts: Mapping[int, Layout]) -> None:
        super().__init__()
        self.compiled = compiled
        self.layouts = tuple(layouts.items())
        self.call: Boxed | None = None

    def forward(self, *args: Any) -> Any:
        box = list(args)
        for position, layout in self.layouts:
            box[position] = layout.conform(box[position])
        assert self.call is not None
        return self.call(box)


class BodyModule(torch.nn.Module):
    """A compiled branch or loop body; runs as it was recorded on tensors of another layout than it was compiled for."""

    def __init__(self, compiled: CompiledOne, layouts: Mapping[int, Layout], recorded: GraphModule) -> None:
        super().__init__()
        self.compiled = compiled
        self.layouts = tuple(layouts.items())
        self.call: Boxed | None = None
        self._recorded = [recorded]  # in a list: not a submodule, the outer graph holds it already
        self._returns_one = not isinstance(_returned(recorded), tuple | list)

    @property
    def recorded(self) -> GraphModule:
        """The graph that was compiled."""
        return self._recorded[0]

    def forward(self, *args: Any) -> Any:
        if not all(layout.fits(args[position]) for position, layout in self.layouts):
            return self.recorded(*args)
        assert self.call is not None
        results = self.call(list(args))
        return results[0] if self._returns_one else tuple(results)


def _returned(gm: GraphModule) -> object:
    output = next(node for node in gm.graph.nodes if node.op == "output")
    return output.args[0]
