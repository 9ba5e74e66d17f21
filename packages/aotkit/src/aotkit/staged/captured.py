"""The first stage: an FX graph of one call, forward and backward in one if anything requires grad."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn

from aotkit_functionalize import GraphMetadata
from aotkit_partition import partition
from aotkit_partition.chunk_losses import chunk_losses
from aotkit_runtime_wrappers import InputPlan

from ..driver.compile import inference_plan, training_plan
from ..driver.context import Captured as CapturedGraph
from ..driver.context import CompileContext, readable
from ..driver.stages import own_stages, partition_options, prepared_joint, split_of
from ..options import Options
from ..recorder import Recorder
from .call import Call
from .costs import GraphCost, Memory, memory_of
from .files import write_stage
from .graphs import graph_cost, graph_sections, read_graph
from .partitioned import Partitioned
from .running import in_stage

__all__ = ["Captured"]


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Captured:
    """A captured call.

    Attributes:
        call: what it was captured for.
        options: of the compile.
        graph: functional; takes the distinct tensors of the call, and tangents, and returns results and gradients.
        metadata: the graph's contract. inputs: how the arguments become the graph's inputs.
        module: the module that was captured, in the process where it was.
    """

    call: Call
    options: Options
    graph: torch.fx.GraphModule
    metadata: GraphMetadata
    inputs: InputPlan
    module: nn.Module | None = None

    @property
    def kind(self) -> Literal["training", "inference"]:
        """Whether the graph has a backward."""
        return "training" if self.metadata.is_training else "inference"

    def cost(self) -> dict[str, GraphCost]:
        """Of the graph, by its name: ``joint`` or ``inference``."""
        return {"joint" if self.kind == "training" else "inference": graph_cost(self.graph)}

    def memory(self) -> Memory:
        """Of arguments and results."""
        return memory_of(self.call.arguments, self._results())

    def partition(
        self,
        strategy: Literal["min-cut", "default", "min-peak"] | None = None,
        *,
        memory_budget: float | None = None,
    ) -> Partitioned:
        """Forward and backward: the next stage. For inference there is nothing to split, but a large loss.

        ``strategy`` and ``memory_budget`` replace those of the options. Raises :class:`CompileError` for a graph that
        can't be split.
        """
        changes = {"partitioner": strategy, "memory_budget": memory_budget}
        options = self.options.patch(**{name: value for name, value in changes.items() if value is not None})
        with in_stage("partition"):
            found = CapturedGraph(self.graph, self.metadata, self.inputs, None)
            if self.kind == "inference":
                plan = inference_plan(found)
                graph, _ = chunk_losses(self.graph, options.chunk_loss_bytes)
                return Partitioned(self.call, options, plan, self.metadata, graph, module=self.module)
            chosen = replace(partition_options(self.metadata, options), details="memory")
            parts = partition(prepared_joint(self.graph, options), self.metadata.num_forward_outputs, chosen)
            plan = training_plan(found, split_of(parts), CompileContext(options, Recorder(), own_stages()))
        return Partitioned(
            self.call, options, plan, self.metadata, parts.forward, parts.backward, parts.report, self.module
        )

    def save(self, path: str | os.PathLike[str], *, signing_key: bytes | str | None = None) -> None:
        """Write the stage to a file. Raises :class:`PackageError` for a graph that has no text."""
        sections, constants = graph_sections("graph", self.graph)
        sections["metadata"] = self.metadata.to_json().encode()
        sections["inputs"] = self.inputs.to_json().encode()
        content = {"call": self.call.to_json(), "constants": constants}
        write_stage(path, "captured", content, sections, self.options, self.call.device, signing_key)

    @staticmethod
    def read(manifest: Mapping[str, Any], sections: Mapping[str, bytes], options: Options) -> Captured:
        """What :meth:`save` wrote."""
        return Captured(
            Call.from_json(manifest["call"]),
            options,
            read_graph("graph", sections, manifest["constants"]),
            GraphMetadata.from_json(sections["metadata"].decode()),
            InputPlan.from_json(sections["inputs"].decode()),
        )

    def _results(self) -> list[Any]:
        (output,) = self.graph.graph.find_nodes(op="output")
        values = output.args[0][: self.metadata.num_forward_outputs]
        return [value.meta.get("val") for value in values if isinstance(value, torch.fx.Node)]

    def __repr__(self) -> str:
        return f"<stage captured for {self.kind}: {len(self.call.arguments)} tensors>"

    def __str__(self) -> str:
        costs = "\n".join(f"  {name}: {cost}" for name, cost in self.cost().items())
        return f"captured for {self.kind}\n{self.call}\n{costs}\n  memory: {self.memory()}\n\n{readable(self.graph)}"
