"""How a graph is recorded, as data: where it is cut, and what of each part stays at its address.

Note [A plan and its recordings]
    A recording holds addresses, so each process makes its own. What it takes to make them does not: the parts of a
    graph, which of them are recorded, which of their inputs keep their address and which they write. A plan says that,
    without the graph; with compiled parts, which are the caller's, it is all that another process needs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx

from ._records import Format
from .reasons import SkipKind, SkipReason
from .split import Segment, SplitOptions, segment_graph, split_graph
from .trees import CudagraphTrees

__all__ = ["GraphPlan", "PlannedPart", "Result", "attributes_of", "bind_plan", "plan_graph", "wrap_graph"]

Boxed = Callable[[list[Any]], Sequence[Any]]


@dataclass(frozen=True, slots=True)
class PlannedPart:
    """Operators of a graph that are compiled together.

    Attributes:
        name: of the part, in reports.
        inputs: names of the values it takes, in order.
        outputs: names of the values it gives.
        recorded: whether it is put into a tree of recordings.
        static: positions of inputs that keep their address.
        written: positions of inputs that its operators write.
    """

    name: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    recorded: bool
    static: tuple[int, ...] = ()
    written: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """One result of a graph: the value of this ``name``, or a ``constant``."""

    name: str | None = None
    constant: bool | int | float | None = None


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """How one graph is recorded; see Note [A plan and its recordings].

    Attributes:
        name: of the graph, in reports.
        parts: in the order in which they run. One that is the whole graph takes its inputs and gives its results.
        inputs: names of the graph's inputs.
        results: the graph's results.
        attributes: names of results that are tensors of the graph, with the attribute that holds each.
        reasons: why some of it, or all, is not recorded.
    """

    name: str
    parts: tuple[PlannedPart, ...]
    inputs: tuple[str, ...] = ()
    results: tuple[Result, ...] = ()
    attributes: tuple[tuple[str, str], ...] = ()
    reasons: tuple[SkipReason, ...] = ()

    @property
    def is_whole(self) -> bool:
        """Whether the graph is one part."""
        return len(self.parts) == 1

    @property
    def records(self) -> bool:
        """Whether any part is recorded."""
        return any(part.recorded for part in self.parts)

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return _FORMAT.to_raw(self)

    @staticmethod
    def from_json(data: dict[str, Any]) -> GraphPlan:
        """The plan that `to_json` described. Raises `ValueError` for anything else."""
        return _FORMAT.from_raw(data)


_FORMAT = Format(GraphPlan, "aotkit plan of recordings", 1)


def plan_graph(
    graph: torch.fx.GraphModule,
    *,
    device: torch.device | None = None,
    static_input_indices: Sequence[int] = (),
    name: str = "graph",
    options: SplitOptions | None = None,
) -> tuple[GraphPlan, list[torch.fx.GraphModule]]:
    """How to record a graph, in one part if all or nothing of it can be; and the graphs of the parts.

    Args:
        graph: functional ATen calls with example values in `node.meta["val"]`; its output is a list or tuple.
        device: of the driver; a tensor elsewhere is a reason not to record. By default any that is not the CPU.
        static_input_indices: inputs of the graph that keep their address.
        name: for reports.
        options: see `SplitOptions`.
    """
    segments = split_graph(graph, device=device, options=options)
    reasons = tuple(dict.fromkeys(reason for segment in segments for reason in segment.reasons))
    if not reasons or all(segment.reasons for segment in segments):
        return _whole_plan(graph, static_input_indices, name, reasons), [graph]
    inputs = tuple(node.name for node in graph.graph.find_nodes(op="placeholder"))
    static = {inputs[index] for index in static_input_indices}
    graphs = [segment_graph(graph, segment) for segment in segments]
    parts = tuple(
        _part(part, segment, f"{name}-{number}", static)
        for number, (segment, part) in enumerate(zip(segments, graphs, strict=True))
    )
    (output,) = graph.graph.find_nodes(op="output")
    results = tuple(Result(v.name) if isinstance(v, torch.fx.Node) else Result(None, v) for v in output.args[0])
    held = [node for node in output.all_input_nodes if node.op == "get_attr"]
    attributes = tuple((node.name, str(node.target)) for node in held)
    return GraphPlan(name, parts, inputs, results, attributes, reasons), graphs


def _whole_plan(
    graph: torch.fx.GraphModule, static_input_indices: Sequence[int], name: str, reasons: tuple[SkipReason, ...] = ()
) -> GraphPlan:
    """A graph in one part, which is recorded unless there are ``reasons`` why not."""
    written = () if reasons else tuple(written_placeholders(graph))
    part = PlannedPart(name, (), (), not reasons, tuple(static_input_indices), written)
    return GraphPlan(name, (part,), reasons=reasons)


def _part(part: torch.fx.GraphModule, segment: Segment, name: str, static: set[str]) -> PlannedPart:
    taken = tuple(node.name for node in part.graph.find_nodes(op="placeholder"))
    fixed = tuple(index for index, value in enumerate(taken) if value in static)
    return PlannedPart(name, taken, segment.outputs, not segment.reasons, fixed, tuple(written_placeholders(part)))


def bind_plan(
    plan: GraphPlan,
    calls: Sequence[Boxed],
    trees: CudagraphTrees,
    *,
    wrap: Callable[..., Callable[..., Any]] | None = None,
    attributes: Mapping[str, Any] | None = None,
    prefix: str = "",
) -> Boxed:
    """A boxed callable of the graph, whose recordings are made when it is called.

    Args:
        plan: of the graph.
        calls: its compiled parts, boxed, in order.
        trees: where recordings go. Why some of the graph is not recorded is told them.
        wrap: puts a compiled part into a tree; by default `trees.wrap`. For a backward the method of its forward's
            `TreeFunction`.
        attributes: by attribute, the tensors that the plan names.
        prefix: before the names of parts, in reports.
    """
    if plan.reasons:
        trees.skipped(plan.reasons, stacklevel=2)
    wrapped = []
    for part, call in zip(plan.parts, calls, strict=True):
        settings: dict[str, Any] = {"static_input_indices": part.static, "mutated_input_indices": part.written}
        wrapped.append((wrap or trees.wrap)(call, name=f"{prefix}{part.name}", **settings) if part.recorded else call)
    return wrapped[0] if plan.is_whole else _runner(plan, wrapped, attributes or {})


def wrap_graph(
    graph: torch.fx.GraphModule,
    compile_part: Callable[[torch.fx.GraphModule, str], Boxed],
    trees: CudagraphTrees,
    *,
    static_input_indices: Sequence[int] = (),
    name: str = "graph",
    options: SplitOptions | None = None,
    wrap: Callable[..., Callable[..., Any]] | None = None,
) -> Boxed:
    """Compile a graph in parts and put those that can be recorded into a tree: `plan_graph` and `bind_plan` at once.

    Args:
        graph: functional ATen calls; its output is a list or tuple.
        compile_part: compiles one graph, given with a name, into a boxed callable.
        trees: where recordings go.
        static_input_indices: inputs of the graph that keep their address.
        name: for reports.
        options: see `SplitOptions`.
        wrap: puts a compiled part into the tree; by default `trees.wrap`. For a backward the method of its forward's
            `TreeFunction`.

    Returns:
        A boxed callable. Where nothing is recorded it is what `compile_part` makes of the graph, after one notice with
        the reasons.
    """
    if trees.driver is None:
        trees.skipped((SkipReason(SkipKind.CPU_DEVICE, "this machine has no CUDA device"),), stacklevel=2)
        return compile_part(graph, name)
    plan, graphs = plan_graph(
        graph, device=trees.driver.device, static_input_indices=static_input_indices, name=name, options=options
    )
    calls = [compile_part(each, part.name) for each, part in zip(graphs, plan.parts, strict=True)]
    return bind_plan(plan, calls, trees, wrap=wrap, attributes=attributes_of(graph, plan))


def attributes_of(graph: torch.fx.GraphModule, plan: GraphPlan) -> dict[str, Any]:
    """The tensors of ``graph`` that are results of it, by the attribute that holds each, for `bind_plan`."""
    return {target: operator.attrgetter(target)(graph) for _, target in plan.attributes}


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


def _runner(plan: GraphPlan, calls: Sequence[Boxed], attributes: Mapping[str, Any]) -> Boxed:
    """Run parts in order; each value is let go after its last use."""
    needed = {result.name for result in plan.results}
    last_use: list[tuple[str, ...]] = []
    for part in reversed(plan.parts):
        last_use.append(tuple(value for value in part.inputs if value not in needed))
        needed.update(part.inputs)
    schedule = list(zip(plan.parts, calls, reversed(last_use), strict=True))
    held = {name: attributes[target] for name, target in plan.attributes}

    def run(args: list[Any]) -> Sequence[Any]:
        values = dict(zip(plan.inputs, args, strict=True))
        args.clear()
        for part, call, ending in schedule:
            given = [values[name] for name in part.inputs]
            for name in ending:
                values.pop(name, None)
            values.update(zip(part.outputs, call(given), strict=True))
        values.update(held)
        return [result.constant if result.name is None else values[result.name] for result in plan.results]

    run._boxed_call = True  # type: ignore[attr-defined]
    return run
