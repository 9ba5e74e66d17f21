"""On which device a graph's kernels run.

Note [Graphs over several devices]
    Kernels are generated for one device: the CUDA device that most of a graph's tensors are on, or the CPU. Numbers
    that a graph keeps as 0-d tensors on the CPU, and that eager lets take part in CUDA arithmetic, are copied to the
    device where they are used. Every other operator with a tensor elsewhere (copies between devices, what is computed
    on another device) stays an ATen call of the same plan, in its place, with that as its reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import torch
from torch.fx import GraphModule, Node

__all__ = ["kernel_device", "tensors_of"]

_CPU = torch.device("cpu")


def kernel_device(gm: GraphModule) -> torch.device:
    """The device that the graph's kernels are for; see Note [Graphs over several devices]."""
    if not any(map(_names_cuda, gm.graph.nodes)):
        return _CPU
    found = Counter(tensor.device for node in gm.graph.nodes for tensor in tensors_of(node))
    on_cuda = {device: count for device, count in found.items() if device.type == "cuda"}
    return max(on_cuda, key=lambda device: (on_cuda[device], -(device.index or 0)), default=_CPU)


def _names_cuda(node: Node) -> bool:
    """Whether tensors on CUDA begin at the node: an input, or an operator that is told so."""
    if node.op == "placeholder" or node.op == "get_attr":
        return any(tensor.device.type == "cuda" for tensor in tensors_of(node))
    device = node.kwargs.get("device") if node.kwargs else None
    return device is not None and torch.device(str(device)).type == "cuda"


def tensors_of(node: Node) -> Iterator[torch.Tensor]:
    """The tensors that a node gives."""
    val = node.meta.get("val")
    for item in val if isinstance(val, list | tuple) else (val,):
        if isinstance(item, torch.Tensor):
            yield item
