"""The verify mode: each result of a stage is written and read back, and the one that was read is used from there on.

So nothing can hide in a closure, and what a compile returns is what a cache entry would give.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from aotkit_functionalize import GraphMetadata
from aotkit_partition import Partition, dump_graph, load_graph
from aotkit_partition.graph_text import graph_constants
from aotkit_runtime_wrappers import WrapperPlan

from .records import Artifact, CompiledGraph, LiveCode, RecordedGraph

__all__ = ["reread_artifact", "reread_compiled", "reread_graph", "reread_metadata", "reread_partition"]


def reread_metadata(metadata: GraphMetadata) -> GraphMetadata:
    """A graph's contract."""
    return _same(GraphMetadata.from_json(metadata.to_json()), metadata, "graph metadata")  # type: ignore[no-any-return]


def reread_graph(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """An FX graph, over the symbols and with the constants of this one."""
    return load_graph(dump_graph(graph), fake_mode=_fake_mode(graph), constants=graph_constants(graph))


def reread_partition(parts: Partition, joint: torch.fx.GraphModule) -> Partition:
    """Both parts of ``joint``."""
    return Partition.from_json(parts.to_json(), fake_mode=_fake_mode(joint), constants=graph_constants(joint))


def reread_compiled(graph: CompiledGraph) -> CompiledGraph:
    """A compiled graph, with the constants of this one: who holds them may write to them."""
    code = graph.code
    if isinstance(code, RecordedGraph):
        plan = _same(type(code.plan).from_json(code.plan.to_json()), code.plan, "plan of recordings")
        return replace(graph, code=replace(code, plan=plan, parts=[reread_compiled(part) for part in code.parts]))
    return graph if isinstance(code, LiveCode) else replace(graph, code=graph.program_text())


def reread_artifact(artifact: Artifact) -> Artifact:
    """All of an artifact that is data."""
    plan = _same(WrapperPlan.from_json(artifact.plan.to_json()), artifact.plan, "wrapper plan")
    backward = None if artifact.backward is None else reread_compiled(artifact.backward)
    return replace(artifact, plan=plan, forward=reread_compiled(artifact.forward), backward=backward)


def _same(reloaded: Any, original: Any, what: str) -> Any:
    if reloaded != original:
        raise AssertionError(f"the {what} changed when it was serialized and reloaded")
    return reloaded


def _fake_mode(graph: torch.fx.GraphModule) -> Any:
    for node in graph.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and hasattr(value, "fake_mode"):
            return value.fake_mode
    return None
