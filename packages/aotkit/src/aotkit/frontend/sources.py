"""Where Dynamo says that the arguments of a graph come from, and which of them stay where they are."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["check_sources", "named_sources", "static_inputs"]


def static_inputs(example_inputs: Sequence[Any], attributes: Sequence[Any]) -> frozenset[int]:
    """Positions of parameters, buffers and other tensors that Dynamo marked as staying at their address.

    ``attributes``: the tensors that the graph holds, which follow its inputs. The marks are what Dynamo expects, not
    what it guards: recordings check addresses at each call.
    """
    marked = (
        index
        for index, value in enumerate(example_inputs)
        if isinstance(value, torch.nn.Parameter) or getattr(value, "_dynamo_static_input_type", None) is not None
    )
    return frozenset(marked) | frozenset(range(len(example_inputs), len(example_inputs) + len(attributes)))


def check_sources(mod: nn.Module, names: Sequence[str], num_args: int) -> list[Any] | None:
    """One source per flat argument, or ``None`` if nobody has written any down.

    Parameters have theirs in ``mod._param_name_to_source``, inputs on the graph's placeholders (``_dynamo_source``).

    Raises ``AssertionError`` if a parameter has none, two arguments have the same, or there are too few or many:
    Dynamo's guards would then be about other values than those that the graph is called with.
    """
    by_name = getattr(mod, "_param_name_to_source", None)
    graph = getattr(mod, "graph", None)
    sources: list[Any] = []
    if by_name is not None:
        for name in names:
            assert name in by_name, f"{name} not found."
            sources.append(by_name[name])
    placeholders = [] if graph is None else graph.find_nodes(op="placeholder")
    marked = [node._dynamo_source for node in placeholders if hasattr(node, "_dynamo_source")]
    if by_name is None and not marked:
        return None
    sources += marked
    seen: set[Any] = set()
    for source in sources:
        assert source not in seen, f"two arguments come from {source}; Dynamo should have passed one of them"
        seen.add(source)
    assert len(sources) == num_args, f"{len(sources)} sources are known for {num_args} arguments"
    return sources


def named_sources(gm: torch.fx.GraphModule) -> list[tuple[str, str]]:
    """Per input of Dynamo's graph its source expression and what a person calls it: ``self.weight``, ``batch['x']``."""
    found = []
    for node in gm.graph.find_nodes(op="placeholder"):
        source = getattr(node, "_dynamo_source", None)
        text = "" if source is None else str(source.name)
        found.append((text, _ROOT.sub(r"\1", _HELD.sub(r".\1", text)) or str(node.name)))
    return found


_ROOT = re.compile(r"\b[LG]\['([A-Za-z_]\w*)'\]")
_HELD = re.compile(r"\._(?:parameters|buffers|modules)\['([^']+)'\]")
