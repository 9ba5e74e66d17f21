"""Memory budgets that the program itself asks for (F3.41).

``torch.autograd.graph.region_activation_memory_budget`` (torch 2.13) marks the nodes of a region in
``meta["custom"]``; older markers set ``meta["memory_budget"]``. There is one cut per graph, so a region's budget holds
for the graph if the whole forward is in regions of the same budget.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.fx

from .errors import InvalidOptionError
from .joint import JointGraph
from .options import PartitionOptions

LEGACY_KEY = "memory_budget"
REGION_KEY = "_region_activation_memory_budget"


def with_region_budget(joint: JointGraph, options: PartitionOptions) -> PartitionOptions:
    """``options`` with the budget that the graph's nodes carry, if they do.

    Raises:
        InvalidOptionError: regions with different budgets, or part of the forward outside of any region.
    """
    marked: dict[float, torch.fx.Node] = {}
    outside: torch.fx.Node | None = None
    legacy: float | None = None
    for index, node in enumerate(joint.nodes):
        if not joint.in_forward[index] or node.op != "call_function":
            continue
        budget = _region_budget(node)
        if budget is not None:
            marked.setdefault(budget, node)
        elif not (joint.facts[index].is_getitem or joint.facts[index].is_symbolic):
            outside = outside or node
        if legacy is None and isinstance(node.meta.get(LEGACY_KEY), float):
            legacy = node.meta[LEGACY_KEY]
    if not marked:
        return options if legacy is None else replace(options, memory_budget=legacy)
    if len(marked) > 1:
        (one, first), (other, second) = list(marked.items())[:2]
        raise InvalidOptionError(
            f"regions of one graph ask for different memory budgets: {one} at '{first.name}', {other} at "
            f"'{second.name}'. There is one cut per graph; give all regions one budget, or break the graph between "
            "them."
        )
    ((budget, node),) = marked.items()
    if outside is not None:
        raise InvalidOptionError(
            f"the region with memory budget {budget} covers '{node.name}' but not '{outside.name}', and there is one "
            "cut per graph. Let the region cover the whole forward, or break the graph at its border."
        )
    return replace(options, memory_budget=budget)


def _region_budget(node: torch.fx.Node) -> float | None:
    custom: Any = node.meta.get("custom")
    found = custom.get(REGION_KEY) if isinstance(custom, dict) else None
    return found if isinstance(found, float) else None
