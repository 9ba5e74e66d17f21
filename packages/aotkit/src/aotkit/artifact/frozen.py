"""The arguments of a graph that may become constants of it, and those that did."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch
from torch.fx import GraphModule

from aotkit_cache import Uncacheable
from aotkit_functionalize import GraphMetadata, records
from aotkit_inductor_lower.graph_passes.freeze import freeze
from aotkit_runtime_wrappers import InputPlan

from .tensors import bytes_of

__all__ = ["FrozenArguments"]


class FrozenArguments:
    """The arguments of a graph that may become constants, and those that did."""

    def __init__(self, tensors: Mapping[int, torch.Tensor]) -> None:
        self.tensors = tensors
        self.used: set[int] = set()

    def freeze(self, graph: GraphModule, metadata: GraphMetadata, inputs: InputPlan) -> GraphModule:
        """The graph of an inference with these arguments as constants, if they are inputs that it only reads."""
        before = graph.graph.find_nodes(op="placeholder")
        if metadata.subclasses is not None or len(metadata.inputs) != len(before):
            return graph
        first = len(before) - len(inputs.others)
        wanted = {
            first + place: index
            for place, index in enumerate(inputs.others)
            if index in self.tensors and _is_only_read(metadata.inputs[first + place])
        }
        frozen = freeze(graph, {position: self.tensors[index] for position, index in wanted.items()})
        after = frozen.graph.find_nodes(op="placeholder")
        self.used |= {
            index for position, index in wanted.items() if before[position].users and not after[position].users
        }
        return frozen

    def positions_of(self, constants: Mapping[str, torch.Tensor]) -> dict[str, int]:
        """Which of a graph's constants are arguments as they are: by name, the position."""
        known = {_memory(tensor): index for index, tensor in self.tensors.items()}
        return {name: known[_memory(value)] for name, value in constants.items() if _memory(value) in known}

    def digests(self) -> dict[str, str]:
        """For a key, a digest of the value of each argument. Raises :class:`Uncacheable` if one has none."""
        return {str(index): _digest(index, tensor) for index, tensor in sorted(self.tensors.items())}


def _is_only_read(info: records.InputInfo) -> bool:
    lazy = info.meta is not None and (info.meta.conj or info.meta.neg)  # the graph would take their memory
    return info.mutation.value == "none" and not lazy


def _memory(value: torch.Tensor) -> Any:
    if value.layout is not torch.strided or value.numel() == 0:
        return id(value)
    return value.data_ptr(), value.dtype, tuple(value.shape), value.stride(), value.is_conj(), value.is_neg()


def _digest(index: int, value: torch.Tensor) -> str:
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.layout is not torch.strided:
        raise Uncacheable(f"the frozen argument {index} is no plain tensor")
    return hashlib.sha256(bytes_of(value.detach())).hexdigest()  # sizes and strides are parts of the key
