"""Record what can be recorded of an FX graph, and run the operators in between as they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.fx

from .eligibility import check_nodes
from .reasons import SkipKind, SkipReason
from .trees import CudagraphTrees

__all__ = ["Segment", "SplitOptions", "split_graph", "wrap_graph"]

Policy = Callable[["Segment", torch.fx.GraphModule], SkipReason | None]
Compile = Callable[[torch.fx.GraphModule, str], Callable[[list[Any]], Sequence[Any]]]


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


def wrap_graph(
    graph: torch.fx.GraphModule,
    compile_part: Compile,
    trees: CudagraphTrees,
    *,
    static_input_indices: Sequence[int] = (),
    name: str = "graph",
    options: SplitOptions | None = None,
    wrap: Callable[..., Callable[..., Any]] | None = None,
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compile a graph in segments and put those that can be recorded into a tree.

    Args:
        graph: functional ATen calls; its output is a list or tuple.
        compile_part: compiles one graph, given with a name, into a boxed callable.
        trees: where recordings go.
        static_input_indices: inputs of the graph that keep their address.
        name: for reports.
        options: see `SplitOptions`.
        wrap: puts a compiled segment into the tree; by default `trees.wrap`. For a backward the method of its
            forward's `TreeFunction`.

    Returns:
        A boxed callable. Where nothing is recorded it is what `compile_part` makes of the graph, after one notice with
        the reasons.
    """
    device = None if trees.driver is None else trees.driver.device
    segments = split_graph(graph, device=device, options=options)
    refused = tuple(dict.fromkeys(reason for segment in segments for reason in segment.reasons))
    if trees.driver is None:
        refused = (SkipReason(SkipKind.CPU_DEVICE, "this machine has no CUDA device"),)
    if refused:
        trees.skipped(refused, stacklevel=2)
    if trees.driver is None or all(segment.reasons for segment in segments):
        return compile_part(graph, name)
    wrap = wrap or trees.wrap
    if not refused:
        written = written_placeholders(graph)
        settings: dict[str, Any] = {"static_input_indices": static_input_indices, "mutated_input_indices": written}
        return wrap(compile_part(graph, name), name=name, **settings)
    placeholders = [node.name for node in graph.graph.nodes if node.op == "placeholder"]
    static = {placeholders[index] for index in static_input_indices}
    steps = []
    for number, segment in enumerate(segments):
        part = segment_graph(graph, segment)
        taken = tuple(node.name for node in part.graph.nodes if node.op == "placeholder")
        call = compile_part(part, f"{name}-{number}")
        if not segment.reasons:
            fixed = [index for index, value in enumerate(taken) if value in static]
            settings = {"static_input_indices": fixed, "mutated_input_indices": written_placeholders(part)}
            call = wrap(call, name=f"{name}-{number}", **settings)
        steps.append((call, taken, segment.outputs))
    return _runner(graph, placeholders, steps)


def written_placeholders(graph: torch.fx.GraphModule) -> list[int]:
    """Positions of placeholders that operators of the graph write, directly or through views.

    Compiled kernels don't go through torch's dispatcher, so a run would not show it.
    """
    written: set[torch.fx.Node] = set()
    for node in graph.graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    written.update(value if isinstance(value, (list, tuple)) else [value])  # type: ignore[arg-type]
    found = []
    for index, placeholder in enumerate(graph.graph.find_nodes(op="placeholder")):
        views, pending = {placeholder}, [placeholder]
        while pending:
            users = [user for user in pending.pop().users if user not in views and _is_view(user)]
            views.update(users)
            pending.extend(users)
        if not views.isdisjoint(written):
            found.append(index)
    return found


def _is_view(node: torch.fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target.is_view


def _runner(
    graph: torch.fx.GraphModule, placeholders: list[str], steps: list[tuple[Any, tuple[str, ...], tuple[str, ...]]]
) -> Callable[[list[Any]], Sequence[Any]]:
    """Run segments in order; each value is let go after its last use."""
    (output,) = graph.graph.find_nodes(op="output")
    returned = output.args[0]
    constants = {node.name: node.target for node in graph.graph.find_nodes(op="get_attr")}
    needed: set[str] = {node.name for node in output.all_input_nodes}
    last_use: list[tuple[str, ...]] = []
    for _, taken, _ in reversed(steps):
        last_use.append(tuple(value for value in taken if value not in needed))
        needed.update(taken)
    schedule = list(zip(steps, reversed(last_use), strict=True))

    def run(args: list[Any]) -> Sequence[Any]:
        values = dict(zip(placeholders, args, strict=True))
        args.clear()
        for (call, taken, made), ending in schedule:
            given = [values[name] for name in taken]
            for name in ending:
                values.pop(name, None)
            values.update(zip(made, call(given), strict=True))
        for name, target in constants.items():
            values[name] = _attribute(graph, str(target))
        return torch.fx.node.map_arg(returned, lambda node: values[node.name])  # type: ignore[no-any-return]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run


def _attribute(graph: torch.fx.GraphModule, target: str) -> Any:
    value: Any = graph
    for part in target.split("."):
        value = getattr(value, part)
    return value
