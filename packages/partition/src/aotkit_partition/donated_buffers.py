"""Saved tensors that a backward compiler may have the memory of, found in the forward graph.

A compiler says by an attribute ``reuses_donated = True`` that what it makes of a backward writes into the memory of
inputs which are marked ``meta["donated"]``. Those marked ``meta["released"]`` it may count as memory that goes with
their last use: nobody but the backward holds them. Whoever makes a graph may mark a call ``meta["new_memory"]``: none
of its results lies in memory of its arguments, though its target does not say so.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch.fx import GraphModule, Node

__all__ = ["donated_tensors", "mark_donated", "mark_released"]

# Memory of an argument, though the schema does not say so.
_SILENT_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
    }
)


def donated_tensors(forward: GraphModule, num_forward_outputs: int, num_saved_tensors: int) -> tuple[int, ...]:
    """Positions of saved tensors that an operator made, and that share memory with no input and no other result."""
    (output,) = forward.graph.find_nodes(op="output")
    results = output.args[0]
    memory: dict[Node, frozenset[Node]] = {}
    for node in forward.graph.nodes:
        memory[node] = _memory(node, memory)
    users: dict[Node, int] = {}
    for result in results:
        for owner in memory.get(result, ()):
            users[owner] = users.get(owner, 0) + 1
    saved = results[num_forward_outputs : num_forward_outputs + num_saved_tensors]
    return tuple(i for i, node in enumerate(saved) if all(_fresh(o) and users[o] == 1 for o in memory[node]))


def mark_donated(backward: GraphModule, num_saved_symints: int, donated: tuple[int, ...]) -> None:
    """Set ``meta["donated"]`` on the inputs of the backward that are these saved tensors."""
    inputs = backward.graph.find_nodes(op="placeholder")
    for position in donated:
        inputs[num_saved_symints + position].meta["donated"] = True


def mark_released(backward: GraphModule, num_saved_symints: int, released: tuple[int, ...]) -> None:
    """Set ``meta["released"]`` on the inputs of the backward that are these saved tensors."""
    inputs = backward.graph.find_nodes(op="placeholder")
    for position in released:
        inputs[num_saved_symints + position].meta["released"] = True


def _memory(node: Node, memory: dict[Node, frozenset[Node]]) -> frozenset[Node]:
    """The nodes whose memory ``node`` may be; itself, if it has memory of its own."""
    target: Any = node.target
    if node.op != "call_function" or node.meta.get("new_memory"):
        return frozenset({node})
    if target is operator.getitem and _apart(node, memory):
        call: Any = node.args[0]
        alike = (user for user in call.users if user.target is target and user.args[1] == node.args[1])
        return frozenset({next(alike)})
    says = isinstance(target, torch._ops.OpOverload) and target not in _SILENT_VIEWS
    if says and all(result.alias_info is None for result in target._schema.returns):
        return frozenset({node})
    above = [memory[argument] for argument in node.all_input_nodes]
    return frozenset().union(*above) if above else frozenset({node})


def _apart(item: Node, memory: dict[Node, frozenset[Node]]) -> bool:
    """Whether this is one of several results that an operator of torch's makes in memory of their own."""
    call: Any = item.args[0]
    of_torch = isinstance(call.target, torch._ops.OpOverload) and call.target.namespace == "aten"
    return of_torch and memory[call] == {call}


def _fresh(node: Node) -> bool:
    """Whether an operator made this; or it is one of the results of one, see :func:`_apart`."""
    made: Any = node.args[0] if node.target is operator.getitem else node
    return bool(made.op == "call_function") and isinstance(made.target, torch._ops.OpOverload)
