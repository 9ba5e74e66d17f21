"""Numbers that a graph keeps as 0-d tensors on the CPU are copied to the device where they are used."""

from __future__ import annotations

import torch
from torch.fx import Graph, GraphModule, Node

from ..analysis.devices import tensors_of

__all__ = ["with_numbers_on_device"]

_CPU = torch.device("cpu")


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
    if not all(tensor.device == device for tensor in tensors_of(node)):
        return []
    return [used for used in node.all_input_nodes if any(t.dim() == 0 and t.device == _CPU for t in tensors_of(used))]
