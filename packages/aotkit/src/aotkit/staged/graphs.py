"""FX graphs of a stage: what they cost, and their text in its file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from aotkit_partition import PartitionError, dump_graph, graph_text, load_graph
from aotkit_partition.runtime_estimate import graph_flops

from ..errors import PackageError
from .costs import GraphCost
from .files import constant_sections, read_constants

__all__ = ["graph_cost", "graph_sections", "read_graph"]


def graph_cost(graph: torch.fx.GraphModule) -> GraphCost:
    """Of an FX graph."""
    calls = [node for node in graph.graph.nodes if node.op == "call_function"]
    return GraphCost(len(calls), int(graph_flops(graph)))


def graph_sections(name: str, graph: torch.fx.GraphModule) -> tuple[dict[str, bytes], list[Any]]:
    """The text of an FX graph and the data of its constants. Raises :class:`PackageError` for one that has none."""
    try:
        text = dump_graph(graph)
    except PartitionError as error:
        raise PackageError(f"the stage can't be saved: {error}") from error
    sections, described = constant_sections(name, graph_text.graph_constants(graph))
    return {name: text.encode(), **sections}, described


def read_graph(name: str, sections: Mapping[str, bytes], described: list[Any]) -> torch.fx.GraphModule:
    """The inverse of :func:`graph_sections`."""
    return load_graph(sections[name].decode(), constants=read_constants(name, sections, described))
