"""The third stage: loops, fused and in order, before there is code of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import nn

from aotkit_functionalize import GraphMetadata
from aotkit_inductor_lower import parse_program, print_program
from aotkit_inductor_lower.driver import Scheduled, generate_program, schedule_graph
from aotkit_runtime_wrappers import WrapperPlan, schema_checks

from ..artifact.records import Artifact, CompiledGraph, Graphs, StoredReport
from ..driver.lower import asks_for_history, lower_options
from ..options import Options
from .call import Call
from .compiled import Compiled
from .costs import GraphCost, Memory, kernel_cost
from .files import constant_sections, read_constants, write_stage
from .running import in_stage

__all__ = ["Lowered", "LoweredGraph", "lower_one"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LoweredGraph:
    """One graph as loops.

    Attributes:
        scheduled: the program, its constants, and what became of the graph.
        detaches: as of the compiled graph.
        checked: as of the compiled graph.
    """

    scheduled: Scheduled
    detaches: bool
    checked: tuple[str, ...]

    @property
    def report(self) -> StoredReport:
        """Kernels and ATen calls with reasons, as data and text."""
        report: Any = self.scheduled.report
        return report if isinstance(report, StoredReport) else StoredReport({**report.to_json(), "text": str(report)})

    def __str__(self) -> str:
        return print_program(self.scheduled.program)


def lower_one(graph: torch.fx.GraphModule, options: Options) -> LoweredGraph:
    """Loops of one functional graph."""
    checked = tuple(sorted(map(str, schema_checks.operators_to_check(graph))))
    return LoweredGraph(schedule_graph(graph, lower_options(options)), asks_for_history(graph), checked)


class SplitCall(Protocol):
    """What is asked of the stage before; :class:`.Partitioned` is the only one."""

    @property
    def call(self) -> Call: ...
    @property
    def options(self) -> Options: ...
    @property
    def plan(self) -> WrapperPlan: ...
    @property
    def metadata(self) -> GraphMetadata: ...
    @property
    def forward(self) -> torch.fx.GraphModule: ...
    @property
    def backward(self) -> torch.fx.GraphModule | None: ...
    @property
    def module(self) -> nn.Module | None: ...
    @property
    def kind(self) -> Literal["training", "inference"]: ...
    def cost(self) -> dict[str, GraphCost]: ...
    def memory(self) -> Memory: ...
    def to_sections(self) -> tuple[dict[str, Any], dict[str, bytes]]: ...


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Lowered:
    """A lowered call.

    Attributes:
        partitioned: the stage before, a :class:`.Partitioned`.
        graphs: by name, as there: ``inference``, or ``forward`` and ``backward``.
    """

    partitioned: SplitCall
    graphs: Mapping[str, LoweredGraph]

    @property
    def kind(self) -> Literal["training", "inference"]:
        """Whether there is a backward."""
        return self.partitioned.kind

    def cost(self) -> dict[str, GraphCost]:
        """Of each graph, with its kernels."""
        before = self.partitioned.cost()
        return {name: kernel_cost(before[name], dict(graph.report.data)) for name, graph in self.graphs.items()}

    def memory(self) -> Memory:
        """As of the stage before."""
        return self.partitioned.memory()

    def compile(self) -> Compiled:
        """Code for the options' processor, or for the device of the call: the last stage, which can be called."""
        before = self.partitioned
        with in_stage("compile"):
            made = {name: _generate(graph, before.options, name != "inference") for name, graph in self.graphs.items()}
        forward, backward = made.get("inference") or made["forward"], made.get("backward")
        texts = None if before.backward is None else Graphs(before.forward, before.backward)
        artifact = Artifact(before.plan, before.metadata, forward, backward, graphs=texts)
        return Compiled.of(before.call, before.options, artifact, self.cost(), self.memory(), before.module)

    def save(self, path: str | os.PathLike[str], *, signing_key: bytes | str | None = None) -> None:
        """Write the stage to a file. Raises :class:`PackageError` for a graph that has no text."""
        content, sections = self.partitioned.to_sections()
        rows = {}
        for name, graph in self.graphs.items():
            found, constants = constant_sections(f"loops.{name}", graph.scheduled.constants)
            sections.update({**found, f"loops.{name}": str(graph).encode()})
            rows[name] = {
                "constants": constants,
                "detaches": graph.detaches,
                "checked": list(graph.checked),
                "report": dict(graph.report.data),
                "device": graph.scheduled.device,
                "fuel": graph.scheduled.fuel,
            }
        before = self.partitioned
        write_stage(
            path, "lowered", {**content, "loops": rows}, sections, before.options, before.call.device, signing_key
        )

    @staticmethod
    def read(partitioned: SplitCall, manifest: Mapping[str, Any], sections: Mapping[str, bytes]) -> Lowered:
        """What :meth:`save` wrote."""
        graphs = {}
        for name, row in manifest["loops"].items():
            text, report = sections[f"loops.{name}"].decode(), StoredReport(row["report"])
            constants = read_constants(f"loops.{name}", sections, row["constants"])
            loops = Scheduled(parse_program(text), constants, report, (), row["device"], row["fuel"])  # type: ignore[arg-type]
            graphs[name] = LoweredGraph(loops, row["detaches"], tuple(row["checked"]))
        return Lowered(partitioned, graphs)

    def __repr__(self) -> str:
        return f"<stage lowered for {self.kind}: {', '.join(self.graphs)}>"

    def __str__(self) -> str:
        lines = [f"lowered for {self.kind}", str(self.partitioned.call)]
        lines += [f"  {name}: {cost}" for name, cost in self.cost().items()]
        lines.append(f"  memory: {self.memory()}")
        lines += [f"\n{name}: {graph.report}\n\n{graph}" for name, graph in self.graphs.items()]
        return "\n".join(lines)


def _generate(graph: LoweredGraph, options: Options, training: bool) -> CompiledGraph:
    program = generate_program(graph.scheduled, lower_options(options, training))
    return CompiledGraph(program, dict(graph.scheduled.constants), graph.detaches, graph.checked, graph.report)
