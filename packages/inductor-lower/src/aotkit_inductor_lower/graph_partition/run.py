"""Compile a graph in parts and call it; see Note [Compiled in parts]."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch.fx import Graph, GraphModule, Node

from ..errors import LoweringError
from ..report import ExternCount, LoweringReport, merge_reports
from ..targets.select import as_present_device, kernel_device
from .layout import Layout
from .split import Part, split
from .split_ops import split_ops

__all__ = ["Compiled", "PartitionedGraph", "compile_parts"]


class Compiled(Protocol):
    """What compiling one part gives: boxed, with a report."""

    def __call__(self, args: list[Any]) -> list[Any]: ...

    def report(self) -> LoweringReport:
        """Kernels, ATen calls and why."""


# They call the functions they are given, on tensors like the ones these were traced with. Others (flex attention)
# look into them, or trace them once more.
_CALLERS = frozenset(("cond", "while_loop", "while_loop_stack_output", "invoke_subgraph", "scan", "map_impl"))


class PartitionedGraph:
    """A graph compiled in parts, in the boxed convention. ``outer`` is the FX graph that calls the parts; a CUDA
    ``device`` is the present one meanwhile, as kernels of the user's own are launched there."""

    _boxed_call = True

    def __init__(self, outer: GraphModule, report: LoweringReport, device: torch.device) -> None:
        self.outer, self.device = outer, device
        self._report = report

    def __call__(self, args: list[Any]) -> list[Any]:
        values = list(args)
        args.clear()
        with as_present_device(self.device):
            return list(self.outer(*values))

    def report(self) -> LoweringReport:
        """The reports of all parts together; calls that stayed count as ATen calls, with their reasons."""
        return self._report


class _Call(torch.nn.Module):
    """A compiled part in the outer graph. Inputs that kernels did not make are checked for their strides."""

    def __init__(self, compiled: Compiled, layouts: Mapping[int, Layout]) -> None:
        super().__init__()
        self.compiled = compiled
        self.layouts = tuple(layouts.items())

    def forward(self, *args: Any) -> Any:
        box = list(args)
        for position, layout in self.layouts:
            box[position] = layout.conform(box[position])
        return self.compiled(box)


class _Body(torch.nn.Module):
    """A compiled branch or loop body; runs as it was recorded on tensors of another layout than it was compiled for."""

    def __init__(self, compiled: Compiled, layouts: Mapping[int, Layout], recorded: GraphModule) -> None:
        super().__init__()
        self.compiled = compiled
        self.layouts = tuple(layouts.items())
        self.recorded = [recorded]  # in a list: not a submodule, the outer graph holds it already
        self.returns_tensor = isinstance(_returned(recorded), Node)

    def forward(self, *args: Any) -> Any:
        if not all(layout.fits(args[position]) for position, layout in self.layouts):
            return self.recorded[0](*args)
        results = self.compiled(list(args))
        return results[0] if self.returns_tensor else tuple(results)


def compile_parts(gm: GraphModule, compile_one: Callable[[GraphModule], Compiled]) -> PartitionedGraph:
    """Compile the stretches of ``gm`` between the calls that stay, and the branches and bodies those call.

    ``compile_one`` compiles an ordinary graph. A part that it refuses runs with ATen as it was recorded.
    """
    return _Pieces(compile_one).compile(gm)


class _Pieces:
    def __init__(self, compile_one: Callable[[GraphModule], Compiled]) -> None:
        self.compile_one = compile_one
        self.reports: list[LoweringReport] = []
        self.counts: Counter[tuple[str, str]] = Counter()
        self.bodies: dict[int, torch.nn.Module] = {}

    def compile(self, gm: GraphModule) -> PartitionedGraph:
        staying = split_ops(gm)
        for node, reason in staying.items():
            if node.op == "call_function" and not reason.startswith("belongs"):
                self.counts[str(node.target), reason] += 1
        outer = split(gm, staying, self._part)
        root: dict[str, Any] = dict(outer.modules)
        for node in outer.graph.nodes:
            if node.op == "get_attr":
                root[str(node.target)] = _attribute(gm, str(node.target))
        root.update(self._compiled_bodies(outer.graph, root))
        module = GraphModule(_holder(root), outer.graph)
        calls = tuple(ExternCount(target, count, reason) for (target, reason), count in self.counts.items())
        return PartitionedGraph(module, merge_reports(self.reports, calls), kernel_device(gm))

    def _part(self, part: Part) -> torch.nn.Module | None:
        placeholders = [n for n in part.graph.graph.nodes if n.op == "placeholder"]
        layouts = _layouts({i: placeholders[i] for i in part.checked})
        compiled = None if layouts is None else self._compiled(part.graph)
        return None if compiled is None or layouts is None else _Call(compiled, layouts)

    def _compiled(self, graph: GraphModule) -> Compiled | None:
        try:
            compiled = self.compile_one(graph)
        except LoweringError as refusal:
            for node in graph.graph.nodes:
                if node.op == "call_function":
                    self.counts[str(node.target), str(refusal)] += 1
            return None
        self.reports.append(compiled.report())
        return compiled

    def _compiled_bodies(self, graph: Graph, root: Mapping[str, Any]) -> dict[str, torch.nn.Module]:
        """Compiled forms of the graphs that only operators in ``_CALLERS`` take."""
        made: dict[str, torch.nn.Module] = {}
        for node in graph.nodes:
            recorded = root.get(str(node.target)) if node.op == "get_attr" else None
            if not isinstance(recorded, GraphModule) or not all(_only_calls(user) for user in node.users):
                continue
            if id(recorded) not in self.bodies:
                self.bodies[id(recorded)] = self._body(recorded) or recorded
            made[str(node.target)] = self.bodies[id(recorded)]
        return made

    def _body(self, recorded: GraphModule) -> torch.nn.Module | None:
        placeholders = [n for n in recorded.graph.nodes if n.op == "placeholder"]
        layouts = _layouts(dict(enumerate(placeholders)))
        if layouts is None or any("val" not in n.meta for n in placeholders):
            return None
        compiled = self._compiled(recorded)
        return None if compiled is None else _Body(compiled, layouts, recorded)


def _only_calls(user: Node) -> bool:
    return isinstance(user.target, torch._ops.HigherOrderOperator) and user.target.name() in _CALLERS


def _layouts(nodes: Mapping[int, Node]) -> dict[int, Layout] | None:
    """The layouts of tensor nodes, or ``None`` if one has none that can be checked."""
    layouts: dict[int, Layout] = {}
    for position, node in nodes.items():
        val = node.meta.get("val")
        if isinstance(val, torch.Tensor):
            layout = Layout.of(val)
            if layout is None:
                return None
            layouts[position] = layout
    return layouts


def _returned(gm: GraphModule) -> object:
    output = next(node for node in gm.graph.nodes if node.op == "output")
    return output.args[0]


def _attribute(gm: GraphModule, target: str) -> Any:
    value: Any = gm
    for part in target.split("."):
        value = getattr(value, part)
    return value


def _holder(root: Mapping[str, Any]) -> torch.nn.Module:
    """A module with these attributes, dotted names nested."""
    top = torch.nn.Module()
    for name, value in root.items():
        owner = top
        *path, last = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                setattr(owner, part, torch.nn.Module())
            owner = getattr(owner, part)
        if isinstance(value, torch.Tensor) and not isinstance(value, torch.nn.Parameter):
            owner.register_buffer(last, value)
        else:
            setattr(owner, last, value)
    return top
