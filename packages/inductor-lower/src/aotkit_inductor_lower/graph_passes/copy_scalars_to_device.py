"""Pass: numbers that a graph keeps as 0-d tensors on the CPU are copied to the device where they are used.

It runs before the other passes, and also on graphs that these leave alone: kernels take no tensors of two devices.
"""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch.fx import Graph, GraphModule, Node

from ..passes import Pass, PassContext
from ..target import on_host
from .fake_values import describe_constants
from .node_facts import tensors_of

__all__ = ["PASS", "copy_scalars_to_device"]


def copy_scalars_to_device(gm: GraphModule, ctx: PassContext) -> GraphModule:
    """The graph with copies to the target's device of the CPU numbers that pointwise operators there take; itself if
    there are none."""
    describe_constants(gm)
    device = torch.device(ctx.target.capabilities.device)
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
            with getattr(val, "fake_mode", nullcontext()):  # else torch before 2.13 asks for a driver
                copy.meta = {**used.meta, "val": val.new_empty((), device=device)}
            copies[used] = copy
        new[node].replace_input_with(new[used], copies[used])
    return GraphModule(gm, graph)


def _numbers_elsewhere(node: Node, device: torch.device) -> list[Node]:
    if node.op != "call_function" or torch.Tag.pointwise not in getattr(node.target, "tags", ()):
        return []
    if not all(tensor.device == device for tensor in tensors_of(node)):
        return []
    return [used for used in node.all_input_nodes if any(t.dim() == 0 and on_host(t) for t in tensors_of(used))]


def _is_elsewhere(ctx: PassContext) -> bool:
    return not ctx.target.capabilities.host_memory


PASS = Pass(
    "copy-scalars-to-device",
    copy_scalars_to_device,
    why="kernels read numbers of the CPU where they run, and are not kept from fusing by them",
    when=_is_elsewhere,
    required=True,
)
