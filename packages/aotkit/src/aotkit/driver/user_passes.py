"""Passes of the user's over the graphs of a compile, and a partitioner of the user's."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch.fx import GraphModule
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from aotkit_cache import Uncacheable

from ..errors import CompileError
from .bugs import of_the_user

if TYPE_CHECKING:
    from aotkit_functionalize import GraphMetadata

    from ..artifact.records import CompiledGraph
    from .context import CompileContext, Kind, Split, Stages

__all__ = ["GraphPasses"]

Pass = Callable[[GraphModule], GraphModule | None]


@dataclass(frozen=True, slots=True)
class GraphPasses:
    """What to do with the graphs of a compile, each once; a pass changes the graph it gets, or returns another one.

    ``frontend``: Dynamo's graph, whose calls are torch's functions. ``joint``: the functional ATen graph of a
    forward, with its backward if it has one, before it is partitioned. ``lowered``: each graph that is about to be
    lowered: inference, forward, backward. ``partition``: takes the place of our partitioner, with the signature of
    torch's (``partition_fn(joint, inputs, num_fwd_outputs=...)``).

    A pass with an attribute ``uuid`` (a string or a number that changes with its code) allows the compiled graph to be
    kept between processes. Inputs and outputs of a graph have to stay: :class:`CompileError` otherwise. Second
    derivatives are refused.
    """

    frontend: Pass | None = None
    joint: Pass | None = None
    lowered: Pass | None = None
    partition: Callable[..., tuple[GraphModule, GraphModule]] | None = None

    def key(self) -> dict[str, Any]:
        """What names these passes in a key. Raises :class:`Uncacheable` for one without a ``uuid``."""
        found = {}
        for field in fields(self):
            given = getattr(self, field.name)
            if given is not None:
                found[field.name] = getattr(given, "uuid", None)
                if not isinstance(found[field.name], str | int):
                    raise Uncacheable(
                        f"the pass {field.name!r} has no uuid; give it an attribute 'uuid' that changes with its code"
                    )
        return found

    def prepare(self, gm: GraphModule) -> GraphModule:
        """Dynamo's graph after the first pass; a pass gets a copy."""
        if self.frontend is None:
            return gm
        own = GraphModule(gm, copy.deepcopy(gm.graph))
        own.meta = dict(gm.meta)
        return _run(self.frontend, "frontend", own)

    def stages(self, stages: Stages) -> Stages:
        """These stages with the passes in their places."""
        return replace(
            stages,
            split=self._split(stages),
            lower=self._lower(stages),
        )

    def _split(self, stages: Stages) -> Callable[[GraphModule, GraphMetadata, CompileContext], Split]:
        split = stages.split
        if self.partition is not None:
            from .stages import split_by

            split = split_by(self.partition)

        def run(joint: GraphModule, metadata: GraphMetadata, ctx: CompileContext) -> Split:
            return split(joint if self.joint is None else _run(self.joint, "joint", joint), metadata, ctx)

        return run

    def _lower(self, stages: Stages) -> Callable[[GraphModule, Kind, str, CompileContext], CompiledGraph]:
        def run(graph: GraphModule, kind: Kind, name: str, ctx: CompileContext) -> CompiledGraph:
            joint = self.joint if kind == "inference" else None
            for what, given in (("joint", joint), ("lowered", self.lowered)):
                graph = graph if given is None else _run(given, what, graph)
            return stages.lower(graph, kind, name, ctx)

        return run


def _run(given: Pass, what: str, graph: GraphModule) -> GraphModule:
    before = _interface(graph)
    with of_the_user():
        found = given(graph) or graph
        found.graph.lint()
    after = _interface(found)
    if before != after:
        raise CompileError(
            f"the pass {what!r} changed a graph of {before[0]} inputs and {before[1]} outputs to one of {after[0]} and "
            f"{after[1]}; what calls the graph expects these to stay"
        )
    values = [node.meta.get("val") for node in found.graph.find_nodes(op="placeholder")]
    missing = [n for n in found.graph.nodes if n.op == "call_function" and "val" not in n.meta]
    if missing and all(value is not None for value in values):
        mode = next((v.fake_mode for v in values if isinstance(v, torch.Tensor) and hasattr(v, "fake_mode")), None)
        FakeTensorProp(found, mode).propagate_dont_convert_inputs(*values)
    found.recompile()
    return found


def _interface(graph: GraphModule) -> tuple[int, int]:
    (output,) = graph.graph.find_nodes(op="output")
    returned = output.args[0]
    return len(graph.graph.find_nodes(op="placeholder")), len(returned) if isinstance(returned, tuple | list) else 1
