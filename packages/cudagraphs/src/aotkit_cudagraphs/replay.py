"""Run a recording and hand out its results."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .driver import DeviceDriver
from .liveness import Layout
from .placement import PathTensor
from .static_inputs import copy_into_buffer
from .tree import Node, NodeOutput, Source


def run_node(
    node: Node, inputs: Sequence[Any], driver: DeviceDriver, *, remember: bool = False, alike: bool = False
) -> Any:
    """Copy the inputs in, replay, return the results for these inputs; the pool learns what was handed out.

    With `remember`, slots also remember the tensors that were handed out, without holding them. `alike`: the inputs'
    layouts are known to be those of a call before.
    """
    with torch.no_grad():
        for index, buffer, dims in node.copies:
            copy_into_buffer(buffer, inputs[index], dims)
        driver.replay(node.graph)
        copies: dict[int, torch.Tensor] = {}
        leaves = [
            base.detach() if base is not None else _result(output, leaf, inputs, copies, alike)
            for leaf, (base, output) in enumerate(zip(node.bases(), node.outputs, strict=True))
        ]
    node.pool.live.hand_out(node.handed)
    node.replays += 1
    if remember:
        _remember(node, leaves)
    if node.structure is list:
        return leaves
    if node.structure is tuple:
        return tuple(leaves)
    return pytree.tree_unflatten(leaves, node.structure)


def _remember(node: Node, leaves: Sequence[Any]) -> None:
    for slot in node.slots:
        slot.handed = [weakref.ref(leaves[leaf]) for leaf in slot.leaves]


def _result(output: NodeOutput, leaf: int, inputs: Sequence[Any], copies: dict[int, torch.Tensor], alike: bool) -> Any:
    match output.source:
        case Source.NEW:
            slot = output.slot
            assert slot is not None
            if not slot.copied:
                return slot.bases[leaf].detach()
            if slot.address in copies:  # results that share memory share the copy
                return output.value.beside(copies[slot.address])
            copies[slot.address] = output.value.on(slot.storage.clone())
            return copies[slot.address]
        case Source.PATH:
            return output.value.tensor()
        case Source.INPUT:
            given = inputs[output.index]
            if output.whole and (alike or output.value.describes(given)) and not given.is_inference():
                return given.detach()
            return _view_of(given, output.value, output.distance)
        case Source.OUTSIDE:
            return output.value.detach()
        case Source.EMPTY:
            like = output.value
            return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        case Source.VALUE:
            return output.value


def _view_of(given: torch.Tensor, layout: Layout, distance: int) -> torch.Tensor:
    """The view that starts `distance` bytes after the first element of `given`."""
    start = int(given.storage_offset()) * given.element_size() + distance
    if start % layout.dtype.itemsize:
        # Another dtype at an odd address: no such view of the given tensor exists, so its bytes are copied.
        everything = torch.empty(0, dtype=torch.uint8, device=given.device).set_(given.untyped_storage())
        return layout.on(everything[start:].clone().untyped_storage(), 0)
    return layout.beside(given, start // layout.dtype.itemsize)


def announce_write(value: Any, in_path: PathTensor | None) -> None:
    """Let autograd notice that a tensor, which it may have saved, was written, though no operator ran."""
    tensor = value if in_path is None else next(iter(in_path.slot.bases.values()))  # results share its version
    if isinstance(tensor, torch.Tensor) and not tensor.is_inference():
        torch.autograd.graph.increment_version(tensor)
