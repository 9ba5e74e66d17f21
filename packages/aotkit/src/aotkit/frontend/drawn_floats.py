"""Floats that a program draws (``random.uniform``) as inputs of a graph.

Note [Floats that are drawn]
    Dynamo draws such a float again at each call and passes it as a tensor. While it traces, that is one of the default
    type, so that types come out as those of a number would: integers times the float are float32. Calls pass one of
    float64. The graph is compiled for what is passed, and uses it as it was traced: what computes in double precision
    and what is returned has all of its digits, the rest a copy of the traced type.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.fx import GraphModule, Node

from .changed_graphs import copy_graph

__all__ = ["take_drawn_floats"]

_DOUBLE = (torch.float64, torch.complex128)


def take_drawn_floats(mod: torch.nn.Module, example_inputs: Sequence[Any]) -> tuple[Any, Sequence[Any]]:
    """The module and the inputs to compile it for; both as they are unless it is a graph with such a float."""
    dynamo = sys.modules.get("torch._dynamo.source")
    if dynamo is None or not isinstance(mod, GraphModule):
        return mod, example_inputs
    drawn = {
        position: node
        for position, node in enumerate(mod.graph.find_nodes(op="placeholder"))
        if isinstance(getattr(node, "_dynamo_source", None), dynamo.RandomValueSource)
        and example_inputs[position].dtype.is_floating_point
    }
    if not drawn:
        return mod, example_inputs
    copied, values = copy_graph(mod)
    for position, node in drawn.items():
        _narrow(copied, values[node], example_inputs[position].dtype)
    copied.recompile()
    return copied, [value.double() if position in drawn else value for position, value in enumerate(example_inputs)]


def _narrow(gm: GraphModule, drawn: Node, dtype: torch.dtype) -> None:
    """Give each use of ``drawn`` that would compute in a wider type than it was traced with a copy of ``dtype``."""
    users = [user for user in drawn.users if user.op != "output" and not _is_double(user)]
    if not users:
        return
    placeholders = gm.graph.find_nodes(op="placeholder")
    with gm.graph.inserting_after(placeholders[-1]):
        narrow = gm.graph.call_method("to", (drawn, dtype))
    narrow.meta = {name: kept for name, kept in users[0].meta.items() if name == "stack_trace"}
    narrow.meta["example_value"] = drawn.meta["example_value"]
    for user in users:
        user.replace_input_with(drawn, narrow)


def _is_double(user: Node) -> bool:
    """Whether one of the tensors that ``user`` reads is of double precision."""
    values = (node.meta.get("example_value") for node in user.all_input_nodes)
    return any(isinstance(value, torch.Tensor) and value.dtype in _DOUBLE for value in values)
