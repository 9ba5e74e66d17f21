"""The second stage: a forward and a backward, and the plan of what stands around them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from aotkit_functionalize import GraphMetadata
from aotkit_partition import PartitionReport
from aotkit_runtime_wrappers import WrapperPlan

from ..driver.context import readable
from ..options import Options
from .call import Call
from .costs import GraphCost, Memory, memory_of
from .files import write_stage
from .graphs import graph_cost, graph_sections, read_graph
from .lowered import Lowered, lower_one
from .running import in_stage

__all__ = ["Partitioned"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Partitioned:
    """A split call.

    Attributes:
        call: as of :class:`.Captured`.
        options: as of :class:`.Captured`.
        plan: how the arguments become the graphs' inputs, and the graphs' results those of the function.
        metadata: the graph's contract.
        forward: an FX graph.
        backward: an FX graph; an inference has none.
        report: what is saved and recomputed, with reasons, and memory over a step.
        module: as of :class:`.Captured`.
    """

    call: Call
    options: Options
    plan: WrapperPlan
    metadata: GraphMetadata
    forward: torch.fx.GraphModule
    backward: torch.fx.GraphModule | None = None
    report: PartitionReport | None = None
    module: nn.Module | None = None

    @property
    def kind(self) -> Literal["training", "inference"]:
        """Whether there is a backward."""
        return "inference" if self.backward is None else "training"

    @property
    def graphs(self) -> dict[str, torch.fx.GraphModule]:
        """The graphs by name: ``inference``, or ``forward`` and ``backward``."""
        if self.backward is None:
            return {"inference": self.forward}
        return {"forward": self.forward, "backward": self.backward}

    def cost(self) -> dict[str, GraphCost]:
        """Of each graph, by name. What the backward recomputes is counted in it."""
        return {name: graph_cost(graph) for name, graph in self.graphs.items()}

    def memory(self) -> Memory:
        """Of arguments, results, what is saved, and the peak of a step."""
        (output,) = self.forward.graph.find_nodes(op="output")
        results = [node.meta.get("val") for node in output.args[0] if isinstance(node, torch.fx.Node)]
        if self.report is None:
            return memory_of(self.call.arguments, results)
        results = results[: self.metadata.num_forward_outputs]
        return memory_of(self.call.arguments, results, self.report.activation_bytes, self.report.peak_bytes)

    def lower(self) -> Lowered:
        """Fused loops: the next stage. Raises :class:`CompileError` for a graph that can't be lowered as a whole."""
        with in_stage("lower"):
            graphs = {name: lower_one(graph, self.options) for name, graph in self.graphs.items()}
        return Lowered(self, graphs)

    def to_sections(self) -> tuple[dict[str, Any], dict[str, bytes]]:
        """What a file of this stage, or of the next one, holds of it."""
        sections = {"plan": self.plan.to_json().encode(), "metadata": self.metadata.to_json().encode()}
        constants = {}
        for name, graph in self.graphs.items():
            found, constants[name] = graph_sections(name, graph)
            sections.update(found)
        if self.report is not None:
            sections["report"] = self.report.to_json().encode()
        return {"call": self.call.to_json(), "constants": constants}, sections

    def save(self, path: str | os.PathLike[str], *, signing_key: bytes | str | None = None) -> None:
        """Write the stage to a file. Raises :class:`PackageError` for a graph that has no text."""
        content, sections = self.to_sections()
        write_stage(path, "partitioned", content, sections, self.options, self.call.device, signing_key)

    @staticmethod
    def read(manifest: Mapping[str, Any], sections: Mapping[str, bytes], options: Options) -> Partitioned:
        """What :meth:`save` wrote."""
        graphs = {name: read_graph(name, sections, found) for name, found in manifest["constants"].items()}
        return Partitioned(
            Call.from_json(manifest["call"]),
            options,
            WrapperPlan.from_json(sections["plan"].decode()),
            GraphMetadata.from_json(sections["metadata"].decode()),
            graphs["inference"] if "inference" in graphs else graphs["forward"],
            graphs.get("backward"),
            PartitionReport.from_json(sections["report"].decode()) if "report" in sections else None,
        )

    def __repr__(self) -> str:
        return f"<stage partitioned for {self.kind}: {', '.join(self.graphs)}>"

    def __str__(self) -> str:
        lines = [f"partitioned for {self.kind}", str(self.call)]
        lines += [f"  {name}: {cost}" for name, cost in self.cost().items()]
        lines.append(f"  memory: {self.memory()}")
        lines += [] if self.report is None else ["", str(self.report)]
        lines += [f"\n{name}:\n{readable(graph)}" for name, graph in self.graphs.items()]
        return "\n".join(lines)
