"""Random ops that run twice draw the same numbers twice (F3.44).

A partition under ``recompute_random`` may place a random op on both sides. The forward then runs it through
``run_and_save_rng_state``, which also returns the generator state from before the draw; that state is handed over like
a saved tensor, behind those whose version autograd checks, and the backward runs the op through
``run_with_rng_state``, which puts the generator back afterwards.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
import torch.fx
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state

from ._torch_compat import without_modes

CUDA_STATE_BYTES = 16  # seed and offset


def replay_random_ops(
    forward: torch.fx.GraphModule,
    backward: torch.fx.GraphModule,
    names: Sequence[str],
    forward_place: int,
    backward_place: int,
) -> list[str]:
    """Rewrite both graphs in place.

    Args:
        forward: in the calling convention of :class:`Partition`.
        backward: in the same.
        names: the random ops that both graphs contain.
        forward_place: how many outputs of the forward come before the states.
        backward_place: how many inputs of the backward come before the states.

    Returns:
        The names of the saved states, in order.
    """
    drawn = {node.name: node for node in forward.graph.nodes if node.name in names}
    again = {node.name: node for node in backward.graph.nodes if node.name in names}
    states = [_save_state(forward.graph, drawn[name]) for name in names]
    output = forward.graph.find_nodes(op="output")[0]
    returned = list(output.args[0])
    output.args = ((*returned[:forward_place], *states, *returned[forward_place:]),)
    described = output.meta.get("desc")
    if isinstance(described, list):
        output.meta["desc"] = [*described[:forward_place], *([None] * len(states)), *described[forward_place:]]
    inputs = backward.graph.find_nodes(op="placeholder")
    following = inputs[backward_place] if backward_place < len(inputs) else inputs[-1].next
    for name, state in zip(names, states, strict=True):
        with backward.graph.inserting_before(following):
            given = backward.graph.create_node("placeholder", state.name, name=state.name)
        given.meta = dict(state.meta)
        _run_from_state(again[name], given)
    forward.recompile()
    backward.recompile()
    return [state.name for state in states]


def _save_state(graph: torch.fx.Graph, node: torch.fx.Node) -> torch.fx.Node:
    """Let the op return the generator's state, too; its result keeps its name."""
    value = node.meta["val"]
    target: Any = node.target
    with graph.inserting_before(node):
        both = graph.call_function(run_and_save_rng_state, (target, *node.args), node.kwargs)
        state = graph.call_function(operator.getitem, (both, 0), name=f"{node.name}_rng_state")
    state.meta["val"] = _state_value(value)
    both.meta = {**node.meta, "val": (state.meta["val"], value)}
    node.target, node.args, node.kwargs = operator.getitem, (both, 1), {}
    return state


def _run_from_state(node: torch.fx.Node, state: torch.fx.Node) -> None:
    target: Any = node.target
    node.target, node.args = run_with_rng_state, (state, target, *node.args)


def _state_value(value: Any) -> torch.Tensor:
    """A fake state of the right size: CPU memory whatever the device."""
    first: torch.Tensor = (
        next(item for item in value if isinstance(item, torch.Tensor)) if isinstance(value, tuple) else value
    )
    size = torch.get_rng_state().numel() if first.device.type == "cpu" else CUDA_STATE_BYTES
    with without_modes():
        return first.new_empty((size,), dtype=torch.uint8, device="cpu")
