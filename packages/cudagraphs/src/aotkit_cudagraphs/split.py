"""Cut an FX graph into what can be recorded and the operators in between."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.fx

from .eligibility import check_nodes
from .reasons import SkipKind, SkipReason

__all__ = ["Segment", "SplitOptions", "split_graph"]

Policy = Callable[["Segment", torch.fx.GraphModule], SkipReason | None]


@dataclass(frozen=True, slots=True)
class SplitOptions:
    """How a graph is split.

    Attributes:
        min_nodes: a segment of fewer operators is not worth a launch and runs as it is.
        policy: is asked about each segment that could be recorded, with its graph; a reason it returns is why not.
    """

    min_nodes: int = 2
    policy: Policy | None = None


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive nodes of a graph that are recorded together, or not recorded.

    Attributes:
        nodes: names of the nodes, in order.
        inputs: names of the values it takes from before it, in its own order.
        outputs: names of the values that are needed after it.
        reasons: why it is not recorded; empty if it is.
    """

    nodes: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    reasons: tuple[SkipReason, ...] = ()


def split_graph(
    graph: torch.fx.GraphModule, *, device: torch.device | None = None, options: SplitOptions | None = None
) -> tuple[Segment, ...]:
    """Cut a graph at the operators that can't be recorded; the whole graph is one segment if there are none.

    Args:
        graph: ATen calls with example values in `node.meta["val"]`.
        device: of the driver; a tensor elsewhere is a reason not to record. By default any that is not the CPU.
        options: see `SplitOptions`.

    Returns:
        Segments in order of execution. Placeholders, attributes and the output belong to none.
    """
    options = options or SplitOptions()
    own = check_nodes(graph, device)
    blocked: dict[torch.fx.Node, SkipReason] = {}
    groups: list[list[torch.fx.Node]] = []
    for node in graph.graph.nodes:
        reason = own.get(node.name)
        if reason is None and node.op == "call_function":
            reason = next((blocked[arg] for arg in node.all_input_nodes if arg in blocked and _taints(arg, own)), None)
        if reason is not None:
            blocked[node] = reason
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        if not groups or (groups[-1][0] in blocked) != (node in blocked):
            groups.append([])
        groups[-1].append(node)
    segments = [_segment(nodes, blocked, options.min_nodes) for nodes in groups]
    return tuple(_ask(options.policy, graph, segment) for segment in segments)


def _taints(node: torch.fx.Node, own: dict[str, SkipReason]) -> bool:
    """Whether what can't be recorded of a node is its value, so that what takes the value can't be either."""
    value = node.meta.get("val")
    reason = own.get(node.name)
    return not isinstance(value, torch.Tensor) or (reason is not None and reason.kind in _VALUE_REASONS)


_VALUE_REASONS = frozenset({SkipKind.CPU_DEVICE, SkipKind.MULTIPLE_DEVICES, SkipKind.SPARSE, SkipKind.UNBACKED_SIZE})


def _ask(policy: Policy | None, graph: torch.fx.GraphModule, segment: Segment) -> Segment:
    reason = None if policy is None or segment.reasons else policy(segment, segment_graph(graph, segment))
    return segment if reason is None else replace(segment, reasons=(reason,))


def _segment(nodes: list[torch.fx.Node], blocked: dict[torch.fx.Node, SkipReason], min_nodes: int) -> Segment:
    reasons = tuple(dict.fromkeys(blocked[node] for node in nodes if node in blocked))
    inside = set(nodes)
    inputs = dict.fromkeys(arg.name for node in nodes for arg in node.all_input_nodes if arg not in inside)
    outputs = tuple(node.name for node in nodes if any(user not in inside for user in node.users))
    if not reasons and len(nodes) < min_nodes:
        text = f"{len(nodes)} operators between others that can't be recorded"
        reasons = (SkipReason(SkipKind.SMALL_SEGMENT, text),)
    return Segment(tuple(node.name for node in nodes), tuple(inputs), outputs, reasons)


def segment_graph(graph: torch.fx.GraphModule, segment: Segment) -> torch.fx.GraphModule:
    """A segment as a graph of its own: `segment.inputs` in, the list of `segment.outputs` out."""
    by_name = {node.name: node for node in graph.graph.nodes}
    part = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    for name in segment.inputs:
        source = by_name[name]
        if source.op == "get_attr":
            copies[source] = part.node_copy(source)
        else:
            copies[source] = part.placeholder(name)
            copies[source].meta = dict(source.meta)
    for name in segment.nodes:
        copies[by_name[name]] = part.node_copy(by_name[name], lambda node: copies[node])
    part.output([copies[by_name[name]] for name in segment.outputs])
    return torch.fx.GraphModule(graph, part)
