"""On which device a graph's kernels run, and what becomes of its tensors elsewhere.

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
from torch.fx import Graph, GraphModule, Node

__all__ = ["kernel_device", "with_numbers_on_device"]

_CPU = torch.device("cpu")


def kernel_device(gm: GraphModule) -> torch.device:
    """The device that the graph's kernels are for; see Note [Graphs over several devices]."""
    if not any(map(_names_cuda, gm.graph.nodes)):
        return _CPU
    found = Counter(tensor.device for node in gm.graph.nodes for tensor in _tensors(node))
    on_cuda = {device: count for device, count in found.items() if device.type == "cuda"}
    return max(on_cuda, key=lambda device: (on_cuda[device], -(device.index or 0)), default=_CPU)


def _names_cuda(node: Node) -> bool:
    """Whether tensors on CUDA begin at the node: an input, or an operator that is told so."""
    if node.op == "placeholder" or node.op == "get_attr":
        return any(tensor.device.type == "cuda" for tensor in _tensors(node))
    device = node.kwargs.get("device") if node.kwargs else None
    return device is not None and torch.device(str(device)).type == "cuda"


def _tensors(node: Node) -> Iterator[torch.Tensor]:
    val = node.meta.get("val")
    for item in val if isinstance(val, list | tuple) else (val,):
        if isinstance(item, torch.Tensor):
            yield item


def with_numbers_on_device(gm: GraphModule, device: torch.device) -> GraphModule:
    """The graph with copies to ``device`` of the CPU numbers that pointwise operators there take; itself if there are
    none."""
    uses = [(node, used) for node in gm.graph.nodes for used in _numbers_elsewhere(node, device)]
    if not uses:
        return gm
    graph = Graph()
    new: dict[Node, Node] = {}
    returned = graph.graph_copy(gm.graph, new)
    graph.output(returned).meta.update(next(iter(gm.graph.find_nodes(op="output"))).meta)
    copies: dict[Node, Node] = {}
    for node, used in uses:
        if used not in copies:
            with graph.inserting_before(new[node]):
                # Of pageable memory, so it is read before the call returns; but the stream is not waited for.
                copy = graph.call_function(
                    torch.ops.aten._to_copy.default, (new[used],), {"device": device, "non_blocking": True}
                )
            val = used.meta["val"]
            copy.meta = {**used.meta, "val": val.new_empty((), device=device)}
            copies[used] = copy
        new[node].replace_input_with(new[used], copies[used])
    return GraphModule(gm, graph)


def _numbers_elsewhere(node: Node, device: torch.device) -> list[Node]:
    if node.op != "call_function" or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return []
    if not all(tensor.device == device for tensor in _tensors(node)):
        return []
    return [used for used in node.all_input_nodes if any(t.dim() == 0 and t.device == _CPU for t in _tensors(used))]
